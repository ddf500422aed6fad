"""A training script that is killed at any moment: every group reaches the trainer exactly once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support import journal_trainer

pytestmark = [pytest.mark.clock, pytest.mark.slow, pytest.mark.timeout(400)]

REPOSITORY = Path(__file__).parents[2]


def start(folder: Path, *settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.journal_trainer", str(folder), *settings],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill_once(folder: Path, after_s: float, *settings: str) -> bool:
    """Kill the script so long after it has begun; whether it was still running."""
    with start(folder, *settings) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "begun\n"
        time.sleep(after_s)
        is_running = script.poll() is None
        os.killpg(script.pid, signal.SIGKILL)
    return is_running


@pytest.mark.parametrize("num", [4, pytest.param(20, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("hook", ["plain", "session"])
def test_every_group_of_two_data_sets_reaches_the_trainer_once_over_kills(
    tmp_path: Path, hook: str, num: int
) -> None:
    """20 kills: ``make test-chaos PYTEST_ARGS=tests/end_to_end/test_journal_kill.py``."""
    (tmp_path / "run").mkdir()
    chance = random.Random(hook)
    num_prompts = 6 * num
    settings = (hook, str(num_prompts))
    num_kills = sum(kill_once(tmp_path, chance.uniform(0.0, 1.6), *settings) for _ in range(num))
    with start(tmp_path, *settings) as script:
        assert script.wait(120) == 0
    trained = json.loads((tmp_path / "checkpoint").read_text())["trained"]
    assert Counter((name, number) for name, number, _ in trained) == {
        (name, number): 2 for name in journal_trainer.NAMES for number in range(1, num_prompts + 1)
    }
    assert {num_tokens for _, _, num_tokens in trained} == {journal_trainer.NUM_TOKENS}
    num_again = (tmp_path / "tokens").stat().st_size - len(trained) * journal_trainer.NUM_TOKENS
    print(f"{hook}: {num_kills} kills, {num_again} tokens generated again")
    assert num_kills >= num // 2
    assert num_again > 0
