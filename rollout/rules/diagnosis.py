"""Explains from a snapshot of a server why it makes no progress, for ``rollout doctor``.

Always true: the first finding is the one to act on.  Each finding names the engines, since when,
what it means, and what to do.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from typing import Any

from engines.protocol.plain_text import first_line


class Severity(IntEnum):
    """How bad a finding is."""

    FINE = 0
    WATCH = 1
    WRONG = 2
    STUCK = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One observation about a server.

    Attributes:
        what: the observation in one line.
        details: the facts behind it, line by line.
        advice: what to do, the best first.
        engine_ids: engines whose logs and stacks help further.
    """

    severity: Severity
    what: str
    details: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    engine_ids: tuple[str, ...] = ()


# What an engine does in a phase, and why the phase may not end.
_MEANING = {
    "start": "the engine loads its model; a wrong path or too little memory shows in its log",
    "pause_generation": "the engine ends all requests and replies after the last one; a scheduler "
    "that hangs (a collective that waits for a lost rank, a very long prefill) never replies",
    "flush_cache": "the engine waits until no request is in flight; requests that bypass the "
    "router or ignore the abort keep it busy",
    "release_memory_occupation": "the engine releases its memory; copying weights to the host "
    "takes seconds, and a GPU driver that hangs never returns",
    "onload_weights": "the engine allocates memory for weights; the trainer may still hold it",
    "update_weights": "the engine loads new weights; with NCCL, one lost rank blocks all engines",
    "verify": "the engine reads all its weights and computes their fingerprints",
    "onload_kv": "the engine allocates memory for its KV cache; the trainer may still hold it",
    "continue_generation": "the engine accepts requests again",
    "begin_weight_update": "the engine prepares for new weights",
    "end_weight_update": "the engine ends the update of its weights",
    "wait_for_ranks": "the engine's first rank has answered, and the others still do what it did; "
    "one that hangs, or has died, never ends",
    "kill": "a killed process that does not exit is stuck in the kernel, usually in a GPU driver",
}
_FENCED = "it gets no commands and no requests, and its process was killed"
_RESTART = (
    "with health.recover it is restarted automatically, up to health.max_restarts times; its log "
    "has the reason of the failure"
)
_FENCED_ATTACHED = "it gets no commands and no requests; it is attached, so this run never stops it"
_RESTART_ATTACHED = (
    "start it again where it was launched, at {}; with health.recover it is used again when it "
    "answers and its weights are verified"
)
# The deadline of each command; of all others it is ``lifecycle.command_timeout_s``.
_SETTINGS = {
    "start": "engine.start_timeout_s",
    "release_memory_occupation": "lifecycle.memory_timeout_s",
    "onload_weights": "lifecycle.memory_timeout_s",
    "onload_kv": "lifecycle.memory_timeout_s",
    "update_weights": "lifecycle.update_timeout_s",
    "snapshot": "lifecycle.update_timeout_s",
    "kill": "engine.kill_timeout_s",
}
DRAFT_ADVICE = (
    "no push trains a draft, so it is right less often the further the policy moves: leave it out "
    "once it costs more time than it saves, or launch with one that was trained with these weights",
    "if the fall came at once, with an offload, the draft's weights were lost: an engine that "
    "others launched needs --enable-draft-weights-cpu-backup (SGLang), or "
    "engine.weights_cpu_backup true in its group (vLLM)",
)
LONG_S = 10.0
JOURNAL_LOST = "rollout/journal_lost_s"
_SLOW = 2.0
_SLOWER = 5.0
# The first time of the trainer has none to compare with.
_LONG_TRAINER_S = 60.0


def diagnose(now: Mapping[str, Any], *, long_s: float = LONG_S) -> list[Finding]:
    """The findings about one server, the worst first.

    Args:
        now: the snapshot of the server.
        long_s: a phase counts as stuck after this many seconds, and not before five times its
            usual duration.
    """
    findings = [
        *_silence(now),
        *_running(now, long_s),
        *_gate(now),
        *_engines(now),
        *_versions(now),
        *_unchanged(now),
        *_drafts(now),
        *_store(now),
        *_journal(now),
    ]
    findings.sort(key=lambda finding: -finding.severity)
    if findings:
        return findings
    running = [f"{span['name']} runs" for span in _phases(now.get("running", ()))]
    does = " and ".join(running) or _rest(now.get("phase", "unknown"))
    return [Finding(Severity.FINE, f"server {now.get('server', '')}: {does}; nothing is wrong")]


