"""A push of a generator never holds more than two buckets, whatever carries them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollout
from engines.fake import FakeEngine
from engines.fake.engine.fake_weights import write_checkpoint
from engines.fake.http_fake import HttpFakeLauncher
from engines.launch import EngineSpec
from engines.protocol import Endpoint, TensorInfo
from rollout.config import RolloutConfig
from rollout.core.errors import WeightMismatch
from rollout.runtime.local import launch_local

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.embedded

TENSORS = tuple(TensorInfo(f"layers.{index}.weight", "float32", (25,)) for index in range(40))
TENSOR_BYTES, BUCKET_BYTES = 100, 500


def make_engine(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return FakeEngine(
        spec.engine_id, endpoint=endpoint, model_path=spec.model_path, tensors=TENSORS
    )


class Trainer:
    """Gathers tensors one by one, and counts the bytes of those that are alive."""

    def __init__(self) -> None:
        self.alive = self.most = 0

    def tensors(self) -> Iterator[tuple[str, Any]]:
        for number, info in enumerate(TENSORS):
            tensor = torch.full(info.shape, float(number))
            self.alive += tensor.nbytes
            self.most = max(self.most, self.alive)
            weakref.finalize(tensor, self._drop, tensor.nbytes)
            yield info.name, tensor
            del tensor

    def _drop(self, num_bytes: int) -> None:
        self.alive -= num_bytes


@pytest.mark.parametrize("transport", ["shared_memory", "by_value"])
def test_at_most_two_buckets_of_a_generator_are_alive(tmp_path: Path, transport: str) -> None:
    server = {
        "model_path": str(write_checkpoint(tmp_path / "model", TENSORS)),
        "groups": {"main": {"num_engines": 2, "engine": {"kind": "embedded"}}},
        "weights": {"bucket_bytes": BUCKET_BYTES, "transport": transport},
    }
    config = RolloutConfig.from_dict({"log_dir": str(tmp_path), "servers": {"policy": server}})
    trainer = Trainer()
    with (
        launch_local(config, launcher=HttpFakeLauncher(make_engine)) as deployment,
        rollout.connect(Path(config.log_dir) / config.run_id)["policy"].pusher() as pusher,
    ):
        for version in (1, 2):
            assert pusher.push(trainer.tensors()).weight_version == version
        assert deployment["policy"].weight_version == 2
        # And the tensor that begins the next bucket.
        assert trainer.most <= 2 * BUCKET_BYTES + TENSOR_BYTES < len(TENSORS) * TENSOR_BYTES / 3
        assert trainer.alive <= BUCKET_BYTES


@pytest.mark.parametrize("transport", ["shared_memory", "by_value"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "copied"])
def test_one_process_takes_a_generator_bucket_by_bucket_too(
    tmp_path: Path, transport: str, stream: bool
) -> None:
    server = {
        "model_path": str(write_checkpoint(tmp_path / "model", TENSORS)),
        "groups": {"main": {"num_engines": 2, "engine": {"kind": "embedded"}}},
        "weights": {"bucket_bytes": BUCKET_BYTES, "transport": transport, "stream": stream},
    }
    config = RolloutConfig.from_dict({"log_dir": str(tmp_path), "servers": {"policy": server}})
    trainer = Trainer()
    with launch_local(config, launcher=HttpFakeLauncher(make_engine)) as deployment:
        policy = deployment["policy"]
        for version in (1, 2):
            report = policy.push(trainer.tensors()).result(60)
            assert report.weight_version == version
        assert trainer.most <= 2 * BUCKET_BYTES + TENSOR_BYTES
        assert trainer.alive <= BUCKET_BYTES

        def wrong() -> Iterator[tuple[str, Any]]:
            yield "layers.0.weigth", torch.ones(25)

        with pytest.raises(WeightMismatch, match=r"no tensor 'layers.0.weigth'; did you mean"):
            policy.push(wrong())
        assert policy.status().result(30).gate == "open"
