"""The state of a stream as JSON, in lines of which each has what changed since the one before.

Always true: lines in order give the state as of the last one; a first line alone gives all of it.
A group is there with its samples once it is finished, and as its prompt before.  A group that was
delivered in a step is offered again to a trainer that has that step still before it.

Pure: ``journal`` has the files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rollout.driver.data.prompt import PromptSource
from rollout.driver.stream.audit import Auditor
from rollout.driver.stream.work_queue import WorkItem, WorkQueue

State = dict[str, Any]


class Changes:
    """Makes the lines of one stream.

    Args:
        step: groups delivered up to this step are not in these lines, but for their serials.
    """

    def __init__(self, step: int = -1) -> None:
        self._step = step
        self._next_serial: int | None = None
        self._works: dict[int, tuple[int, ...]] = {}

    def line(
        self, source: PromptSource, queue: WorkQueue, auditor: Auditor, step: int = -1
    ) -> State | None:
        """The next line; None if nothing has changed.

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
        return line | {"source": dict(source.state_dict())}

    def _work(self, item: WorkItem) -> State | None:
        """What has changed of an item; None if nothing has."""
        before, now = self._works.get(item.serial), item.progress
        if before == now:
            return None
        self._works[item.serial] = now
        prompt = {} if before is not None else {"prompt": asdict(item.prompt)}
        return {"serial": item.serial, **prompt, **item.state_dict()}


class SavedState:
    """The state after some lines.

    Args:
        from_step: the trainer has this step and later ones still before it.

    Attributes:
        step: groups delivered up to this step cannot be offered again; None before the first line.
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
        works = [*self._works.values(), *self._given.values()]
        return {
            "source": self._source,
            "next_serial": self._next_serial,
            "works": sorted(works, key=lambda work: work["serial"]),
            "audit": {
                "num_taken": self._next_serial,
                "delivered": sorted(self._delivered - self._given.keys()),
                "dropped": self._dropped,
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
