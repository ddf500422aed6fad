"""The states of prompts that were taken and are not delivered yet."""

from typing import Any

import pytest

from rollout.core.samples import EngineSpan
from rollout.driver.data.prompt import Prompt
from rollout.driver.data.prompt_data import FixedPrompts
from rollout.driver.stream.audit import Auditor
from rollout.driver.stream.saved_state import Changes, state_of
from rollout.driver.stream.work_queue import WorkItem, WorkQueue


def state(queue: WorkQueue) -> dict[str, Any]:
    line = Changes().line(FixedPrompts([]), queue, Auditor())
    assert line is not None
    return state_of([line])


def begun(queue: WorkQueue, num: int, group_size: int = 2) -> list[WorkItem]:
    taken = [queue.take(Prompt((1,), {}), group_size) for _ in range(num)]
    for item in taken:
        queue.begin(item)
    return taken


def test_waiting_items_keep_the_order_of_the_source() -> None:
    queue = WorkQueue()
    first, second, third = begun(queue, 3)
    for item in (second, third, first):
        queue.end(item)
        queue.requeue(item)
    assert queue.waiting == [first, second, third]


def test_a_batch_has_the_earliest_ready_items() -> None:
    queue = WorkQueue()
    first, second, third = begun(queue, 3)
    for item in (third, first, second):
        queue.end(item)
        queue.put_ready(item)
    assert queue.first_ready(2) == [first, second]
    assert queue.all() == [first, second, third]


def test_an_item_that_ends_early_leaves_no_unfinished_samples_behind() -> None:
    queue = WorkQueue()
    first, second = begun(queue, 2, group_size=3)
    queue.has_generated(first)
    assert queue.num_unfinished == 5
    queue.end(first)
    assert queue.num_unfinished == 3
    queue.end(second)
    assert queue.num_unfinished == 0


def test_after_a_restart_unfinished_items_begin_again_and_ready_items_are_ready() -> None:
    queue = WorkQueue()
    ready, running, waiting = begun(queue, 3)
    queue.end(ready)
    queue.put_ready(ready)
    queue.end(waiting)
    queue.requeue(waiting)
    waiting.samples[0].output_ids.append(7)
    waiting.samples[0].output_logprobs.append(-1.0)
    waiting.samples[0].mask.append(1)
    waiting.samples[0].engines = (EngineSpan("main-0", 0, 1),)
    again = WorkQueue.of_state(state(queue), group_size=2)
    assert [sample.output_ids for sample in again.waiting[1].samples] == [[], []]
    assert again.ready[0].samples == ready.samples
    assert [item.serial for item in again.waiting] == [running.serial, waiting.serial]
    assert list(again.ready) == [ready.serial]
    assert again.take(Prompt((1,), {}), 2).serial == 3


def test_groups_larger_than_the_group_size_are_rejected() -> None:
    queue = WorkQueue()
    (item,) = begun(queue, 1, group_size=4)
    queue.end(item)
    queue.put_ready(item)
    with pytest.raises(ValueError, match="group_size = 2: the state has groups of 4"):
        WorkQueue.of_state(state(queue), group_size=2)


@pytest.mark.parametrize(
    ("num_open", "num_ready", "num_unfinished", "may"),
    [(3, 4, 9, True), (4, 4, 9, False), (0, 8, 0, False), (3, 4, 10, False)],
)
def test_a_group_is_begun_only_with_room_for_it(num_open, num_ready, num_unfinished, may) -> None:
    queue, item = WorkQueue(), WorkItem(0, Prompt((1,)), [])
    queue.running = dict.fromkeys(range(num_open), item)
    queue.ready = dict.fromkeys(range(num_ready), item)
    queue.num_unfinished = num_unfinished
    assert queue.may_begin(limit=10, capacity=8) is may


def test_groups_are_delivered_in_the_order_of_their_prompts() -> None:
    queue = WorkQueue()
    for serial in (7, 3, 5):
        queue.put_ready(WorkItem(serial, Prompt((1,)), []))
    assert [item.serial for item in queue.first_ready(2)] == [3, 5]
