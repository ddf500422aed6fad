"""Rows of samples: what is read equals what was written."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import FinishReason, VersionSpan
from engines.protocol.logprob_kind import LogprobKind
from rollout.core.errors import ConfigError
from rollout.core.samples import EngineSpan, Sample, SampleFailure, SampleGroup, SampleStatus
from rollout.driver.data.sample_rows import groups_of, sample_rows
from tests.support.pages import run_code


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
        failure=draw(st.none() | st.sampled_from(SampleFailure)),
        metadata={"answer": draw(st.text(st.characters(exclude_categories=["Cs"])))},
        loss_mask=draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)),
        engines=(EngineSpan("main-0", 0, cut),) if cut else (),
        routed_experts=draw(st.none() | st.binary(max_size=8)),
        logprob_kind=draw(st.none() | st.sampled_from(LogprobKind)),
        sampling_mask=draw(
            st.none()
            | st.lists(
                st.none() | st.lists(st.integers(0, 2**31), min_size=1, max_size=3),
                min_size=length,
                max_size=length,
            )
        ),
    )


@given(st.lists(st.lists(samples(), min_size=1, max_size=3), max_size=3))
def test_rows_and_json_lines_give_back_their_groups(of_groups: list[list[Sample]]) -> None:
    groups = [SampleGroup(7 * place, members) for place, members in enumerate(of_groups)]
    rows = sample_rows(groups, 5)
    assert groups_of(rows) == groups
    assert groups_of(map(json.loads, [json.dumps(row) for row in rows])) == groups


GROUPS = [
    SampleGroup(
        3,
        [
            Sample(
                [1],
                [2, 2**31],
                [-0.1 - 0.2, -math.inf],
                "\n",
                (VersionSpan("3", 0, 2),),
                FinishReason("stop", 7),
                reward=0.1 + 0.2,
                metadata={"answer": [1, None]},
                engines=(EngineSpan("main-0", 0, 1),),
                routed_experts=b"\0\xff",
                logprob_kind=LogprobKind.PENALISED,
                sampling_mask=[None, [7, 2**31]],
            ),
            Sample([1], status=SampleStatus.FAILED, error="HTTP 400: no", metadata={"other": "x"}),
        ],
        {"source": "gsm8k"},
    ),
    group(1),
]


@pytest.mark.parametrize(
    ("written", "kind"),
    [(kind.value, kind) for kind in LogprobKind] + [(None, None), ("of a later version", None)],
)
def test_a_kind_is_read_by_its_name(written: str | None, kind: LogprobKind | None) -> None:
    """Files of earlier versions have ``cut`` for penalties, too."""
    (row,) = sample_rows([group(logprob_kind=kind)])
    assert row["logprob_kind"] == (kind and kind.value)
    (read,) = groups_of([{**row, "logprob_kind": written}])
    assert read.samples[0].logprob_kind is kind


def test_a_parquet_file_of_datasets_gives_back_its_groups(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    file = str(tmp_path / "step.parquet")
    datasets.Dataset.from_list(sample_rows(GROUPS)).to_parquet(file)
    read = datasets.Dataset.from_parquet(file, cache_dir=str(tmp_path / "cache"))
    assert groups_of(read) == GROUPS


def test_the_page_writes_and_reads_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    made = run_code("how-to/driver.md", "py", number=1, groups=GROUPS)
    assert made["groups"] == GROUPS
    assert made["groups"] is not GROUPS
    assert (tmp_path / "step-3.parquet").exists()


def test_the_page_makes_arrays() -> None:
    pytest.importorskip("numpy")
    made = run_code("how-to/driver.md", "py", groups=[group(), group(1)])
    assert made["batch"]["token_ids"].tolist() == [[1, 2], [1, 2]]
    assert made["flat"]["cu_seqlens"].tolist() == [0, 2, 4]


def test_rows_of_several_steps_keep_their_groups_apart() -> None:
    rows = [row for step in range(3) for row in sample_rows([group(0, reward=float(step))], step)]
    assert [one.rewards for one in groups_of(rows)] == [[0.0], [1.0], [2.0]]


def test_metadata_that_is_not_json_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"metadata.*answer.* is a object, which is not"):
        sample_rows([group(metadata={"answer": object()})])


def test_rows_of_something_else_are_refused_by_their_missing_column() -> None:
    with pytest.raises(ValueError, match="it has no column 'rollout_id'"):
        groups_of([{"prompt": "a"}])
    (row,) = sample_rows([group(1)])
    del row["engines"]
    with pytest.raises(ValueError, match="it has no column 'engines'"):
        groups_of([row])