def _rest(phase: str) -> str:
    """What a server does between two commands."""
    return "the trainer has the memory" if phase == "offloaded" else phase


def _silence(now: Mapping[str, Any]) -> Iterator[Finding]:
    if not now.get("is_answering"):
        yield Finding(
            Severity.STUCK,
            f"the server itself does not answer: {now.get('trouble') or 'no reason known'}",
            ("the values shown are from its last report",),
            (
                "look at the stack of its process (below, if py-spy is installed): its event loop "
                "is blocked, often by the training script in the same process",
            ),
        )
    elif now.get("trouble"):
        yield Finding(Severity.WRONG, now["trouble"])


def _running(now: Mapping[str, Any], long_s: float) -> Iterator[Finding]:
    """The phases that take longer than they usually do."""
    spans = now.get("running", ())
    phases = _phases(spans)
    for phase in phases:
        name, elapsed_s = phase["name"], phase["elapsed_s"]
        budget_s = phase.get("budget_s", 0.0)
        usual_s = _usual_s(now, name)
        # Also stuck after half of its deadline, unless it usually takes longer.
        stuck_s = max(long_s, _SLOWER * usual_s)
        if budget_s:
            stuck_s = min(stuck_s, max(budget_s / 2, usual_s))
        if elapsed_s <= min(stuck_s, max(long_s / 2, _SLOW * usual_s)):
            continue
        is_long = elapsed_s > stuck_s
        of_phase = [
            span
            for span in spans
            if span["kind"] == "engine"
            and (len(phases) == 1 or span["start_s"] >= phase["start_s"] - 0.01)
        ]
        details = [*_whom_it_waits_for(now, of_phase)]
        if usual_s:
            details.append(f"it usually takes {usual_s:.1f} s")
        if not is_long:
            details.append(f"it counts as stuck when it takes longer than {stuck_s:.1f} s")
        if held := now.get("gate", {}).get("num_held", 0):
            details.append(
                f"{held} requests wait at the router's gate in the meantime; none is lost"
            )
        engine_ids = tuple(span["engine_id"] for span in of_phase)
        engines = _by_id(now)
        waits_for = (
            f" for {_named(engine_ids)}" if engine_ids else " without a request to an engine"
        )
        since = f"{datetime.fromtimestamp(phase['start_s']):%H:%M:%S}"
        yield Finding(
            Severity.STUCK if is_long else Severity.WATCH,
            f"{name} has waited {elapsed_s:.1f} s{waits_for}, since {since}{_of_budget(budget_s)}",
            tuple(details),
            tuple(_what_to_do(name, engine_ids, engines, elapsed_s, budget_s)) if is_long else (),
            engine_ids,
        )


