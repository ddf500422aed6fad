"""vLLM engines behind the router: SGLang's ``/generate`` in, its replies out, and failover; and
vLLM's own route."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from engines.fake import faults
from engines.fake.launcher import settings_of
from engines.protocol import Endpoint
from engines.protocol.spec import EngineSpec
from tests.rollout.router.served_vllm import PROMPT, Served, events_of, served
from tests.support.vllm_stub.stub import StubVllm
from tests.support.waits import until

pytestmark = pytest.mark.timeout(60)


async def test_a_request_in_sglangs_form_is_answered_in_it() -> None:
    async with served("vllm") as whole:
        reply = await whole.generate(rid="mine", return_logprob=True)
        meta = reply["meta_info"]
        assert len(reply["output_ids"]) == 8
        assert len(meta["output_token_logprobs"]) == 8
        assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
        assert meta["finish_reason"] == {"type": "length", "length": 8}
        assert meta["weight_versions"] == [{"version": "3", "start": 0, "end": 8}]
        assert meta["prompt_tokens"] == 3
        assert meta["id"] == "mine"
        assert reply["text"] == "".join(f" {token}" for token in reply["output_ids"])


async def test_a_stream_has_everything_so_far_in_each_event() -> None:
    async with served("vllm") as whole:
        sampling = {"max_new_tokens": 6}
        _, headers, content = await whole.post(
            {"input_ids": PROMPT, "sampling_params": sampling, "stream": True}
        )
        events = [json.loads(line[6:]) for line in content.split(b"\n") if line[:7] == b"data: {"]
        lengths = [len(event["output_ids"]) for event in events]
        assert lengths == sorted(lengths)
        assert lengths[-1] == 6
        assert content.endswith(b"data: [DONE]\n\n")
        assert headers["x-weight-version"] == "3"
        assert headers["x-engine-id"] == "main-0"


@pytest.mark.parametrize(
    "kinds", [("vllm", "vllm"), ("vllm", "sglang"), ("sglang", "vllm")], ids="-".join
)
async def test_the_tokens_of_a_lost_engine_are_kept(kinds: tuple[str, str]) -> None:
    async with served(*kinds, token_failover="on") as whole:
        unbroken = await whole.generate(20)
        for engine in whole.engines[:1]:
            engine.faults.strike("generate", faults.die(tokens=9))
        replies = [await whole.generate(20, return_logprob=True) for _ in range(2)]
        (reply,) = [one for one in replies if one["meta_info"]["num_failovers"]]
        meta = reply["meta_info"]
        assert whole.engines[0].is_dead
        assert len(reply["output_ids"]) == 20
        assert reply["output_ids"][:5] == unbroken["output_ids"][:5]
        assert len(meta["output_token_logprobs"]) == 20
        assert meta["weight_versions"] == [{"version": "3", "start": 0, "end": 20}]
        assert meta["finish_reason"]["type"] == "length"
        assert meta["finish_reason"]["length"] == 20


async def test_each_version_has_its_span_after_a_failover() -> None:
    async with served("vllm", "vllm", token_failover="on") as whole:
        first, second = whole.engines
        await second.answer("/update_weight_version", {"new_version": "4"})  # type: ignore[attr-defined]
        first.faults.strike("generate", faults.die(tokens=9))
        replies = [await whole.generate(20) for _ in range(2)]
        (meta,) = [one["meta_info"] for one in replies if one["meta_info"]["num_failovers"]]
        old, new = meta["weight_versions"]
        assert (old["version"], old["start"]) == ("3", 0)
        assert (new["version"], new["start"], new["end"]) == ("4", old["end"], 20)


class Late(StubVllm):
    """vLLM 0.33, whose requests take a while from its port to its scheduler."""

    vllm_version = "0.33.0"

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.entered, self.opened = asyncio.Event(), asyncio.Event()

    async def stream(self, *args: Any) -> AsyncGenerator[dict[str, Any], None]:
        self.entered.set()
        await self.opened.wait()
        async for event in super().stream(*args):
            yield event


def make_late(spec: EngineSpec, endpoint: Endpoint, **settings: Any) -> StubVllm:
    return Late(spec.engine_id, **settings_of(spec, endpoint), **settings)


@pytest.mark.parametrize("is_pause", [True, False])
async def test_a_request_that_comes_after_a_pause_is_sent_again(is_pause: bool) -> None:
    """vLLM 0.33 answers it with 503; another 503 is the client's."""
    async with served("vllm", make=make_late) as whole:
        (engine,) = whole.engines
        assert isinstance(engine, Late)
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8}}
        asked = asyncio.create_task(whole.post(body))
        await engine.entered.wait()
        await engine.answer("/pause", {"mode": "abort"})
        if is_pause:
            await whole.host.set_gate("holding", reason="a push")
        engine.opened.set()
        if is_pause:
            while (await whole.host.stats())["gate"]["num_held"] != 1:
                pass
            await engine.answer("/resume", {})
            await whole.host.set_gate("open", weight_version=3)
        status, _, content = await asked
        assert status == (200 if is_pause else 503), content
        if is_pause:
            assert len(json.loads(content)["output_ids"]) == 8


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"text": "Once"}, b"with input_ids, not with text"),
        ({"input_ids": [[1], [2]]}, b"one prompt and n=1"),
        ({"input_ids": [1], "image_data": "x"}, b"do not take image_data"),
        ({"input_ids": [1], "return_sampling_mask": True}, b"serves here returns none; embedded"),
        ({"input_ids": [1], "sampling_params": {"stop_regex": "a+"}}, b"no sampling parameter"),
        (
            {"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 0},
            b"leave logprob_start_len out",
        ),
    ],
)
async def test_what_vllm_cannot_answer_is_refused_in_words(body: Any, why: bytes) -> None:
    async with served("vllm") as whole:
        status, _, content = await whole.post(body)
        assert status == 400
        assert why in content


