"""Samples whose log-probs a trainer does not compute: refused for training, marked elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engines.protocol import FinishReason, GenerateReply, SamplingParams
from engines.protocol.logprob_kind import LogprobKind
from rollout.core.errors import ConfigError, RolloutError
from rollout.core.samples import Sample, SampleStatus, all_samples
from rollout.driver.client.completer import AbortScope, Completer
from rollout.driver.client.generation_client import GenerationRequest
from rollout.driver.client.http_client import HttpGenerationClient
from rollout.driver.client.limiter import Limiter
from rollout.driver.client.retry import RetryPolicy
from rollout.driver.driver import RolloutDriver
from rollout.driver.evaluation import EvalDataset
from rollout.driver.stream.hooks import Hooks
from rollout.driver.stream.options import RolloutOptions
from tests.rollout.router.served_vllm import PROMPT, Served, served
from tests.support.driving import prompts

pytestmark = pytest.mark.timeout(60)
CUT = SamplingParams(max_new_tokens=6, top_p=0.5)
FULL_KIND, RAW_KIND, CUT_KIND, PENALISED_KIND = LogprobKind


@asynccontextmanager
async def driven(
    *kinds: str, mode: str = "processed_logprobs", **settings: Any
) -> AsyncIterator[tuple[RolloutDriver, Served]]:
    async with (
        served(*kinds, logprobs_mode=mode) as whole,
        RolloutDriver(whole.url, **settings) as driver,
    ):
        yield driver, whole


async def rolled(driver: RolloutDriver, sampling: SamplingParams, **more: Any) -> list[Sample]:
    groups = await driver.rollout(0, prompts(2), group_size=2, sampling=sampling, **more)
    return list(all_samples(groups))


@pytest.mark.parametrize(
    ("mode", "sampling", "why"),
    [
        ("processed_logprobs", {"top_p": 0.5}, "of what top_p=0.5 made .* SGLang or the embedded"),
        ("processed_logprobs", {"top_k": 5, "min_p": 0.2}, "top_k=5, min_p=0.2 made"),
        (
            "processed_logprobs",
            {"repetition_penalty": 1.2},
            "changed by repetition_penalty=1.2; .* or use vLLM with logprobs-mode: raw_",
        ),
        (
            "processed_logprobs",
            {"min_new_tokens": 3, "top_p": 0.5},
            "changed by min_new_tokens=3; leave that out, or use vLLM with logprobs-mode: raw_",
        ),
        ("raw_logprobs", {"regex": "a+"}, "changed by regex=a.; leave that out; a trainer"),
        ("raw_logprobs", {"temperature": 0.3}, "at temperature 1, and the request has .*=0.3"),
    ],
)
async def test_sampling_that_no_engine_has_for_a_trainer_is_refused_at_once(
    mode: str, sampling: dict[str, Any], why: str
) -> None:
    async with driven("vllm", mode=mode) as (driver, whole):
        with pytest.raises(ConfigError, match=why) as raised:
            await rolled(driver, SamplingParams(max_new_tokens=6, **sampling))
        assert raised.value.setting == "sampling"
        assert "generate" not in whole.engines[0].operations()  # type: ignore[attr-defined]
        plain = await rolled(driver, SamplingParams(max_new_tokens=6))
        assert {sample.logprob_kind for sample in plain} == {FULL_KIND}


async def test_a_trainer_that_computes_them_itself_takes_any_kind() -> None:
    options = RolloutOptions(logprob_kind=None)
    async with driven("vllm") as (driver, _):
        for sampling, kind in ((CUT, CUT_KIND), (SamplingParams(max_new_tokens=6), FULL_KIND)):
            samples = await rolled(driver, sampling, options=options)
            assert {sample.logprob_kind for sample in samples} == {kind}


@pytest.mark.parametrize(
    ("kind", "mode", "sampling"),
    [
        ("sglang", "processed_logprobs", {"top_p": 0.5, "top_k": 5, "min_p": 0.2}),
        ("sglang", "processed_logprobs", {"temperature": 0.3}),
        ("vllm", "processed_logprobs", {"temperature": 0.3}),
        ("vllm", "raw_logprobs", {"top_p": 0.5}),
        ("vllm", "raw_logprobs", {"presence_penalty": 1.5, "min_new_tokens": 2}),
    ],
)
async def test_what_is_the_full_distribution_is_taken(
    kind: str, mode: str, sampling: dict[str, Any]
) -> None:
    async with driven(kind, mode=mode) as (driver, _):
        samples = await rolled(driver, SamplingParams(max_new_tokens=6, **sampling))
        assert {sample.logprob_kind for sample in samples} == {FULL_KIND}


async def test_where_some_engines_have_it_only_these_are_used() -> None:
    async with driven("vllm", "sglang") as (driver, whole):
        samples = await rolled(driver, CUT)
        assert {sample.logprob_kind for sample in samples} == {FULL_KIND}
        assert [one.operations().count("generate") for one in whole.engines] == [0, 4]
        plain = await rolled(driver, SamplingParams(max_new_tokens=6))
        assert {span.engine_id for sample in plain for span in sample.engines} == {
            "main-0",
            "main-1",
        }


async def test_a_turn_with_its_own_sampling_is_judged_too() -> None:
    async def generate(session: Any) -> None:
        await session.generate(CUT)

    async with driven("vllm", hooks=Hooks(generate=generate)) as (driver, _):
        with pytest.raises(RolloutError, match=r"turn failed: .*top_p=0.5"):
            await rolled(driver, SamplingParams(max_new_tokens=6))


async def test_an_evaluation_has_the_samples_with_their_mark() -> None:
    async with driven("vllm", reward=lambda sample: 1.0) as (driver, _):
        result = await driver.evaluate(0, {"math": EvalDataset(prompts(3), sampling=CUT)})
        samples = list(all_samples(result.groups["math"]))
        assert [sample.logprob_kind for sample in samples] == [CUT_KIND] * 3
        assert result.metrics["eval/math"] == 1.0


@pytest.mark.parametrize("failover", ["on", "off"])
@pytest.mark.parametrize(("kind", "found"), [("vllm", CUT_KIND), ("sglang", FULL_KIND)])
async def test_a_client_has_each_reply_with_its_mark(
    kind: str, found: LogprobKind, failover: str
) -> None:
    async with served(kind, token_failover=failover) as whole:
        client = HttpGenerationClient(whole.url, timeout_s=30.0)
        request = GenerationRequest("r" * 32, PROMPT, CUT)
        assert (await client.generate(request)).logprob_kind is found
        async for reply in client.stream(GenerationRequest("s" * 32, PROMPT, CUT)):
            assert reply.logprob_kind is found
        await client.close()


class Scripted:
    """A client whose replies are given; each is cut off but number ``num``, by default the last."""

    def __init__(self, *kinds: LogprobKind, num: int = 0) -> None:
        self.replies = [
            GenerateReply(
                "r",
                "x",
                (number,),
                (-1.0,),
                FinishReason("stop" if number == (num or len(kinds)) else "abort"),
                logprob_kind=kind,
            )
            for number, kind in enumerate(kinds, 1)
        ]
        self.prompts: list[list[int]] = []

    async def generate(self, request: GenerationRequest) -> GenerateReply:
        self.prompts.append(list(request.input_ids))
        return self.replies[len(self.prompts) - 1]

    async def abort(self, rids: Sequence[str]) -> None: ...
    async def load(self) -> None: ...
    async def server_metrics(self) -> Mapping[str, float]:
        return {}

    async def report(self, figures: Mapping[str, Any]) -> None: ...
    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("kinds", "output"),
    [
        ((CUT_KIND, CUT_KIND), [1, 2]),
        # The second engine's reply goes on after tokens of another kind, so all begins again.
        ((FULL_KIND, CUT_KIND, CUT_KIND), [3]),
    ],
)
async def test_a_sample_that_goes_on_elsewhere_has_one_kind(
    kinds: tuple[LogprobKind, ...], output: list[int]
) -> None:
    client = Scripted(*kinds)
    sample = await completed(client, CUT)
    assert sample.output_ids == output
    assert sample.logprob_kind is CUT_KIND
    assert client.prompts[1] == [7, 1]


@pytest.mark.parametrize(("least", "output"), [(1, [1, 2]), (0, [3])])
async def test_a_sample_goes_on_after_its_least_length(least: int, output: list[int]) -> None:
    """Its first tokens are of other logits, and the others are not."""
    client = Scripted(PENALISED_KIND, FULL_KIND, FULL_KIND, num=2 if least else 3)
    sample = await completed(client, SamplingParams(max_new_tokens=6, min_new_tokens=least))
    assert sample.output_ids == output
    assert sample.logprob_kind is (PENALISED_KIND if least else FULL_KIND)


async def completed(client: Scripted, sampling: SamplingParams) -> Sample:
    sample = Sample([7])
    sample.status = SampleStatus.PENDING
    clock = asyncio.get_running_loop().time
    completer = Completer(client, Limiter(4, clock=clock), RetryPolicy())
    await completer.complete(sample, sampling, scope=AbortScope())
    assert sample.status is SampleStatus.COMPLETED
    return sample
