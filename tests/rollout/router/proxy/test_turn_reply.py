"""What an engine generates for a turn, without sockets: replies and failures as objects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from rollout.agents.chats import ChatFailure, Ended
from rollout.router.gate.gate import GateState
from rollout.router.http.head_cache import ReplyHead
from rollout.router.proxy.turn_reply import Progress, generate
from tests.rollout.router.exchange_rig import ASK, PLAIN, Rig, rig_of
from tests.rollout.router.generate_events import STREAM, event

Replies = AsyncGenerator[Progress | Ended, None]


async def begin(rig: Rig, **more: Any) -> tuple[Replies, asyncio.Task[Any]]:
    """A turn whose request has entered the gate, and its wait for the first reply."""
    replies = generate(rig.proxy, "s", json.dumps(ASK | more).encode())
    first = asyncio.ensure_future(anext(replies))
    await asyncio.sleep(0)
    return replies, first


async def test_a_turn_that_reads_slowly_gets_the_newest_tokens() -> None:
    rig = rig_of("a")
    replies, first = await begin(rig, stream=True)
    (sent,) = rig.engines.sent
    sent.reply(STREAM, event(1), is_end=False)
    progress = await first
    assert (progress.ids, progress.logprobs_from(0)) == ([1], [])
    sent.more(event(1, 2))
    sent.more(event(1, 2, 3))
    sent.more(event(1, 2, 3, 4, finish="length"), is_end=True)
    (last,) = [reply async for reply in replies]
    assert isinstance(last, Ended)
    assert last.reply.output_ids == (1, 2, 3, 4)
    assert last.reply.finish_reason is not None
    assert rig.is_empty()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_turn_continues_on_another_engine(is_streamed: bool) -> None:
    rig = rig_of("a", "b")
    replies, first = await begin(rig, stream=is_streamed)
    rig.engines.sent[0].reply(STREAM, event(1, 2), is_end=False)
    rig.engines.sent[0].lose()
    assert rig.engines.sent[1].body["input_ids"][-2:] == [1, 2]
    rig.engines.sent[1].reply(STREAM, event(3, 4, finish="length"))
    whole = [await first, *[reply async for reply in replies]][-1]
    assert isinstance(whole, Ended)
    assert whole.reply.output_ids == (1, 2, 3, 4)
    assert whole.reply.num_failovers == 1
    assert rig.is_empty()


async def test_a_turn_is_not_continued_where_failover_is_off() -> None:
    rig = rig_of("a", "b", failover=False)
    replies, first = await begin(rig, stream=True)
    rig.engines.sent[0].reply(STREAM, event(1, 2), is_end=False)
    assert (await first).ids == [1, 2]
    rig.engines.sent[0].lose()
    with pytest.raises(ChatFailure, match="engine a failed"):
        await anext(replies)
    assert len(rig.engines.sent) == 1
    assert rig.is_empty()


async def test_a_whole_reply_is_taken_where_failover_is_off() -> None:
    rig = rig_of("a", "b", failover=False)
    _, first = await begin(rig)
    rig.engines.sent[0].lose()
    whole = json.loads(event(1, 2, finish="length").removeprefix(b"data: "))
    rig.engines.sent[1].reply(PLAIN, json.dumps(whole).encode())
    assert (await first).reply.output_ids == (1, 2)
    assert rig.is_empty()


async def test_a_turn_waits_at_the_gate_and_leaves_it_with_its_client() -> None:
    rig = rig_of("a")
    rig.gate.set_state(GateState.HOLDING)
    _, first = await begin(rig)
    assert (rig.gate.num_held, rig.engines.sent) == (1, [])
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert rig.proxy.counts.num_clients_left == 1
    assert rig.is_empty()


async def test_a_refusal_of_the_gate_says_when_to_come_again() -> None:
    rig = rig_of("a")
    rig.gate.set_state(GateState.CLOSED, reason="training")
    _, first = await begin(rig)
    with pytest.raises(ChatFailure) as refused:
        await first
    assert (refused.value.status, refused.value.retry_after) == (503, "2")
    assert json.loads(refused.value.body)["error"]["reason"] == "training"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_engines_refusal_is_the_turns_failure(is_streamed: bool) -> None:
    rig = rig_of("a")
    _, first = await begin(rig, stream=is_streamed)
    rig.engines.sent[0].reply(ReplyHead(422, PLAIN.headers), b'{"detail": "too long"}')
    with pytest.raises(ChatFailure) as refused:
        await first
    assert (refused.value.status, refused.value.body) == (422, b'{"detail": "too long"}')
    assert rig.is_empty()


@pytest.mark.parametrize(("is_streamed", "status"), [(False, 507), (True, 502)])
async def test_an_error_event_is_the_turns_failure(is_streamed: bool, status: int) -> None:
    rig = rig_of("a")
    _, first = await begin(rig, stream=is_streamed)
    error = {"error": {"message": "m", "code": 507}}
    rig.engines.sent[0].reply(STREAM, b"data: " + json.dumps(error).encode() + b"\n\n")
    with pytest.raises(ChatFailure) as refused:
        await first
    assert (refused.value.status, json.loads(refused.value.body)) == (status, error)
    assert rig.is_empty()


@pytest.mark.parametrize("num_tokens", [1, 20_000])
async def test_a_reply_without_what_a_turn_needs_is_unusable(num_tokens: int) -> None:
    """Also where a thread reads it."""
    rig = rig_of("a")
    _, first = await begin(rig, sampling_params={"max_new_tokens": num_tokens})
    ids = list(range(num_tokens))
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "1"}
    whole = {"output_ids": ids, "text": "x", "meta_info": meta}
    rig.engines.sent[0].reply(STREAM, b"data: " + json.dumps(whole).encode() + b"\n\n")
    with pytest.raises(
        ChatFailure, match=r"engine a failed /generate: .* cannot be used: KeyError"
    ):
        await first
    assert rig.proxy.counts.num_unusable_replies == 1
    assert rig.is_empty()


async def test_the_reason_of_an_unusable_reply_is_cut() -> None:
    rig = rig_of("a")
    _, first = await begin(rig)
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [["x" * 9000, 1, None]]}
    whole = {"output_ids": [1], "text": "x", "meta_info": {"id": "r-1", **meta}}
    rig.engines.sent[0].reply(STREAM, b"data: " + json.dumps(whole).encode() + b"\n\n")
    with pytest.raises(ChatFailure) as refused:
        await first
    assert b"cannot be used: UnusableReply: the log-prob 'xxx" in refused.value.body
    assert len(refused.value.body) < 1000
    assert rig.is_empty()


async def test_a_turn_that_takes_too_long_gets_the_deadline() -> None:
    rig = rig_of("a")
    _, first = await begin(rig)
    (live,) = rig.proxy.live
    live.expire(60.0)
    with pytest.raises(ChatFailure, match="no complete reply after 60 s") as late:
        await first
    assert late.value.status == 504
    assert rig.is_empty()


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_router_that_stops_ends_its_turns(has_begun: bool) -> None:
    rig = rig_of("a")
    replies, first = await begin(rig, stream=True)
    if has_begun:
        rig.engines.sent[0].reply(STREAM, event(1), is_end=False)
        await first
        first = asyncio.ensure_future(anext(replies))
    rig.proxy.stop_live()
    with pytest.raises(ChatFailure, match="cut off" if has_begun else "the router is stopping"):
        await first
    assert rig.is_empty()
