"""Pushes by broadcast to real SGLang and an embedded engine, through one group that is kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file

from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.engines.embedded import reference
from tests.support.contract import CPU_OPTIONS, PROMPT
from tests.support.engine_keys import Keys
from tests.support.kept_groups import kept_group
from tests.support.processes import wait_until
from tests.support.real_policy import one_engine, real_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


@pytest.fixture
def policy(models: list[Path], tmp_path: Path) -> Iterator[ServerHandle]:
    ours = {"engine": {"kind": "embedded", "options": CPU_OPTIONS["embedded"]}}
    config = real_config(
        models[0],
        tmp_path,
        {"real": one_engine(), "ours": ours},
        health={"probe_interval_s": 0.5, "probe_timeout_s": 5.0},
        weights={"transport": "distributed", "bucket_bytes": 100_000, "group_timeout_s": 20},
    )
    with launch_local(config) as deployment:
        yield deployment["policy"]


def engine(policy: ServerHandle, group: str) -> EngineStatus:
    groups = policy.status().result(30).groups
    return next(one for of in groups for one in of.engines if of.name == group)


def half_closed(pid: int) -> int:
    """Connections of an engine whose other end is gone: those of a group that it has not left."""
    root = psutil.Process(pid)
    return sum(
        one.status == psutil.CONN_CLOSE_WAIT
        for process in (root, *root.children(recursive=True))
        for one in process.net_connections()
    )


def pushed(policy: ServerHandle, model: Path) -> str:
    """These weights to all, held against what each generates; the group they came through."""
    policy.push(load_file(model / "model.safetensors")).result(120)
    wanted = reference.greedy(model, list(PROMPT), max_new_tokens=8)
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": list(PROMPT), "sampling_params": sampling}
    for group in ("real", "ours"):
        one = engine(policy, group)
        if one.state == "serving":
            answer: Any = httpx.post(
                f"{one.endpoint.url}/generate",
                json=body,
                timeout=60,
                trust_env=False,
                auth=Keys(one),
            ).json()
            assert answer["output_ids"][: len(wanted)] == wanted, group
    return kept_group(policy._pushes.idle_group)


def test_a_group_with_real_sglang_is_kept_until_another_engine_dies(
    policy: ServerHandle, models: list[Path]
) -> None:
    real = engine(policy, "real").pid
    assert real is not None
    name = pushed(policy, models[1])
    assert name
    assert [pushed(policy, models[2]), pushed(policy, models[0])] == [name, name]
    before = engine(policy, "ours").pid
    assert before is not None
    os.kill(before, signal.SIGKILL)

    def is_back() -> bool:
        return engine(policy, "ours").pid not in (None, before)

    assert wait_until(is_back, 60)
    another = pushed(policy, models[1])
    assert another not in ("", name)
    assert half_closed(real) == 0
    assert pushed(policy, models[2]) == another
    assert engine(policy, "real").pid == real
