"""``rollout status`` and ``rollout top``: where everything is, once or again and again."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollout.commands import sources
from rollout.commands.output import AsJson, console, gib, print_json, seconds
from rollout.errors import RolloutError

_STATES = {"serving": "green", "fenced": "red", "stale": "yellow"}
_MAX_ROWS = 40
_NUM_EVENTS = 5
_BAR = 24


def status(
    run: sources.Run = "",
    key: sources.Key = "",
    ray: sources.OverRay = False,
    address: sources.Address = "auto",
    namespace: sources.Namespace = "rollout",
    as_json: AsJson = False,
) -> None:
    """Show where every server, group and engine of a run is; also while a step runs."""
    found = sources.find(run, key=key, ray=ray, address=address, namespace=namespace)
    states = {one.name: one.state() for one in found}
    if as_json:
        print_json(states)
        return
    for source in found:
        console().print(picture(states[source.name], source.where))


def top(
    run: sources.Run = "",
    key: sources.Key = "",
    ray: sources.OverRay = False,
    address: sources.Address = "auto",
    namespace: sources.Namespace = "rollout",
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    num: Annotated[int, typer.Option(min=0, help="How many looks; 0: until Ctrl-C.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Watch a run in the terminal."""
    found = sources.find(run, key=key, ray=ray, address=address, namespace=namespace)
    looks = 0
    with Live(console=console(), auto_refresh=False, screen=False) as live:
        while True:
            looks += 1
            if as_json:
                print_json({one.name: one.state() for one in found})
            else:
                live.update(Group(*(_safely(one) for one in found)), refresh=True)
            if num and looks >= num:
                return
            time.sleep(every)


def _safely(source: sources.Source) -> RenderableType:
    try:
        return picture(source.state(), source.where)
    except RolloutError as error:  # it may come back: what watches goes on
        return Text(f"{source.name}: {error}", style="red")


def picture(now: dict[str, Any], where: str) -> RenderableType:
    """One server, for people."""
    gate = now.get("gate", {})
    head = Text()
    head.append(f"{now.get('server', '')}", style="bold")
    head.append(f"  {now.get('phase', 'unknown')}", style=_STATES.get(now.get("phase", ""), "cyan"))
    head.append(f"  version {now.get('weight_version', '-')}  gate {gate.get('state', '-')}")
    if gate.get("num_held"):
        head.append(f" ({gate['num_held']} wait)")
    router = now.get("router", {})
    head.append(f"  in flight {router.get('num_in_flight', 0)}  router {now.get('router_url', '')}")
    if where.startswith("http"):
        head.append(f"  page {where}", style="dim")
    parts: list[RenderableType] = [head]
    if not now.get("is_answering"):
        parts.append(Text(f"does not answer: {now.get('trouble')}", style="bold red"))
    parts += [_deadline(one) for one in now.get("running", ()) if one["kind"] in ("phase", "group")]
    parts.append(_engines(now.get("engines", [])))
    if now.get("steps"):
        last = now["steps"][-1]
        phases = "  ".join(f"{name} {took:.2f}" for name, took in last["phase_s"].items())
        parts.append(
            Text(f"last step: lost {last['lost_s']:.2f} s at the boundary ({phases})", style="dim")
        )
        if last.get("checking"):
            parts.append(Text(last["checking"]["said"], style="dim"))
    for event in now.get("events", [])[-_NUM_EVENTS:]:
        at = time.strftime("%H:%M:%S", time.localtime(event["start_s"]))
        said = event.get("said", "").partition("\n")[0]
        parts.append(Text(f"{at} {event['name']} {event.get('engine_id', '')} {said}", style="dim"))
    return Group(*parts, Text(""))


def _deadline(span: dict[str, Any]) -> Text:
    elapsed_s, budget_s = span["elapsed_s"], span.get("budget_s", 0.0)
    share = min(1.0, elapsed_s / budget_s) if budget_s else 0.0
    color = "red" if share > 0.5 else "yellow" if share > 0.2 else "green"
    filled = round(share * _BAR)
    text = Text(f"{span['source']}: {span['name']} ", style="bold")
    text.append("█" * filled + "░" * (_BAR - filled), style=color)
    text.append(f" {seconds(elapsed_s)}" + (f" of {seconds(budget_s)}" if budget_s else ""))
    return text


def _engines(engines: list[dict[str, Any]]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("engine", "state", "version", "in flight", "memory", "doing", "last error"):
        table.add_column(name, justify="right" if name in ("in flight", "memory") else "left")
    order = sorted(engines, key=lambda one: (one["state"] == "serving", not one["doing"]))
    for one in order[:_MAX_ROWS]:
        doing = one["doing"]
        error = one["fenced_because"] or (one["last_error"] or {}).get("said", "")
        table.add_row(
            one["engine_id"],
            Text(one["state"], style=_STATES.get(one["state"], "cyan")),
            str(one["weight_version"] if one["weight_version"] is not None else "-"),
            str(one["num_in_flight"]),
            gib(one["resident_bytes"]),
            f"{doing['name']} since {seconds(time.time() - doing['start_s'])}" if doing else "",
            Text(error.partition("\n")[0][:60], style="red"),
        )
    if len(order) > _MAX_ROWS:
        table.add_row(f"... and {len(order) - _MAX_ROWS} more, which serve")
    return table
