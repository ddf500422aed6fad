"""What a push takes is what a plan computes from sizes alone."""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.fake.engine.fake_weights import write_checkpoint
from engines.protocol import TensorInfo
from rollout.config import RolloutConfig, Transport, WeightsConfig
from rollout.core.errors import ConfigError
from rollout.core.machine import Room
from rollout.runtime.preflight import check_before_launch, push_sizes, wrong_settings
from rollout.weights.push.push_memory import (
    PushMemory,
    PushSizes,
    push_memory,
    push_memory_text,
)
from rollout.weights.routes import buffers

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
QWEN3_30B_A3B = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def peaks_of(
    sizes: PushSizes, weights: WeightsConfig, *, ranks_per_host: int = 1
) -> dict[tuple[str, bool], PushMemory]:
    found = push_memory(sizes, weights, ranks_per_host=ranks_per_host)
    return {(one.route, one.is_streamed): one for one in found}


@pytest.mark.embedded
@pytest.mark.parametrize("config", [QWEN3_8B, QWEN3_30B_A3B], ids=["8B", "30B-A3B"])
def test_sizes_from_the_config_alone_are_those_of_the_model(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(written(tmp_path, config)), dtype=torch.bfloat16
        )
    tensors = [one.nbytes for one in model.state_dict().values()]
    sizes = push_sizes(str(tmp_path))
    assert sizes is not None
    assert sizes.largest_bytes == max(tensors)
    assert sizes.model_bytes == pytest.approx(sum(tensors), rel=1e-5)  # without norms of heads


@pytest.mark.parametrize(
    ("config", "model_gb", "bucket_gb"), [(QWEN3_8B, 16.4, 1.24), (QWEN3_30B_A3B, 61.1, 0.81)]
)
def test_peaks_of_real_models(
    tmp_path: Path, config: dict[str, Any], model_gb: float, bucket_gb: float
) -> None:
    """The embedding of the 8B model, and a layer's stacked experts, are larger than a bucket."""
    sizes = push_sizes(written(tmp_path, config))
    assert sizes is not None
    found = peaks_of(sizes, WeightsConfig(), ranks_per_host=8)
    gb = {
        name: (peaks.trainer_bytes / 1e9, peaks.engine_bytes / 1e9, peaks.least_shared_bytes / 1e9)
        for name, peaks in found.items()
    }
    eight = min(8 * bucket_gb, model_gb)
    assert gb["cuda_ipc", True] == pytest.approx((3 * bucket_gb, 0, 0), rel=0.01)
    assert gb["shared_memory", True] == pytest.approx((bucket_gb, 0, eight), rel=0.01)
    assert gb["shared_memory", False] == pytest.approx((bucket_gb, 0, model_gb), rel=0.01)
    assert gb["distributed", True] == pytest.approx((2 * bucket_gb, bucket_gb, 0), rel=0.01)


def test_experts_of_a_checkpoint_count_as_one_tensor_of_the_trainer(tmp_path: Path) -> None:
    parts = ("gate_proj", "up_proj", "down_proj")
    tensors = [
        TensorInfo(f"model.layers.0.mlp.experts.{expert}.{part}.weight", "float32", (10, 10))
        for expert in range(4)
        for part in parts
    ]
    folder = write_checkpoint(tmp_path, [*tensors, TensorInfo("norm", "float32", (10,))])
    assert push_sizes(str(folder)) == PushSizes(12 * 400 + 40, 8 * 400)


# -- measured -------------------------------------------------------------------------------------


