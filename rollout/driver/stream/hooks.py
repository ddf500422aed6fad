"""The callables with which users change a rollout, and the functions that call them.

Always true: whatever a hook raises or returns, and a hook that hangs in an ``await``, fails the
samples that it was called for, which keep the traceback; it never leaves this file.  ``CallEnded``
leaves it, and the samples stay as they were.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engines.protocol.plain_text import one_line
from rollout.core.arguments import Positive, Seconds, options
from rollout.core.errors import GenerationAborted
from rollout.core.samples import Sample, SampleFailure, SampleGroup, SampleStatus, all_samples
from rollout.driver.client.session import Session
from rollout.driver.user_code import (
    CallEnded,
    HookLate,
    original,
    raised_by,
    result_now,
    result_of,
    wrong_result,
)

Reward = Callable[[Sample], float | Awaitable[float]]
GroupReward = Callable[[SampleGroup], Sequence[float] | Awaitable[Sequence[float]]]
Generate = Callable[[Session], Awaitable[None]]
SampleFilter = Callable[[Sample], bool]
GroupFilter = Callable[[SampleGroup], bool | str]
PostProcess = Callable[[list[SampleGroup]], None]
OnSample = Callable[[Sample], None]
OnFailure = Callable[[Sample, BaseException], None]


@options
class Hooks:
    """The user's callables; all are optional.

    An async hook that has not returned within its limit fails its samples.  A sync one cannot be
    interrupted: it stops the driver, which warns of it by name after five seconds.

    Attributes:
        generate: replaces the plain completion, for several turns, tools, agents.
        reward: for one sample, sync or async.
        group_reward: for all samples of a group at once, instead of ``reward``.
        generate_timeout_s: for one call of ``generate``, with all its turns and waits, or None for
            no limit.
        reward_timeout_s: for one call of an async reward or group reward, or None for no limit.
        reward_tries: failed calls after which the sample fails.
        sample_filter: False removes a sample from its group.
        group_filter: False, or the reason as text, drops a group; True or "" keeps it.  The first
            80 characters of a reason name it in metrics, and 32 reasons of a batch; more are
            ``other``.
        post_process: may change the samples of a batch when it is full, in place; it returns
            nothing.

    Raises:
        TypeError, ValueError: a value is no function, or a number out of range.
    """

    generate: Generate | None = None
    reward: Reward | None = None
    group_reward: GroupReward | None = None
    # An episode of hours is a mistake more often than a wish; a judge's answer takes minutes.
    generate_timeout_s: Seconds | None = 3600.0
    reward_timeout_s: Seconds | None = 600.0
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


async def generate_with(hooks: Hooks, session: Session, on_failure: OnFailure) -> None:
    """Generate the session's sample by the hook.  A stop leaves it aborted."""
    sample, hook = session.sample, hooks.generate
    assert hook is not None
    with _failing("generate", [sample], on_failure):
        try:
            await result_of("generate", hook, session, limit_s=hooks.generate_timeout_s)
        except GenerationAborted:
            sample.status = SampleStatus.ABORTED
            return
        sample.check()
        if sample.status is SampleStatus.PENDING:
            sample.fail(
                "the generate hook ended without a turn", failure=SampleFailure.GENERATE_ERROR
            )


async def apply_reward(hooks: Hooks, sample: Sample, on_failure: OnFailure) -> None:
    """Reward one sample, unless it has failed."""
    reward = hooks.reward
    if reward is None or hooks.group_reward is not None or sample.status is SampleStatus.FAILED:
        return
    with _failing("reward", [sample], on_failure):
        value = await _call_with_retries(hooks, "reward", reward, sample)
        sample.reward = _number("reward", reward, value)


