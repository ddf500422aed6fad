"""The callables with which users change a rollout, and the functions that call them.

Always true: an exception in a hook, also a ``CancelledError`` of its own, never leaves this file.
It fails the samples that the hook was called for, which keep the traceback.  ``CallEnded`` leaves
it, and the samples stay as they were.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engines.protocol.plain_text import one_line
from rollout.core.arguments import Positive, Seconds, options
from rollout.core.errors import GenerationAborted
from rollout.core.samples import Sample, SampleGroup, SampleStatus, all_samples
from rollout.driver.client.session import Session
from rollout.driver.stream.user_code import CallEnded, original, raised_by, result_of, user_code

Reward = Callable[[Sample], float | Awaitable[float]]
GroupReward = Callable[[SampleGroup], Sequence[float] | Awaitable[Sequence[float]]]
Generate = Callable[[Session], Awaitable[None]]
SampleFilter = Callable[[Sample], bool]
GroupFilter = Callable[[SampleGroup], bool | str]
PostProcess = Callable[[list[SampleGroup]], None]
OnSample = Callable[[Sample], None]


@options
class Hooks:
    """The user's callables; all are optional.

    Attributes:
        generate: replaces the plain completion, for several turns, tools, agents.
        reward: for one sample, sync or async.
        group_reward: for all samples of a group at once, instead of ``reward``.
        reward_timeout_s: for one call of an async reward; a sync reward cannot be interrupted.
        reward_tries: failed calls after which the sample fails.
        sample_filter: False removes a sample from its group.
        group_filter: False, or the reason as text, drops a group; True or "" keeps it.  The first
            80 characters of a reason name it in metrics, and 32 reasons of a batch; more are
            ``other``.
        post_process: may change the rewards of a batch when it is full.

    Raises:
        ConfigError: a value is no function, or a number out of range.
    """

    generate: Generate | None = None
    reward: Reward | None = None
    group_reward: GroupReward | None = None
    reward_timeout_s: Seconds | None = None
    reward_tries: Positive = 1
    sample_filter: SampleFilter | None = None
    group_filter: GroupFilter | None = None
    post_process: PostProcess | None = None


def drop_zero_std(group: SampleGroup) -> str:
    """A group filter: with equal rewards, every group-relative advantage is zero.

    Args:
        group: with its rewards.
    """
    return "zero_std" if group.has_zero_std else ""


async def generate_with(hook: Generate, session: Session) -> None:
    """Generate the session's sample by ``hook``.  A stop leaves it aborted."""
    sample = session.sample
    with _failing("generate", [sample]):
        try:
            await result_of("generate", lambda: hook(session))
        except GenerationAborted:
            sample.status = SampleStatus.ABORTED
            return
        sample.check()
        if sample.status is SampleStatus.PENDING:
            sample.fail("the generate hook ended without a turn")


async def apply_reward(hooks: Hooks, sample: Sample) -> None:
    """Reward one sample, unless it has failed."""
    reward = hooks.reward
    if reward is None or hooks.group_reward is not None or sample.status is SampleStatus.FAILED:
        return
    with _failing("reward", [sample]):
        sample.reward = _number(await _call_with_retries(hooks, "reward", lambda: reward(sample)))


async def apply_group_reward(hooks: Hooks, group: SampleGroup) -> None:
    """Reward all samples of a group at once, except failed ones."""
    reward = hooks.group_reward
    unfailed = [sample for sample in group.samples if sample.status is not SampleStatus.FAILED]
    if reward is None or not unfailed:
        return
    to_reward = SampleGroup(group.prompt_index, unfailed, group.metadata)
    with _failing("group reward", unfailed):
        rewards = await _call_with_retries(hooks, "group reward", lambda: reward(to_reward))
        if len(rewards) != len(unfailed):
            raise ValueError(f"{len(rewards)} rewards for {len(unfailed)} samples")
        numbers = [_number(value) for value in rewards]
        for sample, number in zip(unfailed, numbers, strict=True):
            sample.reward = number


def keeps_sample(hooks: Hooks, sample: Sample) -> bool:
    """Whether the sample filter keeps a sample; a filter that raises fails the sample."""
    if hooks.sample_filter is None or sample.status is SampleStatus.FAILED:
        return True
    is_kept = True
    with _failing("sample filter", [sample]):
        is_kept = bool(hooks.sample_filter(sample))
    return is_kept


def why_dropped(hooks: Hooks, group: SampleGroup) -> str:
    """Why the group filter drops a group; empty if it keeps it.

    A filter that raises fails the samples of the group.
    """
    if hooks.group_filter is None:
        return ""
    decision: bool | str = ""
    with _failing("group filter", group.samples):
        decision = hooks.group_filter(group)
    if isinstance(decision, str):
        return one_line(decision)
    return "" if decision else "filtered"


def post_process(hooks: Hooks, groups: list[SampleGroup]) -> None:
    """Call the hook, if there is one, with the batch; if it raises, all samples fail."""
    if hooks.post_process is not None:
        with _failing("post_process", all_samples(groups)):
            hooks.post_process(groups)


async def _call_with_retries(hooks: Hooks, what: str, call: Callable[[], Any]) -> Any:
    for num in range(1, max(1, hooks.reward_tries) + 1):
        try:
            async with asyncio.timeout(hooks.reward_timeout_s):
                return await result_of(what, call)
        except CallEnded:
            raise
        except Exception:
            if num >= hooks.reward_tries:
                raise
    raise AssertionError


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward is {number}; it must be a finite number")
    return number


@contextmanager
def _failing(hook: str, samples: Iterable[Sample]) -> Iterator[None]:
    """Fail ``samples`` if the block, which calls the hook, raises.

    Raises:
        CallEnded: the hook has ended the call.
    """
    try:
        with user_code(hook):
            yield
    except CallEnded:
        raise
    except Exception as error:
        is_timeout = isinstance(error, TimeoutError) and not str(error)
        why = f"{hook} did not return in time" if is_timeout else raised_by(hook, original(error))
        for sample in samples:
            sample.fail(why, traceback.format_exc())
