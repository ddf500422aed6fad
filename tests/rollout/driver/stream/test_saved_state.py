"""The lines of the saved state: together they give what one line of everything gives."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engines.protocol import SamplingParams
from engines.protocol.logprob_kind import LogprobKind
from rollout.core.samples import Sample, SampleStatus
from rollout.driver.client.session import Session
from rollout.driver.data.prompt import Prompt
from rollout.driver.data.prompt_data import FixedPrompts
from rollout.driver.stream.audit import Auditor
from rollout.driver.stream.hooks import Hooks
from rollout.driver.stream.options import RolloutOptions
from rollout.driver.stream.saved_state import Changes, SavedState, state_of
from rollout.driver.stream.stream import Stream
from rollout.driver.stream.work_queue import WorkItem, WorkQueue
from tests.support.driving import SAMPLING, driving, engines, push, source
from tests.support.virtual_time import pass_time, virtual_time

BATCH: dict[str, Any] = {"num_groups": 4, "group_size": 2, "sampling": SAMPLING}


async def two_turns(session: Session) -> None:
    await session.generate(SamplingParams(max_new_tokens=4))
    session.observe([7, 8], " tool ")
    await pass_time(0.05)
    await session.generate()


class Collector:
    """Takes lines of a stream at many moments."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._changes = Changes()
        self.lines: list[Any] = []

    def take(self) -> None:
        if (line := self._stream._line(self._changes, -1)) is not None:
            self.lines.append(copied(line))

    async def run(self) -> None:
        while True:
            self.take()
            await pass_time(0.013)


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("generate", [None, two_turns])
@virtual_time
async def test_the_lines_of_a_run_give_its_state_at_any_time(generate: Any) -> None:
    hooks = Hooks(
        reward=lambda sample: float(len(sample.output_ids)),
        generate=generate,
        sample_filter=lambda sample: sample.metadata["number"] % 3 > 0 or sample.output_ids[0] % 2,
        group_filter=lambda group: group.metadata["number"] % 5 > 0,
    )
    options = RolloutOptions(mode="async", over_sampling=2.0, max_version_lag=1)
    async with driving(engines(0.01, 0.03, 0.2), hooks=hooks) as (driver, client):
        data = source(200)
        client.weight_version = 0
        await driver.rollout(0, data, options=options, **BATCH)
        stream = driver.stream_of(data)
        collector = Collector(stream)
        collecting = asyncio.create_task(collector.run())
        for step in range(1, 9):
            await pass_time(0.07)
            await push(client, step, 0.01)
            await driver.rollout(step, data, options=options, **BATCH)
            collector.take()
            state = state_of(copied(collector.lines))
            state["audit"]["dropped"].sort()
            whole = copied(stream.state_dict())
            whole["audit"]["dropped"].sort()
            assert state == whole
        collecting.cancel()
    lines = collector.lines
    assert len(lines) > 30
    finished = [work for line in lines for work in line["works"] if work["samples"] is not None]
    assert len(finished) > 20
    assert all(one["status"] != "aborted" for work in finished for one in work["samples"])


def begun(num: int) -> tuple[WorkQueue, Auditor, list[WorkItem]]:
    queue, auditor = WorkQueue(), Auditor()
    items = [queue.take(Prompt((1,), {}), 1) for _ in range(num)]
    for item in items:
        auditor.take(item.serial)
        queue.begin(item)
    return queue, auditor, items


def finish(queue: WorkQueue, item: WorkItem) -> None:
    queue.end(item)
    queue.put_ready(item)


def generate(sample: Sample, *ids: int, logprob: float = -1.0) -> None:
    sample.output_ids += ids
    sample.output_logprobs += [logprob] * len(ids)
    sample.mask.extend([1] * len(ids))
    sample.text += " ".join(map(str, ids))
    sample.status = SampleStatus.ABORTED


def test_a_group_is_written_as_its_prompt_and_again_when_it_is_finished() -> None:
    queue, auditor, (item,) = begun(1)
    changes, data = Changes(), FixedPrompts([])
    generate(item.samples[0], 5, 6)
    line = changes.line(data, queue, auditor)
    assert line is not None
    (work,) = line["works"]
    assert (work["prompt"]["ids"], work["samples"]) == ((1,), None)
    generate(item.samples[0], 7)
    assert changes.line(data, queue, auditor) is None  # of what is generated
    finish(queue, item)
    line = changes.line(data, queue, auditor)
    assert line is not None
    (work,) = line["works"]
    assert "prompt" not in work
    assert [one["output_ids"] for one in work["samples"]] == [[5, 6, 7]]
    assert changes.line(data, queue, auditor) is None


