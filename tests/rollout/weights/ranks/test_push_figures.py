"""The figures of a push: sums by rank and stage, and spans whose number is bounded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rollout.core.types import PushStage
from rollout.weights.ranks.figures import PushFigures
from rollout.weights.ranks.messages import Share
from rollout.weights.tensors.sources import Pairs

GATHER_S, COPY_S, ENGINE_S = 0.5, 0.25, 1.0
PAIRS = Pairs.of([("a", torch.zeros(6)), ("b", torch.zeros(2, dtype=torch.bfloat16))])


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def share(figures: PushFigures, *, is_made: bool) -> Share:
    made = {"shared_memory 0": {"path": "/a"}} if is_made else {}
    return Share("", False, made, {}, {}, *figures.measured(PAIRS, PAIRS))


def pushed(num_ranks: int, num_buckets: int, **more: Any) -> PushFigures:
    """A push in which the ranks send the buckets in turn."""
    clock = Clock()
    figures = PushFigures(num_ranks, clock=clock, **more)
    for index in range(num_buckets):
        figures.begin()
        clock.now_s += GATHER_S
        figures.gathered()
        clock.now_s += COPY_S
        figures.offered(
            [share(figures, is_made=index % num_ranks == rank) for rank in range(num_ranks)]
        )
        clock.now_s += ENGINE_S
        figures.wanted(clock.now_s)
    return figures


def test_each_rank_has_its_seconds_and_bytes_by_stage() -> None:
    assert pushed(2, 3).stages("shared_memory") == (
        PushStage(0, "gather", "", 84, 1.5),
        PushStage(0, "copy", "shared_memory", 56, 0.5),
        PushStage(1, "gather", "", 84, 1.5),
        PushStage(1, "copy", "shared_memory", 28, 0.25),
        PushStage(0, "engine", "shared_memory", 84, 3.0),
    )


def test_what_no_rank_has_a_part_of_is_sent_by_rank_0() -> None:
    figures = PushFigures(2)
    figures.begin()
    figures.gathered()
    figures.offered([share(figures, is_made=False)] * 2)
    figures.wanted(0.0)
    sent = {one.rank: one.num_bytes for one in figures.stages("by_value") if one.stage == "copy"}
    assert sent == {0: 28, 1: 0}


def test_a_push_without_buckets_has_no_figures() -> None:
    figures = PushFigures(2)
    figures.wanted(1.0)
    assert figures.stages("by_value") == ()
    assert figures.spans(1, "by_value") == []


def test_a_bucket_is_spans_of_each_rank_from_rank_0s_go_on() -> None:
    figures = pushed(2, 1)
    figures.density = 0.25
    spans = figures.spans(7, "by_value delta")
    first = spans[0].start_s
    assert [
        (span.rank, span.name, round(span.start_s - first, 3), span.elapsed_s) for span in spans
    ] == [
        (0, "gather", 0.0, GATHER_S),
        (0, "copy", GATHER_S, COPY_S),
        (1, "gather", 0.0, GATHER_S),
        (0, "engine", GATHER_S + COPY_S, ENGINE_S),
    ]
    assert {(span.weight_version, span.num_bytes, span.said) for span in spans} == {
        (7, 28, "bucket 0")
    }
    assert [(span.route, span.density) for span in spans] == [
        ("", None),
        ("by_value delta", 0.25),
        ("", None),
        ("by_value delta", None),
    ]


@pytest.mark.parametrize(("num_ranks", "most"), [(2, 50), (3, 20), (64, 10)])
def test_the_number_of_spans_is_bounded_and_their_sums_stay_exact(
    num_ranks: int, most: int
) -> None:
    figures = pushed(num_ranks, 199, most_spans=most)
    spans = figures.spans(1, "by_value")
    assert len(spans) <= max(most, 2 * num_ranks + 1)
    assert spans[0].said.startswith("buckets 0 to ")
    assert spans[-1].said.endswith(" 198")
    assert sum(span.elapsed_s for span in spans) == pytest.approx(
        199 * (num_ranks * GATHER_S + COPY_S + ENGINE_S)
    )
    stages = {(one.rank, one.stage): one for one in figures.stages("by_value")}
    for (rank, stage), one in stages.items():
        same = [span for span in spans if (span.rank, span.name) == (rank, stage)]
        assert sum(span.num_bytes for span in same) == one.num_bytes
    for rank in range(num_ranks):
        lane = sorted((span for span in spans if span.rank == rank), key=lambda span: span.start_s)
        assert all(
            before.end_s <= after.start_s + 1e-6 for before, after in itertools.pairwise(lane)
        )
