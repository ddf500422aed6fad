"""How a vLLM server is started, and what is refused before it is."""

from __future__ import annotations

import asyncio
import json
import uuid
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.launch import LocalLauncher, check_spec, start_settings
from engines.protocol import NO_ACCESS, Endpoint, EngineAccess, WorkerType
from engines.protocol.errors import EngineNotReady
from engines.protocol.spec import EngineSpec
from engines.vllm.command import build_command
from engines.vllm.environment import build_environment
from rollout.config import RolloutConfig
from rollout.core.errors import ConfigError
from rollout.runtime.preflight import check_before_launch, wrong_settings
from tests.support.builders import write_checkpoint

HERE = Endpoint("127.0.0.1", 4000)
LONGEST_SOCKET_PATH = 107
SPEC = EngineSpec("policy-0", "vllm", "/models/m", "/dev/null", gpu_ids=(0, 1))


def flags(spec: EngineSpec) -> dict[str, str]:
    words = build_command(spec, HERE)[3:]
    found, name = {}, ""
    for word in words:
        if word.startswith("--"):
            found[name := word] = ""
        else:
            found[name] = word
    return found


def test_the_command_opens_what_the_client_needs() -> None:
    found = flags(SPEC)
    assert found["--host"] == "127.0.0.1"
    assert found["--model"] == "/models/m"
    assert found["--tensor-parallel-size"] == "2"
    assert "--enable-sleep-mode" in found
    assert "--enable-scale-out" in found
    assert json.loads(found["--weight-transfer-config"]) == {"backend": "rollout_shm"}
    assert found["--logprobs-mode"] == "processed_logprobs"
    assert build_environment(SPEC, {})["VLLM_SERVER_DEV_MODE"] == "1"


def test_the_users_mode_of_log_probs_is_kept_if_it_gives_any() -> None:
    raw = replace(SPEC, options={"logprobs-mode": "raw_logprobs"})
    assert flags(raw)["--logprobs-mode"] == "raw_logprobs"
    with pytest.raises(ValueError, match="raw_logits, which gives no log-probs"):
        flags(replace(SPEC, options={"logprobs-mode": "raw_logits"}))


def test_on_gpus_vllms_worker_has_our_checks() -> None:
    name = "--worker-cls"
    assert flags(SPEC)[name] == "engines.vllm_plugin.gpu_worker.GpuWorker"
    assert flags(replace(SPEC, options={"worker-cls": "mine.Worker"}))[name] == "mine.Worker"
    assert name not in flags(replace(SPEC, gpu_ids=()))


