"""Parts of ``benchmarks.gpu``: checkpoints of real sizes without their bytes, and repetitions."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.embedded
# Tensors and bytes of the published checkpoints in bfloat16, without the twin of a tied one.
PUBLISHED = {
    "qwen3-0.6b": (310, 1_192_099_840),
    "qwen3-8b": (399, 16_381_470_720),
    "qwen3-30b-a3b": (18_867, 61_064_245_248),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_the_tensors_of_the_published_model(tmp_path: Path, name: str) -> None:
    from benchmarks.gpu.shapes import checkpoint_bytes, make_checkpoint

    assert make_checkpoint(tmp_path, name) == PUBLISHED[name]
    assert checkpoint_bytes(name) == PUBLISHED[name][1]
    file = (tmp_path / "model.safetensors").stat()
    assert file.st_size > PUBLISHED[name][1]
    assert file.st_blocks * 512 < 8 << 20  # the header


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-30b-a3b"])
def test_a_tiny_one_is_loaded_whole_by_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    from benchmarks.gpu.shapes import make_checkpoint
    from engines.embedded.weights.model_weights import ModelWeights

    num_tensors, num_bytes = make_checkpoint(tmp_path, name, is_tiny=True)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys"))
    weights = ModelWeights(model)
    assert weights.num_bytes == num_bytes
    assert len([one for one in weights.manifest() if not one["is_tied"]]) == num_tensors


def test_a_peak_in_the_middle_of_the_work_is_seen() -> None:
    from benchmarks.gpu.sync import peak_during

    used, was_read = [5], threading.Event()

    def read() -> int:
        if used[0] == 70:
            was_read.set()
        return used[0]

    def work() -> None:
        used[0] = 70
        assert was_read.wait(10)
        used[0] = 6

    assert peak_during(work, read) == 70


def test_work_that_takes_long_is_repeated_less_often_but_twice() -> None:
    from benchmarks.gpu.repeats import rates, repeat

    assert len(repeat(list, 10, budget_s=60)) == 10
    assert len(repeat(list, 10, budget_s=-1)) == 2
    assert rates([1.0, 4.0, 2.0], 8 << 30) == (4.0, 2.0)


def num_values(tensor: Any) -> int:
    """How many of the 256 values its bytes have."""
    import torch

    return len(tensor.reshape(-1).view(torch.uint8).unique())


def test_limits_are_measured_with_random_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU copies constant ones faster than those of any model."""
    import torch

    from benchmarks.gpu import limits
    from tests.support.gpu.machine import the_gpu

    copy, fingerprint = torch.Tensor.copy_, limits.device_fingerprint
    read: dict[str, list[int]] = {"copied": [], "fingerprinted": []}

    def noted_copy(target: Any, source: Any) -> Any:
        read["copied"].append(num_values(source))
        return copy(target, source)

    def noted_fingerprint(name: str, tensor: Any) -> str:
        read["fingerprinted"].append(num_values(tensor))
        return fingerprint(name, tensor)

    monkeypatch.setattr(torch.Tensor, "copy_", noted_copy)
    monkeypatch.setattr(limits, "device_fingerprint", noted_fingerprint)
    with the_gpu("cpu", tmp_path) as gpu:
        found = limits.measure(gpu, 2)
    assert min(found.values()) > 0
    assert len(read["copied"]) >= 4 * 3
    assert set(read["copied"] + read["fingerprinted"]) == {256}


def test_the_memory_saver_is_measured_with_random_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from engines.protocol import MemoryTag
    from tests.support.gpu import saver

    released: list[int] = []

    class KeptMemory:
        """Keeps the weights, and loses the cache, as one with a backup does."""

        def __init__(self, *_: Any, **options: Any) -> None:
            self.made: dict[MemoryTag, Any] = {}

        def allocate(self, tag: MemoryTag, layout: Any) -> list[Any]:
            self.made[tag] = torch.zeros(layout[0][0], dtype=torch.uint8)
            return [self.made[tag]]

        def release(self, tags: list[MemoryTag]) -> None:
            released.extend(num_values(self.made[tag]) for tag in tags)

        def resume(self, tags: list[MemoryTag]) -> None:
            if MemoryTag.KV_CACHE in tags:
                self.made[MemoryTag.KV_CACHE].zero_()

    monkeypatch.setattr(saver, "Memory", KeptMemory)
    monkeypatch.setattr(saver, "gpu_memory", lambda _: [SimpleNamespace(used_bytes=0)])
    saver.main("cpu", "0", 1 << 16, "backup", 2)
    rounds = json.loads(capsys.readouterr().out)["rounds"]
    assert released == [256] * 4, "weights and cache, twice"
    assert all(one["weights_kept"] and one["cache_is_zero"] for one in rounds)


def test_the_documentation_has_a_goal_for_each_family() -> None:
    from benchmarks.gpu.__main__ import FAMILIES

    text = (Path(__file__).parents[2] / "benchmarks/README.md").read_text()
    _, _, after = text.partition("| family | tensors |")
    rows = after.partition("\n\n")[0].splitlines()[2:]
    named = [family for row in rows for family in re.findall(r"`(\S+)`", row.split("|")[1])]
    assert sorted([*named, "limits"]) == sorted(FAMILIES)
