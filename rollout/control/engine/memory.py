"""Releasing and resuming the memory of one engine.

Always true:
- nothing is released or resumed twice, because SGLang crashes on that (``redo`` relies on it);
- a release counts only after the memory was measured to be free, as far as the driver separates
  this engine's memory from that of programs beside it.  A shortfall that others may have caused
  is a warning;
- after a lost reply, the outcome is checked, not guessed.  The engine's report of its released
  tags decides.  Without a report, the memory that was freed by the time of a later reply decides.
  If both are inconclusive, the group ends the engine.  A call is repeated only if the engine
  reports that it was not done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from enum import StrEnum
from itertools import starmap
from pathlib import Path

from engines.protocol import GpuMemory, MemoryTag
from engines.protocol.errors import EngineError, EngineRejected, EngineUnreachable
from engines.protocol.plain_text import holder_text, size_text
from rollout.control.engine.state import EngineState
from rollout.core.errors import LifecycleError
from rollout.observability.timeline.recorder import current_span, record_event
from rollout.rules.release_policy import ReleasePolicy, bytes_to_resume, least_freed_bytes

logger = logging.getLogger(__name__)

_SERVER_ERROR = 500
_MOST_HOLDERS = 4
WEIGHTS_TAGS = (MemoryTag.WEIGHTS,)
KV_TAGS = (MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH)


class EngineMemory:
    """Releases and resumes the memory of a group's engines, one at a time.

    Args:
        model_path: the checkpoint; its size bounds what a release must free.
    """

    def __init__(self, policy: ReleasePolicy, model_path: str) -> None:
        self.policy = policy
        self._checkpoint_bytes = size_of_weights(model_path)

    async def release(self, member: EngineState, tags: Sequence[MemoryTag] | None = None) -> int:
        """Release the tags that are not released yet.

        Args:
            tags: None: those of the policy.

        Returns:
            The freed bytes; 0 if not measured.

        Raises:
            LifecycleError: too little memory was freed.
            EngineError: the call failed, and its outcome is unknown.
        """
        wanted = self.policy.tags if tags is None else tags
        tags = [tag for tag in wanted if tag not in member.released]
        if not tags:
            return 0
        by_tag = await member.memory_by_tag()
        before, own_before = await member.used_bytes(), await member.own_bytes()
        least = least_freed_bytes(tags, by_tag, self._checkpoint_bytes)
        try:
            await member.engine.release_memory_occupation(tags)
        except EngineError as error:
            released = await _released_after(member, error)
            freed = _freed(before, await member.used_bytes())
            if not _was_done(member, release_outcome(tags, released, freed, least), error):
                await member.engine.release_memory_occupation(tags)
        member.released.update(tags)
        if not self.policy.weights_cpu_backup and MemoryTag.WEIGHTS in tags:
            member.weight_version = None
        after, own_after = await member.used_bytes(), await member.own_bytes()
        _note(member, before, after)
        own_freed = _freed(own_before, own_after)
        freed = _freed(before, after) if own_freed is None else own_freed
        held = {tag: by_tag[tag] for tag in tags if tag in by_tag}
        member.released_bytes |= bytes_to_resume(held, freed, self._checkpoint_bytes)
        if freed is None:
            return 0
        if least and freed < least:  # without a least value, a page more is no failure
            text = (
                f"release of {', '.join(tags)} freed {size_text(freed)}, at least "
                f"{size_text(least)} must be freed; {size_text(after or 0)} are still in use"
            )
            if own_freed is not None or await _is_resident(member, tags):
                raise LifecycleError(text)
            logger.warning(
                "engine %s: %s, by all programs on its GPUs together", member.engine_id, text
            )
        return max(0, freed)

    async def onload_weights(self, member: EngineState) -> None:
        """Resume the memory of the weights; its contents are not verified yet."""
        await self.resume(member, WEIGHTS_TAGS)

    async def onload_kv(self, member: EngineState) -> None:
        """Resume the memory of the KV cache and the CUDA graphs."""
        await self.resume(member, KV_TAGS)

    async def resume(self, member: EngineState, tags: Sequence[MemoryTag]) -> None:
        """Resume those of ``tags`` that are released.

        Raises:
            EngineError: the call failed, and its outcome is unknown.
        """
        wanted = [tag for tag in tags if tag in member.released]
        if not wanted:
            return
        before = await member.used_bytes()
        try:
            await member.engine.resume_memory_occupation(wanted)
        except EngineError as error:
            released = await _released_after(member, error)
            if not _was_done(member, resume_outcome(wanted, released), error):
                await member.engine.resume_memory_occupation(wanted)
        member.released.difference_update(wanted)
        _note(member, before, await member.used_bytes())


async def redo(member: EngineState, tags: Sequence[MemoryTag], *, is_release: bool) -> None:
    """Undo and repeat the release or resume of ``tags`` of an engine that may have got it before.

    Raises:
        EngineError: it had not: SGLang ends when it resumes what is not released, or the reverse.
    """
    calls = [member.engine.release_memory_occupation, member.engine.resume_memory_occupation]
    for call in reversed(calls) if is_release else calls:
        await call(tags)


async def why_no_room(tags: Sequence[MemoryTag], members: Sequence[EngineState]) -> str:
    """Why the GPUs have no room to resume these tags.

    Checked before any engine is called: the memory saver ends the process of an engine that
    cannot get its memory back.
    """
    found = await asyncio.gather(*(_why_no_room_for(member, tags) for member in members))
    return "; ".join(filter(None, found))


async def _why_no_room_for(member: EngineState, tags: Sequence[MemoryTag]) -> str:
    wanted = [tag for tag in tags if tag in member.released and member.released_bytes.get(tag)]
    gpus = await member.gpu_memory() if wanted else ()
    if not gpus:
        return ""
    # Tensor parallelism divides weights and KV cache equally.
    needed = sum(member.released_bytes[tag] for tag in wanted) // len(gpus)
    return "; ".join(
        f"engine {member.engine_id}: GPU {gpu.uuid} has {size_text(gpu.free_bytes)} free, "
        f"{' and '.join(wanted)} need {size_text(needed)}{_resident_in(gpu)}"
        for gpu in gpus
        if gpu.free_bytes < needed
    )


async def why_no_room_beside(member: EngineState) -> str:
    """Why one more engine does not fit on the GPUs of one that serves."""
    gpus = await member.process.gpu_memory()
    if gpus is None:
        return "the memory of its GPUs is not measured (pip install nvidia-ml-py)"
    return "; ".join(
        f"GPU {gpu.uuid} has {size_text(gpu.free_bytes)} free, a boot needs {size_text(needed)}"
        for gpu in gpus
        if gpu.free_bytes < (needed := gpu.used_bytes if gpu.own_bytes is None else gpu.own_bytes)
    )


def _resident_in(gpu: GpuMemory) -> str:
    most = sorted(gpu.holders.items(), key=lambda holder: -(holder[1] or 0))[:_MOST_HOLDERS]
    holders = starmap(holder_text, most)
    advice = "free it (in PyTorch: torch.cuda.empty_cache()) and repeat the command"
    return f"; {', '.join([*holders, advice])}"


class CallOutcome(StrEnum):
    """The outcome of a call whose reply was lost."""

    DONE = "done"
    NOT_DONE = "not done"
    UNCERTAIN = "uncertain"


def is_lost(error: EngineError) -> bool:
    """Whether a failed call may have been executed."""
    if isinstance(error, EngineUnreachable):
        return error.maybe_executed
    return isinstance(error, EngineRejected) and error.status >= _SERVER_ERROR


def release_outcome(
    tags: Sequence[MemoryTag],
    released: Collection[str] | None,
    freed_bytes: int | None,
    least_bytes: int,
) -> CallOutcome:
    """The outcome of a release of ``tags``.

    Args:
        released: tags that the engine reports as released, or None without a report.
        freed_bytes: measured from outside, or None if not measured.
        least_bytes: the least that must be freed; may be 0.
    """
    if released is not None:
        return _outcome([tag in released for tag in tags])
    if least_bytes and freed_bytes is not None and freed_bytes >= least_bytes:
        return CallOutcome.DONE
    return CallOutcome.UNCERTAIN  # the memory may still be freed later


def resume_outcome(tags: Sequence[MemoryTag], released: Collection[str] | None) -> CallOutcome:
    """The outcome of a resume of ``tags``.  Only the engine's report counts: resumed memory is
    visible from outside only once it is used."""
    if released is None:
        return CallOutcome.UNCERTAIN
    return _outcome([tag not in released for tag in tags])


def _outcome(done: Sequence[bool]) -> CallOutcome:
    if all(done):
        return CallOutcome.DONE
    return CallOutcome.UNCERTAIN if any(done) else CallOutcome.NOT_DONE


async def _is_resident(member: EngineState, tags: Sequence[MemoryTag]) -> bool:
    """Whether the engine itself reports that some of these tags are not released."""
    released = (await member.engine.server_info()).released
    return released is not None and not released.issuperset(tags)


async def _released_after(member: EngineState, error: EngineError) -> Collection[str] | None:
    """The tags that the engine reports as released, after a call whose reply was lost.

    Raises:
        EngineError: ``error``, if its call was certainly not executed, or if the engine does not
            reply.
    """
    if not is_lost(error):
        raise error
    try:
        # SGLang's schedulers handle this call after the lost one.
        return (await member.engine.server_info()).released
    except EngineError as silent:
        raise error from silent


def _was_done(member: EngineState, outcome: CallOutcome, error: EngineError) -> bool:
    """Whether the lost call was executed; the result is recorded.

    Raises:
        EngineError: ``error``, if that is unknown.
    """
    if outcome is CallOutcome.UNCERTAIN:
        raise error
    message = f"a reply was lost, its call is {outcome}: {error}"
    record_event("checked", message, engine_id=member.engine_id)
    logger.warning("engine %s: %s", member.engine_id, message)
    return outcome is CallOutcome.DONE


def _freed(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else before - after


def _note(member: EngineState, before: int | None, after: int | None) -> None:
    """Record the measured memory for the report, and in the current span."""
    member.used_after = after
    if (span := current_span()) is not None:
        span.memory_before_bytes, span.memory_after_bytes = before, after
        span.num_gpus = member.slot.num_gpus


def size_of_weights(model_path: str) -> int:
    """Bytes of a checkpoint on disk."""
    return sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors"))
