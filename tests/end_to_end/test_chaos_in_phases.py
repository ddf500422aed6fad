"""Real engines under load that die, freeze, drop connections or answer 502 in mid-phase.

Every request ends exactly once and with the tokens of the weights that it names, the step goes on
without the engine, nothing is left of it, another takes its place, and the next step works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engines.vllm import routes
from rollout.config import RolloutConfig
from rollout.core.types import EngineStatus
from rollout.runtime.local import launch_local
from tests.support.cpu_engines import cpu_config
from tests.support.fault_proxy import FAULTS, ProxiedLauncher, tree_of
from tests.support.load import Load
from tests.support.models import FOR_VLLM, plain_models
from tests.support.nvml import NvmlDouble, logical_gpus
from tests.support.processes import shared_memory_of, wait_until
from tests.support.real_policy import RealPolicy, Sabotage, saved_every_4_tokens
from tests.support.referee import Referee

pytestmark = [pytest.mark.exec, pytest.mark.slow, pytest.mark.timeout(600)]
# The request that each phase sends to every engine.
PATHS = {
    "pause_generation": "/pause_generation",
    "flush_cache": "/flush_cache",
    "release_memory_occupation": "/release_memory_occupation",
    "resume": "/resume_memory_occupation",
    "update": "/update_weights_from_disk",  # from shared memory, as engines of this host have it
    "verify": "/weights_checker",
    "onload_kv": "/resume_memory_occupation",
    "continue_generation": "/continue_generation",
}
VLLM_PATHS = {
    "pause_generation": routes.PAUSE,
    "flush_cache": routes.RESET_CACHE,
    "release_memory_occupation": routes.SLEEP,
    "resume": routes.WAKE_UP,
    "update": routes.UPDATE,
    "verify": routes.RPC,  # of the plugin's fingerprints
    "onload_kv": routes.WAKE_UP,
    "continue_generation": routes.RESUME,
}
# Which request of the step that is, where it is not the first of its path.
NTH = {"onload_kv": 2}
# A start takes half a minute there, a minute and more for vLLM: every phase and every fault, but
# not all pairs.
ON_OTHERS = (
    ("freeze", "pause_generation"),
    ("kill", "update"),
    ("stop", "pause_generation"),
    ("502", "flush_cache"),
    ("kill", "release_memory_occupation"),
    ("drop", "resume"),
    ("freeze", "update"),
    ("502", "verify"),
    ("stop", "verify"),
    ("kill", "onload_kv"),
    ("drop", "continue_generation"),
)
IN_USUAL_RUN = {
    "embedded": [("kill", "release_memory_occupation")],
    "sglang": [("kill", "update")],
    "vllm": [],
}
CASES = [
    pytest.param(
        kind,
        fault,
        phase,
        marks=[
            getattr(pytest.mark, kind),
            *([] if (fault, phase) in IN_USUAL_RUN[kind] else [pytest.mark.chaos]),
        ],
        id=f"{kind}-{fault}-{phase}",
    )
    for kind, pairs in {
        "embedded": [(fault, phase) for phase in PATHS for fault in FAULTS],
        "sglang": ON_OTHERS,
        "vllm": ON_OTHERS,
    }.items()
    for fault, phase in pairs
]
# On logical GPUs: an engine that dies while its memory goes, comes back or is gone.
ON_GPU = "-gpu"
CASES += [
    pytest.param(
        kind + ON_GPU,
        fault,
        phase,
        marks=[getattr(pytest.mark, kind), *marks],
        id=f"{kind}{ON_GPU}-{fault}-{phase}",
    )
    for kind, fault, phase, *marks in [
        ("embedded", "kill", "release_memory_occupation"),
        ("embedded", "kill", "onload_kv"),
        ("embedded", "502", "release_memory_occupation", pytest.mark.chaos),
        ("embedded", "stop", "update", pytest.mark.chaos),
        ("sglang", "kill", "release_memory_occupation", pytest.mark.chaos),
        ("sglang", "kill", "onload_kv", pytest.mark.chaos),
    ]
]
BOTH = ["main-0", "main-1"]
NUM_CLIENTS = 8
PHASE_TIMEOUT_S = 12.0
BACK_WITHIN_S = {"embedded": 60.0, "sglang": 150.0, "vllm": 300.0}


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def launcher(kind: str) -> ProxiedLauncher:
    return ProxiedLauncher()


@pytest.fixture(scope="module")
def nvml(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NvmlDouble | None]:
    """The logical GPUs, one for each engine; None where engines use the host's memory."""
    if not kind.endswith(ON_GPU):
        yield None
        return
    with logical_gpus(tmp_path_factory.mktemp("gpus"), len(BOTH), 8 << 30) as gpus:
        yield gpus


def used_on(nvml: NvmlDouble | None) -> list[int]:
    """Bytes in use on each logical GPU; empty if there are none."""
    return [] if nvml is None else [nvml.used_bytes(index) for index in range(len(BOTH))]


