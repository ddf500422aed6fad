"""Shards of FSDP2 are gathered bucket by bucket: two real ranks over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.embedded
WORKER = Path(__file__).with_name("fsdp_worker.py")


def test_shards_are_pushed_whole_with_one_bucket_of_them_alive(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=90)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["has_shards"]
    assert report["equal"], "what was gathered is not what was sharded"
    assert report["buckets"] > 3
    # A bucket's worth, of a model that has several: nothing else was whole at any time.
    assert report["most"] <= 3000 < report["total"] / 3
    assert report["alive"] == 0
