"""A driver's requests say what they want of their tokens, and no batch has others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from engines.protocol import (
    FinishReason,
    GenerateReply,
    PauseMode,
    SamplingParams,
    VersionSpan,
)
from engines.protocol.logprob_kind import LogprobKind
from rollout.core.errors import ConfigError, RolloutError, VersionUnavailable
from rollout.core.samples import Sample, SampleStatus, all_samples
from rollout.driver.client.completer import AbortScope, Completer
from rollout.driver.client.generation_client import (
    FailureKind,
    GenerationError,
    GenerationRequest,
)
from rollout.driver.client.limiter import Limiter
from rollout.driver.client.retry import RetryPolicy
from rollout.driver.client.session import Session
from rollout.driver.driver import RolloutDriver
from rollout.driver.evaluation import EvalDataset
from rollout.driver.stream.hooks import Hooks
from rollout.driver.stream.options import RolloutOptions
from rollout.rules.contract import Contract
from tests.support.driving import SAMPLING, always, driving, engines, prompts, push, source
from tests.support.fake_generation_client import FakeGenerationClient
from tests.support.virtual_time import pass_time, virtual_time

BATCH: dict[str, Any] = {"num_groups": 4, "group_size": 2, "sampling": SAMPLING}


@asynccontextmanager
async def pushing(client: FakeGenerationClient, chance: Random) -> AsyncIterator[None]:
    """Push a new version again and again, in all kinds of pauses."""
    client.weight_version = 0

    async def keep_pushing() -> None:
        for version in range(1, 10_000):
            await pass_time(chance.uniform(0.2, 3.0))
            await push(client, version, chance.uniform(0.01, 0.5), chance.choice(list(PauseMode)))

    pusher = asyncio.create_task(keep_pushing())
    try:
        yield
    finally:
        pusher.cancel()
        await asyncio.wait([pusher])
        for engine in client.engines:
            await engine.continue_generation()
        client.open()


async def two_turns(session: Session) -> None:
    await session.generate(SamplingParams(max_new_tokens=5))
    session.observe([7])
    await session.generate()


@pytest.mark.parametrize("hooks", [Hooks(), Hooks(generate=two_turns)], ids=["plain", "turns"])
@pytest.mark.parametrize("mode", ["sync", "one_ahead", "async"])
@pytest.mark.parametrize("seed", range(6))
def test_no_sample_of_a_batch_is_older_than_its_lag(seed: int, mode: Any, hooks: Hooks) -> None:
    @virtual_time
    async def run() -> None:
        chance = Random(seed)
        speeds = [chance.uniform(0.01, 0.06) for _ in range(3)]
        async with driving(engines(*speeds), hooks=hooks) as (driver, client):
            data = source(5000)
            async with pushing(client, chance):
                for step in range(8):
                    lag = chance.randrange(3)
                    options = RolloutOptions(mode=mode, over_sampling=1.5, max_version_lag=lag)
                    served = client.weight_version or 0
                    groups = await driver.rollout(step, data, options=options, **BATCH)
                    newest = max(served, driver.weight_version or 0)
                    for sample in all_samples(groups):
                        sample.check()
                        assert min(sample.versions) >= newest - lag
                        assert sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
                    await pass_time(chance.uniform(0.0, 1.0))
            stream = driver.stream_of(data)
            assert stream.auditor.findings(stream.pending) == []
            assert {one.contract.logprob_kind for one in client.requests} == {LogprobKind.FULL}

    run()


@pytest.mark.parametrize("seed", range(12))
def test_an_evaluation_has_one_version_and_no_token_of_another_one_is_waited_for(
    seed: int,
) -> None:
    @virtual_time
    async def run() -> None:
        chance, num_done = Random(seed), 0
        moved: list[str] = []
        async with driving(engines(0.01, 0.03), always(1.0)) as (driver, client):
            async with pushing(client, chance):
                for step in range(8):
                    datasets = {"a": EvalDataset(prompts(3)), "b": EvalDataset(prompts(2))}
                    datasets = {
                        name: replace(one, sampling=SAMPLING) for name, one in datasets.items()
                    }
                    begin = len(client.requests)
                    served = client.weight_version or 0
                    try:
                        result = await driver.evaluate(step, datasets)
                    except RolloutError as error:
                        moved.append(str(error))
                        continue
                    num_done += 1
                    samples = [
                        one for groups in result.groups.values() for one in all_samples(groups)
                    ]
                    (version,) = {number for one in samples for number in one.versions}
                    assert len(samples) == 5
                    assert version >= served
                    wanted = [one.contract.weight_version or 0 for one in client.requests[begin:]]
                    assert wanted == sorted(wanted)  # a version that is past is left for good
                    assert wanted[-1] == version
            assert num_done
            assert all("changed in each of 3 tries" in why for why in moved)

    run()


# -- one sample -----------------------------------------------------------------------------------

TOO_OLD = GenerationError("too old", kind=FailureKind.VERSION, weight_version=5)
NO_KIND = GenerationError("no engine has it", kind=FailureKind.LOGPROB_KIND)
LAG, EXACT = Contract(max_version_lag=1), Contract(weight_version=3)


class Answers:
    """A client that gives two tokens of a version with each answer; ``+`` if they were cut off."""

    def __init__(self, *answers: str | GenerationError) -> None:
        self.answers = list(answers)
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> GenerateReply:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, GenerationError):
            raise answer
        version, number = answer.lstrip("+"), len(self.requests)
        return GenerateReply(
            "r",
            "xx",
            (number, number),
            (-1.0, -1.0),
            FinishReason("abort" if answer[0] == "+" else "stop"),
            weight_versions=(VersionSpan(version, 0, 2),),
            logprob_kind=LogprobKind.CUT if version == "9" else None,
        )

    async def load(self) -> None: ...
    async def abort(self, rids: Sequence[str], *, prefix: str = "") -> None: ...
    async def server_metrics(self) -> dict[str, float]:
        return {}

    async def report(self, figures: Any) -> None: ...
    async def close(self) -> None: ...


async def completed(
    client: Answers, contract: Contract, *, restarts: int = 1, turn: bool = False
) -> tuple[Sample, list[Exception]]:
    """A sample that was completed so, and what has ended its scope."""
    ended: list[Exception] = []
    sample = Sample([50], status=SampleStatus.PENDING)
    if turn:
        sample = Sample([50], [60], [-1.0], weight_versions=(VersionSpan("3", 0, 1),))
    left = iter([True] * restarts)
    completer = Completer(client, Limiter(4, clock=asyncio.get_running_loop().time), RetryPolicy())
    await completer.complete(
        sample,
        SamplingParams(max_new_tokens=9),
        scope=AbortScope(ended.append),
        contract=contract,
        may_restart=lambda: next(left, False),
        base=len(sample.output_ids),
        of_hook=turn,
    )
    return sample, ended


@virtual_time
@pytest.mark.parametrize(
    ("answers", "restarts", "output", "lags"),
    [
        (["3"], 1, [1, 1], [1]),
        (["+3", "4"], 1, [1, 1, 2, 2], [1, 1]),
        # Cut off, and what it goes on with is the second version since: the third reply is of it.
        (["+3", "+5", "5"], 1, [3, 3], [1, 1, 1]),
        (["+3", "+5", "5"], 0, [1, 1, 2, 2, 3, 3], [1, 1, None]),
        # What the router refuses begins again, too; and without limit at last.
        ([TOO_OLD, "5"], 1, [2, 2], [1, 1]),
        (["+3", TOO_OLD, "5"], 1, [3, 3], [1, 1, 1]),
        ([TOO_OLD, TOO_OLD, "3"], 1, [3, 3], [1, 1, None]),
        # A finished sample is judged at its delivery.
        (["+3", "5"], 1, [1, 1, 2, 2], [1, 1]),
    ],
)
async def test_a_sample_with_tokens_that_are_too_old_begins_again(
    answers: list[Any], restarts: int, output: list[int], lags: list[int | None]
) -> None:
    client = Answers(*answers)
    sample, ended = await completed(client, LAG, restarts=restarts)
    assert (sample.output_ids, ended) == (output, [])
    assert sample.status is SampleStatus.COMPLETED
    assert [request.contract.max_version_lag for request in client.requests] == lags
    sample.check()


@virtual_time
async def test_a_turn_keeps_the_turns_before_it_and_goes_on_without_the_limit() -> None:
    client = Answers(TOO_OLD, "5")
    sample, ended = await completed(client, LAG, turn=True)
    assert (sample.output_ids, ended) == ([60, 2, 2], [])
    assert [request.contract.max_version_lag for request in client.requests] == [1, None]


@virtual_time
@pytest.mark.parametrize(
    ("answers", "version"),
    [
        ([TOO_OLD], 5),
        (["+3", TOO_OLD], 5),
        # An engine alone passes the wish over.
        (["4"], 4),
        (["+3", "4"], 4),
        (["2"], 2),
    ],
)
@pytest.mark.parametrize("turn", [False, True])
async def test_an_exact_version_that_is_not_had_ends_the_call(
    answers: list[Any], version: int, turn: bool
) -> None:
    client = Answers(*answers)
    _, ended = await completed(client, EXACT, turn=turn)
    (error,) = ended
    assert isinstance(error, VersionUnavailable)
    assert error.weight_version == version
    assert not client.answers


TRAINING = Contract(logprob_kind=LogprobKind.FULL)


@virtual_time
@pytest.mark.parametrize("answer", [NO_KIND, "9"])
async def test_a_kind_of_log_probs_that_is_not_had_ends_the_call(answer: Any) -> None:
    sample, ended = await completed(Answers(answer), TRAINING)
    (error,) = ended
    assert isinstance(error, ConfigError)
    assert error.setting == "sampling"
    assert (sample.output_ids, sample.status) == ([], SampleStatus.PENDING)


@virtual_time
@pytest.mark.parametrize(("answer", "why"), [(NO_KIND, "no engine has it"), ("9", "a trainer's")])
async def test_it_fails_a_turn_of_a_hook_alone(answer: Any, why: str) -> None:
    sample, ended = await completed(Answers(answer), TRAINING, turn=True)
    assert (sample.status, ended) == (SampleStatus.FAILED, [])
    assert why in sample.error


@virtual_time
async def test_a_call_ends_with_it_and_its_prompts_stay() -> None:
    client = Answers(NO_KIND, *["3"] * 4)
    async with RolloutDriver("http://nowhere", client=client, adapt_every_s=None) as driver:
        data = source(2)
        plan: dict[str, Any] = {"num_groups": 2, "group_size": 2, "sampling": SAMPLING}
        client.answers = [NO_KIND] * 4
        with pytest.raises(ConfigError, match="no engine has it") as raised:
            await driver.rollout(0, data, **plan)
        assert raised.value.setting == "sampling"
        client.answers = ["3"] * 4
        assert len(await driver.rollout(0, data, **plan)) == 2


@virtual_time
async def test_an_evaluation_of_weights_that_are_not_pushed_raises_at_once() -> None:
    datasets = {"K": EvalDataset(prompts(3), sampling=SAMPLING)}
    async with driving(engines(0.01), always(1.0)) as (driver, client):
        client.weight_version = 0
        driver.set_weight_version(57)
        with pytest.raises(
            VersionUnavailable, match=r"57 is to be evaluated, .* serve 0: push"
        ) as raised:
            await driver.evaluate(0, datasets)
        assert (raised.value.weight_version, client.requests) == (0, [])
        await push(client, 57)
        result = await driver.evaluate(0, datasets)
        assert result.metrics["eval/K/weight_version/min"] == 57


@virtual_time
async def test_an_evaluation_ends_where_the_engines_go_back_to_older_weights() -> None:
    async with driving(engines(0.1), always(1.0)) as (driver, client):
        client.weight_version, client.hold_timeout_s = 3, 30.0
        await client.engines[0].update_weight_version("3")
        datasets = {"K": EvalDataset(prompts(3), sampling=SAMPLING)}
        call = asyncio.create_task(driver.evaluate(0, datasets))
        await pass_time(0.5)
        await push(client, 1)
        with pytest.raises(VersionUnavailable) as raised:
            await call
        assert raised.value.weight_version == 1