@pytest.fixture(scope="module")
def policy(
    kind: str,
    nvml: NvmlDouble | None,
    launcher: ProxiedLauncher,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RealPolicy]:
    folder = tmp_path_factory.mktemp(kind)
    kind = kind.removesuffix(ON_GPU)
    models = plain_models(folder, **(FOR_VLLM if kind == "vllm" else {}))
    engine = cpu_config(kind, cpus=0.5, gpus=0 if nvml is None else 1)
    server = {
        "model_path": str(models[0]),
        "groups": {"main": {"num_engines": 2, "engine": engine}},
        "lifecycle": {
            f"{what}_timeout_s": PHASE_TIMEOUT_S for what in ("command", "memory", "update")
        },
        # All these deaths are ours: none of them is a reason to wait with the next start.
        "health": {
            "probe_interval_s": 0.5,
            "max_restarts": 100,
            "backoff_s": 0.1,
            "max_backoff_s": 0.1,
        },
    }
    config = RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": server}})
    launched = launch_local(config, launcher=launcher)
    with saved_every_4_tokens(), launched as deployment:
        yield RealPolicy(deployment["policy"], models, folder, Sabotage())


class Remains:
    """The processes and files of an engine that remain."""

    def __init__(self, engine: EngineStatus) -> None:
        assert engine.pid is not None
        guard = psutil.Process(engine.pid).parent()
        assert guard is not None
        self.processes = [guard, *tree_of(engine.pid)]
        # It may read the last push from the trainer's memory, which outlives it.
        self.files = {
            file for file in shared_memory_of(engine.pid) if file.parent == Path("/dev/shm")
        }

    def __repr__(self) -> str:
        return f"{self.processes}, {[file for file in self.files if file.exists()]}"

    def are_none(self) -> bool:
        return not any(map(_runs, self.processes)) and not any(map(Path.exists, self.files))


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def serving(policy: RealPolicy) -> list[str]:
    return [one.engine_id for one in policy.engines() if one.state == "serving"]


async def step(policy: RealPolicy) -> None:
    tensors = policy.next_tensors()
    await policy.handle.offload()
    await policy.handle.push(tensors)


@pytest.mark.parametrize(("kind", "fault", "phase"), CASES, indirect=["kind"], scope="module")
async def test_a_step_goes_on_when_a_real_engine_fails_in_it(
    policy: RealPolicy,
    nvml: NvmlDouble | None,
    launcher: ProxiedLauncher,
    kind: str,
    fault: str,
    phase: str,
) -> None:
    kind = kind.removesuffix(ON_GPU)
    version = policy.handle.weight_version
    used = used_on(nvml)
    proxy, victim = launcher.proxies["main-1"], policy.engines()[1]
    remains = Remains(victim)
    load = Load(policy.handle.url, NUM_CLIENTS, seed=version, lengths=(20, 60))
    async with load.running():
        await load.reaches(NUM_CLIENTS // 2)
        num_struck = proxy.num_struck
        paths = VLLM_PATHS if kind == "vllm" else PATHS
        proxy.strike(paths[phase], fault, NTH.get(phase, 1))
        await step(policy)
        assert proxy.num_struck == num_struck + 1
        left = serving(policy)
        await load.reaches(load.ended.total() + NUM_CLIENTS)
    check(load, policy, version, version + 1)
    stays = outlives(kind, fault, phase)
    assert left == (BOTH if stays else ["main-0"])
    if not stays:
        assert await asyncio.to_thread(wait_until, remains.are_none, 10), remains
        assert await asyncio.to_thread(wait_until, lambda: is_back(policy), BACK_WITHIN_S[kind])
        await step(policy)
    assert serving(policy) == BOTH
    assert (policy.engines()[1].pid == victim.pid) is stays
    assert used_on(nvml) == used
    load = Load(policy.handle.url, NUM_CLIENTS, seed=-1 - version, lengths=(4, 8))
    async with load.running():
        await load.reaches(2 * NUM_CLIENTS)
    assert not load.broken
    check(load, policy, policy.handle.weight_version)


def outlives(kind: str, fault: str, phase: str) -> bool:
    """Whether what the engine has done is known after all: a freeze passes, and the embedded
    engine and vLLM's plugin report what is released."""
    is_settled = phase in ("release_memory_occupation", "resume", "onload_kv") and fault in (
        "drop",
        "502",
    )
    return fault == "freeze" or (kind != "sglang" and is_settled)


def check(load: Load, policy: RealPolicy, *versions: int) -> None:
    """Each was answered, and once; by these versions, and rightly."""
    assert load.ended.keys() == set(load.asked)
    assert set(load.ended.values()) == {1}
    # Those that the router may carry on elsewhere are the ones of every fourth client.
    assert not [line for line in load.broken if int(line.split(".")[0]) % 4 == 0]
    answers = load.taken()
    assert {span.version for one in answers for span in one.spans} == set(versions)
    findings = Referee(policy.weights_of).findings(answers)
    assert not findings, "\n".join(findings[:5])


def is_back(policy: RealPolicy) -> bool:
    """Recovery has started it again; it lacks what was pushed."""
    return not any(one.fence_reason for one in policy.engines())
