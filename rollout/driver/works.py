"""Where each prompt is that was taken and is not delivered or dropped yet.

Always true:
- a work that was begun is in one place: put aside, under way, or ready;
- what is put aside lies in the order in which its prompts left the source.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from typing import Any

from rollout.driver.plan import deliverable
from rollout.driver.prompts import Prompt
from rollout.driver.work import Work, work_of, work_state
from rollout.errors import ConfigError


class Works:
    """The works of one stream.

    Attributes:
        num_taken: prompts so far; the serial of the next.
        num_unfinished: samples under way that are being generated, or wait for it.
        aside: begun or not, they wait for their turn.
        under_way: a task runs each of them, by serial.
        ready: they went through every filter, by serial.
    """

    def __init__(self) -> None:
        self.num_taken = 0
        self.num_unfinished = 0
        self.aside: list[Work] = []
        self.under_way: dict[int, Work] = {}
        self.ready: dict[int, Work] = {}
        self._num_left: dict[int, int] = {}

    def all(self) -> list[Work]:
        """In the order in which their prompts left the source."""
        works = [*self.aside, *self.under_way.values(), *self.ready.values()]
        return sorted(works, key=lambda work: work.serial)

    # -- from place to place ----------------------------------------------------------------

    def take(self, prompt: Prompt, group_size: int) -> Work:
        """A work for the next prompt; it is in no place before it is begun."""
        work = Work.begin(self.num_taken, prompt, group_size)
        self.num_taken += 1
        return work

    def begin(self, work: Work) -> None:
        """It is under way."""
        self.under_way[work.serial] = work
        self._num_left[work.serial] = work.num_unfinished
        self.num_unfinished += work.num_unfinished

    def has_generated(self, work: Work) -> None:
        """One sample of it needs no engine any more."""
        self._num_left[work.serial] -= 1
        self.num_unfinished -= 1

    def end(self, work: Work) -> None:
        """It is under way no more; whoever says so puts it elsewhere, or drops it."""
        del self.under_way[work.serial]
        self.num_unfinished -= self._num_left.pop(work.serial)

    def put_aside(self, work: Work) -> None:
        insort(self.aside, work, key=lambda one: one.serial)

    def put_ready(self, work: Work) -> None:
        work.is_accepted = True
        self.ready[work.serial] = work

    def take_ready(self, num_groups: int) -> list[Work]:
        """The ready ones that make a batch, in order."""
        return [self.ready.pop(serial) for serial in deliverable(list(self.ready), num_groups)]

    # -- across a restart -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As JSON has it; what is under way as far as its last reply."""
        return {
            "next_serial": self.num_taken,
            "works": [work_state(work) for work in self.all()],
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], group_size: int) -> Works:
        """The works that ``state_dict`` wrote down.

        Raises:
            ConfigError: groups among them are larger than ``group_size``.
        """
        all_works = [work_of(one) for one in state["works"]]
        odd = [work for work in all_works if len(work.samples) > group_size]
        if odd:
            raise ConfigError(
                f"group_size = {group_size}: the state has groups of {len(odd[0].samples)}",
                setting="group_size",
                value=group_size,
            )
        works = cls()
        works.num_taken = state["next_serial"]
        works.ready = {work.serial: work for work in all_works if work.is_accepted}
        works.aside = [work for work in all_works if not work.is_accepted]
        return works
