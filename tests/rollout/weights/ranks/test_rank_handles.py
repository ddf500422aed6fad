"""Two ranks push CUDA IPC handles to an engine of two tensor-parallel ranks.

The engines are fakes, CUDA is a double (``tests/support/cuda_double.py``), and a rank is a thread.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from engines.embedded.weights.payload_tensors import read_payload
from engines.fake import FakeEngine
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.fake.http_fake import HttpFakeLauncher
from engines.launch import EngineSpec
from engines.protocol import Endpoint, ServerInfo
from engines.vllm_plugin.pushed_handles import tensors_behind
from rollout.config import Transport
from rollout.core.errors import ConfigError, PhaseFailed
from rollout.core.types import StepReport
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.handle.pusher import Pusher
from rollout.runtime.local import launch_local
from rollout.weights.ranks import protocol
from rollout.weights.ranks.link import RankLink
from rollout.weights.tensors.payload import flattened_bucket
from tests.support import cuda_double, served_fakes
from tests.support.cuda_double import CudaDouble
from tests.support.thread_ranks import Messages
from tests.support.vllm_stub.stub import StubVllm
from tests.support.vllm_stub.wire import ServedStubs

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(120)]
# As torch and NVML name the GPUs of the fakes: the engine's rank 0 is on GPU 0.
UUIDS = ["1", "0", "9"]


class TwoRanks(FakeEngine):
    """Opens each entry as its tensor-parallel rank would.

    Attributes:
        entries: of each update, the tensors that each rank finds.
        devices: of each update, the index of each rank's GPU.
    """

    entries: list[list[dict[str, torch.Tensor]]]
    devices: list[list[int]]

    async def server_info(self) -> ServerInfo:
        info = await super().server_info()
        return replace(info, raw={**info.raw, "tp_size": 2})

    async def update_weights_from_tensor(
        self, serialized_named_tensors: Sequence[str], **more: Any
    ) -> None:
        cuda_double.opened.clear()
        found = [dict(read_payload(one, more["load_format"])) for one in serialized_named_tensors]
        self.entries.append(found)
        self.devices.append(list(cuda_double.opened))
        by_value = base64.b64encode(flattened_bucket(list(found[0].items()))).decode()
        await super().update_weights_from_tensor([by_value], **more)


@dataclass
class Trainer:
    """Two ranks, each a thread with a GPU of its own."""

    run: DeploymentHandle
    cuda: CudaDouble
    gpus: Sequence[int]
    messages: Messages = field(default_factory=Messages)

    def __post_init__(self) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in self.gpus]
        policy = self.run["policy"]
        for thread, gpu in zip(self._threads, self.gpus, strict=True):
            thread.submit(self.cuda.use, gpu).result()

        def pusher(rank: int) -> Pusher:
            link = RankLink(rank, len(self.gpus), self.messages)
            return Pusher(policy._pushes.server, link, timeout_s=10)

        self.pushers = self._each(pusher)

    def push(self, tensors: Callable[[int], Any]) -> list[StepReport | Exception]:
        def one(rank: int) -> StepReport | Exception:
            try:
                return self.pushers[rank].push(tensors(rank))
            except Exception as error:
                return error

        return self._each(one)

    def close(self) -> None:
        self._each(lambda rank: self.pushers[rank].close())
        for thread in self._threads:
            thread.shutdown()

    def _each(self, do: Callable[[int], Any]) -> list[Any]:
        futures = [thread.submit(do, rank) for rank, thread in enumerate(self._threads)]
        return [future.result(60) for future in futures]


def tensors_of(rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Other values on each rank, which the ranks of a trainer never have.

    An iterator, which is copied to the rank's GPU.
    """
    for one in DEFAULT_TENSORS:
        yield one.name, torch.full(one.shape, rank + 1.0, dtype=getattr(torch, one.dtype))


@pytest.fixture(autouse=True)
def no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values show which rank a handle is of, so each rank has its own."""
    monkeypatch.setattr(protocol, "check_replicas", lambda answers: None)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaDouble:
    double = CudaDouble(UUIDS)
    double.install(monkeypatch.setattr)
    return double


@pytest.fixture
def engines() -> list[TwoRanks]:
    return []


@pytest.fixture
def run(
    cuda: CudaDouble, engines: list[TwoRanks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DeploymentHandle]:
    """One engine on GPUs 0 and 1."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def make(spec: EngineSpec, endpoint: Endpoint) -> TwoRanks:
        engine = TwoRanks(spec.engine_id, endpoint=endpoint, model_path=spec.model_path)
        engine.entries, engine.devices = [], []
        engines.append(engine)
        return engine

    groups = {"main": {"num_engines": 1, "engine": {"kind": "fake", "gpus": 2}}}
    server = {"weights": {"bucket_bytes": 64}, "verify": {"fingerprints": False}}
    config = served_fakes.config(tmp_path, groups, server=server)
    with launch_local(config, launcher=HttpFakeLauncher(make)) as deployment:
        yield deployment