class Measured:
    """Peaks of one push, made bucket by bucket as its engines ask."""

    def __init__(self) -> None:
        self.alive = self.most = self.most_in_files = 0

    def count(self, tensor: Any) -> None:
        self.alive += tensor.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor, self._drop, tensor.nbytes)

    def gathered(self, name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        """A name map that takes as much as a gather."""
        if tensor.is_meta:
            yield name, tensor
            return
        whole = tensor.clone()
        self.count(whole)
        yield name, whole

    def _drop(self, num_bytes: int) -> None:
        self.alive -= num_bytes


def measured(monkeypatch: pytest.MonkeyPatch, folder: Path, route: str, **options: Any) -> Measured:
    """A push of 24 tensors of 40 kB and two of 400 kB, in buckets of 100 kB."""
    torch = pytest.importorskip("torch")
    from rollout.weights.push.push import PushRequest
    from rollout.weights.ranks.follower import Follower
    from rollout.weights.ranks.leader import Leader
    from rollout.weights.ranks.trainer_rank import TrainerRank
    from rollout.weights.routes.route import EnginePlace
    from tests.support.cuda_double import CudaDouble
    from tests.support.still_server import HERE, StillServer, server_config

    found = Measured()
    if route == Transport.CUDA_IPC:
        double = CudaDouble(["GPU-0"])
        double.install(monkeypatch.setattr)
        double.use(0)
        note = double._note
        monkeypatch.setattr(
            double, "_note", lambda made, device: (found.count(made), note(made, device))
        )
    tensors = {f"t{number:02}": torch.ones(10_000) for number in range(24)}
    tensors |= {f"u{number}": torch.ones(100_000) for number in range(2)}
    engine = EnginePlace("engine", HERE, gpus=("GPU-0",) if route == Transport.CUDA_IPC else ())
    server = StillServer(fingerprints="", engines=[engine])
    weights = {"bucket_bytes": 100_000, "shared_memory_path": str(folder), "transport": route}
    rank = TrainerRank(server_config(**weights))
    named: Any = tensors
    if route == Transport.CUDA_IPC:
        from rollout.weights.ranks import follower as follower_module
        from rollout.weights.routes.rank_end import OwnGpu
        from rollout.weights.tensors.payload import ExportSettings

        gpu = OwnGpu("GPU-0", ExportSettings("", ""))
        monkeypatch.setattr(follower_module, "gpu_with", lambda named: gpu)
    request = PushRequest(named, 1, found.gathered)
    follower = Follower(rank, server, request)
    is_streamed = options.pop("is_streamed")
    contents = request.contents(rank.config.weights.update)
    leader = Leader(server, follower, contents, may_stream=is_streamed, streams=is_streamed)
    follower.prepare(leader.decide([follower.ready()]))
    is_last, index = False, 0
    while not is_last:
        share, pairs = follower.make(index)
        leader.join([share], pairs)
        is_last, index = share.is_last, index + 1
        del pairs
        found.most_in_files = max(found.most_in_files, rank.pool.num_bytes())
    follower.resources.close()
    rank.close()
    return found


SIZES = PushSizes(24 * 40_000 + 2 * 400_000, 400_000)
HEADERS = 8192 * 14  # one page each


@pytest.mark.torch
@pytest.mark.parametrize(
    ("route", "is_streamed"),
    [("cuda_ipc", True), ("shared_memory", True), ("shared_memory", False)],
)
def test_the_peaks_of_a_push_are_those_that_are_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, route: str, is_streamed: bool
) -> None:
    weights = WeightsConfig(bucket_bytes=100_000, transport=Transport(route))
    computed = peaks_of(SIZES, weights)[route, is_streamed]
    found = measured(monkeypatch, tmp_path, route, is_streamed=is_streamed)
    assert found.most == computed.trainer_bytes
    in_files = found.most_in_files - HEADERS, found.most_in_files
    assert in_files[0] <= computed.shared_memory_bytes
    assert in_files[1] >= computed.least_shared_bytes


@pytest.mark.torch
def test_a_push_works_with_the_least_shared_memory_that_is_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files of buckets of other sizes are removed when there is no more room."""
    weights = WeightsConfig(bucket_bytes=100_000, transport=Transport.SHARED_MEMORY)
    computed = peaks_of(SIZES, weights)["shared_memory", True]
    limit = computed.least_shared_bytes + 2 * 8192

    def room(path: Path) -> Room:
        used = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
        return Room(str(path), limit - used, 1 << 40)

    monkeypatch.setattr(buffers, "room_on", room)
    found = measured(monkeypatch, tmp_path, "shared_memory", is_streamed=True)
    assert computed.least_shared_bytes <= found.most_in_files <= limit
    assert limit < computed.shared_memory_bytes


@pytest.mark.parametrize(("transport", "is_refused"), [("shared_memory", True), ("auto", False)])
def test_64_mb_as_in_docker_are_found_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    transport: str,
    is_refused: bool,
) -> None:
    model = written(tmp_path, QWEN3_8B)
    weights = {"transport": transport, "shared_memory_path": str(tmp_path)}
    server = {
        "model_path": model,
        "groups": {"main": {"engine": {"kind": "fake"}}},
        "weights": weights,
    }
    config = RolloutConfig.from_dict({"log_dir": str(tmp_path), "servers": {"policy": server}})
    assert wrong_settings(config) == []
    docker = SimpleNamespace(f_blocks=16384, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: docker)
    said = (
        "servers.policy.weights.shared_memory_path = .*: it has 64 MiB in all, and a push through "
        "it takes 2.32 GiB or more .*: in Docker, give --shm-size=17g; in Kubernetes, mount"
    )
    if is_refused:
        with pytest.raises(ConfigError, match=said):
            check_before_launch(config)
    else:
        check_before_launch(config)
        assert re.search(said, caplog.text)


@pytest.mark.parametrize("encoding", ["delta", "auto"])
def test_copies_for_deltas_are_the_model_once_more_where_rank_0_sends(encoding: str) -> None:
    sizes, weights = PushSizes(1000, 100), WeightsConfig(encoding=encoding, bucket_bytes=100)
    for ranks, copies in ((1, 1000 if encoding == "delta" else 0), (8, 0)):
        found = peaks_of(sizes, weights, ranks_per_host=ranks)
        assert {name: one.copies_bytes for name, one in found.items()} == {
            ("cuda_ipc", True): 0,
            ("shared_memory", True): copies,
            ("shared_memory", False): copies,
            ("distributed", True): 1000,
            ("by_value", True): 1000,
        }
    assert "1000 B of copies on rank 0" in push_memory_text(found["by_value", True])
    by_disk = WeightsConfig(encoding=encoding, transport="disk", disk_path="/ckpt/{version}")
    assert peaks_of(sizes, by_disk)["disk", False].copies_bytes == 1000
