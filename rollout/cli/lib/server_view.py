"""One server as text for a terminal: ``rollout status``, ``top`` and ``serve`` print it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from engines.protocol.plain_text import first_line, size_text
from rollout.cli.lib.output import is_terminal, table

_STATES = {"serving": "green", "fenced": "red", "stale": "yellow"}
_MAX_ROWS = 40
_NUM_EVENTS = 5
_BAR = 24


def render_server(state: dict[str, Any], where: str) -> RenderableType:
    """The state of one server (``/api/state``) as text.

    Args:
        where: how the server was found, as in ``RunningServer``.
    """
    gate = state.get("gate", {})
    phase = state.get("phase", "unknown")
    head = Text.assemble(
        (state.get("server", ""), "bold"),
        (f"  {phase}", _STATES.get(phase, "cyan")),
        f"  version {state.get('weight_version', '-')}  gate {gate.get('state', '-')}",
        f" ({gate['num_held']} waiting)" if gate.get("num_held") else "",
        f"  in flight {state.get('router', {}).get('num_in_flight', 0)}",
    )
    addresses = [f"router {state.get('router_url', '')}"]
    addresses += [f"agents {url}" for url in state.get("agents_urls", ())]
    addresses += [f"page {where}"] if where.startswith("http") else []
    parts: list[RenderableType] = [head, *(Text(address, style="dim") for address in addresses)]
    if not state.get("is_answering"):
        parts.append(Text(f"does not answer: {state.get('trouble')}", style="bold red"))
    parts += [
        _deadline(span) for span in state.get("running", ()) if span["kind"] in ("phase", "group")
    ]
    parts += [Text(found["what"], style="yellow") for found in state.get("unchanged") or ()]
    parts += [
        Text(f"{engine['engine_id']}: {drafts['fall']}", style="yellow")
        for engine in state.get("engines", [])
        if (drafts := engine.get("drafts")) and drafts["fall"]
    ]
    parts.append(_engines(state.get("engines", [])))
    if state.get("steps"):
        last = state["steps"][-1]
        phases = "  ".join(f"{name} {took:.2f}" for name, took in last["phase_s"].items())
        parts.append(
            Text(f"last step: lost {last['lost_s']:.2f} s at the boundary ({phases})", style="dim")
        )
    for event in state.get("events", [])[-_NUM_EVENTS:]:
        at = time.strftime("%H:%M:%S", time.localtime(event["start_s"]))
        message = event.get("said", "").partition("\n")[0]
        parts.append(
            Text(f"{at} {event['name']} {event.get('engine_id', '')} {message}", style="dim")
        )
    return Group(*parts, Text(""))


def _deadline(span: dict[str, Any]) -> Text:
    elapsed_s, budget_s = span["elapsed_s"], span.get("budget_s", 0.0)
    share = min(1.0, elapsed_s / budget_s) if budget_s else 0.0
    color = "red" if share > 0.5 else "yellow" if share > 0.2 else "green"
    filled = round(share * _BAR)
    bar = f" {'█' * filled}{'░' * (_BAR - filled)}" if is_terminal() else ""
    return Text.assemble(
        f"{span['source']}: {span['name']}",
        (bar, color),
        f" {_seconds(elapsed_s)}" + (f" of {_seconds(budget_s)}" if budget_s else ""),
        style="bold",
    )


def _engines(engines: list[dict[str, Any]]) -> RenderableType:
    heads = ("engine", "state", "version", "in flight", "memory", "doing")
    rows = table(*heads, right=("in flight", "memory"))
    order = sorted(engines, key=lambda engine: (engine["state"] == "serving", not engine["doing"]))
    for engine in order[:_MAX_ROWS]:
        doing = engine["doing"]
        rows.add_row(
            engine["engine_id"],
            _state(engine),
            str(engine["weight_version"] if engine["weight_version"] is not None else "-"),
            str(engine["num_in_flight"]),
            _memory(engine),
            f"{doing['name']} since {_seconds(time.time() - doing['start_s'])}" if doing else "",
        )
    if len(order) > _MAX_ROWS:
        rows.add_row(f"... and {len(order) - _MAX_ROWS} more, all serving")
    return Group(rows, *_errors(order[:_MAX_ROWS]))


def _state(engine: dict[str, Any]) -> Text:
    text = Text(engine["state"], style=_STATES.get(engine["state"], "cyan"))
    return text.append(f", standby: {engine['standby']}") if engine["standby"] else text


def _errors(engines: list[dict[str, Any]]) -> Iterator[Text]:
    """The last error of each engine that has one."""
    for engine in engines:
        if error := engine["fence_reason"] or (engine["last_error"] or {}).get("said", ""):
            yield Text(f"{engine['engine_id']}: {first_line(error)}", style="red")


def _memory(engine: dict[str, Any]) -> str:
    """Memory in use on its GPUs, by all programs; on the host for an engine without GPUs."""
    gpus = engine["gpus"]
    if engine["num_gpus"] and not gpus:
        return "not measured"
    if not gpus:
        return size_text(engine["resident_bytes"])
    used, total = (sum(gpu[name] for gpu in gpus) for name in ("used_bytes", "total_bytes"))
    return f"{size_text(used)} of {size_text(total)} on {len(gpus)} GPUs"


def _seconds(value: float) -> str:
    """Seconds as text: ``4.2 s``, ``3 min 20 s``, ``1 h 5 min``."""
    if value < 100:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