def _phases(spans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The phases that run, or the starts of groups before the first phase."""
    phases = [span for span in spans if span["kind"] == "phase"]
    return phases or [span for span in spans if span["kind"] == "group"]


def _by_id(now: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {engine["engine_id"]: engine for engine in now.get("engines", ())}


def _whom_it_waits_for(
    now: Mapping[str, Any], of_phase: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """What each engine does in a phase, and how many are not in it."""
    if not of_phase:
        yield (
            "no request to an engine is running: the server prepares the phase, or an earlier "
            "command still holds the engines"
        )
        return
    engines = _by_id(now)
    for span in of_phase[:5]:
        yield _lateness(span, engines, now["running"])
    if len(of_phase) > 5:
        yield f"... and {len(of_phase) - 5} more engines"
    if others := engines.keys() - {span["engine_id"] for span in of_phase}:
        yield (
            f"the other {len(others)} of {len(engines)} engines have finished it or take no part "
            "in it"
        )
    if meaning := _MEANING.get(of_phase[0]["name"]):
        yield f"in {of_phase[0]['name']}, {meaning}"


def _lateness(span: Mapping[str, Any], engines: Mapping[str, Mapping[str, Any]], spans: Any) -> str:
    engine_id = span["engine_id"]
    url = engines.get(engine_id, {}).get("url", "")
    calls = [
        other for other in spans if other["kind"] == "call" and other.get("engine_id") == engine_id
    ]
    if not calls:
        return f"engine {engine_id}: in {span['name']} for {span['elapsed_s']:.1f} s"
    call = calls[-1]
    return (
        f"engine {engine_id} ({url}): HTTP call {call['name']} without a reply for "
        f"{call['elapsed_s']:.1f} s{_of_budget(call.get('budget_s', 0.0))}"
    )


def _what_to_do(
    name: str,
    engine_ids: tuple[str, ...],
    engines: Mapping[str, Mapping[str, Any]],
    elapsed_s: float,
    budget_s: float,
) -> Iterator[str]:
    late = [engines[engine_id] for engine_id in engine_ids if engine_id in engines]
    pids = [_process(engine) for engine in late if engine.get("pid")]
    if budget_s:
        left_s = max(0.0, budget_s - elapsed_s)
        then = (
            "keeps running, because it is attached"
            if late and not pids
            else "killed, and recovery restarts it"
        )
        yield (
            f"wait: in {left_s:.0f} s, at the deadline, a late engine is fenced (gets no commands "
            f"and no requests) and {then}; {_outcome(engine_ids, engines)}"
        )
    if pids:
        yield (
            f"or kill it now: kill -9 {', '.join(pids[:8])}; its guard cleans up after it, and the "
            "phase does not wait for its deadline"
        )
    elif late:
        yield (
            "or stop it now where it was launched: it is attached, so this run never stops it; the "
            "phase then does not wait for its deadline"
        )
    if name == "flush_cache":
        yield "find the clients that bypass the router: the engine's log names them"
    if name in ("onload_weights", "onload_kv"):
        yield "check whether the trainer has released its memory (GPU memory below)"
    setting = _SETTINGS.get(name, "lifecycle.command_timeout_s")
    yield (
        f"if the phase is slow but not stuck, raise {setting}; "
        "`rollout trace` shows how long it took in earlier steps"
    )


def _outcome(engine_ids: tuple[str, ...], engines: Mapping[str, Mapping[str, Any]]) -> str:
    """What happens to the step when these engines are fenced."""
    remaining = {
        engine.get("group")
        for engine_id, engine in engines.items()
        if engine_id not in engine_ids and not engine.get("fence_reason")
    }
    late = {engines[engine_id].get("group") for engine_id in engine_ids if engine_id in engines}
    emptied = sorted(map(str, late - remaining))
    if emptied:
        return (
            f"group {', '.join(emptied)} has no other engine, so the step then fails; repeat "
            "it when an engine is back"
        )
    return (
        "the other engines continue, unless they are fewer than min_engines or on_failure is "
        "raise: then the step fails, and can be repeated"
    )


def _process(engine: Mapping[str, Any]) -> str:
    node = engine.get("node_id", "local")
    return str(engine["pid"]) if node in ("", "local") else f"{engine['pid']} on node {node}"


def _gate(now: Mapping[str, Any]) -> Iterator[Finding]:
    gate = now.get("gate", {})
    state, in_s = gate.get("state"), gate.get("in_state_s") or 0.0
    # A command that runs has its own finding.
    if state in (None, "", "open") or not now.get("is_answering") or now.get("lock_owner"):
        return
    held = gate.get("num_held", 0)
    reason = gate.get("reason") or "no reason given"
    waits = f"; {held} requests wait at it" if held else ""
    if state == "closed":
        yield Finding(
            Severity.WRONG,
            f"the gate is closed for {in_s:.0f} s: {reason}{waits}",
            ("a command failed; the gate stays closed until the engines are verified again",),
            (
                "fix the cause, then repeat the failed command, or call `push` or "
                "`offload`: each group continues from its phase",
            ),
        )
    elif in_s > max(_LONG_TRAINER_S, _SLOW * _usual_trainer_s(now)):
        yield Finding(
            Severity.WATCH,
            f"the gate holds requests for {in_s:.0f} s; the server is {now.get('phase')}{waits}",
            (
                "no command runs: the server waits for the next command, which is usual while the "
                f"trainer has the GPUs, for {_usual_trainer_s(now):.0f} s in the last steps",
            ),
            (
                "if the training step is over, call push(weights), or serve() if the "
                "weights were kept; if the training script has died, start it again or stop the "
                "run: `rollout stop`",
            ),
        )


def _engines(now: Mapping[str, Any]) -> Iterator[Finding]:
    for engine in now.get("engines", ()):
        engine_id = engine["engine_id"]
        if engine.get("fence_reason"):
            is_attached = engine.get("pid") is None
            yield Finding(
                Severity.WRONG,
                f"engine {engine_id} is fenced: {first_line(engine['fence_reason'])}",
                (_FENCED_ATTACHED if is_attached else _FENCED,),
                (_RESTART_ATTACHED.format(engine.get("url")) if is_attached else _RESTART,),
                (engine_id,),
            )
        elif engine.get("is_stale"):
            yield Finding(
                Severity.WATCH,
                f"engine {engine_id} was restarted and lacks the published weights",
                (),
                ("it serves after the next push, or earlier with health.weights_path",),
            )
        elif engine.get("routing") in ("dead", "draining") and engine.get("reason"):
            yield Finding(
                Severity.WRONG,
                f"engine {engine_id} gets no requests: {first_line(engine['reason'])}",
                (),
                (
                    _RESTART_ATTACHED.format(engine.get("url"))
                    if engine.get("pid") is None
                    else "it is probed, and restarted if probes keep failing",
                ),
                (engine_id,),
            )


def _versions(now: Mapping[str, Any]) -> Iterator[Finding]:
    if now.get("phase") != "serving":
        return
    held: dict[Any, list[str]] = {}
    for engine in now.get("engines", ()):
        if not engine.get("fence_reason") and not engine.get("is_stale"):
            held.setdefault(engine.get("weight_version"), []).append(engine["engine_id"])
    published = now.get("base_version")
    held.pop(published, None)
    for version, ids in held.items():
        yield Finding(
            Severity.WRONG,
            f"{_named(tuple(ids))} hold weight version {version}, published is {published}",
            (),
            ("push again; fence them if they must not serve until then",),
        )


def _unchanged(now: Mapping[str, Any]) -> Iterator[Finding]:
    for weights in now.get("unchanged") or ():
        causes = (f"likely: {cause}" for cause in weights["causes"])
        yield Finding(Severity.WRONG, weights["what"], tuple(causes), tuple(weights["advice"]))


def _drafts(now: Mapping[str, Any]) -> Iterator[Finding]:
    for engine in now.get("engines", ()):
        drafts, engine_id = engine.get("drafts"), engine["engine_id"]
        if drafts and drafts["fall"]:
            yield Finding(
                Severity.WATCH,
                f"engine {engine_id}: {drafts['fall']}",
                ("replies are right, and take longer: what a draft gets wrong costs a step",),
                DRAFT_ADVICE,
                (engine_id,),
            )


def _store(now: Mapping[str, Any]) -> Iterator[Finding]:
    store = now.get("store")
    if store and not store["is_on"]:
        yield Finding(
            Severity.WRONG,
            f"the weight store is off: {first_line(store['reason'])}",
            ("a restarted engine waits for the next push",),
            ("fix the cause and restart the run; training itself continues",),
        )
    elif store and store["lag"] > 2:
        yield Finding(
            Severity.WRONG,
            f"the weight store is {store['lag']} versions behind",
            (f"its last write took {store['write_s']:.1f} s", first_line(store["reason"])),
            ("an engine that dies now waits for the next push; check the nodes' free memory",),
        )


def _journal(now: Mapping[str, Any]) -> Iterator[Finding]:
    """The driver says once that its journal is behind, and once that it is not."""
    metrics = [report["metrics"] for report in now.get("figures", ())]
    lost_s = next(
        (figures[JOURNAL_LOST] for figures in reversed(metrics) if JOURNAL_LOST in figures), 0.0
    )
    if lost_s > 0:
        yield Finding(
            Severity.WRONG,
            f"the driver's journal is not on disk, as of {lost_s:.0f} s before that was noticed",
            ("generation goes on; a crash of the training script loses samples or repeats them",),
            ("the log of the training script has the reason, often a full disk; free some space",),
        )


def _usual_s(now: Mapping[str, Any], name: str) -> float:
    """The median duration of this phase over the last steps, in seconds; 0 without steps."""
    took = [step["phase_s"][name] for step in now.get("steps", ()) if name in step["phase_s"]]
    return statistics.median(took) if took else 0.0


def _usual_trainer_s(now: Mapping[str, Any]) -> float:
    """The median time of the trainer in the last steps, in seconds; 0 without steps."""
    took = [step.get("trainer_s", 0.0) for step in now.get("steps", ())]
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
