"""Replies say of which distribution their log-probs are, and none is joined of two kinds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.fake import faults
from engines.protocol.logprob_kind import LogprobKind, LogprobRule
from engines.vllm.features import LOGPROB_RULES
from rollout.router.proxy.reader_choice import kind_of_unread
from tests.rollout.router.served_vllm import PROMPT, Served, events_of, served

pytestmark = pytest.mark.timeout(60)
CUT = {"top_p": 0.5}


@pytest.mark.parametrize(
    ("kind", "sampling", "expected"),
    [
        ("vllm", {}, "full"),
        ("vllm", {"temperature": 0.3}, "full"),
        ("vllm", CUT, "cut"),
        ("vllm", {"repetition_penalty": 1.2}, "penalised"),
        ("sglang", CUT, "full"),
        ("sglang", {"presence_penalty": 1.5}, "penalised"),
        ("vllm", {"min_new_tokens": 2}, "penalised"),
        ("sglang", {"logit_bias": {"5": 1.0}}, "penalised"),
    ],
)
@pytest.mark.parametrize("failover", ["on", "off"])
async def test_a_reply_says_the_kind_of_its_log_probs(
    kind: str, sampling: dict[str, Any], expected: str, failover: str
) -> None:
    async with served(kind, token_failover=failover) as whole:
        sampling = {"max_new_tokens": 8, **sampling}
        body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
        status, headers, content = await whole.post(body)
        assert status == 200
        assert headers["x-logprob-kind"] == expected
        meta = json.loads(content)["meta_info"]
        is_read = failover == "on" or kind == "vllm"
        assert meta.get("logprob_kind") == (expected if is_read else None)
        _, headers, content = await whole.post({**body, "stream": True})
        assert headers["x-logprob-kind"] == expected
        if is_read:
            assert events_of(content)[-1]["meta_info"]["logprob_kind"] == expected


@pytest.mark.parametrize("failover", ["on", "off"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_openai_routes_say_it_in_a_header(path: str, failover: str) -> None:
    async with served("vllm", token_failover=failover) as whole:
        messages = [{"role": "user", "content": "a"}]
        body = {"prompt": PROMPT, "messages": messages, "max_tokens": 4, "logprobs": True}
        _, headers, _ = await whole.post(body, path)
        assert headers["x-logprob-kind"] == "full"
        _, headers, _ = await whole.post({**body, **CUT}, path)
        assert headers["x-logprob-kind"] == "cut"


async def test_vllm_in_raw_mode_is_right_at_temperature_1_only() -> None:
    async with served("vllm", logprobs_mode="raw_logprobs") as whole:
        for sampling, kind, logprob in (
            (CUT, "full", -1.0),
            ({"temperature": 0.3}, "raw", -1.5),
        ):
            reply = await whole.generate(sampling_params=sampling, return_logprob=True)
            assert reply["meta_info"]["logprob_kind"] == kind
            assert reply["meta_info"]["output_token_logprobs"][0][0] == logprob


async def broken(whole: Served, **more: Any) -> Any:
    """Status and content of the one of several requests whose engine died after nine tokens."""
    whole.engines[0].faults.strike("generate", faults.die(tokens=9))
    sampling = {"max_new_tokens": 20, **more.pop("sampling", {})}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, **more}
    for _ in whole.engines:
        status, _, content = await whole.post(body)
        if whole.engines[0].is_dead:
            return status, content
    raise AssertionError("no request was on the engine that dies")


@pytest.mark.parametrize("kinds", [("vllm", "sglang"), ("sglang", "vllm")], ids="-".join)
async def test_a_reply_of_another_kind_starts_over(kinds: tuple[str, str]) -> None:
    async with served(*kinds, token_failover="on") as whole:
        status, content = await broken(whole, sampling=CUT)
        assert status == 200
        meta = json.loads(content)["meta_info"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        now, logprob = ("full", -1.0) if kinds[1] == "sglang" else ("cut", -0.5)
        assert meta["logprob_kind"] == now
        assert logprobs == [logprob] * 20
        assert meta["num_failovers"] == 1
        assert meta["num_recomputed_tokens"] > 0
        counts = await whole.host.stats()
        assert counts["num_failovers_refused"] == {"logprob_kind": 1}


async def test_an_engine_of_the_same_kind_goes_on_before_any_other() -> None:
    async with served("vllm", "sglang", "vllm", token_failover="on") as whole:
        status, content = await broken(whole, sampling=CUT)
        assert status == 200
        meta = json.loads(content)["meta_info"]
        assert meta["logprob_kind"] == "cut"
        assert [entry[0] for entry in meta["output_token_logprobs"]] == [-0.5] * 20
        assert meta["num_failovers"] == 1
        assert not (await whole.host.stats())["num_failovers_refused"]


async def test_a_stream_that_was_shown_ends_and_says_why() -> None:
    async with served("vllm", "sglang", token_failover="on") as whole:
        _, content = await broken(whole, sampling=CUT, stream=True)
        *shown, last = events_of(content)
        assert {event["meta_info"]["logprob_kind"] for event in shown} == {"cut"}
        assert "log-probs of its tokens are cut" in last["error"]["message"]
        assert "engine main-1 would be full" in last["error"]["message"]


async def test_without_log_probs_or_a_cut_any_kind_goes_on() -> None:
    for more in ({"return_logprob": False, "sampling": CUT}, {"sampling": {"temperature": 0.3}}):
        async with served("vllm", "sglang", token_failover="on") as whole:
            status, content = await broken(whole, **more)
            assert status == 200
            assert json.loads(content)["meta_info"]["num_recomputed_tokens"] == 0


def test_a_body_is_parsed_only_where_a_parameter_decides() -> None:
    processed = LOGPROB_RULES["processed_logprobs"]
    body = b'{"input_ids":[1],"sampling_params":{"temperature":0.3,"top_p":0.5}'  # not JSON
    assert kind_of_unread("/generate", body, LogprobRule(), 1 << 20) is LogprobKind.FULL
    assert kind_of_unread("/generate", body, processed, 1 << 20) is None
    assert kind_of_unread("/generate", body + b"}", processed, 1 << 20) is LogprobKind.CUT
    assert kind_of_unread("/generate", body + b"}", processed, 16) is None
    assert kind_of_unread("/tokenize", body, processed, 1 << 20) is None
    several = b'{"sampling_params":[{"top_p":0.5},{"top_p":1}]}'
    assert kind_of_unread("/generate", several, processed, 1 << 20) is None
    processor = b'{"sampling_params":{},"custom_logit_processor":"x"}'  # SGLang has it outside
    found = kind_of_unread("/generate", processor, LogprobRule(), 1 << 20)
    assert found is LogprobKind.PENALISED
    of_config = LogprobRule(has_cuts=True, defaults=(("top_p", 0.8),))
    for fields, kind in ((b"{}", LogprobKind.CUT), (b'{"temperature":0}', LogprobKind.FULL)):
        assert kind_of_unread("/v1/completions", fields, of_config, 1 << 20) is kind
