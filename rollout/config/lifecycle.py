"""Settings of the phases and of health checks."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rollout.config.base import ConfigSection, PathText, Seconds


class Drain(StrEnum):
    """What happens to requests in flight when their engine is paused."""

    ABORT = "abort"
    RETRACT = "retract"
    FINISH = "finish"


class LifecycleConfig(ConfigSection):
    """Deadlines of the phases, and what happens when an engine misses one."""

    on_failure: Literal["fence", "raise"] = "fence"
    """``fence`` continues without the failed engine; ``raise`` fails the step."""
    drain: Drain = Drain.ABORT
    """What happens to requests in flight at a pause. ``abort`` ends them and returns the tokens so
    far. ``retract`` keeps them and continues them later with the new weights (not with
    ``weights.update: lora``, and on SGLang not with ``enable-return-routed-experts``). ``finish``
    waits until they are complete."""
    drain_timeout_s: Seconds = 60.0
    """How long ``finish`` waits for requests, and how long the requests of an engine that is being
    removed may run; after that they are aborted."""
    command_timeout_s: Seconds = 60.0
    """Deadline for every engine to carry out a command that moves neither memory nor weights: to
    stop generating; to have no requests in flight and empty caches, for which the engine itself
    waits; to report its weight version and fingerprints; to accept requests again."""
    memory_timeout_s: Seconds = 120.0
    """Deadline for releasing memory, including the copy of the weights to the host, and for taking
    it back."""
    update_timeout_s: Seconds = 600.0
    """Deadline for one engine to receive a whole push."""


class HealthConfig(ConfigSection):
    """How engines are probed, and how a dead engine is restarted.

    An engine that stops answering, alone or with its node, is taken out of its group after at most
    ``probes_to_dead * (probe_interval_s + probe_timeout_s)`` seconds, 40 with the defaults. If its
    group would have too few engines without it, this takes three times as long.
    """

    recover: bool = True
    """Probe the engines and replace dead ones; if false, an engine that fails stays fenced."""
    probe_interval_s: Seconds = 5.0
    """Time between two probes of all engines; an engine that the router lost is probed at once."""
    probe_timeout_s: Seconds = 5.0
    """Deadline for the reply to a probe; probes use separate connections."""
    probes_to_dead: Annotated[int, Field(ge=1)] = 4
    """Failed probes in a row after which an engine is killed and replaced; after two it gets no new
    requests, if other engines are healthy. One that answers probes is replaced after three
    failures that the router reports; 12 answered probes in a row void earlier ones."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Restarts of one engine after which it stays fenced; they count no more when it has served for
    ten minutes. Four engines of a server may restart at the same time."""
    backoff_s: Seconds = 2.0
    """Wait before the second restart of an engine in a row; doubles with each further restart."""
    max_backoff_s: Seconds = 120.0
    """Longest wait between two restarts of an engine."""
    weights_path: PathText | None = None
    """Where each weight version is saved, for example ``/ckpt/{version}``. A restarted engine loads
    its weights from there instead of waiting for the next push."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.weights_path is not None and "{version}" not in self.weights_path:
            yield (
                "weights_path",
                "weights_path must contain {version}, for example /ckpt/{version}",
            )
