"""The prompts of a stream that are not delivered or dropped yet, and their samples so far.

Always true:
- an item that was begun is waiting, running or ready, and only one of these;
- serials are unique and number the prompts in the order in which they left the source;
- waiting items are sorted by serial; samples keep their index in the group.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.core.samples import Sample, SampleGroup, SampleStatus
from rollout.driver.client.partial import restart
from rollout.driver.client.session import Session, Turn
from rollout.driver.data.plain_values import from_plain, to_plain
from rollout.driver.data.prompt import Prompt
from rollout.driver.data.sample_rows import sample_of, sample_values

Unknown = Callable[[Any, str], Any]
# Values of a sample that code of the user has made, or an engine's text.
_FREE = ("metadata", "reward", "text", "error", "traceback")


@dataclass(slots=True, eq=False)
class WorkItem:
    """One prompt and its samples, until they are delivered as a group.

    Attributes:
        rewarded: indices of the samples that have their reward.
        num_redone: how often the finished group was stale and was generated again.
        num_restarted: how many of its samples were stale when they were cut off.
        num_accepted: how often it passed every filter.
        is_accepted: it is finished, as of the last time.
        num_parked: how often it was interrupted unfinished.
        sessions: those that a generate hook has now, by the index of their sample.
        turns: of the samples of earlier sessions that were cut off, by index.
        failures: samples that failed, each with what was raised.
    """

    serial: int
    prompt: Prompt
    samples: list[Sample]
    rewarded: set[int] = field(default_factory=set)
    num_redone: int = 0
    num_restarted: int = 0
    num_accepted: int = 0
    is_accepted: bool = False
    num_parked: int = 0
    sessions: dict[int, Session] = field(default_factory=dict)
    turns: dict[int, list[Turn]] = field(default_factory=dict)
    failures: list[tuple[Sample, BaseException]] = field(default_factory=list)

    @classmethod
    def begin(cls, serial: int, prompt: Prompt, group_size: int) -> WorkItem:
        """An item without any generated token."""
        samples = [
            Sample(list(prompt.ids), status=SampleStatus.PENDING, metadata=dict(prompt.metadata))
            for _ in range(group_size)
        ]
        return cls(serial, prompt, samples)

    @property
    def num_unfinished(self) -> int:
        return sum(sample.is_unfinished for sample in self.samples)

    def restart(self, indices: Iterable[int]) -> None:
        """Discard the output and the reward of these samples."""
        for index in indices:
            sample = self.samples[index]
            self.failures = [failure for failure in self.failures if failure[0] is not sample]
            restart(sample)
            self.rewarded.discard(index)
            self.turns.pop(index, None)
        self.is_accepted = False

    def note_failure(self, sample: Sample, cause: BaseException) -> None:
        """Keep what was raised for a sample that failed, for a call that raises for it."""
        self.failures.append((sample, cause))

    def end_session(self, index: int, session: Session) -> None:
        """Have the session's sample, unless that was cut off before it had new tokens."""
        was_open = self.sessions.pop(index, None) is not None
        if was_open or not session.sample.is_unfinished:
            self.samples[index], self.turns[index] = session.sample, session.turns
        if not self.samples[index].is_unfinished:
            self.turns.pop(index, None)

    def group(self) -> SampleGroup:
        """The group for the trainer."""
        return SampleGroup(self.serial, self.samples, dict(self.prompt.metadata))

    @property
    def progress(self) -> tuple[int, ...]:
        """Equal as long as nothing of ``state_dict`` has changed."""
        return self.num_accepted if self.is_accepted else 0, self.num_redone

    def prompt_state(self, unknown: Unknown) -> dict[str, Any]:
        """Its prompt as JSON; ``unknown`` as ``to_plain`` takes it."""
        metadata = to_plain(self.prompt.metadata, "metadata", unknown)
        return {"ids": self.prompt.ids, "metadata": metadata}

    def samples_state(self, unknown: Unknown) -> list[dict[str, Any]] | None:
        """Its samples as JSON, or None before all are finished."""
        if not self.is_accepted:
            return None
        return [_state_of(sample, unknown) for sample in self.samples]

    @classmethod
    def of_state(cls, state: Mapping[str, Any], group_size: int) -> WorkItem:
        """The item of a saved state."""
        prompt = Prompt(tuple(state["prompt"]["ids"]), from_plain(state["prompt"]["metadata"]))
        item = cls.begin(state["serial"], prompt, group_size)
        item.num_redone = state["num_redone"]
        if state["samples"] is not None:
            item.samples = [sample_of(_from_state(values)) for values in state["samples"]]
            item.rewarded = set(range(len(item.samples)))
        return item


