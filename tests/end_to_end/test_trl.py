"""TRL's trainers on embedded engines: they learn, and never from tokens of other weights."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rollout
from rollout.adapters.trl import RolloutFunction, RolloutWorker, WeightTransfer
from rollout.core.errors import WeightMismatch
from rollout.runtime.handle import ServerHandle
from rollout.testing.tiny_model import make_tiny_model
from tests.support.engine_keys import request_to
from tests.support.processes import ROOT, program, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.embedded, pytest.mark.timeout(420)]
ENGINE = {
    "kind": "embedded",
    "cpus": 1,
    "options": {"dtype": "float32", "max-total-tokens": 8192, "log-level": "warning"},
}
SHORT = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 6,
    "learning_rate": 1e-2,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}
MESSAGES = [[{"role": "user", "content": letter}] for letter in "abcdefgh"]
GAP = "sampling/sampling_logp_difference"


@pytest.fixture(autouse=True)
def trl(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    return pytest.importorskip("trl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", architecture="qwen3")


def config(folder: Path, model: Path, **group: Any) -> rollout.RolloutConfig:
    server = {"model_path": str(model), "groups": {"main": {"engine": ENGINE} | group}}
    return rollout.RolloutConfig.from_dict(
        {"run_id": "trl", "log_dir": str(folder), "servers": {"policy": server}}
    )


@pytest.fixture
def policy(tmp_path: Path, model: Path) -> Iterator[ServerHandle]:
    with rollout.launch(config(tmp_path, model)) as deployment:
        yield deployment["policy"]


def small_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [-sum(ids) / len(ids) / 100 for ids in completion_ids]


def trained(
    model: Path, folder: Path, rollout_func: Callable[..., Any], **more: Any
) -> list[dict[str, Any]]:
    """The log of a short training of the tiny model, on messages."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = GRPOConfig(
        output_dir=str(folder / "trl"), model_init_kwargs={"dtype": "float32"}, **SHORT
    )
    dataset = Dataset.from_list([{"prompt": messages} for messages in MESSAGES])
    trainer = GRPOTrainer(
        str(model), small_ids, settings, dataset, rollout_func=rollout_func, **more
    )
    trainer.train()
    return steps_of(trainer.state.log_history)


def steps_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in log if "reward" in entry]


def test_the_example_learns_and_its_log_probs_are_the_trainers(
    warm_started: Path, tmp_path: Path
) -> None:
    options = ("--model", str(warm_started), "--out", str(tmp_path), "--steps", "12")
    with program("examples/trl_grpo.py", *options) as example:
        assert example.finish(280) == 0, example.output
        assert wait_until(lambda: not example.descendants(), 20), example.descendants()
    steps = json.loads((tmp_path / "trl_grpo.json").read_text())["steps"]
    rewards = [step["reward"] for step in steps]
    assert len(rewards) == 12
    assert rewards[0] < 0.5
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.25
    assert max(step[f"{GAP}/max"] for step in steps) < 1e-5
    assert max(step[f"{GAP}/mean"] for step in steps) < 1e-6


def test_the_example_is_short() -> None:
    lines = (ROOT / "examples/trl_grpo.py").read_text().splitlines()
    assert len(lines) <= 40
    assert len([line for line in lines if re.search("rollout", line)]) <= 8


class ReloadingEngines(RolloutFunction):
    """Its engines load the checkpoint again after each push, as in trl#5312.

    There vLLM slept between steps, and its wake-up overwrote the weights that TRL had just sent.
    """

    def __init__(self, policy: ServerHandle, body: dict[str, str]) -> None:
        super().__init__(policy)
        self._body = body

    def sync_weights(self, trainer: Any) -> None:
        super().sync_weights(trainer)
        for engine in self._policy.status().result().groups[0].engines:
            body = json.dumps(self._body).encode()
            request = request_to(engine, "/update_weights_from_disk", body)
            with urllib.request.urlopen(request, timeout=30) as reply:
                assert json.load(reply)["success"]


def test_an_engine_that_samples_with_the_checkpoint_is_caught(
    policy: ServerHandle, model: Path, tmp_path: Path
) -> None:
    body = {"model_path": str(model), "weight_version": "0"}
    words = "sampled with weight version 0, but the trainer pushed version 1"
    with ReloadingEngines(policy, body) as reloading, pytest.raises(WeightMismatch, match=words):
        trained(model, tmp_path, reloading)


def test_old_weights_under_the_new_version_show_in_the_log_probs(
    policy: ServerHandle, model: Path, tmp_path: Path
) -> None:
    with ReloadingEngines(policy, {"model_path": str(model)}) as reloading:
        first, second = trained(model, tmp_path, reloading)
    assert first[f"{GAP}/max"] < 1e-4  # the checkpoint is what the trainer begins with
    assert second[f"{GAP}/mean"] > 1e-2


