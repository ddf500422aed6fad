"""The parts of the plugin that need no vLLM; the others are tested in ``vllm_cpu/``."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from engines.vllm_plugin.checkpoint_names import parts_of, tied_names
from engines.vllm_plugin.pushed_files import tensors_at, tensors_in
from engines.vllm_plugin.worker import CheckedWorker, WorkerExtension

pytestmark = pytest.mark.torch

OF_FILE = "file:///tmp/vllm_dist_1"


def config(num_ranks: int, num_stages: int = 1, quant_config: str | None = None) -> Any:
    parallel = SimpleNamespace(world_size=num_ranks, pipeline_parallel_size=num_stages)
    return SimpleNamespace(parallel_config=parallel, quant_config=quant_config)


ONE_RANK, TWO_STAGES = config(1), config(2, num_stages=2)


class Attention(torch.nn.Module):
    """As vLLM joins three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = torch.nn.Linear(4, 8)
        self.qkv_proj.output_sizes = [4, 2, 2]


class Model(torch.nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.embed = torch.nn.Embedding(8, 4)
        self.embed.org_vocab_size = 5  # vLLM pads to a multiple of 64
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def test_joined_layers_and_padding_are_undone() -> None:
    model = Model()
    parts = {part.name: part for part in parts_of(model, ONE_RANK)}
    joined = model.attention.qkv_proj.weight
    assert parts.keys() == {
        *(f"attention.{one}_proj.{leaf}" for one in "qkv" for leaf in ("weight", "bias")),
        "embed.weight",
    }
    assert torch.equal(parts["attention.k_proj.weight"].tensor, joined[4:6])
    assert parts["attention.k_proj.weight"].tensor.data_ptr() == joined[4:].data_ptr()
    assert parts["attention.v_proj.bias"].layer == "attention.qkv_proj"
    assert parts["embed.weight"].tensor.shape == (5, 4)
    assert all(part.is_known for part in parts.values())
    assert tied_names(model) == {"head.weight": "embed.weight"}


class Renamed(Model):
    hf_to_vllm_mapper = SimpleNamespace(orig_to_new_prefix={"decoder.": "model.decoder."})


NAMES_OF_VLLM = pytest.mark.parametrize(
    ("model", "vllm_config"),
    [
        (Model, config(2)),
        (Model, config(4, num_stages=2)),
        (Model, config(1, quant_config="fp8")),
        (Renamed, ONE_RANK),
    ],
    ids=["two ranks", "two ranks in each stage", "quantised", "renamed"],
)


@NAMES_OF_VLLM
def test_elsewhere_the_names_are_vllms(model: Any, vllm_config: Any) -> None:
    parts = parts_of(model(), vllm_config)
    assert "attention.qkv_proj.weight" in {part.name for part in parts}
    assert not any(part.is_known for part in parts)


def worker_with(model: Model, vllm_config: Any) -> WorkerExtension:
    worker: Any = WorkerExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.vllm_config = vllm_config
    worker.device = torch.device("cpu")
    return worker  # type: ignore[no-any-return]


@NAMES_OF_VLLM
def test_a_worker_lists_no_tensors_under_names_or_shapes_of_vllms_own(
    model: Any, vllm_config: Any
) -> None:
    worker = worker_with(model(), vllm_config)
    assert worker.rollout_manifest() == []
    assert "attention.qkv_proj.weight" in worker.rollout_fingerprints()["checksums"]


@pytest.mark.parametrize("vllm_config", [ONE_RANK, TWO_STAGES], ids=["the model", "a stage"])
def test_a_worker_that_has_whole_tensors_lists_those_of_the_checkpoint(vllm_config: Any) -> None:
    listed = {one["name"]: one for one in worker_with(Model(), vllm_config).rollout_manifest()}
    assert listed["embed.weight"]["shape"] == [5, 4]
    assert listed["attention.k_proj.weight"]["shape"] == [2, 4]
    assert listed["head.weight"]["is_tied"]


def test_a_worker_on_a_gpu_proves_by_sums_with_one_copy_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model()
    model.large = torch.nn.Linear(4096, 1024)
    worker = worker_with(model, ONE_RANK)
    worker.device = torch.device("cuda", 0)
    copies: list[int] = []
    copy = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.nbytes)
        return copy(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    found = worker.rollout_fingerprints()
    assert len(copies) == 1
    assert copies[0] < found["num_bytes"] / 16
    assert {text.partition(":")[0] for text in found["checksums"].values()} == {"sums"}
    worker.weight_transfer_engine = SimpleNamespace(
        broadcasts=SimpleNamespace(groups=SimpleNamespace(names=list))
    )
    assert worker.rollout_state()["fingerprints"] == "sums"


def test_the_files_of_a_folder_are_one_bucket(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4.0)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(2, 3, dtype=torch.bfloat16)}, tmp_path / "2.safetensors")
    found = tensors_at(str(tmp_path))
    assert torch.equal(found["a"], torch.arange(4.0))
    assert found["b"].dtype is torch.bfloat16
    assert found["b"].shape == (2, 3)
    save_file({"a": torch.ones(1)}, tmp_path / "3.safetensors")
    with pytest.raises(ValueError, match=r"two files in .* hold tensor 'a'"):
        tensors_at(str(tmp_path))


