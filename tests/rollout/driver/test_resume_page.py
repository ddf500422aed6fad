"""The code of the page how-to/resume.md: a training that ends at step 57 and continues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rollout
from engines.fake.http_fake import HttpFakeLauncher
from rollout.core.errors import RolloutError
from rollout.driver.data.prompt_data import PromptData
from rollout.runtime.local import launch_local
from rollout.weights.push.weight_push import WeightPush
from tests.support.builders import push
from tests.support.driving import SAMPLING, always, numbers, source
from tests.support.pages import run_code
from tests.support.served_fakes import config

PAGE = "how-to/resume.md"
BATCH: dict[str, Any] = {"num_groups": 4, "group_size": 2, "sampling": SAMPLING}


class Trainer:
    """It keeps its checkpoint in a file; the fakes get what they load instead of tensors."""

    def __init__(self, folder: Path, step: int = 0) -> None:
        self.step = step
        self._folder = folder

    def save(self, name: str, state: dict[str, Any]) -> None:
        (self._folder / name).write_text(json.dumps(state))

    def load(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self._folder / name).read_text())
        self.step = state["step"]
        return state

    def state_dict(self) -> WeightPush:
        return push(self.step)


@contextmanager
def launch_fakes(settings: Any, **more: Any) -> Iterator[Any]:
    with launch_local(settings, launcher=HttpFakeLauncher(), **more) as deployment:
        yield deployment


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rollout, "launch", launch_fakes)
    return config(tmp_path, {"main": {}})


def train_until(step: int, settings: Any, trainer: Trainer, data: PromptData) -> list[int]:
    """The first run, which ends after this step; returns the prompts that it used."""
    trainer.step = step
    with rollout.launch(settings) as deployment:
        deployment["policy"].push(push(step)).result(60)
        with rollout.Driver(deployment["policy"].url, always(1.0)) as driver:
            groups = driver.rollout(step, data, **BATCH).result()
            run_code(PAGE, trainer=trainer, driver=driver, data=data, step=step)
    return numbers(groups)


def test_a_training_continues_with_its_version_and_its_prompts(
    settings: Any, tmp_path: Path
) -> None:
    trainer = Trainer(tmp_path)
    used = train_until(57, settings, trainer, source(12))
    made = run_code(
        PAGE,
        number=1,
        rollout=rollout,
        trainer=Trainer(tmp_path),
        config=settings,
        data=source(12),
        sampling=SAMPLING,
        judge=always(1.0),
    )
    groups = made["groups"]
    assert {version for group in groups for one in group for version in one.versions} == {57}
    assert (used, numbers(groups)) == ([1, 2, 3, 4], [5, 6, 7, 8])


def test_a_step_that_was_not_saved_is_delivered_again_from_the_journal(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = []
    for _ in range(2):  # the first one ends before it has saved step 58
        with rollout.launch(settings, expect_version=57) as deployment:
            policy = deployment["policy"]
            policy.push(push(57)).result(60)
            names = {"rollout": rollout, "policy": policy, "judge": always(1.0), "step": 57}
            made.append(run_code(PAGE, number=2, data=source(12), batch=BATCH, **names)["groups"])
    assert numbers(made[0]) == [1, 2, 3, 4]
    for group in (*made[0], *made[1]):
        for sample in group:
            del sample.metadata["rollout_id"]
    assert made[1] == made[0]


def test_without_the_push_nothing_is_sampled(settings: Any) -> None:
    with (
        rollout.launch(settings, expect_version=57) as deployment,
        rollout.Driver(deployment["policy"].url, always(1.0)) as driver,
    ):
        policy = deployment["policy"]
        status = policy.status().result(30)
        assert (status.gate, status.weight_version) == ("closed", 0)
        policy.push(push(58)).result(60)
        groups = driver.rollout(59, source(4), weight_version=58, **BATCH).result()
    assert {version for group in groups for one in group for version in one.versions} == {58}


def test_without_expect_version_the_wanted_version_is_missed(settings: Any) -> None:
    with (
        rollout.launch(settings) as deployment,
        rollout.Driver(deployment["policy"].url, always(1.0)) as driver,
        pytest.raises(RolloutError, match=r"57 is wanted, .* the newest has 0, and the engines"),
    ):
        driver.rollout(58, source(4), weight_version=57, **BATCH).result()
