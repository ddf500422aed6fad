"""Environments of SGLang servers; no SGLang needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.protocol.spec import EngineSpec
from engines.sglang.environment import build_environment
from engines.sglang.parallel import Parallel
from tests.support.cuda_wheels import CudaWheels

OURS = {"PATH": "/usr/bin", "HOME": "/home/u", "PYTHONPATH": "/ours"}


def environment(
    inherited: dict[str, str] | None = None,
    *,
    num_ranks: int = 1,
    cpu_ids: tuple[int, ...] = (0, 1, 2, 3),
    engine_id: str = "e-0",
    **fields: Any,
) -> dict[str, str]:
    spec = EngineSpec(engine_id, "sglang", "/nowhere", "/e.log", **fields)
    return build_environment(spec, inherited or OURS, Parallel(num_ranks, {}), cpu_ids=cpu_ids)


def test_an_engine_sees_its_own_gpus_and_no_health_probe_generates() -> None:
    env = environment(gpu_ids=(6, 7))
    assert env["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert "SGLANG_USE_CPU_ENGINE" not in env
    assert env["HOME"] == "/home/u"


def test_an_engine_without_gpus_sees_none_and_runs_on_the_cpu() -> None:
    env = environment()
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "0"),
        ({"env": {"NCCL_CUMEM_ENABLE": "1"}}, "1"),
        ({"options": {"moe-a2a-backend": "deepep_v2"}}, "1"),
        ({"options": {"enable_kv_cache_sharding": True}}, "1"),
        ({"num_nodes": 2}, "7"),  # SGLang's choice, unless it inherits one
        ({"gpu_ids": ()}, "7"),
    ],
)
def test_the_memory_of_nccl_is_what_a_push_compares_with_the_trainers(
    fields: dict[str, Any], expected: str
) -> None:
    env = environment(OURS | {"NCCL_CUMEM_ENABLE": "7"}, **{"gpu_ids": (0,)} | fields)
    assert env["NCCL_CUMEM_ENABLE"] == expected


def test_a_server_whose_scheduler_died_ends_at_once_unless_told_to_dump() -> None:
    name = "SGLANG_PYSPY_DUMP_BEFORE_CRASH"
    env = environment()
    assert (env[name], env["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"]) == ("0", "0")
    assert environment(env={name: "1"})[name] == environment(OURS | {name: "1"})[name] == "1"


def test_what_was_meant_for_this_interpreter_does_not_reach_another() -> None:
    assert environment()["PYTHONPATH"] == "/ours"
    env = environment(python="/sg/bin/python")
    assert "PYTHONPATH" not in env
    assert env["PATH"] == "/sg/bin:/usr/bin"


@pytest.mark.parametrize(
    ("engine_id", "num_ranks", "num_cpus", "expected"),
    [
        ("main-0", 1, 1.0, "0"),
        ("main-1", 1, 1.0, "1"),
        ("main-5", 1, 1.0, "1"),
        ("main-1", 1, 2.0, "2,3"),
        ("main-0", 2, 2.0, "0|1"),
        ("main-1", 2, 0.5, "2|3"),
        ("noname", 1, 8.0, "0,1,2,3"),
    ],
)
def test_engines_on_the_cpu_are_spread_over_its_cores(
    engine_id: str, num_ranks: int, num_cpus: float, expected: str
) -> None:
    env = environment(engine_id=engine_id, num_ranks=num_ranks, num_cpus=num_cpus)
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == expected


@pytest.mark.parametrize(
    ("engine_id", "num_ranks", "num_nodes", "num_cpus", "expected"),
    [
        ("main-0", 2, 2, 4.0, "0,1,2,3|0,1,2,3"),
        ("main-0", 4, 2, 4.0, "0,1|2,3|0,1|2,3"),
        ("main-1", 4, 2, 2.0, "2|3|2|3"),
    ],
)
def test_the_cores_of_each_node_are_divided_by_the_ranks_on_it(
    engine_id: str, num_ranks: int, num_nodes: int, num_cpus: float, expected: str
) -> None:
    env = environment(
        engine_id=engine_id,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        num_cpus=num_cpus,
        dist_init_addr="10.0.0.1:5000",
    )
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == expected


def test_variables_of_the_configuration_win() -> None:
    env = environment(env={"SGLANG_CPU_OMP_THREADS_BIND": "all", "HOME": "/elsewhere"})
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "all"
    assert env["HOME"] == "/elsewhere"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: true"),
        ("SGLANG_RUST_SERVER", "1"),
        ("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "true"),
    ],
)
def test_a_variable_that_breaks_the_lifecycle_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        environment(env={name: value})


def test_expandable_segments_are_fine_without_a_memory_saver() -> None:
    environment(OURS | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, memory_saver=False)


TRAINER = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "LOCAL_RANK": "3",
    "GROUP_RANK": "0",
    "ROLE_RANK": "3",
    "ROLE_NAME": "default",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "8",
    "ROLE_WORLD_SIZE": "8",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "1",
    "TMS_INIT_ENABLE": "1",
    "TMS_INIT_ENABLE_CPU_BACKUP": "1",
    "LD_PRELOAD": "/x/torch_memory_saver_hook_mode_preload.abi3.so:/usr/lib/libjemalloc.so",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def test_what_configures_a_trainer_does_not_reach_its_engine() -> None:
    env = environment(OURS | TRAINER, gpu_ids=(0,))
    assert env["LD_PRELOAD"] == "/usr/lib/libjemalloc.so"
    assert env.keys() & TRAINER.keys() == {"LD_PRELOAD"}
    # What its configuration says is the user's will.
    assert environment(OURS | TRAINER, env={"MASTER_PORT": "1"})["MASTER_PORT"] == "1"


def test_threads_that_a_user_chose_reach_an_engine() -> None:
    assert environment(OURS | {"OMP_NUM_THREADS": "1"})["OMP_NUM_THREADS"] == "1"
    assert environment(OURS | TRAINER | {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"


def test_an_engine_that_releases_gpu_memory_has_its_graphs_and_backups_in_pausable_memory() -> None:
    names = {
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        "TMS_RETAIN_CPU_BACKUP": "1",
    }
    assert environment(gpu_ids=(0,)).items() >= names.items()
    assert not environment(gpu_ids=(0,), memory_saver=False).keys() & names.keys()
    assert not environment().keys() & names.keys()
    chosen = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0"}
    assert environment(gpu_ids=(0,), env=chosen).items() >= chosen.items()


def test_the_loader_finds_the_runtime_that_the_preloaded_memory_saver_needs(
    tmp_path: Path,
) -> None:
    wheels = CudaWheels(tmp_path, "13.0")
    folder = wheels.add("cu13", 13).parent
    name, python = "LD_LIBRARY_PATH", wheels.python
    inherited = OURS | {name: "/theirs"}
    assert environment(inherited, python=python, gpu_ids=(0,))[name] == f"/theirs:{folder}"
    own = environment(inherited, python=python, gpu_ids=(0,), env={name: "/own"})
    assert own[name] == f"/own:{folder}"
    assert environment(OURS, python=python, gpu_ids=(0,))[name] == str(folder)
    assert name not in environment(OURS, python=python, gpu_ids=(0,), memory_saver=False)
    assert name not in environment(OURS, python=python)
    assert environment(inherited, python=python)[name] == "/theirs"


@pytest.mark.parametrize(
    ("version", "pausable"),
    [("0.5.20", False), ("0.5.21", True), ("0.5.23.post1", True), ("", True)],
)
def test_graphs_without_a_host_copy_stay_where_they_are(
    tmp_path: Path, version: str, pausable: bool
) -> None:
    if version:
        (tmp_path / f"lib/python3.12/site-packages/sglang-{version}.dist-info").mkdir(parents=True)
    env = environment(gpu_ids=(0,), python=str(tmp_path / "bin/python"))
    assert ("SGLANG_MEMORY_SAVER_CUDA_GRAPH" in env) is pausable


def test_logical_gpus_are_those_of_an_engine_on_the_cpu() -> None:
    options = {"device": "cpu"}
    spec = EngineSpec("e-0", "sglang", "/nowhere", "/e.log", gpu_ids=(0,), options=options)
    env = build_environment(spec, OURS, Parallel(1, {}))
    assert (env["SGLANG_USE_CPU_ENGINE"], env["CUDA_VISIBLE_DEVICES"]) == ("1", "0")
