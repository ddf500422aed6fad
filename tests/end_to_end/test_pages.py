"""The code of pages about weights and memory, over embedded engines and a trainer of one rank."""

from __future__ import annotations

import builtins
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM

import rollout
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from rollout.testing.tiny_model import make_tiny_model
from tests.support.pages import code_of, run_code

pytestmark = [pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(240)]
COLOCATED = "how-to/colocated.md"
FSDP2 = "how-to/fsdp2.md"
LORA = "how-to/lora.md"
MEGATRON = "how-to/megatron.md"
PUSHING = "how-to/pushing-weights.md"
HEADS, KV_HEADS, HIDDEN = 4, 2, 64


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_model(
        folder,
        "qwen3",
        dtype="bfloat16",
        hidden_size=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
    )


@pytest.fixture(scope="module")
def model(model_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_path)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with the folder ``runs``, and a process group of one rank."""
    folder = tmp_path_factory.mktemp("work")
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder
    dist.destroy_process_group()


def server(model_path: Path, **more: Any) -> dict[str, Any]:
    groups = {"main": {"engine": {"kind": "embedded", "options": {"max-total-tokens": 4096}}}}
    return {"model_path": str(model_path), "groups": groups, **more}


@pytest.fixture(scope="module")
def deployment(model_path: Path, work: Path) -> Iterator[DeploymentHandle]:
    servers = {
        "policy": server(model_path),
        "reference": server(model_path, weights={"update": "frozen"}),
    }
    config = rollout.RolloutConfig.from_dict({"run_id": "run-id", "servers": servers})
    with rollout.launch(config) as deployment:
        yield deployment


@pytest.fixture
def policy(deployment: DeploymentHandle) -> Iterator[ServerHandle]:
    """The server; after the code of a page it serves with the version that was pushed last."""
    policy = deployment["policy"]
    yield policy
    status = policy.status().result(30)
    assert status.phase == "serving"
    assert status.gate == "open"
    reply = policy.generate([1, 2, 3]).result(60)
    assert int(reply.weight_version) == status.weight_version


def same(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    return [(name, tensor)]


class Trainer:
    """It holds the model, and notes what the code calls."""

    def __init__(self, model: Any) -> None:
        self.called: list[str] = []
        self.state_dict = model.state_dict

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.called.append(name)


def test_the_check_of_the_push_path(policy: ServerHandle, model: Any) -> None:
    run_code(PUSHING, number=4, policy=policy, model=model, to_hf=same)
    assert policy.weight_version == 1


def test_a_push_in_a_block_and_one_without(policy: ServerHandle, model: Any) -> None:
    before, seen = policy.weight_version, []
    run_code(PUSHING, policy=policy, model=model, groups=[], train=seen.append)
    assert seen == [[]]
    assert policy.weight_version == before + 2


def test_a_push_of_a_rank_that_has_connected(policy: ServerHandle, model: Any) -> None:
    step = policy.weight_version + 1
    names = {"rollout": rollout, "torch": torch, "model": model, "step": step}
    made = run_code(PUSHING, number=1, **names)
    assert made["report"].weight_version == step
    names = {"pusher": made["pusher"], "model": model}
    stages = run_code("how-to/watch.md", number=1, **names)["report"].push_stages
    assert {stage.stage for stage in stages} >= {"copy", "engine"}
    made["pusher"].close()


def test_a_push_of_a_trainer_that_runs_elsewhere(policy: ServerHandle, model: Any) -> None:
    before, seen = policy.weight_version, []

    def connect(run: str) -> Any:
        seen.append(run)
        return rollout.connect("run-id")

    names = {"rollout": SimpleNamespace(connect=connect), "state_dict": model.state_dict}
    run_code("how-to/parts.md", **names)["policy"].close()
    assert (seen, policy.weight_version) == (["runs/my-run"], before + 1)


def test_a_push_under_other_names(policy: ServerHandle, model: Any) -> None:
    before = policy.weight_version
    tensors = {f"other.{name}": tensor for name, tensor in model.state_dict().items()}

    def to_hf(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return same(name.removeprefix("other."), tensor)

    run_code(PUSHING, number=2, policy=policy, megatron_tensors=tensors, to_hf=to_hf)
    assert policy.weight_version == before + 1


def test_the_trainers_own_logprobs(policy: ServerHandle, model: Any) -> None:
    before = policy.weight_version
    run_code("concepts.md", server=policy, model=model)
    assert policy.weight_version == before + 1


def test_a_generator_of_megatron_bridge(policy: ServerHandle, model: Any) -> None:
    class Bridge:
        def export_hf_weights(self, model: Any) -> Iterator[tuple[str, Tensor]]:
            yield from model.state_dict().items()

    step = policy.weight_version + 1
    made = run_code(MEGATRON, policy=policy, bridge=Bridge(), model=model, step=step)
    assert made["report"].weight_version == step
    made["pusher"].close()


def fused(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Megatron's tensors of the same weights, and the names of those that are not fused."""
    found: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in state.items():
        layer = name.partition("model.layers.")[2].partition(".")[0]
        ours = f"decoder.layers.{layer}"
        of_layer = f"model.layers.{layer}"
        if name.endswith("gate_proj.weight"):
            up = state[f"{of_layer}.mlp.up_proj.weight"]
            found[f"{ours}.mlp.linear_fc1.weight"] = torch.cat([tensor, up])
        elif name.endswith("q_proj.weight"):
            parts = [state[f"{of_layer}.self_attn.{one}_proj.weight"] for one in "qkv"]
            grouped = [part.view(KV_HEADS, -1, HIDDEN // HEADS, HIDDEN) for part in parts]
            qkv = torch.cat(grouped, dim=1).reshape(-1, HIDDEN)
            found[f"{ours}.self_attention.linear_qkv.weight"] = qkv
        elif not name.endswith(("up_proj.weight", "k_proj.weight", "v_proj.weight")):
            found[f"decoder.{name}"] = tensor
            names[f"decoder.{name}"] = name
    return found, names


def test_a_name_map_of_megatrons_fused_tensors(policy: ServerHandle, model: Any) -> None:
    # The engine has the same weights under the checkpoint's names.
    greedy = rollout.SamplingParams(temperature=0.0, max_new_tokens=8)
    before = policy.generate([1, 2, 3], greedy).result(60).output_ids
    tensors, names = fused(model.state_dict())
    step = policy.weight_version + 1
    with policy.pusher() as pusher:
        run_code(
            MEGATRON,
            number=1,
            pusher=pusher,
            whole_tensors=tensors,
            step=step,
            HF_NAMES=names,
            num_groups=KV_HEADS,
            q_per_group=HEADS // KV_HEADS,
            head_dim=HIDDEN // HEADS,
            hidden=HIDDEN,
        )
    assert policy.generate([1, 2, 3], greedy).result(60).output_ids == before


def test_all_servers_give_their_memory_together(
    deployment: DeploymentHandle, policy: ServerHandle, model: Any
) -> None:
    phases: list[str] = []

    def train() -> None:
        phases.extend(one.phase for one in deployment.status().result(30).values())

    names = {"train_everything": train, "new_weights": model.state_dict}
    run_code(COLOCATED, deployment=deployment, **names)
    assert phases == ["offloaded", "offloaded"]


def test_servers_take_turns(deployment: DeploymentHandle, policy: ServerHandle, model: Any) -> None:
    trainer, scored = Trainer(model), []
    names = {"trainer": trainer, "score": scored.append, "new_weights": model.state_dict}
    made = run_code(COLOCATED, number=2, deployment=deployment, **names)
    assert scored == [made["reference"].url]
    assert trainer.called == ["step"]


def test_the_trainer_frees_its_memory_before_the_kv_caches(
    policy: ServerHandle, model: Any
) -> None:
    trainer = Trainer(model)
    run_code(COLOCATED, number=5, policy=policy, trainer=trainer, torch=torch, groups=[])
    assert trainer.called == ["step", "offload_parameters"]


def test_the_adapter_of_the_page_on_lora(model_path: Path, model: Any, work: Path) -> None:
    values = yaml.safe_load(code_of(LORA, "yaml")) | {"run_id": "lora"}
    settings = values["servers"]["policy"]
    settings["model_path"] = str(model_path)
    settings["groups"]["main"]["engine"]["kind"] = "embedded"
    rows, columns = model.state_dict()["model.layers.0.self_attn.q_proj.weight"].shape
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora"
    halves = {f"{prefix}_A.weight": (16, columns), f"{prefix}_B.weight": (rows, 16)}
    tensors = {name: torch.randn(shape) for name, shape in halves.items()}
    with rollout.launch(rollout.RolloutConfig.from_dict(values)) as deployment:
        policy, before = deployment["policy"], deployment["policy"].weight_version
        names = {"train": lambda groups: None, "groups": [], "adapter_tensors": tensors}
        run_code(LORA, policy=policy, **names)
        assert policy.weight_version == before + 1


def test_the_loop_of_the_page_on_fsdp2(
    model_path: Path, model: Any, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"run_id": "ranks", "servers": {"policy": server(model_path)}}
    config = rollout.RolloutConfig.from_dict(values)
    trained: list[int] = []
    names = {
        "config": config,
        "run_folder": f"{config.log_dir}/{config.run_id}",
        "judge": lambda sample: float(len(sample.output_ids)),
        "my_share": [rollout.Prompt((1, 2)), rollout.Prompt((3,))],
        "sampling": rollout.SamplingParams(max_new_tokens=2),
        "model": model,
        "train": lambda model, groups: trained.append(len(groups)),
        "range": lambda first, _: builtins.range(first, first + 2),
    }
    made = run_code(FSDP2, **names)
    assert trained == [2, 2]
    assert made["policy"].weight_version == 2
    made["pusher"].close()
    made["deployment"].stop()


def test_the_signal_that_ends_the_ranks() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        run_code(FSDP2, number=1)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
