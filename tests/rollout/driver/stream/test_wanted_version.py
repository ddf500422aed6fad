"""A batch of weights that the policy does not have is an error, and not a sample."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.core.errors import RolloutError
from rollout.driver.stream.delivery import why_wrong_version
from rollout.driver.stream.options import RolloutOptions
from tests.support.driving import SAMPLING, driving, engines, numbers, prompts, push, source
from tests.support.virtual_time import pass_time, virtual_time

NO_TOKEN = r"weight version 57 is wanted, and no token has it: the newest has 0"


@virtual_time
@pytest.mark.parametrize("is_router", [True, False])
@pytest.mark.parametrize("by_argument", [True, False])
async def test_a_version_that_no_token_has_is_an_error(by_argument: bool, is_router: bool) -> None:
    async with driving(engines(0.01, 0.01)) as (driver, client):
        client.weight_version = 0 if is_router else None  # one engine alone reports no load
        more = {"weight_version": 57} if by_argument else {}
        if not by_argument:
            driver.set_weight_version(57)
        with pytest.raises(RolloutError, match=NO_TOKEN) as caught:
            await driver.rollout(58, prompts(2), group_size=2, sampling=SAMPLING, **more)
    assert ("the engines serve 0" in str(caught.value)) is is_router
    assert "launch(config, expect_version=57)" in str(caught.value)


@virtual_time
@pytest.mark.parametrize("mode", ["sync", "one_ahead", "async"])
async def test_prompts_of_a_refused_batch_are_generated_again(mode: Any) -> None:
    async with driving(engines(0.01)) as (driver, client):
        client.weight_version = 0
        data, options = source(4), RolloutOptions(mode=mode)
        plan: dict[str, Any] = {
            "group_size": 1,
            "num_groups": 2,
            "sampling": SAMPLING,
            "options": options,
        }
        with pytest.raises(RolloutError, match=NO_TOKEN):
            await driver.rollout(58, data, weight_version=57, **plan)
        await push(client, 57)
        groups = await driver.rollout(58, data, weight_version=57, **plan)
        assert numbers(groups) == [1, 2] or mode == "async"
        assert {version for group in groups for one in group for version in one.versions} == {57}


@virtual_time
async def test_groups_from_before_a_push_are_used_where_the_options_allow_it() -> None:
    options = RolloutOptions(mode="one_ahead")
    async with driving(engines(0.01)) as (driver, client):
        await push(client, 1)
        plan: dict[str, Any] = {"group_size": 1, "num_groups": 2, "sampling": SAMPLING}
        data = source(12)
        await driver.rollout(1, data, weight_version=1, options=options, **plan)
        await pass_time(5)  # the next batch is ready
        await push(client, 2)
        groups = await driver.rollout(2, data, weight_version=2, options=options, **plan)
        assert {version for group in groups for one in group for version in one.versions} == {1}


@pytest.mark.parametrize(
    ("newest", "wanted", "served", "options", "is_wrong"),
    [
        (57, 57, 57, {}, False),
        (58, 57, 58, {}, False),
        (0, 57, 0, {}, True),
        (0, 57, None, {}, True),
        (0, 57, 57, {}, True),  # the base under an adapter
        (56, 57, 57, {"max_version_lag": 1}, False),
        (55, 57, 57, {"max_version_lag": 1}, True),
        (56, 57, 56, {"max_version_lag": 1}, True),  # the push is missing
        (56, 57, 57, {"over_sampling": 2.0}, False),
        (56, 57, 57, {"mode": "async"}, False),
        (0, 57, 0, {"mode": "async"}, True),
        (0, 57, None, {"mode": "async"}, False),
    ],
)
def test_a_batch_may_be_older_only_where_it_can_have_groups_from_before(
    newest: int, wanted: int, served: int | None, options: dict[str, Any], is_wrong: bool
) -> None:
    why = why_wrong_version(newest, wanted, served, RolloutOptions(**options))
    assert bool(why) is is_wrong


@virtual_time
async def test_stale_groups_are_counted_where_none_is_left() -> None:
    async with driving(engines(0.01)) as (driver, client):
        client.weight_version = 57
        options = RolloutOptions(max_version_lag=1, when_stale="drop")
        message = r"no group is left of 2 prompts \(stale: 2, .*version is 57, and max_version_lag"
        with pytest.raises(RolloutError, match=message):
            await driver.rollout(58, prompts(2), group_size=1, sampling=SAMPLING, options=options)
