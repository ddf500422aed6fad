"""Log-probs of engines and trainer: figures, and what a mismatch looks like."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

import rollout
from engines.protocol import VersionSpan
from engines.protocol.logprob_kind import LogprobKind
from rollout.core.errors import LogprobMismatch
from rollout.core.samples import EngineSpan, Sample, SampleGroup
from rollout.driver.logprobs.comparison import compare_logprobs
from rollout.driver.logprobs.mismatch import Mismatch
from tests.support.small_policy import Policy, new_policy

OLD = new_policy(random.Random(7))
NEW = OLD.trained(random.Random(8))
FAULTY = NEW.with_swapped_rows()


def sampled(
    *engines: tuple[str, Policy], version: str = "4", temperature: float = 1.0, num: int = 8
) -> list[Sample]:
    """What engines return that hold these policies."""
    draw = random.Random(9)
    return [
        policy.sample(draw, engine_id=engine_id, version=version, temperature=temperature)
        for engine_id, policy in engines
        for _ in range(num)
    ]


def rows(samples: Sequence[Sample], temperature: float = 1.0) -> list[list[float]]:
    """The log-probs of the trainer, who has the new policy."""
    return [NEW.logprobs(sample, temperature) for sample in samples]


def found_in(samples: Sequence[Sample], temperature: float = 1.0, **settings: float) -> Mismatch:
    """The mismatch with the trainer."""
    report = compare_logprobs(
        samples, rows(samples, temperature), temperature=temperature, **settings
    )
    assert report.mismatch is not None
    return report.mismatch


# -- what a mismatch looks like -------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engines_with_the_trainers_weights_are_no_mismatch(temperature: float) -> None:
    samples = sampled(("main-0", NEW), ("main-1", NEW), temperature=temperature)
    report = compare_logprobs(samples, rows(samples, temperature), temperature=temperature)
    assert report.mismatch is None
    assert report.overall.largest < 1e-9
    assert report.overall.mean_ratio == pytest.approx(1)
    report.raise_mismatch()


@pytest.mark.parametrize("num_behind", [1, 3])
def test_engines_a_version_behind_that_report_the_new_version_are_found(num_behind: int) -> None:
    names = [f"main-{index}" for index in range(4)]
    behind = names[:num_behind]
    engines = [(name, OLD if name in behind else NEW) for name in names]
    mismatch = found_in(sampled(*engines))
    assert mismatch.gap > 0.05
    assert mismatch.engine_id == ("main-0" if num_behind == 1 else "")
    assert mismatch.weight_version == "4"
    assert all((name in mismatch.why) is (name in behind) for name in names)
    assert mismatch.why.endswith("The limit is 0.05")


def test_the_figures_show_an_engine_that_is_behind_below_the_limit() -> None:
    samples = sampled(("main-0", OLD), ("main-1", NEW))
    report = compare_logprobs(samples, rows(samples), limit=0.2)
    assert report.mismatch is None
    assert report.by_engine["main-1"].mean < 1e-9 < 0.05 < report.by_engine["main-0"].mean


def test_a_tensor_that_is_swapped_in_one_engine_is_found() -> None:
    mismatch = found_in(sampled(("main-0", NEW), ("main-1", FAULTY)))
    assert (mismatch.engine_id, mismatch.weight_version) == ("main-1", "4")
    assert mismatch.gap > 1


def test_a_tensor_that_is_swapped_in_the_push_is_found_on_all_engines() -> None:
    mismatch = found_in(sampled(("main-0", FAULTY), ("main-1", FAULTY)))
    assert (mismatch.engine_id, mismatch.weight_version) == ("", "4")
    assert "2 engines (main-0, main-1)" in mismatch.why


def test_a_version_that_is_off_on_every_engine_is_found() -> None:
    engines = "main-0", "main-1"
    samples = sampled(*((name, FAULTY) for name in engines), version="3")
    mismatch = found_in(samples + sampled(*((name, NEW) for name in engines)))
    assert (mismatch.engine_id, mismatch.weight_version) == ("", "3")


def test_a_stale_version_is_no_mismatch_below_the_limit() -> None:
    samples = sampled(("main-0", OLD), version="3") + sampled(("main-0", NEW))
    report = compare_logprobs(samples, rows(samples), limit=0.2)
    assert report.mismatch is None
    assert report.by_version["3"].mean > 0.05
    assert report.by_version["4"].mean < 1e-9


def with_cut(samples: Sequence[Sample], kind: LogprobKind | None) -> Sequence[Sample]:
    """As engines report them that keep the more probable half: each is twice as probable."""
    for sample in samples:
        sample.output_logprobs = [min(0.0, one + math.log(2)) for one in sample.output_logprobs]
        sample.logprob_kind = kind
    return samples


def test_a_mismatch_says_that_log_probs_are_behind_a_cut() -> None:
    engines = ("main-0", NEW), ("main-1", NEW)
    mismatch = found_in(with_cut(sampled(*engines), LogprobKind.CUT))
    assert "top-p" in mismatch.why
    assert "before you look for wrong weights" in mismatch.why
    halves = [*with_cut(sampled(engines[0]), LogprobKind.CUT), *sampled(engines[1])]
    assert found_in(halves).engine_id == "main-0"


def test_a_mismatch_says_that_logits_were_changed() -> None:
    samples = with_cut(sampled(("main-0", NEW), ("main-1", NEW)), LogprobKind.PENALISED)
    why = found_in(samples).why
    assert "a grammar or min_new_tokens changed (logprob_kind is penalised)" in why
    assert "top-p" not in why


def test_a_cut_elsewhere_is_not_told_of_tokens_that_are_off() -> None:
    samples = sampled(("main-0", NEW), ("main-1", FAULTY))
    for sample in samples[: len(samples) // 2]:
        sample.logprob_kind = LogprobKind.CUT  # of tokens that were all kept
    mismatch = found_in(samples)
    assert mismatch.engine_id == "main-1"
    assert "top-p" not in mismatch.why


def test_log_probs_without_the_temperature_say_so() -> None:
    samples = sampled(("main-0", NEW), temperature=1.0)
    for sample in samples:
        sample.logprob_kind = LogprobKind.RAW
    assert "compare at temperature 1" in found_in(samples, temperature=0.7).why
    assert compare_logprobs(samples, rows(samples)).mismatch is None
    swapped = sampled(("main-0", FAULTY))
    for sample in swapped:
        sample.logprob_kind = LogprobKind.RAW
    assert "compare at temperature 1" not in found_in(swapped).why


@pytest.mark.parametrize("engine_temperature", [0.7, 1.3])
def test_another_temperature_is_found(engine_temperature: float) -> None:
    samples = sampled(("main-0", NEW), ("main-1", NEW), temperature=engine_temperature)
    assert "2 engines (main-0, main-1)" in found_in(samples).why


def test_another_temperature_of_one_engine_names_the_engine() -> None:
    samples = sampled(("main-0", NEW)) + sampled(("main-1", NEW), temperature=0.7)
    assert found_in(samples).engine_id == "main-1"


@pytest.mark.parametrize("by", [1, -1])
def test_log_probs_that_are_shifted_by_a_token_are_found(by: int) -> None:
    samples = sampled(("main-0", NEW))
    shifted = [row[by:] + row[:by] for row in rows(samples)]
    assert compare_logprobs(samples, shifted).mismatch is not None


@pytest.mark.parametrize("side", ["engine", "trainer", "both"])
def test_a_log_prob_that_is_not_finite_names_its_side(side: str) -> None:
    samples = sampled(("main-0", NEW), ("main-1", NEW))
    theirs = rows(samples)
    if side != "trainer":
        samples[-1].output_logprobs[3] = math.nan
    if side != "engine":
        theirs[-1][5] = -math.inf
    mismatch = compare_logprobs(samples, theirs).mismatch
    assert mismatch is not None
    sides = {
        "engine": "1 log-probs are not finite: the engine's",
        "trainer": "1 log-probs are not finite: the trainer's",
        "both": "2 log-probs are not finite: the engine's and the trainer's",
    }
    assert mismatch.why.endswith(sides[side])
    # No engine is to blame for what the trainer computes.
    assert mismatch.engine_id == ("" if side == "trainer" else "main-1")


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_log_probs_that_are_not_finite_are_found_and_are_in_no_figure(value: float) -> None:
    samples = sampled(("main-0", NEW), ("main-1", NEW))
    samples[-1].output_logprobs[3] = value
    report = compare_logprobs(samples, rows(samples))
    assert report.mismatch is not None
    assert report.mismatch.engine_id == "main-1"
    assert "not finite" in report.mismatch.why
    assert report.overall.num_not_finite == 1
    assert all(math.isfinite(figure) for figure in report.metrics().values())


def test_a_mismatch_is_raised_with_engine_version_and_gap() -> None:
    samples = sampled(("main-0", NEW), ("main-1", FAULTY))
    with pytest.raises(LogprobMismatch, match="engine main-1 with weight version 4") as raised:
        compare_logprobs(samples, rows(samples)).raise_mismatch()
    error = raised.value
    assert (error.engine_id, error.weight_version) == ("main-1", "4")
    assert error.gap > 1


def test_samples_without_engines_and_versions_are_compared_too() -> None:
    samples = sampled(("", FAULTY), version="")
    mismatch = found_in(samples)
    assert mismatch.engine_id == ""
    assert "engine unknown" in mismatch.why


# -- types ----------------------------------------------------------------------------------------


def with_gaps(draw: random.Random, gap: float) -> tuple[Sample, list[float]]:
    """A sample whose gaps are about ``gap`` on average, and the trainer's row."""
    num, spread = 500, gap * math.sqrt(math.pi / 2)
    return Sample([1], [5] * num, [-2.0] * num), [-2.0 + draw.gauss(0, spread) for _ in range(num)]