@pytest.fixture
def trainer_on(run: DeploymentHandle, cuda: CudaDouble) -> Iterator[Callable[..., Trainer]]:
    """Makes a trainer with ranks on these GPUs."""
    made: list[Trainer] = []

    def make(*gpus: int) -> Trainer:
        made.append(Trainer(run, cuda, gpus))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_each_tensor_parallel_rank_gets_the_bucket_of_the_rank_on_its_gpu(
    trainer_on: Callable[..., Trainer], cuda: CudaDouble, engines: list[TwoRanks]
) -> None:
    # Rank 0 of the trainer is on the GPU of rank 1 of the engine.
    trainer = trainer_on(0, 1)
    said = trainer.push(tensors_of)
    assert [getattr(one, "weight_version", one) for one in said] == [1, 1]
    (engine,) = engines
    assert len(engine.entries) > 1
    for entries in engine.entries:
        values = [{float(one.flatten()[0]) for one in entry.values()} for entry in entries]
        assert values == [{2.0}, {1.0}]
    # The engine finds the GPU by its UUID: entry 0 is on GPU "0", which torch counts second here.
    assert engine.devices == [[1, 0]] * len(engine.entries)
    names = [name for entries in engine.entries for name in entries[0]]
    assert names == [one.name for one in DEFAULT_TENSORS]
    assert cuda.num_collects > 0
    assert all(pusher.rank.pool.num_bytes() == 0 for pusher in trainer.pushers)


