"""Importance weights and rejection, compared with each sequence computed by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollout
from rollout.core.samples import Sample

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

LEVELS = ("token", "sequence", "geometric")
Row = tuple[list[float], list[int]]

# Gaps of any size: those of one engine in bfloat16, and those of lost weights.
GAP = st.one_of(st.floats(-0.1, 0.1), st.floats(-1e4, 1e4))
BOUND = st.floats(1e-6, 1e6)


@st.composite
def rows(draw: Callable[[Any], Any]) -> list[Row]:
    """Gaps and masks of sequences with different lengths."""
    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    return [
        (
            draw(st.lists(GAP, min_size=num, max_size=num)),
            draw(st.lists(st.integers(0, 1), min_size=num, max_size=num)),
        )
        for num in lengths
    ]


def log_ratio_of_a_token(row: Row, place: int, level: str) -> float:
    """Computed with fractions, for one token alone."""
    gaps, mask = row
    if level == "token":
        return gaps[place]
    of_policy = [Fraction(gap) for gap, flag in zip(gaps, mask, strict=True) if flag]
    total = sum(of_policy, Fraction())
    return float(total / len(of_policy) if level == "geometric" else total)


def padded(given_rows: list[Row], padding: float = 0.0) -> tuple[Any, Any]:
    """Tensors of shape [N, T], float64."""
    width = max(len(gaps) for gaps, _ in given_rows)
    gaps = torch.full((len(given_rows), width), padding, dtype=torch.float64)
    mask = torch.zeros(len(given_rows), width)
    for index, (row_gaps, row_mask) in enumerate(given_rows):
        gaps[index, : len(row_gaps)] = torch.tensor(row_gaps, dtype=torch.float64)
        mask[index, : len(row_mask)] = torch.tensor(row_mask)
    return gaps, mask


def report_of(given_rows: list[Row]) -> rollout.LogprobReport:
    """The same as log-probs of samples."""
    samples = [
        Sample([1], [5] * len(gaps), [0.0] * len(gaps), loss_mask=mask) for gaps, mask in given_rows
    ]
    return rollout.compare_logprobs(samples, [gaps for gaps, _ in given_rows])


def tokens(given_rows: list[Row]) -> list[tuple[int, int]]:
    """The places of the policy's tokens."""
    return [
        (index, place)
        for index, (_, mask) in enumerate(given_rows)
        for place, flag in enumerate(mask)
        if flag
    ]


