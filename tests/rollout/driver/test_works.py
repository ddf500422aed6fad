"""Where prompts are that were taken and not delivered yet."""

import pytest

from rollout.driver.prompts import Prompt
from rollout.driver.work import Work
from rollout.driver.works import Works
from rollout.errors import ConfigError


def begun(works: Works, num: int, group_size: int = 2) -> list[Work]:
    taken = [works.take(Prompt((1,), {}), group_size) for _ in range(num)]
    for work in taken:
        works.begin(work)
    return taken


def test_what_is_put_aside_lies_in_the_order_of_the_source() -> None:
    works = Works()
    first, second, third = begun(works, 3)
    for work in (second, third, first):
        works.end(work)
        works.put_aside(work)
    assert works.aside == [first, second, third]


def test_a_batch_is_what_came_first_of_what_is_ready() -> None:
    works = Works()
    first, second, third = begun(works, 3)
    for work in (third, first, second):
        works.end(work)
        works.put_ready(work)
    assert works.take_ready(2) == [first, second]
    assert works.all() == [third]


def test_a_work_that_ends_early_leaves_no_unfinished_samples_behind() -> None:
    works = Works()
    first, second = begun(works, 2, group_size=3)
    works.has_generated(first)
    assert works.num_unfinished == 5
    works.end(first)
    assert works.num_unfinished == 3
    works.end(second)
    assert works.num_unfinished == 0


def test_after_a_restart_what_was_under_way_is_aside_and_what_was_ready_is_ready() -> None:
    works = Works()
    ready, under_way, aside = begun(works, 3)
    works.end(ready)
    works.put_ready(ready)
    works.end(aside)
    works.put_aside(aside)
    again = Works.of_state(works.state_dict(), group_size=2)
    assert [work.serial for work in again.aside] == [under_way.serial, aside.serial]
    assert list(again.ready) == [ready.serial]
    assert again.take(Prompt((1,), {}), 2).serial == 3


def test_groups_larger_than_wanted_are_refused_by_their_size() -> None:
    works = Works()
    begun(works, 1, group_size=4)
    with pytest.raises(ConfigError, match="group_size = 2: the state has groups of 4"):
        Works.of_state(works.state_dict(), group_size=2)
