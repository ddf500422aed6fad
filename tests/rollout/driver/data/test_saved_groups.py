"""Files of groups: what is read equals what was written, and a wrong file is named."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import ConfigError, RolloutError
from rollout.core.samples import Sample, SampleGroup
from rollout.driver.data import saved_groups
from rollout.driver.data.sample_rows import sample_rows
from rollout.driver.data.saved_groups import SavedGroups, read_groups, write_groups


def groups_of_step(step: int) -> list[SampleGroup]:
    samples = [Sample([1], [step, 2], [-0.1, -1 / 3], reward=step / 3) for _ in range(2)]
    return [SampleGroup(index, samples, {"step": step}) for index in range(3)]


def test_each_step_of_a_folder_has_its_own_groups(tmp_path: Path) -> None:
    saved = SavedGroups(tmp_path / "run" / "groups")
    files = [saved.write(step, groups_of_step(step)) for step in (12, 3)]
    assert [file.name for file in files] == ["000012.jsonl", "000003.jsonl"]
    (saved.path / "notes.jsonl").write_text("not a step")
    assert list(saved.files()) == [3, 12]
    assert saved.read(12) == groups_of_step(12)
    assert saved.read(3) == groups_of_step(3)
    with pytest.raises(RolloutError, match=r"step 4 is not saved in .*, which has 3, 12"):
        saved.read(4)
    for step in range(20, 30):
        saved.write(step, groups_of_step(step))
    with pytest.raises(RolloutError, match=r"which has 3\.\.29"):
        saved.read(4)


def test_a_file_has_the_groups_of_every_step(tmp_path: Path) -> None:
    saved = SavedGroups(write_groups(tmp_path / "one.jsonl", groups_of_step(1), 1))
    assert saved.read(1) == saved.read(7) == groups_of_step(1)


def test_a_step_that_is_written_again_replaces_its_file_and_leaves_no_part(tmp_path: Path) -> None:
    saved = SavedGroups(tmp_path)
    saved.write(1, groups_of_step(1))
    saved.write(1, groups_of_step(2))
    assert saved.read(1) == groups_of_step(2)
    broken = [SampleGroup(0, [Sample([1], [2], [-0.1], metadata={"x": object()})])]
    with pytest.raises(ConfigError, match="cannot be saved"):
        saved.write(1, broken)
    assert [file.name for file in tmp_path.iterdir()] == ["000001.jsonl"]
    assert saved.read(1) == groups_of_step(2)


def test_a_write_that_goes_on_beside_another_of_its_step_does_not_mix_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def rows(groups: Sequence[SampleGroup], step: int) -> Iterator[Mapping[str, Any]]:
        for number, row in enumerate(sample_rows(groups, step)):
            if number == 1 and not begun.is_set():
                begun.set()
                assert goes_on.wait(10)
            yield row

    monkeypatch.setattr(saved_groups, "sample_rows", rows)
    saved = SavedGroups(tmp_path)
    with ThreadPoolExecutor(1) as threads:
        cancelled = threads.submit(saved.write, 1, groups_of_step(1))
        assert begun.wait(10)
        saved.write(1, groups_of_step(2))
        assert saved.read(1) == groups_of_step(2)
        goes_on.set()
        cancelled.result(10)
    assert saved.read(1) == groups_of_step(1)
    assert [file.name for file in tmp_path.iterdir()] == ["000001.jsonl"]


@pytest.mark.torch  # its extra has datasets
def test_parquet_of_the_library_of_tables_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = sample_rows(groups_of_step(4), 4)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "000004.parquet")
    assert SavedGroups(tmp_path).read(4) == groups_of_step(4)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("no.jsonl", None, "there is no file"),
        ("file.txt", "", r"ends in \.jsonl or \.parquet"),
        ("cut.jsonl", '{"rollout_id": 1', "has no rows"),
        ("other.jsonl", '{"prompt": "a"}', "no column 'rollout_id'"),
        ("list.jsonl", "[1, 2]", "has no saved groups"),
        ("empty.jsonl", "", "has no groups"),
    ],
)
def test_what_has_no_groups_is_named(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_groups(file)


def test_a_row_of_another_version_names_the_column_that_it_lacks(tmp_path: Path) -> None:
    (row, *_) = sample_rows(groups_of_step(1), 1)
    del row["output_ids"]
    (tmp_path / "old.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match="no column 'output_ids'"):
        read_groups(tmp_path / "old.jsonl")


def test_a_folder_without_steps_is_named(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("")
    with pytest.raises(ConfigError, match=r"STEP\.jsonl or STEP\.parquet"):
        SavedGroups(tmp_path).read(1)
