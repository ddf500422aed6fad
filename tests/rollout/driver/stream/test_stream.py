"""Batches from a source: what continues, is aborted or is kept, in all three modes."""

import asyncio
from dataclasses import replace

import pytest

from engines.fake.engine.faults import die, lose, reject
from engines.protocol import SamplingParams
from rollout.core.errors import RolloutError
from rollout.core.samples import SampleStatus, all_samples
from rollout.driver.client.retry import RetryPolicy
from rollout.driver.stream.hooks import Hooks
from rollout.driver.stream.options import RolloutOptions
from tests.support.driving import SAMPLING, driving, engines, numbers, prompts, push, source
from tests.support.virtual_time import pass_time, virtual_time

# Groups of two end at different times on these.
UNLIKE = (0.01, 0.03, 0.05, 0.02, 0.04)
BATCH = {"num_groups": 4, "group_size": 2, "sampling": SAMPLING}


@virtual_time
async def test_a_list_of_prompts_is_returned_complete_and_in_order() -> None:
    async with driving(engines(0.01, 0.05)) as (driver, _):
        groups = await driver.rollout(3, prompts(20), group_size=2, sampling=SAMPLING)
    assert numbers(groups) == list(range(1, 21))
    assert [group.prompt_index for group in groups] == list(range(20))
    assert {len(group) for group in groups} == {2}
    assert {len(sample.output_ids) for sample in all_samples(groups)} == {10}
    assert {sample.metadata["rollout_id"] for sample in all_samples(groups)} == {3}


@virtual_time
async def test_no_more_are_in_flight_than_allowed() -> None:
    most = 0

    async with driving(engines(0.01), max_in_flight=3) as (driver, client):

        def look(_) -> None:
            nonlocal most
            most = max(most, client.num_in_flight + 1)

        await driver.rollout(0, prompts(10), group_size=2, sampling=SAMPLING, on_sample=look)
    assert most == 3


@virtual_time
async def test_a_full_batch_aborts_the_rest_and_keeps_its_tokens() -> None:
    async with driving(engines(*UNLIKE)) as (driver, client):
        data = source(100)
        options = RolloutOptions(over_sampling=2.0)
        first = await driver.rollout(0, data, options=options, **BATCH)
        assert len(first) == 4
        assert client.num_in_flight == 0
        stream = driver.stream_of(data)
        samples = [sample for item in stream._queue.waiting for sample in item.samples]
        assert any(0 < len(sample.output_ids) < 10 for sample in samples)
        second = await driver.rollout(1, data, options=options, **BATCH)
        assert stream.auditor.findings(stream.pending) == []
    assert len({*numbers(first), *numbers(second)}) == 8
    assert {len(sample.output_ids) for sample in all_samples(second)} == {10}
    assert max(numbers(first) + numbers(second)) <= 8 + 4


@virtual_time
async def test_a_partial_sample_continues_with_the_rest_of_its_budget() -> None:
    async with driving(engines(*UNLIKE)) as (driver, client):
        data, options = source(100), RolloutOptions(over_sampling=2.0)
        await driver.rollout(0, data, options=options, **BATCH)
        begun = len(client.requests)
        await driver.rollout(1, data, options=options, **BATCH)
    gone_on = [request for request in client.requests[begun:] if len(request.input_ids) > 1]
    assert gone_on
    for request in gone_on:
        assert len(request.input_ids) - 1 + request.sampling.max_new_tokens == 10


@virtual_time
async def test_a_partial_sample_of_a_custom_processor_begins_again() -> None:
    """As one with a grammar does, which a fake refuses."""
    batch = BATCH | {"sampling": replace(SAMPLING, custom_params={"strength": 1})}
    async with driving(engines(*UNLIKE)) as (driver, client):
        data, options = source(100), RolloutOptions(over_sampling=2.0)
        await driver.rollout(0, data, options=options, **batch)
        groups = await driver.rollout(1, data, options=options, **batch)
    assert client.aborted
    assert {len(request.input_ids) for request in client.requests} == {1}
    assert {request.sampling.max_new_tokens for request in client.requests} == {10}
    assert {len(sample.output_ids) for sample in all_samples(groups)} == {10}


