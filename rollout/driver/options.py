"""How a rollout is made, in values that are checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from engines.protocol import SamplingParams
from rollout.driver.plan import Mode, WhenStale
from rollout.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """What a rollout from a source may do beyond generating its prompts.

    Attributes:
        mode: ``sync``, ``one_ahead`` or ``async``; see ``plan.Mode``.
        over_sampling: groups under way for each group that is wanted; what is ready beyond the
            batch goes to the next one.
        partial: what is unfinished when the batch is full keeps its tokens and goes on next
            time; else it begins anew.
        max_version_lag: weight versions that the oldest token of a sample may be behind.
        when_stale: whether what is older is done anew or dropped.
        max_redone: times a group is done anew before it is dropped.
        max_rejected: groups that filters may drop for one batch; 10 for each wanted if left out.
        max_failed_share: of the samples of a batch; more raises, and nothing is lost.
        abort_timeout_s: until aborted requests must have ended.
        pin: the only weight version that a token may have.
    """

    mode: Mode | str = Mode.SYNC
    over_sampling: float = 1.0
    partial: bool = True
    max_version_lag: int | None = None
    when_stale: WhenStale | str = WhenStale.REDO
    max_redone: int = 3
    max_rejected: int | None = None
    max_failed_share: float = 0.0
    abort_timeout_s: float = 30.0
    pin: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (("mode", Mode), ("when_stale", WhenStale)):
            value = getattr(self, name)
            if value not in list(kind):
                raise _wrong(name, value, f"one of {', '.join(kind)}")
            object.__setattr__(self, name, kind(value))
        _at_least("over_sampling", self.over_sampling, 1)
        _at_least("max_redone", self.max_redone, 0)
        for name in ("max_version_lag", "max_rejected"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 0)
        if not 0 <= self.max_failed_share <= 1:
            raise _wrong("max_failed_share", self.max_failed_share, "a share between 0 and 1")
        if not self.abort_timeout_s > 0:
            raise _wrong("abort_timeout_s", self.abort_timeout_s, "more than 0")


@dataclass(frozen=True, slots=True)
class Batch:
    """How much of what is wanted.

    Attributes:
        num_groups: prompts of one batch.
        group_size: samples of each.
    """

    num_groups: int
    group_size: int
    sampling: SamplingParams

    def __post_init__(self) -> None:
        _at_least("num_groups", self.num_groups, 1)
        _at_least("group_size", self.group_size, 1)
        _at_least("max_new_tokens", self.sampling.max_new_tokens, 1)
        if self.sampling.n != 1:
            raise _wrong("n", self.sampling.n, "1: group_size says how many samples there are")
        if self.sampling.min_new_tokens > self.sampling.max_new_tokens:
            raise _wrong(
                "min_new_tokens",
                self.sampling.min_new_tokens,
                f"at most max_new_tokens, which is {self.sampling.max_new_tokens}",
            )


def _at_least(name: str, value: float, lowest: int) -> None:
    if not value >= lowest:
        raise _wrong(name, value, f"at least {lowest}")


def _wrong(name: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"{name} = {value}: must be {accepted}", setting=name, value=value)
