"""``rollout plan`` shows the memory sums of GPUs, for the models of the recipes."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rollout.cli.lib.gpu_sums
from engines.protocol import GpuMemory
from rollout.cli.main import app

CONFIGS = Path(__file__).parents[2] / "support/hub_configs"
GIB = 1 << 30


def planned(folder: Path, *words: str, **changes: Any) -> tuple[Any, str]:
    """The sums of one group, or None, and the whole text of the plan."""
    engine = {"kind": "sglang", "gpus": 1, "options": {"mem-fraction-static": 0.6}}
    group = {"num_engines": 8, "engine": engine | changes.pop("engine", {})}
    server = {
        "model_path": str(CONFIGS / changes.pop("model", "Qwen3-8B")),
        "groups": {"main": group | changes.pop("group", {})},
    }
    values = {"cluster": {"trainer_gpus": 8}, "servers": {"policy": server | changes}}
    file = folder / "rollout.json"
    file.write_text(json.dumps(values))
    as_json, text = (
        CliRunner().invoke(app, ["plan", str(file), *words, *more]) for more in (["--json"], [])
    )
    assert as_json.exit_code == text.exit_code == 0, text.output
    return json.loads(as_json.stdout)["groups"][0]["gpu"], " ".join(text.stdout.split())


def test_a_plan_has_the_sums_of_a_trainer_and_engines_on_the_same_gpus(tmp_path: Path) -> None:
    sums, text = planned(tmp_path, "--gpu-gib", "80")
    assert sums["gpu_bytes"] == 80 * GIB
    assert sums["engine"]["kv_tokens"] == 238431
    assert sums["trainer"]["step_bytes"] == 16 * 8190722048 // 8
    assert sums["push_bytes"] == 3 * 151936 * 4096 * 2
    assert sums["free"]["serving"] == 80 * GIB - int(48 * GIB) - 12 * 8190722048 // 8
    assert "policy/main: memory of each GPU, computed, not measured" in text
    assert "weights 15.26 GiB, then KV cache, 144 KiB a token; 238431 tokens fit" in text
    assert "a trainer with FSDP2 on 8 GPUs: 15.26 GiB in its step" in text


def test_too_little_room_is_named(tmp_path: Path) -> None:
    model = {"model": "Qwen3-30B-A3B", "engine": {"gpus": 8}, "group": {"num_engines": 1}}
    sums, text = planned(tmp_path, "--gpu-gib", "40", **model)
    assert sums["free"]["training"] < 0
    assert "GiB TOO LITTLE in the trainer's step" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": {"update": "frozen"}},
        {"group": {"needs_offload": False, "num_engines": 2}},
        {"weights": {"update": "lora"}},
    ],
)
def test_only_a_push_in_full_counts_the_trainer(tmp_path: Path, changes: dict[str, Any]) -> None:
    sums, text = planned(tmp_path, **changes)
    assert sums["trainer_gpus"] == sums["trainer"]["step_bytes"] == sums["push_bytes"] == 0
    assert "free: 31.64 GiB beside a serving engine" in text


@pytest.mark.parametrize(
    "engine",
    [{"gpus": 0}, {"options": {}}, {"options": {"mem-fraction-static": "much"}}],
    ids=["on the CPU", "no share is given", "a share in words"],
)
def test_what_is_not_known_is_not_computed(tmp_path: Path, engine: dict[str, Any]) -> None:
    sums, text = planned(tmp_path, engine=engine)
    assert sums is None
    assert "computed, not measured" not in text


def test_the_gpus_of_this_machine_are_taken_where_it_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [GpuMemory("GPU-a", 0, 141 * GIB), GpuMemory("GPU-b", 0, 96 * GIB)]
    monkeypatch.setattr(rollout.cli.lib.gpu_sums, "memory_of_all_gpus", lambda: (gpus, ""))
    sums, text = planned(tmp_path)
    assert sums["gpu_bytes"] == 96 * GIB
    assert "a GPU: 96.00 GiB (the smallest of this machine)" in text