@virtual_time
async def test_without_partial_unfinished_samples_restart() -> None:
    async with driving(engines(*UNLIKE)) as (driver, client):
        data = source(100)
        options = RolloutOptions(over_sampling=2.0, partial=False)
        for step in range(3):
            await driver.rollout(step, data, options=options, **BATCH)
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []
    assert {len(request.input_ids) for request in client.requests} == {1}


@virtual_time
async def test_a_partial_sample_records_the_version_of_each_token() -> None:
    async with driving(engines(*UNLIKE)) as (driver, client):
        data, options = source(100), RolloutOptions(over_sampling=2.0)
        await driver.rollout(0, data, options=options, **BATCH)
        await push(client, 7)
        groups = await driver.rollout(1, data, options=options, **BATCH)
    spans = {tuple(s.version for s in sample.weight_versions) for sample in all_samples(groups)}
    assert ("0", "7") in spans
    for sample in all_samples(groups):
        sample.check()


@virtual_time
async def test_samples_older_than_the_lag_are_generated_again() -> None:
    async with driving(engines(*UNLIKE)) as (driver, client):
        data = source(100)
        options = RolloutOptions(over_sampling=2.0, max_version_lag=0)
        await driver.rollout(0, data, options=options, **BATCH)
        await push(client, 1)
        groups = await driver.rollout(1, data, options=options, **BATCH)
        stream = driver.stream_of(data)
        assert stream.stats.num_redone > 0
        assert stream.auditor.findings(stream.pending) == []
    assert {version for sample in all_samples(groups) for version in sample.versions} == {1}


@virtual_time
async def test_samples_older_than_the_lag_are_dropped_on_request() -> None:
    async with driving(engines(*UNLIKE)) as (driver, client):
        data = source(100)
        options = RolloutOptions(over_sampling=2.0, max_version_lag=0, when_stale="drop")
        first = await driver.rollout(0, data, options=options, **BATCH)
        await push(client, 1)
        second = await driver.rollout(1, data, options=options, **BATCH)
        stream = driver.stream_of(data)
        assert stream.stats.num_stale_dropped == len(stream.auditor.dropped) > 0
        assert stream.auditor.findings(stream.pending) == []
    assert not set(numbers(first)) & set(numbers(second))


@virtual_time
async def test_a_batch_of_which_all_is_stale_says_so() -> None:
    async with driving(engines(0.01)) as (driver, _):
        options = RolloutOptions(max_version_lag=1, when_stale="drop")
        said = (
            r"no group is left of 2 prompts \(stale: 2, with tokens of version 0; the policy's "
            r"version is 57, and max_version_lag is 1\)"
        )
        with pytest.raises(RolloutError, match=said):
            await driver.rollout(
                58,
                prompts(2),
                group_size=2,
                sampling=SAMPLING,
                weight_version=57,
                options=options,
            )


@virtual_time
async def test_a_group_that_is_stale_too_often_is_dropped() -> None:
    async with driving(engines(0.01)) as (driver, client):
        data = source(8)
        options = RolloutOptions(mode="async", max_version_lag=0, max_redone=1)
        for version in range(1, 4):
            await driver.rollout(version, data, options=options, **BATCH)
            await pass_time(1.0)
            await push(client, version)
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []


@virtual_time
async def test_filtered_groups_are_replaced_until_the_batch_is_full() -> None:
    hooks = Hooks(group_filter=lambda group: "odd" if group.metadata["number"] % 2 else "")
    async with driving(engines(0.01), hooks=hooks) as (driver, _):
        data = source(100)
        groups = await driver.rollout(0, data, **BATCH)
        stream = driver.stream_of(data)
        assert numbers(groups) == [2, 4, 6, 8]
        assert stream.stats.rejected == {"odd": 4}
        assert stream.auditor.findings(stream.pending) == []


@virtual_time
async def test_the_same_groups_come_whatever_the_engines_speed() -> None:
    hooks = Hooks(group_filter=lambda group: group.metadata["number"] % 3 > 0)
    seen = set()
    for speeds in [(0.01,), (0.05, 0.01), (0.02, 0.01, 0.07)]:
        async with driving(engines(*speeds), hooks=hooks, max_in_flight=5) as (driver, _):
            data = source(100)
            made = [numbers(await driver.rollout(step, data, **BATCH)) for step in range(3)]
            seen.add(tuple(map(tuple, made)))
    assert len(seen) == 1


