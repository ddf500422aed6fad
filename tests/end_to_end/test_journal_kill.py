"""A training script that is killed at any moment: every sample reaches the trainer exactly once."""

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
# What is generated between two lines of the journal, and until the first one is on disk.
LOST_S = 2.0


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
def test_every_sample_reaches_the_trainer_once_over_kills(
    tmp_path: Path, hook: str, num: int
) -> None:
    """20 kills: ``make test-chaos PYTEST_ARGS=tests/end_to_end/test_journal_kill.py``."""
    (tmp_path / "run").mkdir()
    chance = random.Random(hook)
    num_prompts = 3 * num
    settings = (hook, str(num_prompts))
    num_kills = sum(kill_once(tmp_path, chance.uniform(0.0, 1.6), *settings) for _ in range(num))
    with start(tmp_path, *settings) as script:
        assert script.wait(120) == 0
    state = json.loads((tmp_path / "checkpoint").read_text())
    trained = state["trained"]
    assert Counter(number for number, _, _ in trained) == dict.fromkeys(
        range(1, num_prompts + 1), 2
    )
    assert {num for _, num, _ in trained} == {journal_trainer.NUM_TOKENS}
    num_trained = len(trained) * journal_trainer.NUM_TOKENS
    num_again = (tmp_path / "tokens").stat().st_size - num_trained
    lost_s = num_again * journal_trainer.TOKEN_S / (num_kills * journal_trainer.IN_FLIGHT)
    num_continued = sum(num_parts > 1 for _, _, num_parts in trained)
    print(
        f"{hook}: {num_kills} kills, {num_continued} of {len(trained)} samples continued, "
        f"{num_again} tokens generated again, {lost_s:.2f} s per sample in flight and kill"
    )
    assert num_kills >= num // 2
    assert num_continued > 0
    assert lost_s < LOST_S
