"""Ranks and engines are killed at random moments of a push, see ``tests/support/rank_kills.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("num_kills", [8, pytest.param(200, marks=pytest.mark.chaos)])
def test_after_a_kill_at_any_moment_nothing_hangs_and_the_next_push_works(
    num_kills: int, tmp_path: Path
) -> None:
    seed = int.from_bytes(os.urandom(2), "little")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.rank_kills",
            tmp_path / "kills",
            str(num_kills),
            str(seed),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    print(done.stdout[-1000:])
    assert done.returncode == 0, f"seed {seed}: {done.stdout[-1000:]}\n{done.stderr[-4000:]}"
