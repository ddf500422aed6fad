"""A broadcast from the groups' side, over fakes: who is asked what, and in which order.

What the trainer's end does with real engines is in ``tests/end_to_end/test_transports.py``.
"""

import asyncio
from typing import Any

import pytest

from engines.errors import EngineRejected
from engines.fake import FakeEngine
from rollout.errors import WeightsUnavailable
from rollout.weights.feed import FeedAddress
from rollout.weights.feeding import Bucket, Feed
from rollout.weights.push import PushTarget, WeightPush, push_weights
from rollout.weights.transports.by_broadcast import ByBroadcast
from tests.support.builders import manifest


def a_push(address: FeedAddress) -> WeightPush:
    return WeightPush(1, manifest(), carrier=ByBroadcast("g", "gloo"), feed=address)


def a_feed() -> Feed:
    info = manifest().tensors.values()
    payload = {
        "names": [one.name for one in info],
        "dtypes": [one.dtype for one in info],
        "shapes": [list(one.shape) for one in info],
    }
    terms = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 4}
    return Feed(iter([Bucket(payload, True)]), terms=lambda _: terms)


class Recording(FakeEngine):
    async def init_weights_update_group(self, **where: Any) -> None:
        self.where = where
        await super().init_weights_update_group(**where)


async def test_each_engine_gets_its_ranks_and_leaves_in_the_end() -> None:
    feed = a_feed()
    one, other = Recording("a"), Recording("b")
    targets = {"a": PushTarget(one, payload_copies=2), "b": PushTarget(other)}
    answers = await push_weights(a_push(feed.address), targets, budget_s=20)
    assert all(answer.failure is None for answer in answers.values())
    assert (one.where["rank_offset"], other.where["rank_offset"]) == (1, 3)
    assert one.operations() == [
        "weight_version",
        "init_weights_update_group",
        "begin_weight_update",
        "update_weights_from_distributed",
        "end_weight_update",
        "destroy_weights_update_group",
    ]
    assert await one.weight_version() == "1"
    feed.close()


async def test_an_engine_that_does_not_answer_is_left_out_before_a_group_is_made() -> None:
    feed = a_feed()
    dead, well = Recording("a"), Recording("b")
    dead.die("killed")
    targets = {"a": PushTarget(dead), "b": PushTarget(well)}
    answers = await push_weights(a_push(feed.address), targets, budget_s=20)
    assert answers["a"].failure is not None
    assert answers["b"].failure is None
    assert well.where["rank_offset"] == 1
    feed.close()


async def test_a_group_that_does_not_form_changes_nothing() -> None:
    feed = a_feed()
    bad, good = Recording("a"), Recording("b")
    bad.fail_next("init_weights_update_group", EngineRejected("no peer", status=400))
    begun: list[None] = []
    with pytest.raises(WeightsUnavailable, match=r"did not form: .*no peer.*no engine's weights"):
        await push_weights(
            a_push(feed.address),
            {"a": PushTarget(bad), "b": PushTarget(good)},
            budget_s=20,
            on_begin=lambda: begun.append(None),
        )
    assert begun == []
    assert "begin_weight_update" not in good.operations()
    assert good.operations()[-1] == "destroy_weights_update_group"
    feed.close()


async def test_no_engine_is_asked_for_anything_when_a_group_stays_away() -> None:
    feed = a_feed()
    feed._gather_s = 0.2
    engine = Recording("a")
    push = a_push(feed.address).read_by(2)
    with pytest.raises(WeightsUnavailable, match="1 of 2 groups came"):
        await asyncio.wait_for(push_weights(push, {"a": PushTarget(engine)}, budget_s=20), 10)
    assert engine.operations() == ["weight_version"]
    feed.close()