@virtual_time
async def test_a_filter_that_drops_everything_ends_with_its_statistics() -> None:
    hooks = Hooks(group_filter=lambda group: "zero_std" if group.prompt_index % 3 else "too easy")
    async with driving(engines(0.01), hooks=hooks) as (driver, _):
        data, options = source(1000), RolloutOptions(max_rejected=9)
        with pytest.raises(
            RolloutError, match=r"dropped 1\d groups, more than 9, and kept 0 of 4 .*zero_std: \d"
        ):
            await driver.rollout(0, data, options=options, **BATCH)
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []


@virtual_time
async def test_filters_that_drop_a_whole_list_raise() -> None:
    async with driving(engines(0.01), hooks=Hooks(group_filter=lambda group: False)) as (driver, _):
        with pytest.raises(RolloutError, match=r"is left of 3 prompts \(filtered: 3\)"):
            await driver.rollout(0, prompts(3), group_size=1, sampling=SAMPLING)


@virtual_time
async def test_a_source_that_ends_gives_a_short_batch_and_then_none() -> None:
    async with driving(engines(0.01)) as (driver, _):
        data = source(6, num_epochs=1)
        sizes = [len(await driver.rollout(step, data, **BATCH)) for step in range(3)]
    assert sizes == [4, 2, 0]


@virtual_time
async def test_one_ahead_makes_the_next_batch_while_the_trainer_trains() -> None:
    async with driving(engines(0.01)) as (driver, client):
        data, options = source(100), RolloutOptions(mode="one_ahead")
        loop = asyncio.get_running_loop()
        await driver.rollout(0, data, options=options, **BATCH)
        await pass_time(5.0)
        began = loop.time()
        groups = await driver.rollout(1, data, options=options, **BATCH)
        assert loop.time() == began
        assert numbers(groups) == [5, 6, 7, 8]
        assert max(request.input_ids[0] for request in client.requests) <= 12


@virtual_time
async def test_async_runs_ahead_as_far_as_staleness_allows_and_no_further() -> None:
    async with driving(engines(0.01)) as (driver, client):
        data = source(100)
        options = RolloutOptions(mode="async", max_version_lag=2)
        await driver.rollout(0, data, options=options, **BATCH)
        await pass_time(60.0)
        assert max(request.input_ids[0] for request in client.requests) == 4 + 12
        assert len(driver.stream_of(data).pending) == 12


@pytest.mark.parametrize("mode", ["one_ahead", "async"])
def test_a_push_between_batches_cuts_samples_that_continue_with_new_weights(mode: str) -> None:
    @virtual_time
    async def run() -> None:
        async with driving(engines(0.1, 0.17)) as (driver, client):
            data = source(100)
            options = RolloutOptions(mode=mode, max_version_lag=3)
            mixed = 0
            for step in range(6):
                groups = await driver.rollout(step, data, options=options, **BATCH)
                await pass_time(0.3)
                await push(client, step + 1)
                for sample in all_samples(groups):
                    sample.check()
                    assert len(sample.output_ids) == 10
                    mixed += len(sample.versions) > 1
            stream = driver.stream_of(data)
            assert stream.auditor.findings(stream.pending) == []
            assert mixed

    run()


@virtual_time
async def test_a_lost_engine_costs_no_sample() -> None:
    of = engines(0.01, 0.01)
    of[0].faults.strike("generate", die(tokens=4))
    of[1].faults.strike("generate", lose(executed=True))
    async with driving(of, max_in_flight=4) as (driver, _):
        groups = await driver.rollout(0, prompts(10), group_size=2, sampling=SAMPLING)
    assert {sample.status for sample in all_samples(groups)} == {SampleStatus.TRUNCATED}


@virtual_time
async def test_a_refusal_is_final() -> None:
    of = engines(0.01)
    of[0].faults.strike("generate", reject(400, "prompt is longer than the context"))
    async with driving(of) as (driver, client):
        with pytest.raises(
            RolloutError, match=r"1 of 2 samples failed.*HTTP 400: prompt is longer"
        ):
            await driver.rollout(0, prompts(2), group_size=1, sampling=SAMPLING)
    assert len(client.requests) == 2


@virtual_time
async def test_a_closed_gate_is_retried_until_it_opens() -> None:
    async with driving(engines(0.01)) as (driver, client):
        client.is_closed = True
        call = asyncio.create_task(driver.rollout(0, prompts(2), group_size=1, sampling=SAMPLING))
        await pass_time(30.0)
        client.is_closed = False
        assert len(await call) == 2
    assert 50 < len(client.requests) < 70


