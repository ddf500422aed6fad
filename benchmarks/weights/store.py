"""The DRAM store: write, restore, and the same load from disk.

A row of ``restore_*`` or ``disk_*`` ends when the tensors are in the memory of an engine, loaded by
the embedded engine's code; in rows of ``*_safe_open`` they are loaded as SGLang does it, with
``safe_open`` and a copy.

The tensors of ``restore_*`` are verified: in ``restore_local`` by the engine while it copies them,
in the others before the load.  The tensors of ``disk_*`` are not verified, except those of
``disk_warm_verified``, which are hashed after the load.  In ``half_remote`` half of the units are
on another node, that is, an agent in another process, and come over TCP; in ``three_peers`` three
quarters come from three such nodes; in ``half_mooncake`` half of the units come by Mooncake's
TransferEngine, where that is installed.

Rows of ``node_*`` are writes over TCP to a node whose memory the server's process does not map;
here it is a thread.  They are of whole tensors, and of deltas of a push that changed this share of
the elements.  The seconds include the fingerprints of all whole tensors there, but not the
trainer's comparison, which is made for the engines.

The environment variables ``BENCH_DISK`` and ``BENCH_SHM`` name other folders for the checkpoint and
for the store, such as a tmpfs with huge pages.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import Rows
from benchmarks.weights.clock import Row, rate
from benchmarks.weights.delta import DENSITIES, change
from rollout.core.errors import WeightsUnavailable
from rollout.weights.format.encoding import BegunPush
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.store.coordinator import Coordinator
from rollout.weights.store.delta_chain import DeltaChain
from rollout.weights.store.node.agent import AgentSettings, StoreAgent
from rollout.weights.store.node.assembly import AssemblyRequest
from rollout.weights.store.transfer.mooncake import open_mooncake
from rollout.weights.store.transfer.rdma import RdmaTransfer
from rollout.weights.store.transfer.unit_client import AgentClient
from rollout.weights.store.transfer.unit_server import AgentServer
from rollout.weights.tensors.delta_base import DeltaBase, DeltaEncoder
from rollout.weights.tensors.sources import Pairs

SHAPES = ("dense", "experts")
SHARED_MEMORY = os.environ.get("BENCH_SHM", "/dev/shm")


def manifest_of(shape: str, num_bytes: int) -> Manifest:
    """About ``num_bytes`` of bfloat16: layers of a dense model, or 128 experts per layer."""
    specs: list[TensorSpec] = []
    per_layer = 64 << 20
    for layer in range(max(1, num_bytes // per_layer)):
        at = f"model.layers.{layer}"
        if shape == "dense":
            specs += [
                TensorSpec(f"{at}.{part}.weight", "bfloat16", (4096, 2048))
                for part in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
            ]
        else:
            specs += [
                TensorSpec(f"{at}.mlp.experts.{expert}.{part}.weight", "bfloat16", (128, 1024))
                for expert in range(128)
                for part in ("gate_up_proj", "down_proj")
            ]
    return Manifest.of(specs)


class Model:
    """Tensors of a trainer, and the memory of an engine into which they are loaded."""

    def __init__(self, manifest: Manifest) -> None:
        import torch

        from benchmarks.weights.holder import Holder, allocated
        from engines.embedded.weights.model_weights import ModelWeights
        from engines.tensors.torch_fingerprint import fingerprints

        self.manifest = manifest
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            name: torch.empty(spec.shape, dtype=torch.bfloat16).normal_(generator=generator)
            for name, spec in manifest.tensors.items()
        }
        self.engine = allocated(
            {name: (tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()}
        )
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.weights = ModelWeights(Holder(self.engine))
        self.fingerprints = fingerprints(self.tensors)

    def contents(self) -> Iterator[tuple[str, Any]]:
        import torch

        for name, tensor in self.tensors.items():
            yield name, memoryview(tensor.view(torch.uint8).reshape(-1).numpy())

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.tensors, folder / "model.safetensors")

    def load(self, folder: Path) -> None:
        """Load as the embedded engine does."""
        from engines.embedded.weights.disk_update import update_from_disk

        update_from_disk(self.weights, str(folder))

    def load_and_verify(self, folder: Path) -> None:
        self.load(folder)
        assert self.weights.checksum()[0] == self.fingerprints

    def load_by_safe_open(self, folder: Path) -> None:
        """Load as SGLang does."""
        from safetensors import safe_open

        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    self.engine[name].copy_(file.get_tensor(name))

    def check(self) -> None:
        """Assert that the engine has the trainer's tensors, and zero it for the next load."""
        import torch

        assert all(torch.equal(self.engine[name], tensor) for name, tensor in self.tensors.items())
        for tensor in self.engine.values():
            tensor.zero_()


