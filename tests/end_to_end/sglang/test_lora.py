"""The LoRA loop on real SGLang: the base frozen, an adapter pushed each step.

What a release loses here is what no push brings back.  So the policy refuses at the start; forced
past it, the fingerprints find the lost base; and with a backup nothing changes at all.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import rollout
from engines.http.client import EngineClient
from engines.launch import EngineSpec, LocalLauncher, RunningEngine
from engines.protocol import Endpoint, ServerInfo
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.support.chat_models import THINKS_FIRST
from tests.support.engine_keys import client_of
from tests.support.event_lines import lines_of
from tests.support.load import PROMPTS
from tests.support.lora import (
    BASE,
    answers_on_every_path,
    make_adapter,
    merged_checkpoint,
    of_mixed_list,
)
from tests.support.models import make_plain_model
from tests.support.processes import ROOT
from tests.support.real_policy import one_engine, real_config
from tests.support.referee import Answer, Referee, Span
from tools.cpu_engines import install

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

RANK = 4
SETTINGS = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
}
OPTIONS = {
    "enable-lora": True,
    "max-lora-rank": RANK,
    "lora-target-modules": ["q_proj", "v_proj", "gate_proj", "up_proj"],
}
NUM_TOKENS = 24
NO_RECOVERY = {"recover": False}


def config(model: Path, folder: Path, **engine: Any) -> rollout.RolloutConfig:
    group = one_engine(options=OPTIONS, **engine)
    return real_config(
        model, folder, {"main": group}, weights={"update": "lora"}, health=NO_RECOVERY
    )


@dataclass
class Trainer:
    """A base that is not the checkpoint on disk, and an adapter for each step.

    Attributes:
        disk: the checkpoint that the engines load.
        base: the trainer's own base, as a checkpoint.
    """

    disk: Path
    base: Path
    folder: Path

    def weights(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self.base / "model.safetensors")

    def adapter(self, step: int) -> dict[str, Any]:
        return make_adapter(RANK, step)

    def merged(self, step: int) -> Path:
        """Base and adapter in one checkpoint, for transformers."""
        path = self.folder / f"merged-{step}"
        return merged_checkpoint(self.base, self.adapter(step), SETTINGS, path)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = tmp_path_factory.mktemp("lora")
    disk, base = (
        make_plain_model(folder / name, seed) for seed, name in enumerate(["disk", "own"])
    )
    (disk / "chat_template.jinja").write_text(THINKS_FIRST)
    return Trainer(disk, base, folder)


@pytest.fixture(scope="module")
def policy(
    trainer: Trainer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[rollout.ServerHandle]:
    with launch_local(config(trainer.disk, tmp_path_factory.mktemp("lora-logs"))) as deployment:
        yield deployment["policy"]


def answers(policy: ServerHandle, **named: str | None) -> list[Answer]:
    """The greedy answer to each prompt, through the router.

    Args:
        named: ``lora_path``, if the requests shall have it.
    """
    found = []
    with httpx.Client(base_url=policy.url, timeout=60, trust_env=False) as client:
        for prompt in PROMPTS[:4]:
            sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
            body = {
                "input_ids": prompt,
                "sampling_params": sampling,
                "return_logprob": True,
                **named,
            }
            reply = client.post("/generate", json=body)
            assert reply.status_code == 200, reply.text
            found.append(Answer.of(prompt, reply.json()))
    return found


def numbers(of: list[Answer]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """What must be equal to the last bit."""
    return [(one.output, one.logprobs) for one in of]


def are_of(path: Path, found: list[Answer]) -> bool:
    """Whether all tokens and log-probabilities are those of this checkpoint."""
    return not Referee(lambda version: path).findings(
        [replace(one, spans=(Span(0, 0, len(one.output)),)) for one in found]
    )


def test_the_lora_loop(policy: ServerHandle, trainer: Trainer, tmp_path: Path) -> None:
    # The trainer's base is not what the engines have loaded: it is pushed once, at the start.
    assert are_of(trainer.disk, answers(policy))
    assert policy.checks.base_differs(trainer.weights())
    policy.push(policy.phases.make_push(trainer.weights(), is_base=True)).result(120)
    version = policy.weight_version
    base = answers(policy)
    assert are_of(trainer.base, base)
    assert not are_of(trainer.disk, base)

    # The first evaluation, before any training, is right.
    expected = {one.prompt: one.output for one in base}

    def is_right(sample: rollout.Sample) -> float:
        return float(tuple(sample.output_ids) == expected[tuple(sample.prompt_ids)])

    greedy = rollout.SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [rollout.Prompt(prompt) for prompt in expected]
    with rollout.Driver(policy.url, is_right) as driver:
        found = driver.evaluate(0, {"first": rollout.EvalDataset(prompts, greedy)}).result(60)
    assert found.metrics["eval/first"] == 1.0

    for step in (1, 2):
        with policy.offloaded() as window:
            window.push(trainer.adapter(step), adapter=SETTINGS)
        assert policy.status().result(30).weight_version == version + step
        # Bit for bit what it was before: the base has come back from its backup.
        assert numbers(answers(policy, **BASE)) == numbers(base)
        trained = answers(policy)
        assert are_of(trainer.merged(step), trained)
        assert not are_of(trainer.base, trained)
        assert are_of(trainer.merged(step), answers(policy, lora_path="policy"))

    # Nothing pushed, nothing lost: the adapter outlives a release as well.
    with policy.offloaded():
        pass
    assert numbers(answers(policy)) == numbers(trained)
    assert numbers(answers(policy, **BASE)) == numbers(base)

    # On every path, each answer names the version of the weights that it came from.
    weights = {version: trainer.base, version + 2: trainer.merged(2)}
    referee = Referee(weights.__getitem__)
    of_base, of_adapter = of_mixed_list(policy, "policy")
    for expected, by_path in (
        (version + 2, answers_on_every_path(policy, {}) | {"mixed": of_adapter}),
        (version, answers_on_every_path(policy, BASE) | {"mixed": of_base}),
    ):
        for path, found in by_path.items():
            assert {span.version for one in found for span in one.spans} == {expected}, path
            assert referee.findings(found) == [], path


def test_adapters_are_pushed_while_requests_run_and_each_keeps_its_version(
    trainer: Trainer, tmp_path: Path
) -> None:
    group = one_engine(options=OPTIONS | {"max-total-tokens": 6000}) | {"num_engines": 2}
    weights = {"update": "lora", "adapters": ["policy", "judge"]}
    settings = real_config(
        trainer.disk, tmp_path, {"main": group}, weights=weights, health=NO_RECOVERY
    )
    made = {
        version: merged_checkpoint(
            trainer.disk, trainer.adapter(version), SETTINGS, tmp_path / f"merged-{version}"
        )
        for version in range(1, 7)
    }
    referee = Referee(lambda version: made[version])
    owners = {version: ("policy", "judge")[version % 2] for version in made}
    with launch_local(settings) as deployment:
        policy = deployment["policy"]

        def push(version: int, name: str) -> None:
            more = {"adapter": SETTINGS, "adapter_name": name}
            made_push = policy.phases.make_push(trainer.adapter(version), version, **more)
            report = policy.push(made_push).result(120)
            assert report.paused_s == 0.0
            assert policy.status().result(30).gate == "open"

        for version in (1, 2):
            push(version, owners[version])
        with ThreadPoolExecutor(8) as clients:
            asked: list[tuple[str, Future[Answer]]] = []
            for version in range(3, 7):
                begun = [threading.Event() for _ in range(4)]
                for index, one in enumerate(begun):
                    named = ("policy", "judge")[index % 2]
                    asked.append((named, clients.submit(long_answer, policy.url, named, one)))
                assert all(one.wait(60) for one in begun)
                push(version, owners[version])
            found = [(name, answer.result(120)) for name, answer in asked]
        for name, answer in found:
            (version,) = {span.version for span in answer.spans}
            assert owners[version] == name
            assert len(answer.output) == NUM_LONG
        assert len({span.version for _, one in found for span in one.spans}) >= 4
        assert not referee.findings([answer for _, answer in found])
        assert referee.could_tell([answer for _, answer in found], list(made.values()))


NUM_LONG = 96


def long_answer(url: str, name: str, begun: threading.Event) -> Answer:
    """A greedy answer that is streamed.

    Args:
        begun: set with its first token.
    """
    sampling = {"temperature": 0, "max_new_tokens": NUM_LONG, "ignore_eos": True}
    body = {"input_ids": PROMPTS[0], "sampling_params": sampling, "return_logprob": True}
    last: dict[str, Any] = {}
    with (
        httpx.Client(timeout=60, trust_env=False) as client,
        client.stream(
            "POST", f"{url}/generate", json=body | {"lora_path": name, "stream": True}
        ) as reply,
    ):
        for line in lines_of(reply):
            if line.startswith("data: {"):
                begun.set()
                last = json.loads(line[6:])
    return Answer.of(PROMPTS[0], last)


async def test_an_adapter_comes_from_disk_too(
    policy: ServerHandle, trainer: Trainer, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    (tmp_path / "adapter_config.json").write_text(json.dumps(SETTINGS))
    save_file(trainer.adapter(9), tmp_path / "adapter_model.safetensors")
    (engine,) = (await policy.status()).groups[0].engines
    client = client_of(engine, engine_id=engine.engine_id)
    try:
        answers(policy)  # with an empty prefix cache the last bits may differ
        before = answers(policy)
        await client.load_lora_adapter("from-disk", str(tmp_path))
        assert numbers(answers(policy, lora_path="from-disk")) != numbers(before)
        assert numbers(answers(policy)) == numbers(before)
        await client.unload_lora_adapter("from-disk")
    finally:
        await client.aclose()


def test_without_a_backup_it_is_refused_at_the_start(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(rollout.ConfigError, match="weights_cpu_backup to true") as refused:
        launch_local(config(trainer.disk, tmp_path, weights_cpu_backup=False))
    assert refused.value.setting == "servers.policy.groups.main.engine.weights_cpu_backup"
    assert not list(tmp_path.rglob("*.log"))


class WithoutBackup(LocalLauncher):
    """Starts engines without the backup that their configuration has."""

    async def launch(self, spec: EngineSpec) -> RunningEngine:
        return await super().launch(replace(spec, weights_cpu_backup=False))


class Boastful(EngineClient):
    """And this assumes that they have one."""

    async def server_info(self) -> ServerInfo:
        return replace(await super().server_info(), enable_weights_cpu_backup=True)


@pytest.mark.chaos
def test_forced_past_the_policy_the_fingerprints_fence_the_engine(
    trainer: Trainer, tmp_path: Path
) -> None:
    def connect(endpoint: Endpoint, engine_id: str) -> EngineClient:
        return Boastful(endpoint, engine_id=engine_id)

    whole = config(trainer.disk, tmp_path)
    with launch_local(whole, launcher=WithoutBackup(), connect=connect) as deployment:
        policy = deployment["policy"]

        def step() -> None:
            with policy.offloaded() as window:
                window.push(trainer.adapter(1), adapter=SETTINGS)

        with pytest.raises(rollout.PhaseFailed, match="is not what it was before") as failed:
            step()
        assert failed.value.phase == "verify"
        (engine,) = policy.status().result(30).groups[0].engines
        assert "is not what it was before, and was not pushed" in engine.fence_reason
        # And no reply uses the remains of the base weights.
        reply = httpx.post(f"{policy.url}/generate", json={"input_ids": [1]}, trust_env=False)
        assert reply.status_code == 503


def test_the_page_on_lora_works_as_it_is_written(trainer: Trainer, tmp_path: Path) -> None:
    """With its options and its configuration of an adapter; the model and the machine are ours."""
    page = (ROOT / "docs/how-to/lora.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (settings,) = re.findall(r"push\(adapter_tensors, adapter=(.*?)\)\n", page)
    adapter_config = json.loads(settings)
    values = yaml.safe_load(text) | {"log_dir": str(tmp_path)}
    server = values["servers"]["policy"]
    server["model_path"] = str(trainer.disk)
    server["groups"]["main"]["num_engines"] = 1
    engine = server["groups"]["main"]["engine"]
    options = engine["options"] | {"dtype": "float32", "max-total-tokens": 2000}
    engine |= install.engine("sglang", options=options)
    rank = adapter_config["r"]
    with launch_local(rollout.RolloutConfig.from_dict(values)) as deployment:
        policy = deployment["policy"]
        base = numbers(answers(policy))
        with policy.offloaded() as window:
            window.push(make_adapter(rank, 1), adapter=adapter_config)
        trained = numbers(answers(policy))
        assert trained != base
        # One that is too wide for the engine is refused, and the one before serves on.
        with pytest.raises(rollout.WeightMismatch, match="main takes adapter policy@2"):
            refused(policy, rank * 2)
        policy.serve().result(60)
        (known,) = policy.status().result(30).groups[0].engines
        assert not known.fence_reason
        assert numbers(answers(policy)) == trained
        assert numbers(answers(policy, **BASE)) == base


def refused(policy: ServerHandle, rank: int) -> None:
    with policy.offloaded() as window:
        window.push(make_adapter(rank, 1), adapter={"r": rank, "lora_alpha": 32})


PEFT_SETTINGS: dict[str, dict[str, Any]] = {
    "rslora": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "gate_proj", "up_proj"],
        "alpha_pattern": {"v_proj": 4},
        "rank_pattern": {"up_proj": RANK // 2},
    },
    "q_proj": {"target_modules": ["q_proj"]},
    "v_proj": {"target_modules": ["v_proj"]},
    "up_proj": {"target_modules": ["up_proj"]},
}


def test_what_is_served_with_an_adapter_of_peft_is_what_peft_computes(
    policy: ServerHandle, trainer: Trainer, tmp_path: Path
) -> None:
    policy.push(policy.phases.make_push(trainer.weights(), is_base=True)).result(120)
    for name, settings in PEFT_SETTINGS.items():
        named, adapter_config = trained_by_peft(trainer.base, settings, tmp_path / name)
        with policy.offloaded() as window:
            window.push(named, adapter=adapter_config)
        trained = answers(policy)
        assert are_of(tmp_path / name, trained), name
        assert not are_of(trainer.base, trained), name


def trained_by_peft(base: Path, settings: dict[str, Any], merged: Path) -> tuple[Any, Any]:
    """An adapter of PEFT and its config; the whole model goes to ``merged``."""
    import torch
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=RANK, lora_alpha=8, **settings)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    generator = torch.Generator().manual_seed(1)
    for name, half in model.named_parameters():
        if "lora_" in name:
            half.data = torch.randn(half.shape, generator=generator)
    named = {name: one.clone() for name, one in peft.get_peft_model_state_dict(model).items()}
    model.merge_and_unload().save_pretrained(merged)
    return named, lora.to_dict()