@virtual_time
async def test_a_gate_that_stays_closed_fails_after_the_limit() -> None:
    retry_policy = RetryPolicy(unavailable_s=20.0)
    async with driving(engines(0.01), retry_policy=retry_policy) as (driver, client):
        client.is_closed = True
        with pytest.raises(RolloutError, match=r"2 of 2 samples failed.*503"):
            await driver.rollout(0, prompts(2), group_size=1, sampling=SAMPLING)
        assert asyncio.get_running_loop().time() == pytest.approx(20.0)


@virtual_time
async def test_engines_that_all_die_fail_the_step_and_lose_no_prompt() -> None:
    of = engines(0.01)
    retry_policy = RetryPolicy(unavailable_s=5.0)
    async with driving(of, retry_policy=retry_policy) as (driver, client):
        data = source(100)
        await driver.rollout(0, data, **BATCH)
        of[0].die("the machine is gone")
        with pytest.raises(RolloutError, match="8 of 8 samples failed"):
            await driver.rollout(1, data, **BATCH)
        client.engines.append(*engines(0.01))
        groups = await driver.rollout(1, data, **BATCH)
        assert numbers(groups) == [5, 6, 7, 8]
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []


@virtual_time
async def test_a_cancelled_rollout_loses_nothing() -> None:
    async with driving(engines(0.1)) as (driver, client):
        data = source(100)
        call = asyncio.create_task(driver.rollout(0, data, **BATCH))
        await pass_time(0.55)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client.num_in_flight == 0
        groups = await driver.rollout(0, data, **BATCH)
        assert numbers(groups) == [1, 2, 3, 4]
    assert [len(request.input_ids) for request in client.requests[8:]] == [6] * 8


@virtual_time
async def test_requests_held_at_the_gate_are_aborted_there() -> None:
    async with driving(engines(0.01, 0.01), max_in_flight=16) as (driver, client):
        data, options = source(100), RolloutOptions(over_sampling=2.0)
        call = asyncio.create_task(driver.rollout(0, data, options=options, **BATCH))
        await pass_time(0.05)
        client.hold()
        await pass_time(0.5)
        assert not call.done() or len(call.result()) == 4
        client.open()
        await call
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []


@virtual_time
async def test_engines_that_ignore_the_abort_are_abandoned_after_its_deadline() -> None:
    of = engines(0.01, 1000.0)
    of[1].faults.strike("abort_request", reject(500), times=10_000)
    async with driving(of) as (driver, _):
        options = RolloutOptions(over_sampling=2.0, abort_timeout_s=3.0)
        data = source(100)
        groups = await driver.rollout(0, data, options=options, **{**BATCH, "group_size": 1})
        assert len(groups) == 4
        assert asyncio.get_running_loop().time() < 5.0
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []


@virtual_time
async def test_a_slow_reward_does_not_delay_the_end_of_a_batch() -> None:
    async def reward(sample) -> float:
        await pass_time(500.0 if sample.prompt_ids == [5] else 0.0)
        return 1.0

    async with driving(engines(0.01), reward) as (driver, _):
        data, options = source(100), RolloutOptions(over_sampling=2.0)
        await driver.rollout(0, data, options=options, **BATCH)
        assert asyncio.get_running_loop().time() < 1.0
        await driver.rollout(1, data, options=options, **BATCH)
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []


@virtual_time
async def test_a_reward_is_kept_when_its_group_continues_later() -> None:
    rewarded: list[tuple[int, ...]] = []

    def reward(sample) -> float:
        rewarded.append((*sample.prompt_ids, id(sample)))
        return 1.0

    async with driving(engines(*UNLIKE), reward) as (driver, _):
        data, options = source(100), RolloutOptions(over_sampling=2.0)
        for step in range(4):
            await driver.rollout(step, data, options=options, **BATCH)
    assert len(rewarded) == len(set(rewarded))


@virtual_time
async def test_samples_of_a_seeded_rollout_have_distinct_reproducible_seeds() -> None:
    seeds = []
    for speeds in [(0.01,), (0.03, 0.01)]:
        async with driving(engines(*speeds)) as (driver, client):
            sampling = SamplingParams(max_new_tokens=3, sampling_seed=5)
            await driver.rollout(0, prompts(4), group_size=2, sampling=sampling)
            seeds.append(
                sorted((a.input_ids[0], a.sampling.sampling_seed) for a in client.requests)
            )
    assert seeds[0] == seeds[1]
    assert len({seed for _, seed in seeds[0]}) == 8