@contextmanager
def remote_agent(
    node: str, base: Path, rdma: RdmaTransfer | None
) -> Iterator[tuple[AgentClient, int]]:
    """A client of an agent in another process, and the pid of that process."""
    transfer = "mooncake" if rdma else "tcp"
    peer = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.weights.peer", node, str(base), "bench", transfer],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    try:
        host, port = json.loads(peer.stdout.readline())
        yield AgentClient(node, (host, port), rdma=rdma), peer.pid
    finally:
        peer.stdin.close()
        peer.wait(30)
        peer.stdout.close()


def coordinator_of(agents: Mapping[str, Any]) -> Coordinator:
    return Coordinator("bench", agents, replicas=1, unit_bytes=64 << 20, segment_bytes=1 << 30)


def measure(num_bytes: int, repeats: int) -> dict[str, Any]:
    """Rows by the shape of the model."""
    import torch

    torch.set_num_threads(1)
    return {
        shape: _measure(Model(manifest_of(shape, num_bytes)), repeats, Rows(f"store.{shape}"))
        for shape in SHAPES
    }


def _measure(model: Model, repeats: int, rows: Rows) -> Rows:
    gc.freeze()  # as agents and engines do after their start
    with ExitStack() as stack:
        base = Path(tempfile.mkdtemp(prefix="rollout-bench-", dir=SHARED_MEMORY))
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        here = StoreAgent(AgentSettings("here", str(base / "local"), "bench", spare_bytes=0))
        stack.callback(here.close, clear=True)
        _local(model, coordinator_of({"here": here}), repeats, rows)
    rows["restore_half_remote"] = _remote(model, repeats)
    rows["restore_three_peers"] = _remote(model, repeats, num_peers=3)
    if rdma := _mooncake():
        rows["restore_half_mooncake"] = _remote(model, repeats, rdma)
    _disk(model, repeats, rows)
    _deltas(model, repeats, rows)
    return rows


def _mooncake() -> RdmaTransfer | None:
    try:
        return open_mooncake("127.0.0.1")
    except WeightsUnavailable:
        return None


def _remote(
    model: Model, repeats: int, rdma: RdmaTransfer | None = None, *, num_peers: int = 1
) -> Row:
    with ExitStack() as stack:
        base = Path(tempfile.mkdtemp(prefix="rollout-bench-", dir=SHARED_MEMORY))
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        names = [f"peer-{number}" for number in range(num_peers)]
        peers = {name: stack.enter_context(remote_agent(name, base / name, rdma)) for name in names}
        here = StoreAgent(AgentSettings("here", str(base / "here"), "bench", spare_bytes=0))
        stack.callback(here.close, clear=True)
        clients = {name: client for name, (client, _) in peers.items()}
        coordinator = coordinator_of({"here": here, **clients})
        coordinator.write(1, model.manifest, [model.contents()])
        row = _restore(model, coordinator, repeats, [pid for _, pid in peers.values()])
        coordinator.close()
        return row


def _local(model: Model, coordinator: Coordinator, repeats: int, rows: Rows) -> None:
    versions = iter(range(1, 1000))

    def write() -> None:
        coordinator.write(next(versions), model.manifest, [model.contents()])

    rows["write_first"] = rate(write, model.num_bytes, 1)
    write()  # into the other slot, whose pages are mapped for the first time too
    rows["write_reused"] = rate(write, model.num_bytes, repeats)
    rows["restore_local"] = _restore(model, coordinator, repeats, [], is_verified=False)
    rows["restore_local_verified_before"] = _restore(model, coordinator, repeats, [])
    rows["restore_local_safe_open"] = _restore(
        model, coordinator, repeats, [], model.load_by_safe_open
    )
    rows["verify_local"] = rate(lambda: _assemble(coordinator), model.num_bytes, repeats)


