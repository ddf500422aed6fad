"""Admission, pauses and control commands.  Everything here runs on the generation thread.

Always true: a request that arrives while the gate is closed waits in ``held`` and is not in
flight; a refused command has changed nothing (``command_rules`` decides which are refused).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engines.embedded.core.errors import Conflict, Invalid
from engines.embedded.generation import command_rules
from engines.embedded.generation.batcher import Batcher
from engines.embedded.generation.command_rules import Situation
from engines.embedded.generation.generation import Generation
from engines.embedded.memory.regions import Memory
from engines.protocol import MemoryTag, PauseMode

_logger = logging.getLogger(__name__)
ABORTED = "Aborted"


@dataclass(slots=True)
class IdleJob:
    """A job that runs when nothing is in flight; ``closes_gate`` holds new requests until then."""

    run: Callable[[], None]
    closes_gate: bool
    is_cancelled: bool = False


class PauseGate:
    """Admission, pauses, memory.

    Attributes:
        held: requests that wait until the gate opens.
        is_session_open: between begin_weight_update and end_weight_update.
    """

    def __init__(self, batcher: Batcher, memory: Memory, *, is_saver_enabled: bool) -> None:
        self._batcher = batcher
        self._memory = memory
        self._is_saver_enabled = is_saver_enabled
        self._jobs: deque[IdleJob] = deque()
        self.paused: PauseMode | None = None
        self.held: dict[str, Generation] = {}
        self.is_session_open = False
        batcher.on_idle = self._run_idle_jobs

    def situation(self) -> Situation:
        return Situation(
            is_saver_enabled=self._is_saver_enabled,
            paused=self.paused,
            num_in_flight=self._batcher.num_running + self._batcher.num_waiting,
            released=frozenset(self._memory.released),
        )

    # Requests.

    def admit(self, generation: Generation) -> None:
        if self.paused is not None or any(job.closes_gate for job in self._jobs):
            self.held[generation.rid] = generation
            return
        try:
            command_rules.require_can_admit(self.situation())
            if 0 <= generation.logprob_start_len < len(generation.prompt_ids) - 1:
                self._batcher.score(generation)
        except Conflict as refusal:
            generation.refusal = refusal
        except RuntimeError as error:  # out of memory: only this request fails
            generation.abort(f"log-probabilities of the prompt: {error}")
        if not generation.is_over and generation.params.max_new_tokens == 0:
            generation.finish_reason = {"type": "length", "length": 0}
        if generation.is_over:
            self._batcher.step_report.touched.append(generation)
        else:
            self._batcher.admit(generation)

    def abort(self, rid: str) -> None:
        """End one request, held or in flight.  Unknown ids are ignored, as SGLang does."""
        held = self.held.pop(rid, None)
        if held is not None:
            held.abort(ABORTED)
            self._batcher.step_report.touched.append(held)
        else:
            self._batcher.abort(rid, ABORTED)

    def abort_all(self, *, and_held: bool = False) -> None:
        """End all requests in flight.  Held ones stay, as SGLang's do, but at shutdown."""
        self._batcher.abort(None, ABORTED)
        for rid in list(self.held) if and_held else ():
            self.abort(rid)

    # Pauses.

    def pause(self, mode: PauseMode) -> None:
        command_rules.require_can_pause(self.situation(), mode)
        if mode is PauseMode.ABORT:
            self.abort_all()
        elif mode is PauseMode.RETRACT:
            self._batcher.retract()
        self._batcher.is_frozen = mode is not PauseMode.ABORT
        self.paused = mode
        _logger.info("paused mode=%s", mode.value)

    def resume(self) -> None:
        """continue_generation."""
        command_rules.require_can_continue(self.situation())
        self._batcher.is_frozen = False
        self.paused = None
        self._admit_held()
        _logger.info("continued")

    def _admit_held(self) -> None:
        held, self.held = self.held, {}
        for generation in held.values():
            self.admit(generation)

    # Jobs for when nothing is in flight.

    def when_idle(self, job: IdleJob) -> None:
        """Run ``job`` once nothing is in flight, at once if nothing is now."""
        self._jobs.append(job)
        if self.situation().num_in_flight == 0:
            self._run_idle_jobs()

    def cancel(self, job: IdleJob) -> None:
        job.is_cancelled = True
        self._drop_finished_jobs()

    def _run_idle_jobs(self) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            if not job.is_cancelled:
                job.run()
        self._drop_finished_jobs()

    def _drop_finished_jobs(self) -> None:
        self._jobs = deque(job for job in self._jobs if not job.is_cancelled)
        is_closed = self.paused is not None or any(job.closes_gate for job in self._jobs)
        if self.held and not is_closed:
            self._admit_held()

    # Memory.

    def flush(self) -> None:
        if holding := self.situation().num_holding_kv:
            raise Invalid(f"Flush cache failed: {holding} requests are in flight.")
        self._batcher.flush()

    def release(self, tags: Sequence[MemoryTag]) -> None:
        command_rules.require_can_release(self.situation(), tags)
        if MemoryTag.KV_CACHE in tags:
            self._batcher.flush()  # cached prefixes would outlive their contents
        self._memory.release(tags)
        _logger.info("released %s", ",".join(tags))

    def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        command_rules.require_can_resume(self.situation(), tags)
        self._memory.resume(tags)
        _logger.info("resumed %s", ",".join(tags))

    # Weights.

    def begin_update(self) -> None:
        command_rules.require_weights(self.situation(), "begin_weight_update")
        if self.is_session_open:
            raise Conflict("a weight update session is open already; end_weight_update first")
        self.is_session_open = True

    def end_update(self) -> None:
        if not self.is_session_open:
            raise Conflict("no weight update session is open")
        self.is_session_open = False

    def require_session(self, command: str) -> None:
        if not self.is_session_open:
            raise Invalid(
                f"{command} is only allowed inside a weight update session: begin_weight_update "
                "first, end_weight_update after"
            )

    def set_version(self, version: str, *, abort_all: bool) -> None:
        if abort_all:
            self.abort_all()
        self._batcher.step_report.weight_version = version

    def update(
        self, apply: Callable[[], Any], command: str, *, flush: bool, version: str | None
    ) -> None:
        """Change the weights, then their version, then drop prefixes of older weights."""
        command_rules.require_weights(self.situation(), command)
        if flush:
            command_rules.require_can_flush_after_update(self.situation(), command)
        apply()
        if version is not None:
            self._batcher.step_report.weight_version = version
        if flush:
            self._batcher.flush()
