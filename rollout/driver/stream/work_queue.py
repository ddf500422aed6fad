"""The prompts of a stream that are not delivered or dropped yet, and their samples so far.

Always true:
- an item that was begun is waiting, running or ready, and only one of these;
- serials are unique and number the prompts in the order in which they left the source;
- waiting items are sorted by serial; samples keep their index in the group.
"""

from __future__ import annotations

import base64
from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.protocol import FinishReason, VersionSpan
from engines.protocol.logprob_kind import read_kind
from rollout.core.errors import ConfigError
from rollout.core.samples import EngineSpan, Sample, SampleGroup, SampleStatus
from rollout.driver.client.partial import restart
from rollout.driver.client.session import Session, Turn
from rollout.driver.data.prompt import Prompt


@dataclass(slots=True, eq=False)
class WorkItem:
    """One prompt and its samples, until they are delivered as a group.

    Attributes:
        rewarded: indices of the samples that have their reward.
        num_redone: how often the finished group was stale and was generated again.
        num_restarted: how many of its samples were stale when they were cut off.
        is_accepted: it passed every filter.
        num_parked: how often it was interrupted unfinished.
        sessions: those that a generate hook has now, by the index of their sample.
        turns: of the samples of earlier sessions that were cut off, by index.
    """

    serial: int
    prompt: Prompt
    samples: list[Sample]
    rewarded: set[int] = field(default_factory=set)
    num_redone: int = 0
    num_restarted: int = 0
    is_accepted: bool = False
    num_parked: int = 0
    sessions: dict[int, Session] = field(default_factory=dict)
    turns: dict[int, list[Turn]] = field(default_factory=dict)

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
            restart(self.samples[index])
            self.rewarded.discard(index)
            self.turns.pop(index, None)
        self.is_accepted = False

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

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> WorkItem:
        """The item of a saved state."""
        return cls(
            serial=state["serial"],
            prompt=Prompt(tuple(state["prompt"]["ids"]), state["prompt"]["metadata"]),
            samples=[_sample_of_state(sample) for sample in state["samples"]],
            rewarded=set(state["judged"]),
            num_redone=state["num_redone"],
            num_restarted=state["num_restarted"],
            is_accepted=state["is_accepted"],
            num_parked=state["num_parked"],
            turns={
                int(index): [
                    Turn(num, length, status, _reason_of(why)) for num, length, status, why in turns
                ]
                for index, turns in state.get("turns", {}).items()
            },
        )


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
            ConfigError: a group in it is larger than ``group_size``.
        """
        items = [WorkItem.of_state(item) for item in state["works"]]
        too_large = [item for item in items if len(item.samples) > group_size]
        if too_large:
            raise ConfigError(
                f"group_size = {group_size}: the state has groups of {len(too_large[0].samples)}",
                setting="group_size",
                value=group_size,
            )
        queue = cls()
        queue.num_taken = state["next_serial"]
        queue.ready = {item.serial: item for item in items if item.is_accepted}
        queue.waiting = [item for item in items if not item.is_accepted]
        return queue


def _sample_of_state(state: Mapping[str, Any]) -> Sample:
    experts = state["routed_experts"]
    return Sample(
        **{
            **state,
            "prompt_ids": list(state["prompt_ids"]),
            "output_ids": list(state["output_ids"]),
            "output_logprobs": list(state["output_logprobs"]),
            "loss_mask": list(state["loss_mask"]),
            "metadata": dict(state["metadata"]),
            "weight_versions": tuple(VersionSpan(**span) for span in state["weight_versions"]),
            "engines": tuple(EngineSpan(**span) for span in state["engines"]),
            "finish_reason": _reason_of(state["finish_reason"]),
            "status": SampleStatus(state["status"]),
            "logprob_kind": read_kind(state.get("logprob_kind")),
            "routed_experts": None if experts is None else base64.b64decode(experts),
        }
    )


def _reason_of(state: Mapping[str, Any] | None) -> FinishReason | None:
    return None if state is None else FinishReason(**state)
