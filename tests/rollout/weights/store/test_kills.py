"""Real processes, really killed, at any byte of a write."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


def kill_often(base: Path, num_kills: int, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.store_kills", base, str(num_kills), str(seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("seed", [0, 1])  # an odd one is of two nodes
def test_a_process_that_is_killed_at_any_byte_leaves_exactly_one_version(
    seed: int, shared_memory: Path
) -> None:
    kill_often(shared_memory / "base", 40, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_hundreds_of_kills_at_any_byte(seed: int, shared_memory: Path) -> None:
    kill_often(shared_memory / "base", 100, seed)
