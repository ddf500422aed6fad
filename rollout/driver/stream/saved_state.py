"""The state of a stream as JSON, in lines of which each has what changed since the one before.

Always true: lines in order give the state as of the last one; a first line alone gives all of it.
A group is there with its samples once it is finished, and as its prompt before.  A group that was
delivered in a step is offered again to a trainer that has that step still before it.  A group whose
metadata is no JSON is not kept, or its samples are not, and every other group is.

Pure: ``journal`` has the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rollout.driver.data.plain_values import NotPlainError, as_it_is, refuse, to_plain
from rollout.driver.data.prompt import PromptSource
from rollout.driver.stream.audit import Auditor
from rollout.driver.stream.work_queue import WorkItem, WorkQueue

State = dict[str, Any]
NOT_KEPT = "not in the journal"
"""The reason for which a group is dropped after a restart whose prompt was no JSON."""
_UNKEPT = "unkept"


class Changes:
    """Makes the lines of one stream.

    Args:
        step: groups delivered up to this step are not in these lines, but for their serials.
        on_unkept: called with what is not kept, and why; None: values that are no JSON stay as they
            are.
    """

    def __init__(self, step: int = -1, on_unkept: Callable[[str], None] | None = None) -> None:
        self._step = step
        self._on_unkept = on_unkept
        self._unknown = as_it_is if on_unkept is None else refuse
        self._next_serial: int | None = None
        self._works: dict[int, tuple[int, ...]] = {}

    def line(
        self, source: PromptSource, queue: WorkQueue, auditor: Auditor, step: int = -1
    ) -> State | None:
        """The next line, or None if nothing has changed.

        Args:
            step: in which groups were delivered.
        """
        items = {item.serial: item for item in queue.all()}
        works = [state for item in items.values() if (state := self._work(item)) is not None]
        line: State = {"works": works, "next_serial": queue.num_taken}
        if self._next_serial is None:
            line |= {"step": self._step, "audit": auditor.state_dict()}
        else:
            new = range(self._next_serial, queue.num_taken)
            gone = sorted({*self._works, *new} - items.keys())
            dropped = [
                [serial, auditor.dropped[serial]] for serial in gone if serial in auditor.dropped
            ]
            given = [serial for serial in gone if serial not in auditor.dropped]
            line |= {"delivered": given, "in_step": step, "dropped": dropped}
            for serial in gone:
                self._works.pop(serial, None)
            if not (works or gone):
                return None
        self._next_serial = queue.num_taken
        of_source = dict(source.state_dict())
        return line | {"source": to_plain(of_source, "the source's state", self._unknown)}

    def _work(self, item: WorkItem) -> State | None:
        """What has changed of an item, or None if nothing has."""
        before, now = self._works.get(item.serial), item.progress
        if before == now:
            return None
        self._works[item.serial] = now
        state: State = {"serial": item.serial, "num_redone": item.num_redone, "samples": None}
        try:
            if before is None:
                state["prompt"] = item.prompt_state(self._unknown)
        except NotPlainError as error:
            self._report(f"group {item.serial} is not kept: its prompt's {error}")
            return state | {_UNKEPT: str(error)}
        try:
            state["samples"] = item.samples_state(self._unknown)
        except NotPlainError as error:
            self._report(f"the samples of group {item.serial} are not kept: {error}")
        return state

    def _report(self, what: str) -> None:
        if self._on_unkept is not None:
            self._on_unkept(what)


class SavedState:
    """The state after some lines.

    Args:
        from_step: the trainer has this step and later ones still before it.

    Attributes:
        step: groups delivered up to this step cannot be offered again, or None before the first
            line.
    """

    def __init__(self, from_step: int) -> None:
        self._from_step = from_step
        self.step: int | None = None
        self._source: State = {}
        self._next_serial = 0
        self._works: dict[int, State] = {}
        self._given: dict[int, State] = {}
        self._delivered: set[int] = set()
        self._dropped: list[Any] = []

    def add(self, line: State) -> None:
        """Take the next line.

        Raises:
            ``WRONG_FORM``: it is none.
        """
        if "audit" in line:
            self._begin(line)
        self._source, self._next_serial = dict(line["source"]), _number(line["next_serial"])
        for work in line["works"]:
            serial = _number(work["serial"])
            self._works[serial] = self._works.get(serial, {}) | work
            # A call was cancelled before it returned what it had delivered.
            self._delivered.discard(serial)
            self._given.pop(serial, None)
        for serial in line.get("delivered", ()):
            work = self._works.pop(_number(serial), None)
            self._delivered.add(serial)
            if work is not None and line["in_step"] >= self._from_step:
                self._given[serial] = work
        for serial, reason in line.get("dropped", ()):
            self._works.pop(_number(serial), None)
            self._dropped.append([serial, reason])

    def _begin(self, line: State) -> None:
        """The first line of a file, which has everything but what was delivered before."""
        audit = line["audit"]
        self.step = _number(line["step"]) if self.step is None else self.step
        self._delivered = set(map(_number, audit["delivered"]))
        self._dropped = [[_number(serial), reason] for serial, reason in audit["dropped"]]
        self._given = {
            serial: work for serial, work in self._given.items() if serial in self._delivered
        }
        self._works = {}

    def state(self) -> State:
        """What a stream continues from: every group that is not delivered or dropped."""
        all_works = [*self._works.values(), *self._given.values()]
        works = [work for work in all_works if _UNKEPT not in work]
        unkept = [[work["serial"], NOT_KEPT] for work in all_works if _UNKEPT in work]
        return {
            "source": self._source,
            "next_serial": self._next_serial,
            "works": sorted(works, key=lambda work: work["serial"]),
            "audit": {
                "num_taken": self._next_serial,
                "delivered": sorted(self._delivered - self._given.keys()),
                "dropped": [*self._dropped, *unkept],
            },
        }


def _number(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"a number of a group or a step is {value!r:.60}")
    return value


def state_of(lines: Iterable[State]) -> State:
    """The state after ``lines``, for a trainer that has done all steps of them."""
    saved = SavedState(from_step=1 << 62)
    for line in lines:
        saved.add(line)
    return saved.state()