# -- as each sequence alone -----------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@given(given_rows=rows(), cap=BOUND, padding=st.sampled_from([0.0, math.nan, math.inf, -7.0]))
def test_each_weight_is_that_of_its_sequence_alone(
    level: str, given_rows: list[Row], cap: float, padding: float
) -> None:
    gaps, mask = padded(given_rows, padding)
    weights = rollout.importance_weights(gaps, mask, level=level, cap=cap)
    assert weights.shape == mask.shape
    assert bool((weights[mask == 0] == 0).all())
    for index, place in tokens(given_rows):
        log = log_ratio_of_a_token(given_rows[index], place, level)
        expected = cap if log >= math.log(cap) else math.exp(log)
        assert weights[index, place].item() == pytest.approx(expected, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("level", LEVELS)
@given(
    given_rows=rows(),
    bounds=st.tuples(BOUND, BOUND),
    veto=st.one_of(st.none(), st.floats(1e-30, 1.0)),
)
def test_a_token_stays_if_its_ratio_is_between_the_bounds_and_no_token_is_vetoed(
    level: str, given_rows: list[Row], bounds: tuple[float, float], veto: float | None
) -> None:
    lower, upper = sorted(bounds)
    gaps, mask = padded(given_rows)
    settings = {"level": level, "lower": lower, "upper": upper, "veto": veto}
    kept = rollout.rejection_mask(gaps, mask, **settings)
    accepted = report_of(given_rows).accepted(**settings)
    assert kept.dtype == mask.dtype
    assert int(kept.sum()) == sum(map(sum, accepted))
    for index, place in tokens(given_rows):
        row = given_rows[index]
        log = log_ratio_of_a_token(row, place, level)
        policy = [gap for gap, flag in zip(*row, strict=True) if flag]
        if near(log, lower) or near(log, upper) or any(near(gap, veto) for gap in policy):
            continue  # rounding decides
        is_vetoed = veto is not None and min(policy) < math.log(veto)
        expected = math.log(lower) < log < math.log(upper) and not is_vetoed
        assert bool(kept[index, place]) is expected
        assert accepted[index][place] is expected


def near(log: float, bound: float | None) -> bool:
    return bound is not None and math.isclose(log, math.log(bound), rel_tol=1e-9, abs_tol=1e-9)


@given(given_rows=rows(), cap=BOUND, geometric=st.booleans())
def test_a_report_has_the_weights_of_the_tensors(
    given_rows: list[Row], cap: float, geometric: bool
) -> None:
    weights = report_of(given_rows).sequence_weights(cap, geometric=geometric)
    level = "geometric" if geometric else "sequence"
    of_tensors = rollout.importance_weights(*padded(given_rows), level=level, cap=cap)
    for index, place in tokens(given_rows):
        found = of_tensors[index, place].item()
        assert weights[index] == pytest.approx(found, rel=1e-9, abs=1e-300)


@given(given_rows=rows(), level=st.sampled_from(LEVELS))
def test_the_figures_are_finite_and_those_of_the_tokens(given_rows: list[Row], level: str) -> None:
    gaps, mask = padded(given_rows)
    weights = rollout.importance_weights(gaps, mask, level=level)
    kept = rollout.rejection_mask(gaps, mask, level=level, upper=2.0)
    figures = rollout.correction_metrics(gaps, mask, weights=weights, accepted=kept)
    assert all(math.isfinite(value) for value in figures.values())
    places = tokens(given_rows)
    if not places:
        return
    of_tokens = [weights[place].item() for place in places]
    lost = [place for place in places if not kept[place]]
    mean, squares = sum(of_tokens) / len(places), sum(w * w for w in of_tokens) / len(places)
    assert figures["correction/weight_mean"] == pytest.approx(mean)
    assert figures["correction/weight_smallest"] == min(of_tokens)
    assert figures["correction/weight_largest"] == max(of_tokens)
    assert figures["correction/rejected_share"] == pytest.approx(len(lost) / len(places))
    sequences = {index for index, _ in places}
    assert figures["correction/rejected_sequences"] == pytest.approx(
        len({index for index, _ in lost}) / len(sequences)
    )
    if squares:
        assert figures["correction/effective_share"] == pytest.approx(mean * mean / squares)
    report = report_of(given_rows).overall
    assert figures["correction/kl_k1"] == pytest.approx(report.kl_k1)
    assert figures["correction/kl_k3"] == pytest.approx(report.kl_k3)


# -- known cases ----------------------------------------------------------------------------------

GAPS = torch.tensor([[math.log(2), math.log(2), 9.0], [math.log(0.5), 0.0, 0.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


def test_the_levels_of_a_small_case() -> None:
    def weights(level: str) -> list[float]:
        found = rollout.importance_weights(GAPS, MASK, level=level, cap=3.0)
        return found[MASK.bool()].tolist()

    assert weights("token") == pytest.approx([2, 2, 0.5, 1, 1])
    assert weights("sequence") == pytest.approx([3, 3, 0.5, 0.5, 0.5])
    assert weights("geometric") == pytest.approx([2, 2, *[0.5 ** (1 / 3)] * 3])


def test_the_figures_of_a_small_case() -> None:
    weights = rollout.importance_weights(GAPS, MASK, level="token", cap=2.0)
    kept = rollout.rejection_mask(GAPS, MASK, level="token", upper=1.5)
    figures = rollout.correction_metrics(GAPS, MASK, weights=weights, accepted=kept, cap=2.0)
    assert figures == pytest.approx(
        {
            "correction/kl_k1": -math.log(2) / 5,
            "correction/kl_k3": (2 * (1 - math.log(2)) + (-0.5 + math.log(2))) / 5,
            "correction/chi2_token": (4 + 4 + 0.25 + 1 + 1) / 5 - 1,
            "correction/chi2_sequence": (16 + 0.25) / 2 - 1,
            "correction/weight_mean": 6.5 / 5,
            "correction/weight_std": math.sqrt(10.25 / 5 - (6.5 / 5) ** 2),
            "correction/weight_smallest": 0.5,
            "correction/weight_largest": 2.0,
            "correction/capped_share": 2 / 5,
            "correction/effective_share": 6.5**2 / 10.25 / 5,
            "correction/rejected_share": 3 / 5,
            "correction/rejected_sequences": 1.0,
        },
        rel=1e-6,
    )


def test_one_token_far_below_takes_its_whole_sequence_out() -> None:
    gaps = torch.tensor([[0.0, -12.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.ones_like(gaps)
    without = rollout.rejection_mask(gaps, mask, level="token", upper=2.0)
    assert without.tolist() == [[1, 0, 1], [1, 1, 1]]
    vetoed = rollout.rejection_mask(gaps, mask, level="token", upper=2.0, veto=1e-4)
    assert vetoed.tolist() == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("gap", [math.nan, math.inf, -math.inf, 1e30, -1e30])
@pytest.mark.parametrize("level", LEVELS)
def test_a_gap_that_is_no_number_or_huge_gives_a_finite_weight_and_is_rejected(
    gap: float, level: str
) -> None:
    gaps = torch.tensor([[gap, 0.1], [0.1, 0.1]])
    mask = torch.ones(2, 2)
    weights = rollout.importance_weights(gaps, mask, level=level, cap=2.0)
    assert bool(weights.isfinite().all())
    assert weights[0, 0].item() == (2.0 if gap > 0 else 0.0)
    kept = rollout.rejection_mask(gaps, mask, level=level, upper=2.0)
    assert not kept[0, 0]
    assert bool(kept[1].all())
    figures = rollout.correction_metrics(gaps, mask, weights=weights, accepted=kept)
    assert all(math.isfinite(value) for value in figures.values())
    report = rollout.compare_logprobs([Sample([1], [5, 6], [0.0, 0.0])], [[gap, 0.1]])
    if level != "token":
        found = report.sequence_weights(2.0, geometric=level == "geometric")
        assert found == [weights[0, 0].item()]
    assert not report.accepted(level, upper=2.0)[0][0]
    assert all(math.isfinite(value) for value in report.metrics().values())


def test_no_gradient_flows_through_weights_masks_and_figures() -> None:
    logprobs = torch.zeros(2, 3, requires_grad=True)
    gaps = logprobs - torch.full((2, 3), 0.1)
    mask = torch.ones(2, 3)
    weights = rollout.importance_weights(gaps, mask, level="sequence")
    kept = rollout.rejection_mask(gaps, mask, level="geometric", upper=2.0)
    assert not weights.requires_grad
    assert not kept.requires_grad
    (weights * kept * logprobs).sum().backward()
    assert torch.allclose(logprobs.grad, weights * kept)
    rollout.correction_metrics(gaps, mask, weights=weights, accepted=kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_narrow_gaps_are_summed_in_float32(dtype: Any) -> None:
    gaps = torch.full((1, 4096), 2.0**-12, dtype=dtype)
    weights = rollout.importance_weights(gaps, torch.ones(1, 4096), cap=100.0)
    assert weights.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert weights[0, 0].item() == pytest.approx(math.e, rel=1e-5)


def test_a_sample_without_tokens_of_the_policy_has_no_figures() -> None:
    gaps, mask = torch.zeros(1, 2), torch.zeros(1, 2)
    weights = rollout.importance_weights(gaps, mask)
    kept = rollout.rejection_mask(gaps, mask, upper=2.0, veto=0.1)
    figures = rollout.correction_metrics(gaps, mask, weights=weights, accepted=kept)
    assert set(figures.values()) == {0.0}


# -- misuse ---------------------------------------------------------------------------------------

ROW = torch.zeros(1, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rollout.importance_weights(ROW[0], ROW[0]), r"gaps.shape = \[2\]"),
        (lambda: rollout.importance_weights(ROW, ROW[:, :1]), r"mask.shape = \[1, 1\]"),
        (lambda: rollout.importance_weights(ROW, ROW, cap=0), "cap = 0"),
        (lambda: rollout.importance_weights(ROW, ROW, level="word"), "level = 'word'"),
        (lambda: rollout.rejection_mask(ROW, ROW, upper=-1.0), "upper = -1"),
        (lambda: rollout.rejection_mask(ROW, ROW, upper=0.5), "lower = 2.0: must be at most upper"),
        (lambda: rollout.correction_metrics(ROW, ROW, accepted=ROW[:, :1]), "accepted.shape"),
        (lambda: report_of([([0.1], [1])]).accepted(upper=2.0, lower=3.0), "lower = 3.0"),
    ],
)
def test_what_does_not_fit_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