def test_memory_of_a_bucket_is_kept_on_all_ranks_until_the_engine_has_answered(
    trainer_on: Callable[..., Trainer], engines: list[TwoRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    collected_at: list[int] = []
    monkeypatch.setattr(
        torch.cuda, "ipc_collect", lambda: collected_at.append(len(engines[0].entries))
    )
    trainer = trainer_on(0, 1)
    said = trainer.push(tensors_of)
    assert [getattr(one, "weight_version", one) for one in said] == [1, 1]
    num_buckets = len(engines[0].entries)
    # Each rank frees bucket k once k + 1 were applied, and the rest at the end.
    at_the_end = [at for at in collected_at if at == num_buckets]
    assert len(at_the_end) >= 2
    for freed, at in enumerate(sorted(collected_at)[: 2 * (num_buckets - 2)]):
        assert at >= freed // 2 + 1


def test_a_rank_on_another_gpu_leaves_shared_memory(
    trainer_on: Callable[..., Trainer], engines: list[TwoRanks]
) -> None:
    trainer = trainer_on(0, 2)
    ways = trainer.push(lambda rank: dict(tensors_of(0)))
    loaded = [call.operation for call in engines[0].calls]
    assert [getattr(one, "weight_version", one) for one in ways] == [1, 1]
    assert "update_weights_from_disk" in loaded
    assert engines[0].entries == []


EXPANDABLE = "expandable_segments:True,max_split_size_mb:512"


def test_what_is_pushed_is_in_no_expandable_segment(
    trainer_on: Callable[..., Trainer], cuda: CudaDouble, engines: list[TwoRanks]
) -> None:
    """A handle of one is a descriptor, and the engine ends where it may not take that."""
    cuda.settings = EXPANDABLE
    said = trainer_on(0, 1).push(tensors_of)
    assert [getattr(one, "weight_version", one) for one in said] == [1, 1]
    assert engines[0].devices == [[1, 0]] * len(engines[0].entries)
    # The trainer's own settings are back, with those that torch resets if they are left out.
    switched_off = "max_split_size_mb:512,expandable_segments:False"
    assert set(cuda.all_settings) == {switched_off, EXPANDABLE}
    assert cuda.settings == EXPANDABLE


@pytest.mark.parametrize("has_getter", [True, False])
def test_the_allocator_is_asked_once_in_a_push_not_for_each_bucket(
    trainer_on: Callable[..., Trainer],
    cuda: CudaDouble,
    engines: list[TwoRanks],
    monkeypatch: pytest.MonkeyPatch,
    has_getter: bool,
) -> None:
    """Without the getter, as in torch 2.11, an answer is a copy of all that the allocator knows."""
    if not has_getter:
        monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    elif not cuda_double.HAS_ACCELERATOR_SETTINGS:
        pytest.skip("this torch has no getter")
    trainer = trainer_on(0, 1)
    # The trainer changes them between the pushes.
    for version, settings in enumerate([EXPANDABLE, "", EXPANDABLE], 1):
        cuda.settings = settings
        cuda.num_snapshots, cuda.all_settings = 0, []
        said = trainer.push(tensors_of)
        assert [getattr(one, "weight_version", one) for one in said] == [version, version]
        assert cuda.num_snapshots == (0 if has_getter else 2), "one on each rank"
        assert cuda.settings == settings
        assert bool(cuda.all_settings) is bool(settings)
    (engine,) = engines
    assert len(engine.entries) > 3 * 2, "each push has several buckets"
    assert engine.devices == [[1, 0]] * len(engine.entries)


def test_where_such_segments_cannot_be_switched_off_the_push_goes_by_shared_memory(
    trainer_on: Callable[..., Trainer],
    cuda: CudaDouble,
    engines: list[TwoRanks],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda.settings = EXPANDABLE
    cuda.set_error = RuntimeError("no such setting")
    trainer = trainer_on(0, 1)
    said = trainer.push(tensors_of)
    assert [getattr(one, "weight_version", one) for one in said] == [1, 1]
    assert engines[0].entries == []
    assert "update_weights_from_disk" in [call.operation for call in engines[0].calls]
    assert "expandable_segments, and they cannot be switched off" in caplog.text


class VllmWithWorkers(StubVllm):
    """Its two workers open handles with the plugin's code, if they are on GPUs.

    Attributes:
        opened: of each update, what each worker finds, and the index of its GPU.
    """

    is_on_gpus = True
    num_ranks = 2
    opened: list[list[tuple[int, dict[str, torch.Tensor]]]]

    async def rollout_state(self) -> Any:
        return {**await super().rollout_state(), "opens_handles": self.is_on_gpus}

    def load(self, info: Any) -> None:
        if "path" in info:
            super().load(info)
            return
        found = []
        for index in (1, 0):  # torch counts the engine's GPUs in the other order here
            cuda_double.opened.clear()
            device = torch.device("cuda", index)
            tensors = tensors_behind(info["layout"], info["handles"], device)
            found.append((cuda_double.opened[0], tensors))
        self.opened.append(found)
        super().load({"content": base64.b64encode(save(found[0][1])).decode()})


def launched_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: list[VllmWithWorkers], **more: Any
) -> DeploymentHandle:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    engine = {"kind": "vllm", "python": sys.executable, "gpus": 2}
    server = {"weights": {"bucket_bytes": 64, **more}, "verify": {"fingerprints": False}}
    config = served_fakes.config(tmp_path, {"main": {"engine": engine}}, server=server)

    def make(spec: EngineSpec, endpoint: Endpoint) -> VllmWithWorkers:
        made = VllmWithWorkers(spec.engine_id, endpoint=endpoint)
        made.opened = []
        engines.append(made)
        return made

    return launch_local(config, launcher=ServedStubs(make))


@pytest.mark.parametrize("transport", ["auto", "cuda_ipc"])
def test_each_worker_of_vllm_gets_the_bucket_of_the_rank_on_its_gpu(
    cuda: CudaDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    engines: list[VllmWithWorkers] = []
    with launched_vllm(tmp_path, monkeypatch, engines, transport=transport) as deployment:
        trainer = Trainer(deployment, cuda, (0, 1))
        said = trainer.push(tensors_of)
        trainer.close()
    assert [getattr(one, "weight_version", one) for one in said] == [1, 1]
    (engine,) = engines
    assert len(engine.opened) > 1
    for workers in engine.opened:
        values = [
            (gpu, {float(one.flatten()[0]) for one in each.values()}) for gpu, each in workers
        ]
        assert values == [(1, {2.0}), (0, {1.0})]
    names = [name for workers in engine.opened for name in workers[0][1]]
    assert names == [one.name for one in DEFAULT_TENSORS]


def test_a_vllm_engine_that_opens_no_handles_gets_shared_memory(
    cuda: CudaDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmWithWorkers, "is_on_gpus", False)
    engines: list[VllmWithWorkers] = []
    with launched_vllm(tmp_path, monkeypatch, engines) as deployment:
        trainer = Trainer(deployment, cuda, (0, 1))
        said = trainer.push(tensors_of)
        trainer.close()
    assert [getattr(one, "weight_version", one) for one in said] == [1, 1]
    assert engines[0].operations().count("update_weights_from_disk") > 1
    refusal = "cuda_ipc does not reach engine main-0: its workers open no CUDA IPC handles"
    with pytest.raises(PhaseFailed, match=refusal):
        launched_vllm(tmp_path / "named", monkeypatch, engines, transport="cuda_ipc")


def test_cuda_ipc_that_was_named_is_refused_before_anything_is_sent(
    run: DeploymentHandle, trainer_on: Callable[..., Trainer], engines: list[TwoRanks]
) -> None:
    trainer = trainer_on(0, 1)
    for pusher in trainer.pushers:
        config = pusher.rank.config
        weights = config.weights.model_copy(update={"transport": Transport.CUDA_IPC})
        pusher.rank.config = config.model_copy(update={"weights": weights})
    said = trainer.push(lambda rank: dict(tensors_of(0)))  # tensors in host memory
    assert all(isinstance(one, ConfigError) for one in said), said
    assert "no rank has its tensors on GPU GPU-0" in str(said[0])
    assert run["policy"].status().result(30).gate == "open"
    operations = [call.operation for call in engines[0].calls]
    assert "begin_weight_update" not in operations
    said = trainer.push(tensors_of)
    assert [getattr(one, "weight_version", one) for one in said] == [1, 1]
