"""Why does it not go on?  From a snapshot to findings that a newcomer understands.

Always true: the first finding is the one to act on; each says what, who, since when, what that
means, and what to do.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import IntEnum
from typing import Any


class Weight(IntEnum):
    """How bad a finding is."""

    FINE = 0
    WATCH = 1
    WRONG = 2
    STUCK = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is so.

    Attributes:
        what: in one line.
        because: what is behind it, line by line.
        advice: what to do, the best first.
        engine_ids: whose logs and stacks would tell more.
    """

    weight: Weight
    what: str
    because: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    engine_ids: tuple[str, ...] = field(default=())


# What an engine is doing in a phase, and why it may not come to its end.
_MEANING = {
    "start": "the engine loads its model; a wrong path or too little memory shows in its log",
    "pause": "the engine ends all requests and answers when the last has left; a scheduler that "
    "hangs (a collective that waits for a lost rank, a very long prefill) never answers",
    "flush": "the engine waits until nothing is in flight; requests it was sent past the router, "
    "or that ignore the abort, keep it busy",
    "release": "the engine gives its memory back; copying weights to the host takes seconds, a "
    "driver that hangs takes forever",
    "resume_weights": "the engine takes memory back; it cannot while the trainer still holds it",
    "update_weights": "the engine loads new weights; with NCCL, one lost rank makes all wait",
    "verify": "the engine reads all its weights and tells fingerprints",
    "resume_kv": "the engine takes memory back for its KV cache; the trainer may still hold it",
    "continue": "the engine begins to generate again",
    "begin_weight_update": "the engine prepares for new weights",
    "end_weight_update": "the engine ends the update of its weights",
    "kill": "a killed process that does not go is stuck in the kernel, mostly in a GPU driver",
}
LONG_S = 10.0
_SLOWER = 5.0


def diagnose(now: Mapping[str, Any], *, long_s: float = LONG_S) -> list[Finding]:
    """Everything worth saying of a snapshot of one server, the worst first.

    Args:
        long_s: a phase is not called stuck before, nor before five times what it usually takes.
    """
    findings = [
        *_silence(now),
        *_running(now, long_s),
        *_gate(now),
        *_engines(now),
        *_versions(now),
        *_store(now),
    ]
    findings.sort(key=lambda one: -one.weight)
    return findings or [
        Finding(Weight.FINE, f"server {now.get('server', '')} serves; nothing is wrong")
    ]


def _silence(now: Mapping[str, Any]) -> Iterator[Finding]:
    if not now.get("is_answering"):
        yield Finding(
            Weight.STUCK,
            f"the server itself does not answer: {now.get('trouble') or 'no reason known'}",
            ("what is shown is what it said last",),
            (
                "look at the stack of its process (below, where py-spy is there): its event loop "
                "is blocked, often by the training script that shares the process",
            ),
        )
    elif now.get("trouble"):
        yield Finding(Weight.WRONG, now["trouble"])


def _running(now: Mapping[str, Any], long_s: float) -> Iterator[Finding]:
    spans = now.get("running", ())
    engines = {one["engine_id"]: one for one in now.get("engines", ())}
    late = [one for one in spans if one["kind"] == "engine"]
    phases = [one for one in spans if one["kind"] == "phase"]
    groups = [one for one in spans if one["kind"] == "group"]
    for phase in phases or groups:
        of_phase = (
            late
            if len(phases or groups) == 1
            else [one for one in late if one["start_s"] >= phase["start_s"] - 0.01]
        )
        name, elapsed_s = phase["name"], phase["elapsed_s"]
        budget_s = phase.get("budget_s", 0.0)
        usual_s = _usual_s(now, name)
        # Past half of its deadline too, unless that is what it always takes.
        stuck_s = max(long_s, _SLOWER * usual_s)
        if budget_s:
            stuck_s = min(stuck_s, max(budget_s / 2, usual_s))
        is_long = elapsed_s > stuck_s
        who = tuple(one["engine_id"] for one in of_phase)
        because = [_lateness(one, engines, spans) for one in of_phase[:5]]
        if len(of_phase) > 5:
            because.append(f"... and {len(of_phase) - 5} more engines")
        if who:
            because.append(
                f"the other {len(engines) - len(set(who))} of {len(engines)} engines are through, "
                "or have no part in it"
            )
            if meaning := _MEANING.get(of_phase[0]["name"]):
                because.append(f"in {of_phase[0]['name']}, {meaning}")
        else:
            because.append(
                "no engine is being asked at the moment: the server prepares the phase, or a "
                "command before it still holds the engines"
            )
        if usual_s:
            because.append(f"it usually takes {usual_s:.1f} s")
        if not is_long:
            because.append(f"it is called stuck when it takes longer than {stuck_s:.1f} s")
        if held := now.get("gate", {}).get("num_held", 0):
            because.append(f"meanwhile {held} requests wait at the router's gate; none is lost")
        waits_for = f" for {_named(who)}" if who else " for no engine"
        since = f"{datetime.fromtimestamp(phase['start_s']):%H:%M:%S}"
        yield Finding(
            Weight.STUCK if is_long else Weight.WATCH,
            f"{name} has waited {elapsed_s:.1f} s{waits_for}, since {since}{_of_budget(budget_s)}",
            tuple(because),
            tuple(_what_to_do(name, who, engines, elapsed_s, budget_s)) if is_long else (),
            who,
        )


