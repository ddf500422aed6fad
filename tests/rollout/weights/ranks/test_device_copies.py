"""Copies for the store beside handles, with a double of CUDA."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402

from engines.tensors import bulk_copy, torch_fingerprint  # noqa: E402
from rollout.weights.format.manifest import Manifest, TensorSpec  # noqa: E402
from rollout.weights.push.push import PushRequest  # noqa: E402
from rollout.weights.ranks.follower import Follower  # noqa: E402
from rollout.weights.ranks.leader import Leader  # noqa: E402
from rollout.weights.ranks.trainer_rank import TrainerRank  # noqa: E402
from rollout.weights.routes.route import EnginePlace  # noqa: E402
from tests.support import cuda_double  # noqa: E402
from tests.support.cuda_double import CudaDouble  # noqa: E402
from tests.support.still_server import HERE, StillServer, server_config  # noqa: E402

pytestmark = pytest.mark.torch
SHAPE, NUM_TENSORS = (16, 8), 6
NAMES = [f"layer.{number}" for number in range(NUM_TENSORS)]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaDouble:
    double = CudaDouble(["GPU-0"])
    double.install(monkeypatch.setattr)
    double.use(0)
    return double


class Trainer:
    """One process, whose weights are on the GPU of the engine; each tensor is a bucket."""

    def __init__(self, folder: Path) -> None:
        spec = [TensorSpec(name, "float32", SHAPE) for name in NAMES]
        engine = EnginePlace("engine", HERE, gpus=("GPU-0",))
        server = StillServer(Manifest.of(spec), fingerprints="sums", engines=[engine])
        weights = {"bucket_bytes": 512, "store": True, "shared_memory_path": str(folder)}
        self.rank = TrainerRank(server_config(**weights))
        self.alive: list[weakref.ref[torch.Tensor]] = []
        request = PushRequest(self._tensors(), 1)
        self.follower = Follower(self.rank, server, request)
        contents = request.contents(self.rank.config.weights.update)
        self.leader = Leader(server, self.follower, contents, may_stream=True, streams=True)
        self.follower.prepare(self.leader.decide([self.follower.ready()]))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, name in enumerate(NAMES):
            tensor = torch.full(SHAPE, float(number))
            self.alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    def make(self, index: int) -> bool:
        """Make and offer a bucket; whether it was the last."""
        share, pairs = self.follower.make(index)
        self.leader.join([share], pairs)
        return share.is_last

    def num_alive(self) -> int:
        gc.collect()
        return sum(one() is not None for one in self.alive)

    def close(self) -> None:
        self.follower.resources.close()
        self.rank.close()


@pytest.fixture
def trainer(cuda: CudaDouble, tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.close()


def test_a_bucket_is_copied_while_the_next_ones_are_pushed(
    cuda: CudaDouble, trainer: Trainer
) -> None:
    assert trainer.leader.end.routes == "cuda_ipc", "with auto, also from one process"
    for index in range(NUM_TENSORS):
        is_last = trainer.make(index)
        (stream,) = cuda_double.streams
        if not is_last:
            assert len(stream.waiting) == min(index + 1, 2), "nobody waited for the newest two"
            # The generator holds one more: that of the next bucket.
            assert trainer.num_alive() <= 3
    assert is_last
    assert sum(cuda.registered.values()) == trainer.rank.pool.num_bytes() > 0, "all are pinned"
    assert stream.waiting == [], "the trainer may change its tensors now"


def test_the_store_gets_whole_copies_that_nobody_has_hashed(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hashed(*_: object) -> str:
        raise AssertionError("bytes were hashed while the engines wait")

    monkeypatch.setattr(bulk_copy, "copy_and_hash", hashed)
    monkeypatch.setattr(torch_fingerprint, "bytes_fingerprint", hashed)
    for index in range(NUM_TENSORS):
        trainer.make(index)
    assert trainer.leader.copies is not None
    push = trainer.leader.copies.push(1)
    assert push is not None
    assert push.manifest.fingerprints == {}
    found = {}
    for bucket in push.buckets:
        for file in Path(bucket["path"]).glob("*.safetensors"):
            found |= load_file(file)
    for number, name in enumerate(NAMES):
        assert torch.equal(found[name], torch.full(SHAPE, float(number)))


def test_a_push_that_ends_early_waits_for_its_copies_before_their_memory_is_used_again(
    trainer: Trainer,
) -> None:
    trainer.make(0)
    trainer.make(1)
    (stream,) = cuda_double.streams
    trainer.follower.resources.close()
    assert stream.waiting == []