def test_its_sockets_are_in_a_folder_that_ends_with_it(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n: > "$VLLM_RPC_BASE_PATH/it" && echo "$VLLM_RPC_BASE_PATH"\n')
    python.chmod(0o755)
    log = str(tmp_path / "engine.log")
    spec = replace(SPEC, gpu_ids=(), python=str(python), log_path=log)
    with pytest.raises(EngineNotReady) as failed:
        asyncio.run(LocalLauncher().launch(spec))
    folder = Path(failed.value.log_tail)
    assert folder.parent == Path("/dev/shm")
    assert not folder.exists()
    # vLLM adds a UUID.
    assert len(f"{folder}/{uuid.uuid4()}") <= LONGEST_SOCKET_PATH


def test_options_travel_in_vllms_names_and_replace_ours() -> None:
    options = {"max-model-len": 512, "enable-scale-out": False, "pipeline-parallel-size": 2}
    found = flags(replace(SPEC, options=options))
    assert found["--max-model-len"] == "512"
    assert "--enable-scale-out" not in found
    assert "--tensor-parallel-size" not in found
    overrides = start_settings(replace(SPEC, options=options), {}).overrides
    assert [one.name for one in overrides] == ["enable_scale_out"]


def test_threads_of_vllm_on_a_cpu_are_the_cores_of_its_engine() -> None:
    """By default as many as the machine has, which is slow beside other processes."""
    on_cpu = replace(SPEC, gpu_ids=(), num_cpus=2.5)
    inherited = {"OMP_NUM_THREADS": "9"}
    assert build_environment(on_cpu, inherited)["OMP_NUM_THREADS"] == "3"
    assert build_environment(SPEC, inherited)["OMP_NUM_THREADS"] == "9"
    ours = replace(on_cpu, env={"OMP_NUM_THREADS": "7"})
    assert build_environment(ours, inherited)["OMP_NUM_THREADS"] == "7"


def test_an_engine_that_keeps_its_memory_or_has_no_gpu_has_no_sleep_mode() -> None:
    assert "--enable-sleep-mode" not in flags(replace(SPEC, memory_saver=False))
    assert "--enable-sleep-mode" not in flags(replace(SPEC, gpu_ids=()))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"host": "10.0.0.2", "access": NO_ACCESS},
            r"at 10.0.0.2, vLLM's control endpoints .* have no key",
        ),
        ({"options": {"enable-sleep-mode": True}}, "the group's needs_offload"),
        ({"options": {"weight-transfer-config": {}}}, "set at launch"),
        ({"options": {"api-key": "secret"}}, "makes its own keys"),
        ({"options": {"tensor-parallel-size": 4}}, "make 4 ranks, but the engine has 2 GPUs"),
        ({"options": {"pipeline-parallel-size": 3}}, "2 GPUs cannot be divided"),
        ({"worker_type": WorkerType.PREFILL}, "vLLM cannot be a prefill worker"),
        ({"num_nodes": 2}, "runs on one node"),
        ({"env": {"VLLM_SERVER_DEV_MODE": "0"}}, "no control endpoints"),
        ({"env": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}, "sleep mode does not work"),
    ],
)
def test_what_cannot_work_is_refused_by_name(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_spec(replace(SPEC, **change))


@pytest.mark.parametrize("access", [None, EngineAccess("sampling"), EngineAccess("s", "control")])
def test_with_a_key_it_may_listen_at_the_address_of_its_node(access: EngineAccess | None) -> None:
    spec = replace(SPEC, host="10.0.0.2", access=access)
    check_spec(spec)
    command = build_command(spec, Endpoint(spec.host, 4000))
    assert command[command.index("--host") + 1] == "10.0.0.2"
    # Outermost: the last middleware sees a request first.
    assert command[-1] == "--middleware=engines.http.key_check.KeyCheck"


def config(engine: dict[str, Any], model_path: str = "/models/m", **weights: Any) -> RolloutConfig:
    server = {
        "model_path": model_path,
        "groups": {"main": {"engine": {"kind": "vllm", **engine}}},
        "weights": weights,
    }
    return RolloutConfig.from_dict({"servers": {"policy": server}})


def test_pushes_that_vllm_cannot_take_are_refused() -> None:
    with pytest.raises(ConfigError, match="from a folder only"):
        config({}, update="lora")
    config({}, transport="distributed")
    stages = {"options": {"pipeline-parallel-size": 2}, "gpus": 2}
    with pytest.raises(ConfigError, match=r"2 pipeline stages with weights.transport"):
        config(stages, transport="distributed")


def test_a_group_of_running_servers_is_attached() -> None:
    engine = config({"urls": ["http://127.0.0.1:8000"]}).servers["policy"].groups["main"].engine
    assert engine.is_attached
    with pytest.raises(ConfigError, match="options cannot be set"):
        config({"urls": ["http://127.0.0.1:8000"], "options": {"dtype": "float32"}})


@pytest.mark.parametrize(
    ("model", "is_refused"),
    [
        ({"head_dim": 16, "hidden_size": 128, "num_attention_heads": 4}, True),
        ({"hidden_size": 64, "num_attention_heads": 4}, True),
        ({"text_config": {"head_dim": 8}}, True),
        ({"head_dim": 64}, False),
        ({"hidden_size": 64, "num_attention_heads": 2}, False),
        ({"hidden_size": 64, "num_attention_heads": 4, "kv_lora_rank": 16}, False),
        ({}, False),
    ],
)
def test_a_model_whose_first_request_would_end_the_cpu_engine_is_refused(
    tmp_path: Path, model: dict[str, Any], is_refused: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))

    def reasons(num_gpus: int) -> str:
        found = wrong_settings(config({"gpus": num_gpus}, str(tmp_path)))
        return " ".join(str(one) for one in found if "attention heads" in str(one))

    assert ("vLLM's CPU kernels know those of 32, 64" in reasons(0)) is is_refused
    assert not reasons(1)


@pytest.mark.parametrize(
    ("engine", "model_type", "weights", "is_refused"),
    [
        ({"kind": "sglang", "options": {"pp-size": 2}}, "glm4", {}, True),
        ({"kind": "sglang", "options": {"pp-size": 2}}, "qwen3", {}, False),
        ({"options": {"pipeline-parallel-size": 2}}, "glm4", {}, False),
        ({"options": {"pipeline-parallel-size": 2}}, "glm4", {"not_pushed": ["lm_*"]}, True),
        ({}, "glm4", {"not_pushed": ["lm_*"]}, False),
    ],
)
def test_a_tied_head_that_pushes_may_not_reach_is_refused_before_the_start(
    tmp_path: Path, engine: dict[str, Any], model_type: str, weights: Any, is_refused: bool
) -> None:
    model = write_checkpoint(tmp_path)
    tied = {"model_type": model_type, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(tied))
    found = wrong_settings(config({"gpus": 2, **engine}, model, **weights))
    assert any("a head that is tied" in str(one) for one in found) is is_refused


@pytest.mark.parametrize(
    ("modules", "missing"),
    [
        ([], "vllm"),
        (["vllm"], "ray-rollout-vllm, the wheel of the plugin"),
        (["vllm", "engines"], ""),
    ],
)
def test_an_interpreter_without_vllm_or_its_plugin_is_refused(
    tmp_path: Path, modules: list[str], missing: str
) -> None:
    venv.create(tmp_path / "other")
    for module in modules:
        (tmp_path / "site" / module).mkdir(parents=True)
        (tmp_path / "site" / module / "__init__.py").touch()
    engine = {
        "python": str(tmp_path / "other" / "bin" / "python"),
        "env": {"PYTHONPATH": str(tmp_path / "site")},
    }
    try:
        check_before_launch(config(engine))
        refused = ""
    except ConfigError as error:
        refused = str(error)
    assert (f"it has no {missing}; install it there" in refused) is bool(missing)
    assert ("it has no" in refused) is bool(missing)