def _lateness(
    span: Mapping[str, Any],
    engines: Mapping[str, Mapping[str, Any]],
    spans: Any,
) -> str:
    engine_id = span["engine_id"]
    url = engines.get(engine_id, {}).get("url", "")
    calls = [one for one in spans if one["kind"] == "call" and one.get("engine_id") == engine_id]
    if not calls:
        return f"engine {engine_id}: in {span['name']} for {span['elapsed_s']:.1f} s"
    call = calls[-1]
    return (
        f"engine {engine_id} ({url}): HTTP call {call['name']} without an answer for "
        f"{call['elapsed_s']:.1f} s{_of_budget(call.get('budget_s', 0.0))}"
    )


def _what_to_do(
    name: str,
    who: tuple[str, ...],
    engines: Mapping[str, Mapping[str, Any]],
    elapsed_s: float,
    budget_s: float,
) -> Iterator[str]:
    pids = [_process(engines[one]) for one in who if engines.get(one, {}).get("pid")]
    if budget_s:
        left_s = max(0.0, budget_s - elapsed_s)
        then = "ended, and recovery starts another" if pids else "left to whoever launched it"
        yield (
            f"wait: in {left_s:.0f} s, at the deadline, an engine that is late is fenced (taken "
            f"out of everything) and {then}; {_outcome(who, engines)}"
        )
    if pids:
        yield (
            f"or end it now: kill -9 {', '.join(pids[:8])}; its guard clears up what it leaves, "
            "and the phase need not wait for its deadline"
        )
    elif who:
        yield (
            "or end it now, where it was launched: it is attached, so this run never ends it; the "
            "phase then need not wait for its deadline"
        )
    if name == "flush":
        yield "see who sends requests past the router: the engine's log names them"
    if name in ("resume_weights", "resume_kv"):
        yield "see whether the trainer has given its memory back (GPU memory below)"
    yield (
        f"if this is only slow, not stuck, raise lifecycle.{_budget_name(name)}; "
        "`rollout trace` shows how long it took before"
    )


def _outcome(who: tuple[str, ...], engines: Mapping[str, Mapping[str, Any]]) -> str:
    """What becomes of the step when these are out."""
    late = set(who)
    left = Counter(
        one.get("group") for one in engines.values() if not one.get("fenced_because")
    ) - Counter(engines[one].get("group") for one in late if one in engines)
    emptied = sorted({str(engines[one].get("group")) for one in late if one in engines} - set(left))
    if emptied:
        return (
            f"group {', '.join(emptied)} has no other engine, so the step then fails, and can be "
            "repeated when one is back"
        )
    return (
        "the rest goes on, unless fewer than min_engines are left or on_failure is raise: then the "
        "step fails, and can be repeated"
    )


def _process(engine: Mapping[str, Any]) -> str:
    node = engine.get("node_id", "local")
    return str(engine["pid"]) if node in ("", "local") else f"{engine['pid']} on node {node}"


def _budget_name(command: str) -> str:
    short = {"resume_weights": "resume", "resume_kv": "resume", "update_weights": "update"}
    return f"{short.get(command, command)}_timeout_s"


