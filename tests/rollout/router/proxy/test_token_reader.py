"""A reader of tokens alone: what it is given leads to at most one action."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout.router.continuation import fast_path
from rollout.router.continuation.dialects.table import ROUTES
from rollout.router.http.fast_json import loads
from rollout.router.http.head_cache import ReplyHead
from rollout.router.proxy.token_reader import (
    Again,
    Context,
    Finish,
    Refused,
    TokenReader,
    Unusable,
    Write,
)
from tests.rollout.router.generate_events import PROMPT, STREAM, event, with_logprobs

JSON = [(b"content-type", b"application/json")]
MAY, MAY_NOT = Context(may_continue=True), Context(may_continue=False)
ASK = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}


def reader_of(**more: Any) -> TokenReader:
    """It has sent its request, and the head of a stream has come."""
    reply = ROUTES["/generate"].reply(json.dumps(ASK | more).encode(), 4)
    assert reply is not None
    reader = TokenReader(reply)
    begin(reader)
    return reader


def begin(reader: TokenReader, head: ReplyHead = STREAM) -> dict[str, Any]:
    """Send the request to the next engine, which begins its reply; the body it got."""
    body: dict[str, Any] = json.loads(reader.body(7, "sglang"))
    reader.begin(head)
    return body


def payloads(action: Any) -> list[dict[str, Any]]:
    data = action.events if isinstance(action, Write) else bytes(action.body[0])
    lines = data.decode().split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_a_stream_is_written_as_it_comes_and_finished_with_its_end() -> None:
    reader = reader_of(stream=True)
    assert reader.take(event(1)[:20], None) is None
    assert not reader.has_answered
    written = reader.take(event(1)[20:] + event(1, 2), None)
    assert isinstance(written, Write)
    assert payloads(written)[-1]["output_ids"] == [1, 2]
    assert reader.has_answered
    assert reader.take(event(1, 2, 3, 4, finish="length"), None) is None
    end = reader.take(b"data: [DONE]\n\n", MAY_NOT)
    assert isinstance(end, Finish)
    assert end.content_type is None
    assert payloads(end)[-1]["output_ids"] == [1, 2, 3, 4]


def test_a_lost_engines_tokens_are_in_the_next_ones_prompt() -> None:
    reader = reader_of()
    assert reader.take(event(1, 2), None) is None
    assert reader.take_loss(MAY) is None
    assert reader.lose_engine() == ""
    assert begin(reader)["input_ids"] == [1, 2, 1, 2]
    end = reader.take(event(3, 4, finish="length"), MAY)
    assert isinstance(end, Finish)
    assert json.loads(b"".join(end.body))["output_ids"] == [1, 2, 3, 4]
    assert reader.reply.num_kept == 2


def test_a_connection_lost_behind_the_last_token_is_an_end() -> None:
    reader = reader_of()
    assert reader.take(event(1, finish="stop"), None) is None
    assert isinstance(reader.take_loss(MAY_NOT), Finish)


@pytest.mark.parametrize(("context", "kind"), [(MAY, Again), (MAY_NOT, Finish)])
def test_an_abort_continues_where_it_may_come_from_a_pause(context: Context, kind: type) -> None:
    reader = reader_of()
    assert isinstance(reader.take(event(1, finish="abort"), context), kind)


def test_a_refusal_continues_in_a_pause_only() -> None:
    reader = reader_of()
    begin(reader, ReplyHead(503, JSON))
    assert isinstance(reader.take(b"no", Context(True, refusal_in_pause=503)), Again)
    begin(reader, ReplyHead(503, JSON))
    assert reader.take(b"n", None) is None
    refused = reader.take(b"o", MAY)
    assert refused == Refused(503, b"no", Finish([b"no"], 503, b"application/json"))
    assert not reader.has_answered


def test_an_error_event_is_the_engines_refusal() -> None:
    reader = reader_of()
    error = {"error": {"message": "m", "code": 507}}
    refused = reader.take(b"data: " + json.dumps(error).encode() + b"\n\n", None)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.error, refused.end.status) == (507, error, 507)


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: []\n\n", b'data: {"meta_info": 1}\n\n'])
def test_events_that_cannot_be_read_are_unusable(data: bytes) -> None:
    assert isinstance(reader_of(stream=True).take(data, None), Unusable)


def test_a_stream_without_a_finish_is_unusable() -> None:
    assert isinstance(reader_of().take(event(1), MAY), Unusable)


def test_the_prompts_log_probs_hold_back_the_end() -> None:
    reader = reader_of(return_logprob=True, logprob_start_len=0)
    assert reader.await_prompt()
    assert reader.take(with_logprobs(1, finish="stop"), MAY) is None
    end = reader.take_prompt(PROMPT, MAY)
    assert isinstance(end, Finish)


def test_a_stream_with_a_penalty_that_is_paused_ends_with_its_tokens_and_the_reason() -> None:
    sampling = {"max_new_tokens": 4, "presence_penalty": 1.5}
    reader = reader_of(stream=True, sampling_params=sampling)
    assert isinstance(reader.take(event(1, 2), None), Write)
    assert reader.take(event(1, 2, finish="abort"), None) is None
    end = reader.take(b"data: [DONE]\n\n", MAY)
    assert isinstance(end, Finish)
    assert end.why_not_continued == "penalty"
    last = payloads(end)[-1]
    assert last["output_ids"] == [1, 2]
    reason = last["meta_info"]["finish_reason"]
    assert reason["type"] == "abort"
    assert "goes on with what its client has: presence_penalty counts" in reason["message"]


def test_a_whole_reply_with_a_penalty_that_is_paused_starts_over() -> None:
    sampling = {"max_new_tokens": 4, "presence_penalty": 1.5}
    reader = reader_of(sampling_params=sampling)
    assert reader.take(event(1, 2), None) is None
    assert reader.take(event(1, 2, finish="abort"), None) is None
    assert isinstance(reader.take(b"data: [DONE]\n\n", MAY), Again)
    assert reader.lose_engine() == "penalty"
    body = begin(reader)
    assert body["input_ids"] == [1, 2]
    assert body["sampling_params"]["max_new_tokens"] == 4


def test_of_many_events_that_come_together_the_last_ones_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, parsed = reader_of(stream=True, sampling_params={"max_new_tokens": 26}), list[bytes]()
    monkeypatch.setattr(fast_path, "loads", lambda data: parsed.append(data) or loads(data))
    assert isinstance(reader.take(event(1) + event(1, 2), None), Write)
    several = b"".join(event(*range(1, num + 1)) for num in range(3, 21))
    written = reader.take(several, None)
    assert payloads(written)[-1]["output_ids"] == list(range(1, 21))
    assert len(parsed) == 5
    assert reader.lose_engine() == ""
    assert begin(reader)["input_ids"] == [1, 2, *range(1, 21)]


def test_an_error_among_many_events_that_come_together_is_seen() -> None:
    reader = reader_of(stream=True, sampling_params={"max_new_tokens": 26})
    reader.take(event(1) + event(1, 2), None)
    events = [event(*range(1, num + 1)) for num in range(3, 21)]
    events[5] = b'data: {"error": {"code": 500, "message": "no"}}\n\n'
    assert isinstance(reader.take(b"".join(events), None), Refused)


def test_text_that_came_with_an_event_that_was_left_out_makes_no_token_safe() -> None:
    reader = reader_of(stream=True, sampling_params={"max_new_tokens": 26})
    reader.take(event(1) + event(1, 2), None)
    # Behind the third token the engine holds text back, and the third is not read.
    held_back = [
        event(*range(1, num + 1)).replace(_text_of(num), _text_of(3)) for num in range(4, 7)
    ]
    reader.take(b"".join([event(1, 2, 3), *held_back]), None)
    assert reader.lose_engine() == ""
    assert begin(reader)["input_ids"] == [1, 2, 1, 2]


def _text_of(num: int) -> bytes:
    return b'"text": "%s"' % "".join(chr(96 + token) for token in range(1, num + 1)).encode()