async def apply_group_reward(hooks: Hooks, group: SampleGroup, on_failure: OnFailure) -> None:
    """Reward all samples of a group at once, except failed ones."""
    reward = hooks.group_reward
    unfailed = [sample for sample in group.samples if sample.status is not SampleStatus.FAILED]
    if reward is None or not unfailed:
        return
    to_reward = SampleGroup(group.prompt_index, unfailed, group.metadata)
    with _failing("group reward", unfailed, on_failure):
        rewards = await _call_with_retries(hooks, "group reward", reward, to_reward)
        is_list = isinstance(rewards, Sequence) or hasattr(rewards, "tolist")
        if not is_list or isinstance(rewards, str | bytes):
            raise wrong_result("group reward", reward, rewards, "a list of numbers")
        if len(rewards) != len(unfailed):
            wanted = f"a reward for each of {len(unfailed)} samples, not {len(rewards)}"
            raise wrong_result("group reward", reward, rewards, wanted)
        numbers = [_number("group reward", reward, value) for value in rewards]
        for sample, number in zip(unfailed, numbers, strict=True):
            sample.reward = number


def keeps_sample(hooks: Hooks, sample: Sample, on_failure: OnFailure) -> bool:
    """Whether the sample filter keeps a sample; a filter that raises fails the sample."""
    keeps = hooks.sample_filter
    if keeps is None or sample.status is SampleStatus.FAILED:
        return True
    is_kept = True
    with _failing("sample filter", [sample], on_failure):
        decision = result_now("sample filter", keeps, sample)
        if not _is_truth(decision):
            raise wrong_result("sample filter", keeps, decision, "True or False")
        is_kept = bool(decision)
    return is_kept


def why_dropped(hooks: Hooks, group: SampleGroup, on_failure: OnFailure) -> str:
    """Why the group filter drops a group.

    A filter that raises fails the samples of the group.
    """
    keeps = hooks.group_filter
    if keeps is None:
        return ""
    decision: Any = ""
    with _failing("group filter", group.samples, on_failure):
        decided = result_now("group filter", keeps, group)
        if not isinstance(decided, str) and not _is_truth(decided):
            raise wrong_result("group filter", keeps, decided, "True, False or the reason as text")
        decision = decided
    if isinstance(decision, str):
        return one_line(decision)
    return "" if decision else "filtered"


def post_process(hooks: Hooks, groups: list[SampleGroup], on_failure: OnFailure) -> None:
    """Call the hook, if there is one, with the batch; if it raises, all samples fail."""
    change = hooks.post_process
    if change is None:
        return
    with _failing("post_process", all_samples(groups), on_failure):
        result = result_now("post_process", change, groups)
        if result is not None and result is not groups:
            wanted = "nothing: it changes the groups in place"
            raise wrong_result("post_process", change, result, wanted)


async def _call_with_retries(
    hooks: Hooks, what: str, reward: Callable[..., Any], of: Sample | SampleGroup
) -> Any:
    for num in range(1, max(1, hooks.reward_tries) + 1):
        try:
            return await result_of(what, reward, of, limit_s=hooks.reward_timeout_s)
        except CallEnded:
            raise
        except Exception:
            if num >= hooks.reward_tries:
                raise
    raise AssertionError


def _number(what: str, hook: Callable[..., Any], value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise wrong_result(what, hook, value, "a finite number")
    return number


def _is_truth(value: Any) -> bool:
    """Whether it is True or False, also one of numpy or torch."""
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    return isinstance(value, bool | int)


def _failure_of(hook: str, error: Exception) -> SampleFailure:
    if isinstance(error, TimeoutError | HookLate):
        return SampleFailure.TIMEOUT
    kinds = {
        "generate": SampleFailure.GENERATE_ERROR,
        "reward": SampleFailure.REWARD_ERROR,
        "group reward": SampleFailure.REWARD_ERROR,
    }
    return kinds.get(hook, SampleFailure.FILTER_ERROR)


@contextmanager
def _failing(hook: str, samples: Iterable[Sample], on_failure: OnFailure) -> Iterator[None]:
    """Fail ``samples`` if the block, which calls the hook, raises.

    Args:
        on_failure: called with each of them, and what the hook has raised.

    Raises:
        CallEnded: the hook has ended the call.
    """
    try:
        yield
    except CallEnded:
        raise
    except Exception as error:
        for sample in samples:
            sample.fail(
                raised_by(hook, error), traceback.format_exc(), failure=_failure_of(hook, error)
            )
            on_failure(sample, original(error))