@virtual_time
async def test_a_second_call_does_not_change_the_batch_that_is_under_way() -> None:
    data = source(9)
    async with driving(engines(0.01)) as (driver, _):
        first = asyncio.create_task(driver.rollout(0, data, **BATCH | {"num_groups": 4}))
        await pass_time(0.015)
        second = driver.rollout(1, data, **BATCH | {"num_groups": 1})
        assert list(map(numbers, await asyncio.gather(first, second))) == [[1, 2, 3, 4], [5]]


@virtual_time
async def test_another_group_size_is_rejected_while_groups_are_pending() -> None:
    async with driving(engines(*UNLIKE)) as (driver, _):
        data, options = source(100), RolloutOptions(over_sampling=2.0)
        await driver.rollout(0, data, options=options, **BATCH)
        with pytest.raises(ValueError, match=r"group_size = 3: \d groups of 2 are pending"):
            await driver.rollout(1, data, options=options, **{**BATCH, "group_size": 3})


@virtual_time
async def test_progress_is_reported_as_the_batch_fills() -> None:
    progress = []
    async with driving(engines(0.01), max_in_flight=2) as (driver, _):
        await driver.rollout(0, source(9), on_progress=progress.append, **BATCH)
    assert [now.num_ready for now in progress] == sorted(now.num_ready for now in progress)
    assert (progress[-1].num_ready, progress[-1].num_wanted) == (4, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 0}, "group_size = 0: must be at least 1"),
        ({"num_groups": 0}, "num_groups = 0: must be at least 1"),
        ({"num_groups": None}, "num_groups is needed"),
        ({"sampling": SamplingParams(n=4)}, "n = 4: must be 1: group_size sets"),
        ({"sampling": SamplingParams(max_new_tokens=0)}, "max_new_tokens = 0"),
        ({"sampling": SamplingParams(8, min_new_tokens=9)}, "min_new_tokens = 9: must be at most"),
    ],
)
def test_invalid_batch_settings_are_rejected(settings, message: str) -> None:
    @virtual_time
    async def run() -> None:
        async with driving(engines(0.01)) as (driver, client):
            with pytest.raises(ValueError, match=message):
                await driver.rollout(0, source(9), **{**BATCH, **settings})
            assert not client.requests

    run()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "fast"}, "mode = 'fast': must be 'sync', 'one_ahead' or 'async'"),
        ({"when_stale": "keep"}, "when_stale = 'keep'"),
        ({"over_sampling": 0.5}, "over_sampling = 0.5: must be at least 1"),
        ({"over_sampling": float("nan")}, "over_sampling = nan"),
        ({"max_failed_share": 1.5}, "max_failed_share = 1.5"),
        ({"max_version_lag": -1}, "max_version_lag = -1"),
        ({"abort_timeout_s": 0.0}, "abort_timeout_s = 0.0"),
    ],
)
def test_invalid_options_are_rejected(settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutOptions(**settings)


@virtual_time
async def test_prompts_that_do_not_fit_are_rejected_by_their_number() -> None:
    async with driving(engines(0.01), max_prompt_tokens=2) as (driver, client):
        good, settings = prompts(1)[0], {"group_size": 1, "sampling": SAMPLING}
        with pytest.raises(ValueError, match="at least one prompt"):
            await driver.rollout(0, [], **settings)
        with pytest.raises(ValueError, match="prompt 1 has 3 tokens, at most 2 fit"):
            await driver.rollout(0, [good, type(good)((1, 2, 3))], **settings)
    assert not client.requests


@pytest.mark.parametrize("make", [prompts, source])
def test_closing_a_driver_fails_a_pending_rollout_with_a_message(make) -> None:
    @virtual_time
    async def run() -> None:
        async with driving(engines(0.1)) as (driver, client):
            call = asyncio.create_task(driver.rollout(0, make(9), **BATCH))
            await pass_time(0.35)
            await driver.close()
            assert client.num_in_flight == 0
            with pytest.raises(RolloutError, match="closed before the batch was full"):
                await call
            assert asyncio.get_running_loop().time() < 1.0

    run()
