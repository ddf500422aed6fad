"""A driver that keeps the groups of its steps, and one that returns them without engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import RolloutError
from rollout.core.samples import Sample, SampleGroup
from rollout.driver import EvalDataset
from rollout.driver.data.saved_groups import RECORD, REPLAY, SavedGroups
from tests.support.driving import SAMPLING, always, driving, engines, numbers, prompts, source
from tests.support.virtual_time import virtual_time

BATCH: dict[str, Any] = {"group_size": 2, "sampling": SAMPLING}


def judge(sample: Sample) -> float:
    return float(sample.metadata["number"])


async def recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[SampleGroup]]:
    """The groups of two steps of a driver that keeps them."""
    monkeypatch.setenv(RECORD, str(folder))
    data = source(6)
    async with driving(engines(0.01), judge) as (driver, _):
        steps = [await driver.rollout(step, data, num_groups=2, **BATCH) for step in (1, 2)]
    monkeypatch.delenv(RECORD)
    return steps


@virtual_time
async def test_what_was_recorded_is_returned_without_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = await recorded(tmp_path, monkeypatch)
    assert [numbers(groups) for groups in steps] == [[1, 2], [3, 4]]
    monkeypatch.setenv(REPLAY, str(tmp_path))
    seen: dict[int, float] = {}
    data = source(6)
    async with driving(
        engines(0.01),
        always(9.0),
        journal=tmp_path / "journal",
        on_metrics=lambda step, figures: seen.update({step: figures["rollout/reward/mean"]}),
    ) as (driver, client):
        for step in (2, 1):
            groups = await driver.rollout(step, data, num_groups=2, weight_version=7, **BATCH)
            assert groups == steps[step - 1]
        assert await driver.rollout(1, prompts(3), **BATCH) == steps[0]
        state = driver.state_of(data)
        with pytest.raises(RolloutError, match="step 3 is not saved"):
            await driver.rollout(3, prompts(2), **BATCH)
        assert client.requests == []
        assert {report["step"] for report in client.reports} == {1, 2}
    assert seen == {1: 1.5, 2: 3.5}
    assert state["source"]["place"] == 0
    assert not (tmp_path / "journal").exists()


@virtual_time
async def test_an_evaluation_has_zeros_and_asks_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sets = {"sums": EvalDataset(prompts(2), reward=always(1.0), num_samples=2)}
    async with driving(engines(0.01)) as (driver, _):
        true = await driver.evaluate(1, sets)
    monkeypatch.setenv(REPLAY, str(tmp_path))
    async with driving(engines(0.01)) as (driver, client):
        result = await driver.evaluate(1, sets)
        assert client.requests == []
    assert result.metrics.keys() == true.metrics.keys()
    assert result.metrics["eval/sums"] == 0.0
    assert result.groups == {"sums": []}
    assert "evaluation 1 has zeros" in caplog.text


@virtual_time
async def test_groups_that_cannot_be_kept_stay_for_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kept"
    folder.write_text("a file in the way")
    monkeypatch.setenv(RECORD, str(folder))
    data = source(4)
    async with driving(engines(0.01), judge) as (driver, client):
        with pytest.raises(FileExistsError):
            await driver.rollout(1, data, num_groups=2, **BATCH)
        num_sent = len(client.requests)
        await asyncio.to_thread(folder.unlink)
        groups = await driver.rollout(1, data, num_groups=2, **BATCH)
        assert numbers(groups) == [1, 2]
        assert len(client.requests) == num_sent
    assert SavedGroups(folder).read(1) == groups


async def test_a_step_that_is_cancelled_as_it_is_kept_writes_to_the_end_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RECORD, str(tmp_path))
    begun, goes_on = threading.Event(), threading.Event()
    whole = SavedGroups.write

    def write(saved: SavedGroups, step: int, groups: Sequence[SampleGroup]) -> Path:
        begun.set()
        assert goes_on.wait(10)
        return whole(saved, step, groups)

    monkeypatch.setattr(SavedGroups, "write", write)
    data = source(4)
    async with driving(engines(0.01), judge) as (driver, _):
        call = asyncio.create_task(driver.rollout(1, data, num_groups=2, **BATCH))
        await asyncio.to_thread(begun.wait, 10)
        call.cancel()
        done, _ = await asyncio.wait([call], timeout=0.2)
        assert not done
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert numbers(SavedGroups(tmp_path).read(1)) == [1, 2]
        groups = await driver.rollout(1, data, num_groups=2, **BATCH)
    assert numbers(groups) == [1, 2]
    assert SavedGroups(tmp_path).read(1) == groups
