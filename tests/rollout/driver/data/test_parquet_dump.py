"""Dumps: what is read equals what was written."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import FinishReason, VersionSpan
from engines.protocol.logprob_kind import LogprobKind
from rollout.core.errors import ConfigError, RolloutError
from rollout.core.samples import EngineSpan, Sample, SampleGroup, SampleStatus
from rollout.driver.data.parquet_dump import Replay, from_arrow, load_groups, save_groups, to_arrow


def group(index: int = 0, **sample) -> SampleGroup:
    return SampleGroup(index, [Sample([1], [2], [-0.1], **sample)], {"source": "gsm8k"})


@st.composite
def samples(draw) -> Sample:
    length = draw(st.integers(0, 5))
    cut = draw(st.integers(0, length))
    spans = [VersionSpan("3", 0, cut), VersionSpan("4", cut, length)]
    return Sample(
        prompt_ids=draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=4)),
        output_ids=draw(st.lists(st.integers(0, 2**31), min_size=length, max_size=length)),
        output_logprobs=draw(
            st.lists(st.floats(-1e9, 0, allow_nan=False), min_size=length, max_size=length)
        ),
        text=draw(st.text(st.characters(exclude_categories=["Cs"]))),
        weight_versions=tuple(span for span in spans if span.start < span.end),
        finish_reason=draw(
            st.sampled_from([None, FinishReason("stop", 7), FinishReason("stop", "\n")])
        ),
        status=draw(st.sampled_from(list(SampleStatus))),
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        error=draw(st.sampled_from(["", "HTTP 400: no"])),
        metadata={"answer": draw(st.text(st.characters(exclude_categories=["Cs"])))},
        loss_mask=draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)),
        engines=(EngineSpan("main-0", 0, cut),) if cut else (),
        routed_experts=draw(st.none() | st.binary(max_size=8)),
        logprob_kind=draw(st.none() | st.sampled_from(LogprobKind)),
    )


@given(st.lists(st.lists(samples(), min_size=1, max_size=3), max_size=3))
def test_arrow_round_trip_changes_nothing(of_groups: list[list[Sample]]) -> None:
    groups = [SampleGroup(7 * place, members) for place, members in enumerate(of_groups)]
    assert from_arrow(to_arrow(1, groups)) == groups


def test_a_file_gives_back_its_groups(tmp_path: Path) -> None:
    groups = [group(3, reward=0.1 + 0.2), group(1)]
    save_groups(tmp_path / "dump.parquet", 5, groups)
    assert load_groups(tmp_path / "dump.parquet") == groups


def test_replay_of_a_directory_gives_each_rollout(tmp_path: Path) -> None:
    for step in range(3):
        save_groups(tmp_path / f"{step:04}.parquet", step, [group(step, reward=float(step))])
    replay = Replay(tmp_path)
    assert replay.rollout_ids == [0, 1, 2]
    assert replay.rollout(2)[0].rewards == [2.0]
    with pytest.raises(RolloutError, match="no rollout 3 in the dumps; there are 3, from 0 to 2"):
        replay.rollout(3)


def test_a_dump_of_an_earlier_version_has_no_kinds(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    table = to_arrow(0, [group(2)]).drop_columns(["logprob_kind"])
    parquet.write_table(table, tmp_path / "old.parquet")
    assert load_groups(tmp_path / "old.parquet") == [group(2)]


def test_infinite_log_probs_survive(tmp_path: Path) -> None:
    cold = SampleGroup(0, [Sample([1], [2], [-math.inf])])
    assert from_arrow(to_arrow(0, [cold])) == [cold]


def test_metadata_that_is_not_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be JSON"):
        to_arrow(0, [group(metadata={"answer": object()})])


def test_a_file_that_is_not_a_dump_is_rejected_by_name(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    with pytest.raises(ConfigError, match="no such dump"):
        load_groups(tmp_path / "none.parquet")
    with pytest.raises(ConfigError, match=r"has no \*\.parquet"):
        Replay(tmp_path)
    (tmp_path / "text.parquet").write_text("hello, this is no parquet")
    with pytest.raises(ConfigError, match="is not a Parquet file"):
        load_groups(tmp_path / "text.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["a"]}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match=r"is not a dump of samples: no columns rollout_id"):
        load_groups(tmp_path / "other.parquet")
