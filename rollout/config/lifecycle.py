"""Deadlines of the phases, and how engines are watched."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollout.config.slices import Seconds, Slice


class Drain(StrEnum):
    """What becomes of the requests in flight when their engines are paused."""

    ABORT = "abort"
    RETRACT = "retract"
    FINISH = "finish"


class LifecycleConfig(Slice):
    """Deadlines of the phases, and what happens to an engine that misses one."""

    on_failure: Literal["fence", "raise"] = "fence"
    """``fence`` goes on without the failed engine; ``raise`` stops the step."""
    drain: Drain = Drain.ABORT
    """Requests in flight at a pause: ``abort`` ends them with the tokens they have; ``retract``
    lets them go on afterwards, under the new weights; ``finish`` waits for them first."""
    drain_timeout_s: Seconds = 60.0
    """What ``finish`` gives them, and what those of an engine that is removed get; then they
    are aborted."""
    pause_timeout_s: Seconds = 60.0
    """Until every engine has stopped generating."""
    flush_timeout_s: Seconds = 60.0
    """Until nothing is in flight and the caches are empty; waits inside the engine."""
    release_timeout_s: Seconds = 120.0
    """Until the memory is given back, backup to the host included."""
    resume_timeout_s: Seconds = 120.0
    """Until the memory is there again."""
    update_timeout_s: Seconds = 600.0
    """Until one engine holds all of a push."""
    verify_timeout_s: Seconds = 60.0
    """Until every engine has shown its weight version and fingerprints."""
    verify_by: Literal["fingerprint", "canary", "version"] = "fingerprint"
    """``fingerprint`` reads all weights once per step, and has those that it cannot compare tell a
    canary; ``canary`` compares log-probabilities of fixed prompts in its place; ``version`` only
    asks for the number."""
    canary_prompts: tuple[Annotated[tuple[int, ...], Field(min_length=2)], ...] = ()
    """Token ids of those prompts; left out: two, drawn from the middle of the vocabulary."""
    canary_tolerance: Annotated[float, Field(gt=0)] = 0.1
    """Nats by which they may differ on average, and ten times that at one token; equal weights
    do on other kernels and layouts, lost ones by whole nats."""
    continue_timeout_s: Seconds = 60.0
    """Until every engine generates again."""
    stop_timeout_s: Seconds = 15.0
    """What engines and router get to end by themselves before they are killed."""
    lock_timeout_s: Seconds = 900.0
    """How long a command waits for the one before it; then it is refused with its owner."""


class HealthConfig(Slice):
    """How engines are watched, and how a dead one comes back.

    An engine that falls silent, with its node or alone, is out of its group after at most
    ``probes_to_dead * (probe_interval_s + probe_timeout_s)`` seconds, 40 as these are; after
    ``patience`` times as many where its group has too few without it.
    """

    recover: bool = True
    """Watch the engines and replace dead ones; without it an engine that fails stays fenced."""
    probe_interval_s: Seconds = 5.0
    """From one look at all engines to the next; a failure the router sees is looked at at once."""
    probe_timeout_s: Seconds = 5.0
    """How late the answer to a probe may be; probes have connections of their own."""
    probes_to_suspect: Annotated[int, Field(ge=1)] = 2
    """Failed probes in a row after which new requests go to others, if others are well."""
    probes_to_dead: Annotated[int, Field(ge=1)] = 4
    """Failed probes in a row after which an engine is killed and replaced."""
    patience: Annotated[int, Field(ge=1)] = 3
    """Times as many failed probes for an engine without which its group has too few left."""
    reports_to_dead: Annotated[int, Field(ge=1)] = 3
    """Times the router may lose an engine that answers probes, before it is replaced."""
    probes_to_trust: Annotated[int, Field(ge=1)] = 12
    """Answered probes in a row after which what the router reported before is forgotten."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts of one engine before it stays fenced for good."""
    backoff_s: Seconds = 2.0
    """Pause before the second restart of an engine in a row; doubles with each more."""
    max_backoff_s: Seconds = 120.0
    """Longest pause between two restarts of an engine."""
    forget_after_s: Seconds = 600.0
    """An engine that has served this long has all its restarts again."""
    max_parallel_restarts: Annotated[int, Field(ge=1)] = 4
    """Engines of a server started again at the same time; loading many starves the others."""
    weights_path: str | None = None
    """Where saved weights are, as ``/ckpt/{version}``: a restarted engine need not await a push."""
    weights_from_peers: bool = False
    """A restarted engine takes the weights of one of its group that was proved at the current
    version, after the store and before the disk. Embedded engines only, without an adapter."""

    @model_validator(mode="after")
    def _thresholds_fit(self) -> HealthConfig:
        if self.probes_to_suspect > self.probes_to_dead:
            raise ValueError(f"probes_to_suspect {self.probes_to_suspect} is over probes_to_dead")
        if self.weights_path is not None and "{version}" not in self.weights_path:
            raise ValueError("weights_path has no {version} in it, so it would always be the same")
        return self