def _restore(
    model: Model,
    coordinator: Coordinator,
    repeats: int,
    others: list[int],
    load: Callable[[Path], object] | None = None,
    *,
    is_verified: bool = True,
) -> Row:
    def restore() -> None:
        _assemble(coordinator, load or model.load, is_verified=is_verified)

    row = rate(restore, model.num_bytes, repeats, others=others)
    model.check()
    return row


def _assemble(
    coordinator: Coordinator,
    use: Callable[[Path], object] = lambda _: None,
    *,
    is_verified: bool = True,
) -> None:
    write, wanted = coordinator.current_write(), AssemblyRequest(is_verified=is_verified)
    assert write is not None
    assembled = coordinator.assemble(coordinator.record_of(write.version), ["here"], wanted)
    try:
        use(Path(assembled.path))
    finally:
        coordinator.give_back(assembled)


class _Replica:
    """Writes the model, as it changes, to one node."""

    def __init__(self, model: Model, coordinator: Coordinator) -> None:
        self._model = model
        self._coordinator = coordinator
        self._held = DeltaBase()
        self._chain = DeltaChain()
        self._versions = iter(range(1, 1000))

    def written(self, *, is_whole: bool = False) -> tuple[float, int]:
        """Seconds and bytes of one write."""
        model, held = self._model, self._held
        push = BegunPush(next(self._versions), {}, is_whole, is_stored=True)
        encoder = DeltaEncoder(held, push)
        encoder.encode(Pairs.of(model.tensors.items()))
        encoder.succeed()
        sent = WeightPush(push.version, model.manifest, encoded=encoder.stored)
        self._chain = self._chain.then(sent)
        began = time.perf_counter()
        self._coordinator.write(
            push.version, model.manifest, [model.contents()], after=self._chain.after
        )
        seconds = time.perf_counter() - began
        self._chain = self._chain.since(push.version)
        return seconds, self._coordinator.sent_bytes


def _deltas(model: Model, repeats: int, rows: Rows) -> None:
    with ExitStack() as stack:
        base = Path(tempfile.mkdtemp(prefix="rollout-bench-", dir=SHARED_MEMORY))
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        server = AgentServer(StoreAgent(AgentSettings("there", str(base), "bench", spare_bytes=0)))
        stack.callback(server.close)
        client = AgentClient("there", server.address)
        client._has_its_files = lambda: False  # type: ignore[method-assign]
        coordinator = coordinator_of({"there": client})
        stack.callback(coordinator.close)
        replica = _Replica(model, coordinator)
        for _ in range(2):  # both slots, whose pages are mapped for the first time
            replica.written(is_whole=True)
        for density in (None, *DENSITIES[:4]):
            written = []
            for _ in range(min(repeats, 3)):
                change(model.tensors, density or 0.01)
                written.append(replica.written(is_whole=density is None))
            seconds, sent = map(statistics.median, zip(*written, strict=True))
            name = "node_whole" if density is None else f"node_delta_{density:g}"
            rows[name] = {
                "seconds": seconds,
                "sent_bytes": sent,
                "of_whole": sent / model.num_bytes,
            }


def _disk(model: Model, repeats: int, rows: Rows) -> None:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DISK")) as name:
        folder = Path(name)
        model.save(folder)
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())

        def drop_page_cache() -> None:
            """Make the next load read from disk, as after a boot."""
            for path in folder.iterdir():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            time.sleep(0.1)

        for name, load in (
            ("disk_warm", model.load),
            ("disk_warm_verified", model.load_and_verify),
            ("disk_warm_safe_open", model.load_by_safe_open),
        ):
            load(folder)
            rows[name] = rate(lambda load=load: load(folder), model.num_bytes, repeats)  # type: ignore[misc]
            model.check()
        rows["disk_cold"] = rate(
            lambda: model.load(folder), model.num_bytes, min(repeats, 3), before=drop_page_cache
        )