def _gate(now: Mapping[str, Any]) -> Iterator[Finding]:
    gate = now.get("gate", {})
    state, in_s = gate.get("state"), gate.get("in_state_s") or 0.0
    if not state or state == "open" or not now.get("is_answering"):
        return
    held = gate.get("num_held", 0)
    reason = gate.get("reason") or "no reason told"
    waits = f"; {held} requests wait at it" if held else ""
    if now.get("lock_owner"):
        return  # a command runs, and is told of
    if state == "closed":
        yield Finding(
            Weight.WRONG,
            f"the gate is closed for {in_s:.0f} s: {reason}{waits}",
            ("a command failed; the gate stays closed until the engines are proved good again",),
            (
                "mend what the reason names, then repeat the command that failed: it goes on from "
                "where each group is (`offload()` or `onload()` of the server)",
            ),
        )
    else:
        yield Finding(
            Weight.WATCH,
            f"the gate holds requests for {in_s:.0f} s; the server is {now.get('phase')}{waits}",
            (
                "no command runs: the engines wait for whoever drives them, which is usual while "
                "the trainer has the GPUs",
            ),
            (
                "if training is over, call onload() (with a push, where weights were not kept); if "
                "the training script has died, start it again or stop the run: `rollout stop`",
            ),
        )


def _engines(now: Mapping[str, Any]) -> Iterator[Finding]:
    for engine in now.get("engines", ()):
        engine_id = engine["engine_id"]
        if engine.get("fenced_because"):
            yield Finding(
                Weight.WRONG,
                f"engine {engine_id} is fenced: {_first_line(engine['fenced_because'])}",
                ("it is out of everything and its process was ended",),
                (
                    "with health.recover it is started again by itself, up to "
                    "health.max_restarts times; its log says why it failed",
                ),
                (engine_id,),
            )
        elif engine.get("is_stale"):
            yield Finding(
                Weight.WATCH,
                f"engine {engine_id} was started again and lacks the published weights",
                (),
                ("it serves after the next push, or at once with health.weights_path",),
            )
        elif engine.get("routing") in ("dead", "draining") and engine.get("because"):
            yield Finding(
                Weight.WRONG,
                f"engine {engine_id} gets no requests: {_first_line(engine['because'])}",
                (),
                ("it is probed, and replaced if it stays like this",),
                (engine_id,),
            )


def _versions(now: Mapping[str, Any]) -> Iterator[Finding]:
    if now.get("phase") != "serving":
        return
    held: dict[Any, list[str]] = {}
    for engine in now.get("engines", ()):
        if not engine.get("fenced_because") and not engine.get("is_stale"):
            held.setdefault(engine.get("weight_version"), []).append(engine["engine_id"])
    published = now.get("weight_version")
    wrong = {version: ids for version, ids in held.items() if version != published}
    for version, ids in wrong.items():
        yield Finding(
            Weight.WRONG,
            f"{_named(tuple(ids))} hold weight version {version}, published is {published}",
            (),
            ("push again; fence them if they should not serve meanwhile",),
        )


def _store(now: Mapping[str, Any]) -> Iterator[Finding]:
    store = now.get("store")
    if store and not store["is_on"]:
        yield Finding(
            Weight.WRONG,
            f"the weight store is off: {_first_line(store['because'])}",
            ("an engine that is started again waits for the next push",),
            ("mend what it says, and start the run again; training itself goes on",),
        )
    elif store and store["lag"] > 2:
        yield Finding(
            Weight.WRONG,
            f"the weight store is {store['lag']} versions behind",
            (f"its last write took {store['write_s']:.1f} s", _first_line(store["because"])),
            ("an engine that dies now waits for the next push; look at the nodes' free memory",),
        )


def _usual_s(now: Mapping[str, Any], name: str) -> float:
    """The median of this phase over the last steps; 0 where there were none."""
    took = [step["phase_s"][name] for step in now.get("steps", ()) if name in step["phase_s"]]
    return statistics.median(took) if took else 0.0


def _of_budget(budget_s: float) -> str:
    return f" (deadline {budget_s:g} s)" if budget_s else ""


def _named(engine_ids: tuple[str, ...]) -> str:
    unique = list(dict.fromkeys(engine_ids))
    if len(unique) == 1:
        return f"engine {unique[0]}"
    if len(unique) <= 4:
        return f"engines {', '.join(unique)}"
    return f"engines {', '.join(unique[:3])} and {len(unique) - 3} more"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
