"""Continuing a cut-off sample: budget, versions and lengths stay exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import FinishReason, GenerateReply, SamplingParams, VersionSpan
from rollout.core.samples import EngineSpan, Sample, SampleFailure, SampleStatus
from rollout.driver.client.partial import extend, remaining, restart


def reply(num: int, kind: str = "abort", version: str | None = "1", **fields) -> GenerateReply:
    spans = (VersionSpan(version, 0, num),) if version is not None and num else ()
    return GenerateReply(
        **{
            "rid": "r",
            "text": "x" * num,
            "output_ids": tuple(range(num)),
            "output_logprobs": (-1.0,) * num,
            "finish_reason": FinishReason(kind),
            "weight_versions": spans,
            **fields,
        }
    )


def pending() -> Sample:
    return Sample([1, 2], status=SampleStatus.PENDING)


def test_the_remaining_budget_is_the_budget_less_the_tokens_so_far() -> None:
    sampling = SamplingParams(max_new_tokens=10, min_new_tokens=4, temperature=0.5)
    assert remaining(sampling, 0) is sampling
    rest = remaining(sampling, 3)
    assert rest is not None
    assert (rest.max_new_tokens, rest.min_new_tokens, rest.temperature) == (7, 1, 0.5)
    assert remaining(sampling, 10) is None


def test_the_rest_of_a_seeded_request_draws_other_random_numbers() -> None:
    sampling = SamplingParams(max_new_tokens=10, sampling_seed=3)
    rests = [remaining(sampling, num) for num in range(9)]
    seeds = [rest.sampling_seed for rest in rests if rest is not None]
    assert seeds[0] == 3
    assert len(set(seeds)) == 9
    assert all(seed is not None and 0 <= seed < 1 << 63 for seed in seeds)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=8))
def test_parts_add_up_whatever_the_versions(parts: list[tuple[int, int]]) -> None:
    sample, versions = pending(), []
    for num, version in parts:
        extend(sample, reply(num, version=str(version)), budget=100)
        versions += [version] * num
    sample.check()
    drawn_by = [int(s.version) for s in sample.weight_versions for _ in range(s.start, s.end)]
    assert drawn_by == versions
    pairs = zip(sample.weight_versions, sample.weight_versions[1:], strict=False)
    assert all(left.version != right.version for left, right in pairs)


def test_a_turn_that_is_cut_off_before_its_first_token_keeps_what_was_observed() -> None:
    sample = pending()
    extend(sample, reply(2, "length"))
    sample.output_ids += [7]
    sample.output_logprobs += [0.0]
    sample.mask.append(0)
    extend(sample, reply(0))
    sample.check()
    assert (len(sample.output_ids), sample.status) == (3, SampleStatus.ABORTED)


def experts(engine: int, num_tokens: int) -> bytes:
    """Two bytes for each token that an engine has computed: all but the last."""
    return bytes([engine] * 2) * (num_tokens - 1)


def test_routed_experts_are_those_of_the_engine_that_computed_the_token_first() -> None:
    sample = pending()
    extend(sample, reply(3, routed_experts=experts(1, 5)))
    extend(sample, reply(0, routed_experts=b""))  # aborted before its first token
    extend(sample, reply(2, routed_experts=experts(2, 7)))
    assert sample.routed_experts == b"\1\1" * 4 + b"\2\2" * 2
    with pytest.raises(ValueError, match="routed experts do not fit"):
        extend(sample, reply(1, routed_experts=b"abc"))
    assert len(sample.output_ids) == 5
    extend(sample, reply(1, "stop"))
    assert sample.routed_experts is None
    extend(sample, reply(1, "stop", routed_experts=experts(3, 9)))
    assert sample.routed_experts is None  # a part is missing, so there is no whole
    restart(sample)
    extend(sample, reply(1, "stop", routed_experts=experts(3, 3)))
    assert sample.routed_experts == experts(3, 3)


def test_experts_of_a_tools_tokens_come_with_the_next_turn() -> None:
    sample = pending()
    extend(sample, reply(1, "stop", routed_experts=experts(1, 3)))
    sample.output_ids += [7, 8]
    sample.output_logprobs += [0.0, 0.0]
    sample.mask.extend([0, 0])
    extend(sample, reply(1, "stop", routed_experts=experts(2, 6)))
    assert sample.routed_experts == b"\1\1" * 2 + b"\2\2" * 3


def test_sampling_masks_are_those_of_all_parts_or_none() -> None:
    sample = pending()
    extend(sample, reply(2, sampling_mask=((0, 5), None)))
    extend(sample, reply(0, sampling_mask=()))  # aborted before its first token
    assert sample.sampling_mask == [[0, 5], None]
    with pytest.raises(ValueError, match="1 sampling masks for 2 tokens"):
        extend(sample, reply(2, sampling_mask=((0,),)))
    assert len(sample.output_ids) == 2
    sample.output_ids += [7]
    sample.output_logprobs += [0.0]
    sample.mask.append(0)
    assert sample.sampling_mask is not None
    sample.sampling_mask.append(None)
    extend(sample, reply(1, "stop", sampling_mask=((0, 9),)))
    sample.check()
    assert sample.sampling_mask == [[0, 5], None, None, [0, 9]]
    extend(sample, reply(1, "stop"))
    assert sample.sampling_mask is None
    extend(sample, reply(1, "stop", sampling_mask=((0,),)))
    assert sample.sampling_mask is None  # a part is missing, so there is no whole
    restart(sample)
    sample.output_ids, sample.output_logprobs, sample.loss_mask = [7], [0.0], [0]
    extend(sample, reply(1, "stop", sampling_mask=((0,),)))
    assert sample.sampling_mask == [None, [0]]


def test_the_finish_reason_is_the_last_engines() -> None:
    sample = pending()
    extend(sample, reply(2), budget=5)
    assert sample.status is SampleStatus.ABORTED
    extend(sample, reply(1, "stop"), budget=5)
    assert (sample.status, sample.finish_reason) == (SampleStatus.COMPLETED, FinishReason("stop"))


def test_an_abort_at_the_last_token_is_truncated_with_finish_reason_abort() -> None:
    sample = pending()
    extend(sample, reply(5), budget=5)
    assert sample.status is SampleStatus.TRUNCATED
    assert sample.finish_reason == FinishReason("abort")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (reply(6), "6 output tokens where at most 5"),
        (reply(2, output_logprobs=(-1.0,)), "2 output ids but 1 log-probs"),
        (reply(2, output_logprobs=None), "2 output ids but 0 log-probs"),
        (reply(2, finish_reason=None), "finish reason None"),
        (reply(2, "error"), "finish reason"),
        (reply(2, weight_versions=(VersionSpan("1", 0, 1),)), "spans end at 1 of 2"),
    ],
)
def test_an_inconsistent_reply_leaves_the_sample_unchanged(bad, message: str) -> None:
    sample = pending()
    with pytest.raises(ValueError, match=message):
        extend(sample, bad, budget=5)
    assert sample == pending()


def test_an_engine_that_reports_one_version_makes_one_span() -> None:
    sample = pending()
    extend(sample, reply(2, version=None, weight_version="8"))
    assert sample.weight_versions == (VersionSpan("8", 0, 2),)


def test_versions_are_unknown_if_those_of_one_part_are() -> None:
    sample = pending()
    extend(sample, reply(2, version=None))
    extend(sample, reply(2, version="3"))
    sample.check()
    assert sample.weight_versions == ()


def test_a_restarted_sample_is_as_new() -> None:
    sample = pending()
    extend(sample, reply(3))
    sample.fail("no", failure=SampleFailure.ENGINE)
    restart(sample)
    assert sample == pending()


def test_parts_of_several_engines_keep_their_engines_until_the_sample_restarts() -> None:
    sample = pending()
    for num, engine_id in ((2, "main-0"), (3, ""), (1, "main-1")):
        extend(sample, reply(num, engine_id=engine_id))
    assert sample.engines == (EngineSpan("main-0", 0, 2), EngineSpan("main-1", 5, 6))
    restart(sample)
    assert sample.engines == ()
