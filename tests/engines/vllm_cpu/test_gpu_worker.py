"""Our worker of GPUs in vLLM's own Python, above vLLM's class; the GPU is a double."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools.cpu_engines import install

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    python = str(install.python_of("vllm"))
    done = subprocess.run(
        [python, "-m", "tests.support.vllm_gpu_worker"],
        env={**os.environ, **install.variables_of("vllm")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_vllm_can_start_it_and_need_not_extend_it(said: dict[str, Any]) -> None:
    assert said["is_extended"]
    assert said["is_of_vllm"]


def test_it_reports_what_each_tag_holds(said: dict[str, Any]) -> None:
    assert said["without sleep mode"] == {}
    assert said["awake"]["resident_bytes"] == {"weights": 11, "kv_cache": 7}
    assert said["awake"]["released"] == []
    assert said["asleep"]["resident_bytes"] == {"weights": 0, "kv_cache": 0}
    assert said["asleep"]["released"] == ["kv_cache", "weights"]
    assert said["weights are back"] == {"weights": 11, "kv_cache": 0}


def test_it_proves_by_sums_and_opens_handles(said: dict[str, Any]) -> None:
    assert said["awake"]["fingerprints"] == "sums"
    assert said["awake"]["opens_handles"]


def test_an_update_in_sleep_is_refused_before_vllm_sees_it(said: dict[str, Any]) -> None:
    assert said["update"] == (
        "RuntimeError: the weights are released; call /wake_up?tags=weights first"
    )
    assert said["update after wake_up"] == ""
    assert said["calls"] == ["sleep 2", "wake_up ['weights']", "start", "sleep 1"]


def test_memory_that_a_trainer_takes_meanwhile_does_not_fail_a_sleep(said: dict[str, Any]) -> None:
    """vLLM's assertion comes after the release."""
    assert said["other error"] == "AssertionError: another assertion"