@pytest.mark.parametrize(
    ("dtype", "gap", "is_found"),
    [
        ("float32", 0.034, True),
        ("float32", 8e-7, False),
        ("float16", 0.034, True),
        ("float16", 0.003, False),
        ("bfloat16", 0.034, False),
    ],
)
def test_the_limit_is_what_rounding_costs_in_the_type(
    dtype: Any, gap: float, is_found: bool
) -> None:
    sample, row = with_gaps(random.Random(1), gap)
    found = compare_logprobs([sample], [row], dtype=dtype).mismatch
    assert (found is not None) is is_found


# -- figures --------------------------------------------------------------------------------------


def test_every_gap_counts_where_its_token_comes_from() -> None:
    sample = Sample(
        [1],
        [5, 6, 7, 8],
        [-1.0, -1.0, 0.0, -1.0],
        loss_mask=[1, 1, 0, 1],
        weight_versions=(VersionSpan("3", 0, 2), VersionSpan("4", 3, 4)),
        engines=(EngineSpan("main-0", 0, 1), EngineSpan("main-1", 1, 4)),
    )
    report = rollout.compare_logprobs([SampleGroup(0, [sample])], [[-1.5, -0.5, -9.0, -3.0]])
    assert report.gaps == [[-0.5, 0.5, 0.0, -2.0]]
    assert report.overall.num_tokens == 3
    assert report.overall.mean == pytest.approx(1.0)
    assert report.overall.bias == pytest.approx(-2 / 3)
    assert report.overall.largest == 2.0
    assert {name: one.mean for name, one in report.by_engine.items()} == {
        "main-0": 0.5,
        "main-1": 1.25,
    }
    assert {name: one.num_tokens for name, one in report.by_version.items()} == {"3": 2, "4": 1}
    assert {place: one.mean for place, one in report.by_position.items()} == {1: 0.5, 2: 0.5, 4: 2}
    assert report.histograms["main-1"]["1.0"] == 1
    assert report.histograms["main-1"]["+Inf"] == 2
    assert report.histograms["main-1"]["sum"] == 2.5


