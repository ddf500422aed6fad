"""The example on real SGLang: the quickstart's loop, with engines of another project."""

import json
from pathlib import Path

import pytest

from tests.support.processes import program, wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
NUM_STEPS = 4


def test_accuracy_climbs_on_real_sglang(warm_started: Path, tmp_path: Path) -> None:
    where = ("--model", str(warm_started), "--out", str(tmp_path))
    how = ("--engine", "sglang", "--backend", "local", "--steps", str(NUM_STEPS))
    with program("examples/colocated_grpo.py", *where, *how) as example:
        assert example.finish(550) == 0, example.output
        assert wait_until(lambda: not example.descendants(), 20), example.descendants()
    figures = json.loads((tmp_path / "colocated_grpo.json").read_text())
    assert figures["before"]["eval/addition"] < 0.5
    assert figures["eval"]["eval/addition"] > figures["before"]["eval/addition"] + 0.2
    versions = [step["weight_version"] for step in figures["steps"]]
    assert versions == list(range(1, NUM_STEPS + 1))
    assert all(step["freed_bytes"] > 10 * 2**20 for step in figures["steps"])
