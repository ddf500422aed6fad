"""An engine that computes NaN is a failed engine: its tokens reach no client that wants numbers.

SGLang answers such a request with status 200 and null for each log-prob, vLLM with null or -9999;
the embedded engine refuses it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engines.http.reply_check import NotFinite
from engines.protocol import SamplingParams
from rollout.core.errors import RolloutError
from rollout.driver.client.retry import RetryPolicy
from rollout.driver.data.prompt import Prompt
from rollout.driver.driver import RolloutDriver
from tests.rollout.router.conftest import router_config
from tests.rollout.router.continuation.replies import CHAT, COMPLETIONS, VLLM_GENERATE, read
from tests.rollout.router.served_vllm import PROMPT, Served, events_of, served
from tests.rollout.router.stub_engine import reply, stream
from tests.support.waits import until

pytestmark = pytest.mark.timeout(60)
NUM = 20
BODY: dict[str, Any] = {
    "input_ids": PROMPT,
    "sampling_params": {"max_new_tokens": NUM},
    "return_logprob": True,
}
REFUSED = {"error": {"message": "the model's logits", "type": "not_finite", "code": 500}}


async def asked(whole: Served, *, is_streamed: bool) -> Any:
    status, _, content = await whole.post({**BODY, "stream": is_streamed}, "/generate")
    assert status == 200, content
    last = events_of(content)[-1] if is_streamed else json.loads(content)
    logprobs = [entry[0] for entry in last["meta_info"]["output_token_logprobs"]]
    return last["output_ids"], logprobs


async def states(whole: Any) -> list[str]:
    return [engine["state"] for engine in (await whole.host.stats())["engines"]]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_request_that_gets_nan_is_answered_by_another_engine(
    is_streamed: bool, kind: str
) -> None:
    async with served(kind, kind, token_failover="on") as whole:
        right = await asked(whole, is_streamed=is_streamed)
        assert right[1] == [-1.0] * NUM
        whole.engines[0].computes_nan = True  # type: ignore[attr-defined]
        for _ in range(3):
            assert await asked(whole, is_streamed=is_streamed) == right
        assert await states(whole) == ["dead", "serving"]
        stats = await whole.host.stats()
        assert stats["num_engine_failures"] == stats["num_failovers"] == 1
        (reported,) = await whole.host.failures(1.0)
        assert reported[0] == "main-0"
        assert "log-probs that are not numbers" in reported[1]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tokens_from_before_the_first_nan_are_kept(is_streamed: bool) -> None:
    async with served("sglang", "sglang", token_failover="on", token_s=0.02) as whole:
        right, _ = await asked(whole, is_streamed=is_streamed)
        running = asyncio.create_task(asked(whole, is_streamed=is_streamed))
        found = await until(lambda: [one for one in whole.engines if one.in_flight])
        (request,) = found[0].in_flight.values()
        await until(lambda: len(request.output_ids) >= NUM // 2)
        found[0].computes_nan = True  # type: ignore[attr-defined]
        ids, logprobs = await running
        # A fake's next tokens depend on where its prompt ends.
        assert (ids[:2], len(ids), logprobs) == (right[:2], NUM, [-1.0] * NUM)
        assert sorted(await states(whole)) == ["dead", "serving"]


async def test_where_all_engines_compute_nan_the_request_fails_with_the_reason() -> None:
    async with served("sglang", "sglang", "sglang", token_failover="on") as whole:
        for engine in whole.engines:
            engine.computes_nan = True  # type: ignore[attr-defined]
        status, _, content = await whole.post(BODY, "/generate")
        assert status == 502
        assert b"log-probs that are not numbers" in content


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_an_engine_that_refuses_a_request_for_nan_is_lost(
    make_bench: Any, path: str, is_streamed: bool
) -> None:
    whole = json.dumps(REFUSED).encode()
    first = stream(b"data: " + whole + b"\n\n") if is_streamed else reply(whole, "500 Internal")
    fine = stream(b'data: {"text":""}\n\n') if is_streamed else reply(b"{}")
    bench = await make_bench(first, fine, config=router_config(token_failover="off"))
    got = await bench.ask(path, json={"input_ids": [1], "prompt": [1], "stream": is_streamed})
    assert got.status == 200
    assert await states(bench) == ["dead", "serving"]


async def test_a_driver_never_makes_a_sample_of_nan() -> None:
    """Also where the router passes replies on as they are."""
    async with served("sglang", token_failover="off") as whole:
        whole.engines[0].computes_nan = True  # type: ignore[attr-defined]
        retry_policy = RetryPolicy(max_lost=1)
        async with RolloutDriver(
            whole.url, max_failed_share=1.0, retry_policy=retry_policy
        ) as driver:
            sampling = SamplingParams(max_new_tokens=2)
            (group,) = await driver.rollout(1, [Prompt((1, 2))], group_size=1, sampling=sampling)
            (sample,) = group
            assert "log-probs that are not numbers" in sample.error
            assert sample.output_ids == []
        async with RolloutDriver(whole.url, retry_policy=retry_policy) as driver:
            with pytest.raises(
                RolloutError, match="engine main-0 sent an unusable reply: it computed log-probs"
            ):
                await driver.rollout(1, [Prompt((1, 2))], group_size=1, sampling=sampling)


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (COMPLETIONS, {"text": "!", "logprobs": {"token_logprobs": [-1.0, None]}}),
        (CHAT, {"delta": {"content": "!"}, "logprobs": {"content": [{"logprob": None}]}}),
        (VLLM_GENERATE, {"text": "!", "logprobs": {"content": [{"logprob": -9999.0}]}}),
    ],
)
def test_what_vllm_sends_for_nan_is_a_failure_on_each_route(path: str, choice: Any) -> None:
    """In the forms of vLLM 0.32.0."""
    bodies: dict[str, Any] = {
        COMPLETIONS: {"prompt": [1], "logprobs": 1},
        CHAT: {"messages": [{"role": "user", "content": "q"}], "logprobs": True},
        VLLM_GENERATE: {"token_ids": [1], "sampling_params": {"logprobs": 1}},
    }
    taken = read(path, json.dumps(bodies[path] | {"stream": True}).encode(), dialects="vllm")
    assert taken is not None
    taken.body(1, "vllm")
    with pytest.raises(NotFinite, match="not numbers"):
        taken.take(json.dumps({"choices": [choice | {"token_ids": [0]}]}).encode())