def test_the_estimators_come_close_to_the_exact_divergence() -> None:
    other = NEW.trained(random.Random(10), 0.5)
    samples = sampled(("main-0", other), num=100)
    overall = compare_logprobs(samples, rows(samples)).overall
    lasts = [last for one in samples for last in [one.prompt_ids[-1], *one.output_ids[:-1]]]
    exact = 0.0
    for last in lasts:
        ours, theirs = other.distribution(last), NEW.distribution(last)
        exact += sum(math.exp(q) * (q - p) for q, p in zip(ours, theirs, strict=True)) / len(lasts)
    assert overall.kl_k3 == pytest.approx(exact, rel=0.1)
    assert overall.kl_k1 == pytest.approx(exact, rel=0.25)
    assert overall.kl_k2 == pytest.approx(exact, rel=0.25)


def test_importance_weights_are_ratios_up_to_the_cap() -> None:
    sample = Sample([1], [5, 6, 7], [-1.0, -1.0, -1.0])
    report = compare_logprobs([sample], [[-2.0, -1.0, -0.1]])
    (weights,) = report.truncated_weights()
    assert weights == pytest.approx([math.exp(-1), 1.0, 2.0])
    assert report.truncated_weights(cap=3.0)[0][2] == pytest.approx(math.exp(0.9))
    assert report.metrics()["logprob_gap/truncated_share"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="cap = 0"):
        report.truncated_weights(cap=0)


def test_huge_gaps_keep_every_figure_finite() -> None:
    report = compare_logprobs([Sample([1], [5], [-5000.0])], [[0.0]])
    assert all(math.isfinite(figure) for figure in report.metrics().values())
    assert report.truncated_weights() == [[2.0]]


def test_samples_without_tokens_have_no_figures() -> None:
    report = compare_logprobs([Sample([1])], [[]])
    assert report.mismatch is None
    assert report.overall.num_tokens == 0


# -- misuse ---------------------------------------------------------------------------------------

ONE = Sample([1], [5, 6], [-1.0, -1.0])


@pytest.mark.parametrize(
    ("samples", "given", "settings", "message"),
    [
        ([ONE], [[-1.0]], {}, r"trainer_logprobs\[0\] has 1 values for 2 output tokens"),
        ([ONE], [[-1.0, -1.0]] * 2, {}, "trainer_logprobs has 2 rows for 1 samples"),
        ([ONE], [-1.0], {}, r"trainer_logprobs\[0\] is not a row of numbers"),
        ([ONE], [[-1.0, -1.0]], {"temperature": 0}, "temperature = 0"),
        ([ONE], [[-1.0, -1.0]], {"limit": -1}, "limit = -1"),
        ([ONE], [[-1.0, -1.0]], {"dtype": "fp8"}, "dtype = 'fp8'"),
    ],
)
def test_what_does_not_fit_is_named(samples, given, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        compare_logprobs(samples, given, **settings)
