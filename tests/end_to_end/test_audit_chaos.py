"""Every prompt reaches the trainer exactly once, over real engines that are killed meanwhile.

The trainer pushes, crashes and starts again from its last checkpoint, driver and all; engines die
and freeze at random and come back by recovery.
"""

import json
import os
import random
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import rollout
from rollout.core.samples import all_samples
from rollout.driver.data.prompt_data import PromptData
from rollout.driver.stream.options import RolloutOptions
from tests.support.cpu_engines import cpu_config
from tests.support.models import FOR_VLLM

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

NUM_PROMPTS = 4000
NUM_STEPS, NUM_CRASHES = 8, 2
NUM_DEATHS = {"embedded": 4, "sglang": 2, "vllm": 2}
# A push waits for the restart of an engine, which takes vLLM up to two minutes on busy cores.
PUSHED_WITHIN_S = {"embedded": 100, "sglang": 100, "vllm": 300}
LENGTH = 40
BATCH: dict[str, Any] = {
    "num_groups": 8,
    "group_size": 2,
    "sampling": rollout.SamplingParams(max_new_tokens=LENGTH, ignore_eos=True),
}
HEALTH = {"probe_interval_s": 0.5, "probe_timeout_s": 1.0, "probes_to_dead": 3, "backoff_s": 0.1}


class Killer:
    """Ends or freezes an engine of the server now and then, until stopped."""

    def __init__(self, policy: rollout.ServerHandle, seed: int) -> None:
        self._policy = policy
        self._random = random.Random(seed)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_killed = 0
        self.num_frozen = 0

    def __enter__(self) -> "Killer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(self._random.uniform(1.0, 4.0)):
            (group,) = self._policy.status().result(30).groups
            alive = [one.pid for one in group.engines if one.pid and not one.fence_reason]
            if len(alive) < 2:
                continue
            pid = self._random.choice(alive)
            with suppress(ProcessLookupError):
                if self._random.random() < 0.7:
                    os.kill(pid, signal.SIGKILL)
                    self.num_killed += 1
                else:
                    os.kill(pid, signal.SIGSTOP)
                    self.num_frozen += 1
                    self._ends.wait(self._random.uniform(0.2, 3.0))
                    os.kill(pid, signal.SIGCONT)


@pytest.fixture
def policy(kind: str, tmp_path: Path):
    from rollout.testing.tiny_model import make_tiny_model

    shape = FOR_VLLM if kind == "vllm" else {}
    engine = cpu_config(kind, cpus=0.5)
    config = rollout.RolloutConfig.from_dict(
        {
            "log_dir": str(tmp_path),
            "servers": {
                "policy": {
                    "model_path": str(make_tiny_model(tmp_path / "model", **shape)),
                    "groups": {"main": {"num_engines": 2, "engine": engine}},
                    "health": {**HEALTH, "max_restarts": 100},
                    "router": {"token_failover": "on"},
                }
            },
        }
    )
    with rollout.launch(config) as deployment:
        yield deployment["policy"]


def source() -> PromptData:
    rows = [{"input_ids": [5 + i % 90, 7, 11 + i // 90], "number": i} for i in range(NUM_PROMPTS)]
    return PromptData(rows, seed=3, num_epochs=1)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        pytest.param("embedded", "sync", marks=pytest.mark.embedded),
        pytest.param("embedded", "one_ahead", marks=pytest.mark.embedded),
        pytest.param("embedded", "async", marks=pytest.mark.embedded),
        pytest.param("sglang", "async", marks=pytest.mark.sglang),
        pytest.param("vllm", "async", marks=[pytest.mark.vllm, pytest.mark.timeout(1800)]),
    ],
)
def test_every_prompt_reaches_the_trainer_once(
    policy, tmp_path: Path, kind: str, mode: str
) -> None:
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "model" / "model.safetensors")
    options = RolloutOptions(mode=mode, over_sampling=2.0, max_version_lag=50)
    trained: list[int] = []
    saved: tuple[list[int], str] | None = None
    num_crashes, is_over, step = 0, False, 0
    with Killer(policy, seed=11) as killer:
        while not is_over:
            data = source()
            with rollout.Driver(policy.url, lambda sample: 1.0, max_in_flight=24) as driver:
                if saved is not None:
                    trained = list(saved[0])
                    driver.restore(data, json.loads(saved[1]), **BATCH, options=options)
                # The first trainers crash after some steps of work that is not saved.
                crashes_at = step + 3 if num_crashes < NUM_CRASHES else None
                while not is_over and step != crashes_at:
                    groups = driver.rollout(
                        step, data, options=options, weight_version=policy.weight_version, **BATCH
                    ).result(200)
                    for sample in all_samples(groups):
                        sample.check()
                        assert sum(sample.mask) == LENGTH, sample.error
                    trained += [group.metadata["number"] for group in groups]
                    stream = driver._inner.stream_of(data)
                    assert stream.auditor.findings(stream.pending) == []
                    num_deaths = killer.num_killed + killer.num_frozen
                    is_over = (
                        step >= NUM_STEPS
                        and num_deaths >= NUM_DEATHS[kind]
                        and num_crashes == NUM_CRASHES
                    )
                    if step % 2 == 0:
                        saved = (list(trained), json.dumps(driver.state_of(data)))
                    policy.push(weights).result(PUSHED_WITHIN_S[kind])
                    step += 1
                assert len(trained) == stream.auditor.delivered.total()
            num_crashes += 1
    assert len(trained) == len(set(trained))
    print(
        f"{kind}, {mode}: {step} steps, {len(trained)} groups, {num_crashes - 1} crashes, "
        f"{killer.num_killed} killed, {killer.num_frozen} frozen"
    )
