"""Two gloo ranks push to real SGLang of two ranks, which is killed in a push and comes back.

Its second rank is late with each bucket, whose file is used again after the next one.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.engines.embedded import reference
from tests.support.contract import PROMPT
from tests.support.engine_keys import Keys
from tests.support.late_ranks import late_ranks
from tests.support.processes import wait_until
from tests.support.rank_processes import Ranks, errors
from tests.support.real_policy import one_engine, real_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


def engine_of(policy: ServerHandle) -> EngineStatus:
    (group,) = policy.status().result(60).groups
    (engine,) = group.engines
    return engine


def check_generates(policy: ServerHandle, model: Path) -> None:
    """Check that the engine generates what transformers does with these weights."""
    wanted = reference.greedy(model, list(PROMPT), max_new_tokens=8)
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    engine = engine_of(policy)
    answer: Any = httpx.post(
        f"{engine.endpoint.url}/generate",
        auth=Keys(engine),
        json={"input_ids": list(PROMPT), "sampling_params": sampling},
        timeout=60,
        trust_env=False,
    ).json()
    assert answer["output_ids"][: len(wanted)] == wanted


def kill_in_a_bucket(policy: ServerHandle, ranks: Ranks, model: Path) -> None:
    before = engine_of(policy)
    said = ranks.do("push_model", path=str(model), pid=before.pid)
    assert len(errors(said)) == 1, said
    assert before.engine_id in said[0]["error"]

    def is_back() -> bool:
        now = engine_of(policy)
        return now.pid not in (None, before.pid) and now.is_stale

    assert wait_until(is_back, 120)


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.chaos)])
def test_an_engine_takes_the_pushes_of_two_ranks_also_after_it_was_killed_in_a_bucket(
    models: list[Path], tmp_path: Path, is_killed: bool
) -> None:
    """With the kill: ``make test-chaos PYTEST_ARGS=tests/end_to_end/sglang/test_rank_push.py``."""
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", **late_ranks(tmp_path / "late", 0.3)}
    config = real_config(
        models[0],
        tmp_path,
        {"main": one_engine(options={"tp": 2}, env=env)},
        health={"probe_interval_s": 0.5, "backoff_s": 0.1},
        weights={"bucket_bytes": 20_000},
    )
    with launch_local(config) as deployment:
        policy = deployment["policy"]
        ranks = Ranks(SimpleNamespace(config=config), tmp_path, 2)
        try:
            said = ranks.do("push_model", path=str(models[1]))
            assert [one.get("version") for one in said] == [1, 1], said
            check_generates(policy, models[1])
            if is_killed:
                kill_in_a_bucket(policy, ranks, models[2])
            said = ranks.do("push_model", path=str(models[2]))
            assert [one.get("version") for one in said] == [policy.weight_version] * 2, said
            check_generates(policy, models[2])
        finally:
            ranks.end()