def test_an_adapter_is_sampled_as_it_is_trained(
    policy: ServerHandle, model: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=32, target_modules="all-linear")
    with RolloutFunction(policy) as rollout_func:
        first, second = trained(model, tmp_path, rollout_func, peft_config=lora)
    assert first[f"{GAP}/max"] < 1e-4
    assert second[f"{GAP}/max"] < 1e-4


@pytest.mark.parametrize(
    ("kind", "parameters", "version"),
    [
        ("fsdp", "DTensor", 4),  # three of the training, and one that the main process sent alone
        ("ddp", "Parameter", 3),
    ],
)
def test_two_ranks_push_what_they_train(
    kind: str, parameters: str, version: int, model: Path, tmp_path: Path
) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    arguments = [str(tmp_path / "trl"), str(model), str(tmp_path), kind]
    with (
        rollout.launch(config(tmp_path, model, needs_offload=kind == "ddp")) as deployment,
        program(*command, "tests/end_to_end/trl_ranks.py", *arguments) as ranks,
    ):
        assert ranks.finish(280) == 0, ranks.output
        assert wait_until(lambda: not ranks.descendants(), 20), ranks.descendants()
        status = deployment["policy"].status().result(30)
    assert status.weight_version == version
    assert status.phase == ("offloaded" if kind == "ddp" else "serving")
    log = json.loads((tmp_path / "log.json").read_text())
    assert log["parameters"] == [parameters]
    steps = steps_of(log["steps"])
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert max(step[f"{GAP}/max"] for step in steps) < 1e-4


def varlen_attention(
    query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, *_: int, **how: Any
) -> Any:
    """FlashAttention's ``flash_attn_varlen_func`` on a CPU, causal from the end of each key."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    parts = []
    for index in range(len(starts_q) - 1):
        q = query[starts_q[index] : starts_q[index + 1]].transpose(0, 1)
        k, v = (one[starts_k[index] : starts_k[index + 1]].transpose(0, 1) for one in (key, value))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=how["softmax_scale"])
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def test_the_asynchronous_trainer_learns_from_samples_of_known_versions(
    warm_started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With doubles of what TRL runs on GPUs alone: FlashAttention, and the GPU's peak FLOPs."""
    from arithmetic import make_splits, reward
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

    flash = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: flash)
    peak = "trl.experimental.async_grpo.async_grpo_trainer.get_peak_flops_per_device"
    monkeypatch.setattr(peak, lambda *_: None)

    def right(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        return [reward("", ids, one) for ids, one in zip(completion_ids, answer, strict=True)]

    settings = AsyncGRPOConfig(
        output_dir=str(tmp_path / "trl"),
        **SHORT
        | {
            "max_steps": 10,
            "per_device_train_batch_size": 128,
            "num_generations": 8,
            "max_completion_length": 4,
            "learning_rate": 5e-4,
        },
        dtype="float32",
        token_budget=0,
        max_inflight_tasks=128,
        # A batch and no more; what a push makes old is dropped.
        queue_maxsize=128,
        max_staleness=0,
    )
    problems = make_splits(0).train
    dataset = Dataset.from_list([{"prompt": one.prompt, "answer": one.answer} for one in problems])
    tokenizer = AutoTokenizer.from_pretrained(warm_started)
    with rollout.launch(config(tmp_path, warm_started, needs_offload=False)) as deployment:
        policy = deployment["policy"]
        trainer = AsyncGRPOTrainer(
            str(warm_started),
            right,
            settings,
            dataset,
            tokenizer,
            rollout_worker=RolloutWorker(policy, dataset, right, tokenizer, settings),
            weight_transfer=WeightTransfer(policy),
        )
        trainer.train()
        assert policy.weight_version == trainer.model_version == 11
    steps = steps_of(trainer.state.log_history)
    rewards = [step["reward"] for step in steps]
    assert rewards[0] < 0.5
    assert sum(rewards[5:]) / 5 > rewards[0] + 0.1  # batches of 16 prompts vary
    assert all(step["sample/staleness_max"] == 0 for step in steps)
    # Later batches are one push behind: TRL takes each from the queue a step ahead.
    assert abs(steps[0]["kl"]) < 1e-6


def test_the_page_begins_with_code_that_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset
    from trl import GRPOConfig

    page = (ROOT / "docs/how-to/trl.md").read_text()
    (first, *_) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {
        "config": config(tmp_path, model),
        "model": str(model),
        "reward": small_ids,
        "dataset": Dataset.from_list([{"prompt": messages} for messages in MESSAGES]),
        "settings": GRPOConfig(output_dir=str(tmp_path / "trl"), **SHORT),
    }
    exec(compile(first, "trl.md", "exec"), names)
    assert names["trainer"].state.global_step == 2