@pytest.mark.parametrize("stream", [False, True])
async def test_sampling_masks_of_vllm_come_with_generate(stream: bool) -> None:
    sampling = {"top_k": 4, "max_new_tokens": 6}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": stream}
    async with served("vllm", returns_masks=True) as whole:
        status, _, content = await whole.post({**body, "return_sampling_mask": True})
        assert status == 200, content
        reply = events_of(content)[-1] if stream else json.loads(content)
        masks = reply["meta_info"]["output_token_sampling_mask"]
        assert masks == [[token, token + 1] for token in reply["output_ids"]]
        assert len(masks) == 6
        status, _, content = await whole.post(body)  # it has them, and nobody wants them
        assert status == 200, content
        assert b"sampling_mask" not in content
        without_k = {**body, "sampling_params": {"max_new_tokens": 6}}
        status, _, content = await whole.post({**without_k, "return_sampling_mask": True})
        assert status == 400
        assert b"requires top_k" in content


async def test_vllms_own_route_is_passed_on_and_stamped() -> None:
    async with served("vllm") as whole:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}
        status, headers, content = await whole.post(body, "/inference/v1/generate")
        assert status == 200
        (choice,) = json.loads(content)["choices"]
        assert len(choice["token_ids"]) == 4
        assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": 4}]
        assert headers["x-weight-version"] == "3"


def vllms_body(num: int, **more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": num, "logprobs": 0} | more.pop("sampling_params", {})
    return {"token_ids": PROMPT, "sampling_params": sampling, **more}


async def lost_one(whole: Served, **body: Any) -> bytes:
    """The reply of the one of two requests whose engine died after nine tokens."""
    whole.engines[0].faults.strike("generate", faults.die(tokens=9))
    for _ in range(2):
        status, _, content = await whole.post(vllms_body(20, **body), "/inference/v1/generate")
        assert status == 200, content
        if whole.engines[0].is_dead:
            return bytes(content)
    raise AssertionError("no request was on the engine that dies")


async def test_a_request_on_vllms_own_route_goes_on_with_its_tokens() -> None:
    async with served("vllm", "vllm", token_failover="on") as whole:
        status, _, content = await whole.post(vllms_body(20), "/inference/v1/generate")
        assert status == 200
        (unbroken,) = json.loads(content)["choices"]
        await whole.engines[1].answer("/update_weight_version", {"new_version": "4"})  # type: ignore[attr-defined]
        reply = json.loads(await lost_one(whole))
        (choice,) = reply["choices"]
        assert choice.keys() >= unbroken.keys() - {"text"}
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 20
        old, new = choice["weight_versions"]
        assert choice["token_ids"][: old["end"]] == unbroken["token_ids"][: old["end"]]
        assert (old["version"], old["start"]) == ("3", 0)
        assert (new["version"], new["start"], new["end"]) == ("4", old["end"], 20)
        assert choice["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == 20
        assert reply["num_failovers"] == 1


async def test_a_stream_on_vllms_own_route_goes_on_with_its_tokens() -> None:
    async with served("vllm", "vllm", token_failover="on") as whole:
        content = await lost_one(whole, stream=True, stream_options={"include_usage": True})
        *events, usage = events_of(content)
        assert content.endswith(b"data: [DONE]\n\n")
        choices = [choice for event in events for choice in event["choices"]]
        assert sum(len(choice["token_ids"]) for choice in choices) == 20
        assert sum(len(choice["logprobs"]["content"]) for choice in choices) == 20
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "length"
        assert choices[-1]["weight_versions"] == [{"version": "3", "start": 0, "end": 20}]
        assert usage["usage"]["total_tokens"] == len(PROMPT) + 20


async def test_vllms_own_route_is_refused_where_sglang_serves_too() -> None:
    async with served("vllm", "sglang") as whole:
        status, _, content = await whole.post(vllms_body(4), "/inference/v1/generate")
        assert status == 404
        assert b"send /generate, which engines of both kinds take" in content


async def test_an_abort_at_the_router_ends_what_it_names_and_no_other() -> None:
    async with served("vllm", "vllm") as whole:
        running = [
            asyncio.create_task(whole.generate(100_000, rid=rid)) for rid in ("p-1", "p-10", "q-1")
        ]
        await until(lambda: sum(len(engine.in_flight) for engine in whole.engines) == 3)
        status, _, _ = await whole.post({"rid": "p-1"}, "/abort_request")
        assert status == 200
        reply = await running[0]
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert reply["meta_info"]["id"] == "p-1"
        assert [request.done() for request in running[1:]] == [False, False]
        status, _, _ = await whole.post({"abort_all": True}, "/abort_request")
        assert status == 200
        await asyncio.gather(*running)