def _state_of(sample: Sample, unknown: Unknown) -> dict[str, Any]:
    values = sample_values(sample)
    is_finite = all(map(math.isfinite, sample.output_logprobs))
    free = _FREE if is_finite else (*_FREE, "output_logprobs")
    return values | {name: to_plain(values[name], name, unknown) for name in free}


def _from_state(values: Mapping[str, Any]) -> dict[str, Any]:
    free = {name: from_plain(values[name]) for name in (*_FREE, "output_logprobs")}
    return {**values, **free}


class WorkQueue:
    """The items of one stream.

    Attributes:
        num_taken: prompts taken so far; the serial of the next one.
        num_unfinished: samples of running items that are being generated or wait for a slot.
        waiting: new or interrupted items that wait to be run.
        running: items with a task, by serial.
        ready: items that passed every filter, by serial.
    """

    def __init__(self) -> None:
        self.num_taken = 0
        self.num_unfinished = 0
        self.waiting: list[WorkItem] = []
        self.running: dict[int, WorkItem] = {}
        self.ready: dict[int, WorkItem] = {}
        self._num_left: dict[int, int] = {}

    def all(self) -> list[WorkItem]:
        """All items, in the order in which their prompts left the source."""
        items = [*self.waiting, *self.running.values(), *self.ready.values()]
        return sorted(items, key=lambda item: item.serial)

    def may_begin(self, limit: int, capacity: int) -> bool:
        """Whether to start one more group now.

        Args:
            limit: samples that may be in flight.
            capacity: groups that may be running or ready.
        """
        return len(self.running) + len(self.ready) < capacity and self.num_unfinished < limit

    # -- state changes ----------------------------------------------------------------------

    def take(self, prompt: Prompt, group_size: int) -> WorkItem:
        """A new item for the next prompt.  It is in no state until ``begin``."""
        item = WorkItem.begin(self.num_taken, prompt, group_size)
        self.num_taken += 1
        return item

    def begin(self, item: WorkItem) -> None:
        """The item is running."""
        self.running[item.serial] = item
        self._num_left[item.serial] = item.num_unfinished
        self.num_unfinished += item.num_unfinished

    def has_generated(self, item: WorkItem) -> None:
        """One sample of the item needs no engine any more."""
        self._num_left[item.serial] -= 1
        self.num_unfinished -= 1

    def end(self, item: WorkItem) -> None:
        """The item is not running any more.  The caller puts it elsewhere, or drops it."""
        del self.running[item.serial]
        self.num_unfinished -= self._num_left.pop(item.serial)

    def requeue(self, item: WorkItem) -> None:
        """The item waits to be run."""
        insort(self.waiting, item, key=lambda waiting: waiting.serial)

    def put_ready(self, item: WorkItem) -> None:
        item.num_accepted += 1
        item.is_accepted = True
        self.ready[item.serial] = item

    def first_ready(self, num_groups: int) -> list[WorkItem]:
        """The ready items that form a batch, in order."""
        return [self.ready[serial] for serial in sorted(self.ready)[:num_groups]]

    # -- across a restart -------------------------------------------------------------------

    @classmethod
    def of_state(cls, state: Mapping[str, Any], group_size: int) -> WorkQueue:
        """The queue of a saved state.

        Raises:
            ValueError: a group in it is larger than ``group_size``.
        """
        items = [WorkItem.of_state(item, group_size) for item in state["works"]]
        too_large = [item for item in items if len(item.samples) > group_size]
        if too_large:
            raise ValueError(
                f"group_size = {group_size}: the state has groups of {len(too_large[0].samples)}"
            )
        queue = cls()
        queue.num_taken = state["next_serial"]
        for item in items:
            if item.rewarded:  # all of it was finished
                queue.put_ready(item)
            else:
                queue.requeue(item)
        return queue