def test_a_file_may_travel_in_the_request() -> None:
    tensors = {"a": torch.arange(4.0), "b": torch.ones(3, dtype=torch.int8)}
    found = tensors_in(base64.b64encode(save(tensors)).decode())
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_what_is_no_safetensors_file_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no safetensors at .*nowhere"):
        tensors_at(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="the pushed content is not base64"):
        tensors_in("%%%")
    whole = save({"a": torch.ones(4)})
    with pytest.raises(ValueError, match="tensor 'a' ends at byte 16"):
        tensors_in(base64.b64encode(whole[:-4]).decode())


class Vllm:
    """A worker that records its calls."""

    def __init__(self, distributed_init_method: str) -> None:
        self.distributed_init_method = distributed_init_method
        self.asked: list[Any] = []
        self.weight_transfer_engine = SimpleNamespace(is_lost=False)
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self._weight_update_active = True

    def sleep(self, level: int = 1) -> None:
        self.asked.append(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.asked.append(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        self.asked.append(tags)

    def start_weight_update(self) -> None:
        self.asked.append("start")

    def finish_weight_update(self) -> None:
        raise ValueError("a part of a layer was not pushed")


class Worker(CheckedWorker, WorkerExtension, Vllm):
    pass


def test_ranks_meet_by_a_file_beside_the_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    assert Worker(distributed_init_method=OF_FILE).distributed_init_method == OF_FILE
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/dev/shm/mine")
    worker = Worker(distributed_init_method=OF_FILE)
    assert worker.distributed_init_method == "file:///dev/shm/mine/vllm_dist_1"
    over_tcp = "tcp://127.0.0.1:4000"
    assert Worker(distributed_init_method=over_tcp).distributed_init_method == over_tcp


def test_an_update_of_released_weights_never_reaches_vllm() -> None:
    worker = Worker(distributed_init_method=OF_FILE)
    worker.sleep(1)
    with pytest.raises(RuntimeError, match=r"call /wake_up\?tags=weights first"):
        worker.start_weight_update()
    assert worker.asked == [1]
    worker.wake_up(["weights"])
    worker.start_weight_update()
    assert worker.released_tags == {"kv_cache"}
    worker.wake_up()
    assert worker.released_tags == frozenset()


def test_an_update_of_weights_that_a_kernel_has_packed_never_reaches_vllm() -> None:
    """vLLM takes such a weight out of its layer; a layer that has no weight is another thing."""
    worker = Worker(distributed_init_method=OF_FILE)
    worker.model.append(torch.nn.LayerNorm(2, elementwise_affine=False))
    linear = worker.model[0]
    linear.quant_method = object()
    worker.start_weight_update()
    linear.weight = None
    with pytest.raises(RuntimeError, match="vLLM packs the weight of 0 where no update reaches it"):
        worker.start_weight_update()
    assert worker.asked == ["start"]


def test_only_a_release_without_a_backup_loses_the_weights() -> None:
    worker = Worker(distributed_init_method=OF_FILE)
    worker.sleep(1)
    worker.wake_up()
    worker.discard(("kv_cache",))
    assert not worker.weight_transfer_engine.is_lost
    worker.wake_up()
    worker.sleep(2)
    assert worker.weight_transfer_engine.is_lost


def test_a_session_whose_end_fails_is_closed() -> None:
    worker = Worker(distributed_init_method=OF_FILE)
    with pytest.raises(ValueError, match="a part of a layer"):
        worker.finish_weight_update()
    assert not worker._weight_update_active
