"""Releasing and resuming the memory of one engine.

Always true: nothing is released or resumed twice, for SGLang dies of that; a release counts only
when the memory has been measured to be free; a call whose answer was lost is settled by what the
engine holds, see ``settling.py``, or fails.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from engines.protocol import MemoryTag
from rollout.errors import LifecycleError
from rollout.member import Member
from rollout.policy import ReleasePolicy, least_freed_bytes
from rollout.settling import Fate, carry_out, fate_of_release, fate_of_resume
from rollout.timeline.recorder import current


async def release(member: Member, policy: ReleasePolicy, checkpoint_bytes: int) -> int:
    """Give back what is not given back yet; the bytes that came free, 0 where not measured.

    Raises:
        LifecycleError: less came free than must.
    """
    tags = [tag for tag in policy.tags if tag not in member.released]
    if not tags:
        return 0
    by_tag = await member.memory_by_tag()
    before = await member.process.resident_bytes()
    least = least_freed_bytes(tags, by_tag, checkpoint_bytes)

    async def fate_of(released: Collection[str] | None) -> Fate:
        now = await member.process.resident_bytes()
        freed = None if before is None or now is None else before - now
        return fate_of_release(tags, released, freed, least)

    call = partial(member.engine.release_memory_occupation, tags)
    await carry_out(member, "release", call, fate_of)
    member.released.update(tags)
    if not policy.weights_cpu_backup and MemoryTag.WEIGHTS in tags:
        member.weight_version = None
    after = await member.process.resident_bytes()
    _note(before, after)
    if before is None or after is None:
        return 0
    if least and before - after < least:  # where nothing has to, a page more is no failure
        raise LifecycleError(
            f"release of {', '.join(tags)} freed {_mib(before - after)}, at least "
            f"{_mib(least)} must come free; it still holds {_mib(after)}"
        )
    return max(0, before - after)


async def resume(member: Member, tags: Sequence[MemoryTag]) -> None:
    """Take back those of ``tags`` that are released."""
    wanted = [tag for tag in tags if tag in member.released]
    if wanted:
        before = await member.process.resident_bytes()

        async def fate_of(released: Collection[str] | None) -> Fate:
            return fate_of_resume(wanted, released)

        call = partial(member.engine.resume_memory_occupation, wanted)
        await carry_out(member, "resume", call, fate_of)
        member.released.difference_update(wanted)
        _note(before, await member.process.resident_bytes())


def _note(before: int | None, after: int | None) -> None:
    """Onto the timeline."""
    if (span := current()) is not None:
        span.memory_before_bytes, span.memory_after_bytes = before, after


def size_of_weights(model_path: str) -> int:
    """Bytes of a checkpoint on disk."""
    return sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors"))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
