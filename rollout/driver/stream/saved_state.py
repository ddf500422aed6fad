"""The state of a stream as JSON, in lines of which each has what changed since the one before.

Always true: lines in order give the state as of the last one; a first line alone gives all of it.
Tokens of a sample are in one line only, as long as its output only grows.  A group that was
delivered in a step is offered again to a trainer that has that step still before it.

Pure: ``journal`` has the files.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rollout.core.samples import Sample, SampleStatus
from rollout.driver.client.partial import is_begun_by
from rollout.driver.data.prompt import PromptSource
from rollout.driver.stream.audit import Auditor
from rollout.driver.stream.work_queue import WorkItem, WorkQueue

State = dict[str, Any]


@dataclass(slots=True)
class _Written:
    """What the lines so far have of a sample.

    Attributes:
        number: of it in the lines.
        own: the sample of the item, which keeps its ``id`` from another one.
        output: the lists and the text that were written, of which the lists may have grown.
    """

    number: int
    own: Sample
    output: tuple[list[int], list[float], list[int], str]
    num_tokens: int = 0
    mark: object = None

    def is_continued_by(self, sample: Sample) -> bool:
        """Whether the output of ``sample`` begins with what was written."""
        ids, logprobs, mask, text = self.output
        if sample.output_ids is ids:
            return True
        num = self.num_tokens
        return is_begun_by(
            sample, Sample([], ids[:num], logprobs[:num], text, loss_mask=mask[:num])
        )


def _output(sample: Sample) -> tuple[list[int], list[float], list[int], str]:
    return sample.output_ids, sample.output_logprobs, sample.mask, sample.text


class Changes:
    """Makes the lines of one stream.

    Args:
        step: groups delivered up to this step are not in these lines, but for their serials.
    """

    def __init__(self, step: int = -1) -> None:
        self._step = step
        self._next_serial: int | None = None
        self._num_samples = 0
        self._works: dict[int, State] = {}
        self._written: dict[int, dict[int, _Written]] = {}

    def line(
        self,
        source: PromptSource,
        queue: WorkQueue,
        auditor: Auditor,
        partial: Mapping[int, Sample] | None = None,
        step: int = -1,
    ) -> State | None:
        """The next line; None if nothing has changed.

        Args:
            partial: samples in flight with the tokens of their reply so far, by the ``id`` of the
                sample that will get the reply.
            step: in which groups were delivered.
        """
        works, samples = list[State](), dict[str, State]()
        items = {item.serial: item for item in queue.all()}
        for item in items.values():
            work = self._work(item, partial or {}, samples)
            if work != self._works.get(item.serial):
                prompt = {} if item.serial in self._works else {"prompt": asdict(item.prompt)}
                works.append(work | prompt)
                self._works[item.serial] = work
        line: State = {"works": works, "samples": samples, "next_serial": queue.num_taken}
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
                self._written.pop(serial, None)
            if not (works or samples or gone):
                return None
        self._next_serial = queue.num_taken
        return line | {"source": dict(source.state_dict())}

    def _work(
        self, item: WorkItem, partial: Mapping[int, Sample], samples: dict[str, State]
    ) -> State:
        """The item, with numbers of its samples instead of the samples."""
        before, after = self._written.get(item.serial, {}), dict[int, _Written]()
        numbers, turns = [], dict[str, Any]()
        for index, sample in enumerate(item.samples):
            session = item.sessions.get(index)
            latest = sample if session is None else session.sample
            latest = partial.get(id(latest), latest)
            written = before.get(id(sample))
            if written is None or not written.is_continued_by(latest):
                written = _Written(self._num_samples, sample, ([], [], [], ""))
                self._num_samples += 1
            after[id(sample)] = written
            numbers.append(written.number)
            about = (item.is_accepted, index in item.rewarded, session is not None)
            _write(written, latest, about, samples)
            if ended := item.turns.get(index) if session is None else session.turns:
                turns[str(index)] = [list(asdict(turn).values()) for turn in ended]
        self._written[item.serial] = after
        return {
            "serial": item.serial,
            "samples": numbers,
            "judged": sorted(item.rewarded),
            "num_redone": item.num_redone,
            "num_restarted": item.num_restarted,
            "is_accepted": item.is_accepted,
            "num_parked": item.num_parked,
            "turns": turns,
        }


def _write(
    written: _Written, sample: Sample, about: tuple[bool, bool, bool], samples: dict[str, State]
) -> None:
    """Put what has changed of a sample under its number."""
    begin, begin_text = written.num_tokens, len(written.output[-1])
    end, end_text = len(sample.output_ids), len(sample.text)
    mark = (end, end_text, sample.status, sample.reward, sample.error, about)
    if mark == written.mark:
        return
    is_open = about[-1]
    state: State = {
        "weight_versions": [asdict(span) for span in sample.weight_versions],
        "engines": [asdict(span) for span in sample.engines],
        "finish_reason": None if sample.finish_reason is None else asdict(sample.finish_reason),
        "logprob_kind": sample.logprob_kind,
        "status": str(SampleStatus.ABORTED if is_open and end else sample.status),
        "reward": sample.reward,
        "error": sample.error,
        "traceback": sample.traceback,
        "more": {
            "output_ids": sample.output_ids[begin:],
            "output_logprobs": sample.output_logprobs[begin:],
            "text": sample.text[begin_text:],
        },
    }
    if written.mark is None or not sample.is_unfinished:
        experts = sample.routed_experts
        state |= {
            "prompt_ids": list(sample.prompt_ids),
            "metadata": copy.deepcopy(sample.metadata),
            "routed_experts": None if experts is None else base64.b64encode(experts).decode(),
        }
    if sample.is_unfinished or is_open:
        state["more"]["loss_mask"] = sample.mask[begin:]
    else:  # a hook may have changed it
        state["loss_mask"] = list(sample.mask)
    samples[str(written.number)] = state
    written.output, written.num_tokens, written.mark = _output(sample), end, mark


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
        self._samples: dict[int, State] = {}
        self._given: dict[int, State] = {}
        self._delivered: set[int] = set()
        self._dropped: list[Any] = []

    def add(self, line: State) -> None:
        """Take the next line.

        Raises:
            LookupError: it is none.
        """
        if "audit" in line:
            self._begin(line)
        self._source, self._next_serial = line["source"], line["next_serial"]
        for number, sample in line["samples"].items():
            self._add_sample(int(number), sample)
        for work in line["works"]:
            serial = work["serial"]
            self._works[serial] = self._works.get(serial, {}) | work
            # A call was cancelled before it returned what it had delivered.
            self._delivered.discard(serial)
            self._given.pop(serial, None)
        for serial in line.get("delivered", ()):
            work = self._pop(serial)
            self._delivered.add(serial)
            if work is not None and line["in_step"] >= self._from_step:
                self._given[serial] = work
        for serial, reason in line.get("dropped", ()):
            self._pop(serial)
            self._dropped.append([serial, reason])

    def _begin(self, line: State) -> None:
        """The first line of a file, which has everything but what was delivered before."""
        audit = line["audit"]
        self.step = line["step"] if self.step is None else self.step
        self._delivered, self._dropped = set(audit["delivered"]), list(audit["dropped"])
        self._given = {
            serial: work for serial, work in self._given.items() if serial in self._delivered
        }
        self._works, self._samples = {}, {}

    def _add_sample(self, number: int, state: State) -> None:
        more = state.pop("more")
        before = self._samples.setdefault(
            number, {"output_ids": [], "output_logprobs": [], "loss_mask": [], "text": ""}
        )
        before |= state
        for name, value in more.items():
            before[name] += value

    def _pop(self, serial: int) -> State | None:
        """A group that is no longer pending; None if it never was in a line."""
        work = self._works.pop(serial, None)
        return None if work is None else self._whole(work)

    def _whole(self, work: State) -> State:
        return work | {"samples": [self._samples[number] for number in work["samples"]]}

    def state(self) -> State:
        """What a stream continues from: every group that is not delivered or dropped."""
        works = [*map(self._whole, self._works.values()), *self._given.values()]
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


def state_of(lines: Iterable[State]) -> State:
    """The state after ``lines``, for a trainer that has done all steps of them."""
    saved = SavedState(from_step=1 << 62)
    for line in lines:
        saved.add(line)
    return saved.state()
