"""What a user may put into a rollout, as plain callables, and how they are called.

Always true: an exception in a hook never leaves this file.  It fails the sample (or the group)
that the hook was called for, with the traceback kept.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.driver.session import Session
from rollout.errors import GenerationAborted
from rollout.samples import Sample, SampleGroup, SampleStatus

Reward = Callable[[Sample], float | Awaitable[float]]
GroupReward = Callable[[SampleGroup], Sequence[float] | Awaitable[Sequence[float]]]
Generate = Callable[[Session], Awaitable[None]]
SampleFilter = Callable[[Sample], bool]
GroupFilter = Callable[[SampleGroup], bool | str]
PostProcess = Callable[[list[SampleGroup]], None]
OnSample = Callable[[Sample], None]


@dataclass(frozen=True, slots=True)
class Hooks:
    """All of them; none has to be there.

    Attributes:
        generate: in the place of one plain completion: turns, tools, agents.
        reward: of one sample, sync or async.
        group_reward: of all samples of a group at once, in the place of ``reward``.
        reward_timeout_s: for one call of an async reward; a sync one cannot be interrupted.
        reward_tries: calls until a sample fails.
        sample_filter: False takes a sample out of its group.
        group_filter: False, or the reason as text, drops a group; True or "" keeps it.
        post_process: may change the rewards of a batch, once it is full.
    """

    generate: Generate | None = None
    reward: Reward | None = None
    group_reward: GroupReward | None = None
    reward_timeout_s: float | None = None
    reward_tries: int = 1
    sample_filter: SampleFilter | None = None
    group_filter: GroupFilter | None = None
    post_process: PostProcess | None = None


def drop_zero_std(group: SampleGroup) -> str:
    """A group filter: siblings with equal rewards teach a group-relative policy nothing."""
    return "zero_std" if group.has_zero_std else ""


async def generate_with(hook: Generate, session: Session) -> None:
    """Let ``hook`` make the session's sample.  A stop leaves it aborted."""
    sample = session.sample
    try:
        await hook(session)
        sample.check()
    except GenerationAborted:
        sample.status = SampleStatus.ABORTED
    except Exception as error:
        sample.fail(f"generate raised {error!r}", traceback.format_exc())
    else:
        if sample.status is SampleStatus.PENDING:
            sample.fail("the generate hook ended without a turn")


async def judge(hooks: Hooks, sample: Sample) -> None:
    """Reward one sample, unless it has failed."""
    if hooks.reward is None or hooks.group_reward is not None:
        return
    if sample.status is SampleStatus.FAILED:
        return
    reward = hooks.reward
    try:
        sample.reward = _number(await _tried(hooks, lambda: reward(sample)))
    except Exception as error:
        sample.fail(_words("reward", error), traceback.format_exc())


async def judge_group(hooks: Hooks, group: SampleGroup) -> None:
    """Reward all samples of a group at once, failed ones left out."""
    if hooks.group_reward is None:
        return
    whole = [sample for sample in group.samples if sample.status is not SampleStatus.FAILED]
    if not whole:
        return
    reward = hooks.group_reward
    asked = SampleGroup(group.prompt_index, whole, group.metadata)
    try:
        rewards = await _tried(hooks, lambda: reward(asked))
        if len(rewards) != len(whole):
            raise ValueError(f"{len(rewards)} rewards for {len(whole)} samples")
        numbers = [_number(one) for one in rewards]
    except Exception as error:
        for sample in whole:
            sample.fail(_words("group reward", error), traceback.format_exc())
        return
    for sample, number in zip(whole, numbers, strict=True):
        sample.reward = number


def keeps_sample(hooks: Hooks, sample: Sample) -> bool:
    """Whether the sample filter lets it through; a filter that raises fails the sample."""
    if hooks.sample_filter is None or sample.status is SampleStatus.FAILED:
        return True
    try:
        return bool(hooks.sample_filter(sample))
    except Exception as error:
        sample.fail(_words("sample filter", error), traceback.format_exc())
        return True


def why_dropped(hooks: Hooks, group: SampleGroup) -> str:
    """Why the group filter drops a group; empty where it does not.

    A filter that raises fails the samples of the group.
    """
    if hooks.group_filter is None:
        return ""
    try:
        answer = hooks.group_filter(group)
    except Exception as error:
        for sample in group.samples:
            sample.fail(_words("group filter", error), traceback.format_exc())
        return ""
    if isinstance(answer, str):
        return answer
    return "" if answer else "filtered"


async def _tried(hooks: Hooks, call: Callable[[], Any]) -> Any:
    for num in range(1, max(1, hooks.reward_tries) + 1):
        try:
            async with asyncio.timeout(hooks.reward_timeout_s):
                answer = call()
                return await answer if inspect.isawaitable(answer) else answer
        except Exception:
            if num >= hooks.reward_tries:
                raise
    raise AssertionError


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}; it must be a finite number")
    return number


def _words(hook: str, error: Exception) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"{hook} did not answer in time"
    return f"{hook} raised {error!r}"