@pytest.mark.parametrize("is_finished_again", [True, False])
def test_a_group_that_begins_again_is_written_anew(is_finished_again: bool) -> None:
    queue, auditor, (item,) = begun(1)
    changes, data = Changes(), FixedPrompts([])
    generate(item.samples[0], 5, 6)
    finish(queue, item)
    lines = [changes.line(data, queue, auditor)]
    del queue.ready[item.serial]
    item.restart([0])
    queue.begin(item)
    if is_finished_again:
        generate(item.samples[0], 5, 9)
        finish(queue, item)
    lines.append(changes.line(data, queue, auditor))
    (work,) = state_of(copied(lines))["works"]
    if is_finished_again:
        assert work["samples"][0]["output_ids"] == [5, 9]
    else:
        assert work["samples"] is None


def test_a_group_that_was_not_finished_begins_again_with_the_size_of_now() -> None:
    queue, auditor, (item,) = begun(1)
    item.num_redone = 2
    generate(item.samples[0], 5)
    state = copied(state_of([Changes().line(FixedPrompts([]), queue, auditor)]))
    again = WorkQueue.of_state(state, 3)
    (begun_again,) = again.waiting
    assert (begun_again.num_redone, again.num_taken) == (2, 1)
    assert [sample.output_ids for sample in begun_again.samples] == [[], [], []]
    assert begun_again.prompt == item.prompt


def lines_of_two_steps() -> list[dict[str, Any]]:
    """Group 0 is delivered in step 4, group 1 in step 5 of a later file, group 2 is pending."""
    queue, auditor, items = begun(3)
    changes, data, lines = Changes(3), FixedPrompts([]), []

    def deliver(item: WorkItem, step: int) -> None:
        finish(queue, item)
        lines.append(changes.line(data, queue, auditor))
        del queue.ready[item.serial]
        auditor.deliver(item.serial)
        lines.append(changes.line(data, queue, auditor, step=step))

    generate(items[0].samples[0], 5)
    deliver(items[0], 4)
    changes = Changes(4)
    lines.append(changes.line(data, queue, auditor))
    deliver(items[1], 5)
    return list(copied(lines))


@pytest.mark.parametrize(("from_step", "offered"), [(4, [0, 1, 2]), (5, [1, 2]), (6, [2])])
def test_what_was_delivered_is_offered_to_a_trainer_that_has_the_step_before_it(
    from_step: int, offered: list[int]
) -> None:
    saved = SavedState(from_step)
    for line in lines_of_two_steps():
        saved.add(line)
    state = saved.state()
    assert saved.step == 3
    assert [work["serial"] for work in state["works"]] == offered
    assert state["audit"]["delivered"] == [n for n in range(3) if n not in offered]
    assert [work["samples"] is not None for work in state["works"]] == [n < 2 for n in offered]


def test_a_later_file_alone_begins_behind_its_step() -> None:
    saved = SavedState(5)
    for line in lines_of_two_steps()[2:]:
        saved.add(line)
    assert saved.step == 4
    assert [work["serial"] for work in saved.state()["works"]] == [1, 2]


def test_experts_and_kind_are_saved_with_their_sample() -> None:
    queue, auditor, (item,) = begun(1)
    generate(item.samples[0], 5)
    item.samples[0].routed_experts = b"\0\1\xff"
    item.samples[0].logprob_kind = LogprobKind.RAW
    finish(queue, item)
    line = copied(Changes().line(FixedPrompts([]), queue, auditor))
    (again,) = WorkQueue.of_state(state_of([line]), 1).first_ready(1)
    assert again.samples == item.samples


async def test_a_state_keeps_what_it_has_when_the_trainer_changes_its_samples() -> None:
    async with driving(engines(0.001), Hooks(reward=lambda sample: 1.0).reward) as (driver, _):
        data = source(8)
        options = RolloutOptions(mode="async")
        await driver.rollout(0, data, options=options, **BATCH)
        await driver.rollout(1, data, options=options, **BATCH)
        state = driver.state_of(data)
        before = copied(state)
        for item in driver.stream_of(data)._queue.all():
            for sample in item.samples:
                sample.output_ids.append(1)
                sample.metadata["more"] = 1
        assert copied(state) == before
