"""The files that ``docs/architecture.md`` lists for each walk do run on the way.

A function counts when it is called, in any thread of this process, which runs trainer, server and
router.  What else runs is not compared: the lists are of what a reader must open.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from rollout import RolloutConfig, launch
from rollout.runtime.handle import ServerHandle
from rollout.testing.tiny_model import make_tiny_model
from tests.support.event_lines import lines_of
from tests.support.processes import ROOT
from tests.support.waits import until

pytestmark = pytest.mark.embedded
PAGE = (ROOT / "docs/architecture.md").read_text()
_called: set[str] = set()


def listed(heading: str) -> list[str]:
    """The files of the table under a heading of the page."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    files = []
    for where, names in re.findall(r"^\| ([^|]+) \| (`[^|]+\.py`) \|$", section, re.MULTILINE):
        _, folder, *_ = [*where.split("`"), ""]
        files += [f"{folder}/{name}".lstrip("/") for name in re.findall(r"`([^`]+)`", names)]
    return files


def _note(frame: FrameType, event: str, _: Any) -> None:
    if event == "call" and frame.f_code.co_name != "<module>":
        _called.add(frame.f_code.co_filename)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def policy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    config = {
        "log_dir": str(tmp_path_factory.mktemp("logs")),
        "servers": {
            "policy": {
                "model_path": str(model),
                "groups": {"main": {"num_engines": 2, "engine": {"kind": "embedded"}}},
                "router": {"token_failover": "on"},
            }
        },
    }
    # Threads that the launch starts are watched, too.
    threading.setprofile(_note)
    try:
        with launch(RolloutConfig.from_dict(config)) as deployment:
            yield deployment["policy"]
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


@contextmanager
def called() -> Iterator[set[str]]:
    """Filled with the files of this library whose functions are called meanwhile."""
    files: set[str] = set()
    _called.clear()
    sys.setprofile(_note)
    try:
        yield files
    finally:
        sys.setprofile(None)
    files |= {name.removeprefix(f"{ROOT}/") for name in _called if name.startswith(str(ROOT))}


async def test_the_files_of_a_recovery(policy: ServerHandle) -> None:
    """The first here: before a push the new engine's checkpoint is what its group serves."""
    files = listed("The path of a recovery")
    engine = (await policy.status()).groups[0].engines[0]
    assert engine.pid is not None

    def is_back() -> bool:
        status = policy.status().result(60).groups[0].engines[0]
        return status.state == "serving" and status.pid not in (None, engine.pid)

    with called() as seen:
        os.kill(engine.pid, signal.SIGKILL)
        await until(is_back, 120)
    assert len(files) == 7
    assert set(files) <= seen, sorted(set(files) - seen)


def test_the_files_of_a_bucket(policy: ServerHandle, model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    files = listed("The path of a push")
    with policy.pusher() as pusher, called() as seen:
        pusher.push(weights)
    assert len(files) == 16
    assert set(files) <= seen, sorted(set(files) - seen)


def test_the_files_of_an_offload(policy: ServerHandle, model: Path) -> None:
    files = listed("The path of an offload")
    with called() as seen:
        policy.offload().result(60)
    policy.push(load_file(model / "model.safetensors")).result(60)
    assert len(files) == 7
    assert set(files) <= seen, sorted(set(files) - seen)


def test_the_files_of_a_request_whose_engine_is_lost(policy: ServerHandle) -> None:
    url = f"{policy.url}/generate"
    sampling = {"max_new_tokens": 400, "ignore_eos": True}
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling, "stream": True}
    files = listed("The path of a request")
    # One request for each engine, so one of them loses its engine.
    with (
        called() as seen,
        httpx.stream("POST", url, json=body, timeout=60) as first,
        httpx.stream("POST", url, json=body, timeout=60) as second,
    ):
        replies = [lines_of(reply) for reply in (first, second)]
        for lines in replies:
            next(lines)
        engine = policy.status().result().groups[0].engines[0]
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        for lines in replies:
            *_, last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 400}
    assert len(files) == 18
    assert set(files) <= seen, sorted(set(files) - seen)
