"""The DRAM store: write, restore, and the same from disk.

Rows of ``restore_*`` and ``disk_*`` end with the tensors in the memory of an engine, loaded as the
embedded engine does; those of ``*_safe_open`` as SGLang does: ``safe_open`` and a copy.
``restore_*`` are proved, tensor by tensor: ``restore_local`` by the engine, piece by piece where it
reads them to, the others before they are loaded; ``disk_*`` are not, but for ``disk_warm_proved``,
whose tensors are hashed when all are loaded.  ``half_remote``: half of
the units are on another node, an agent in a process of its own, and come over TCP;
``half_mooncake``: by Mooncake's TransferEngine, where that is installed.

``BENCH_DISK`` and ``BENCH_SHM``: folders for the checkpoint and for the store, where the usual ones
are not what shall be measured (a tmpfs with huge pages).
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.weights.clock import Row, rate
from rollout.errors import WeightsUnavailable
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.store.agent import AgentSettings, StoreAgent
from rollout.weights.store.assembling import Wanted
from rollout.weights.store.client import AgentClient
from rollout.weights.store.coordinator import Coordinator
from rollout.weights.store.mooncake import open_mooncake
from rollout.weights.store.moving import Mover

SHAPES = ("dense", "experts")
_PROVED = Wanted()
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
    """Tensors of a trainer, and the memory of an engine that they are loaded into."""

    def __init__(self, manifest: Manifest) -> None:
        import torch

        from benchmarks.weights.holder import Holder, allocated
        from engines.embedded.fingerprint import fingerprints
        from engines.embedded.weights import Weights

        self.manifest = manifest
        make = torch.Generator().manual_seed(0)
        self.tensors = {
            name: torch.empty(spec.shape, dtype=torch.bfloat16).normal_(generator=make)
            for name, spec in manifest.tensors.items()
        }
        self.engine = allocated(
            {name: (one.shape, one.dtype) for name, one in self.tensors.items()}
        )
        self.num_bytes = sum(one.nbytes for one in self.tensors.values())
        self.weights = Weights(Holder(self.engine))
        self.fingerprints = fingerprints(self.tensors)

    def contents(self) -> Iterator[tuple[str, Any]]:
        import torch

        for name, tensor in self.tensors.items():
            yield name, memoryview(tensor.view(torch.uint8).reshape(-1).numpy())

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.tensors, folder / "model.safetensors")

    def load(self, folder: Path) -> None:
        """As the embedded engine does."""
        from engines.embedded.files import update_from_disk

        update_from_disk(self.weights, str(folder))

    def load_and_prove(self, folder: Path) -> None:
        self.load(folder)
        assert self.weights.checksum()[0] == self.fingerprints

    def load_by_safe_open(self, folder: Path) -> None:
        """As SGLang does."""
        from safetensors import safe_open

        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (it is no mapping)
                    self.engine[name].copy_(file.get_tensor(name))

    def check(self) -> None:
        import torch

        assert all(torch.equal(self.engine[name], one) for name, one in self.tensors.items())
        for one in self.engine.values():
            one.zero_()


@contextmanager
def remote_agent(node: str, base: Path, mover: Mover | None) -> Iterator[tuple[AgentClient, int]]:
    """An agent in another process, and its pid."""
    transfer = "mooncake" if mover else "tcp"
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
        yield AgentClient(node, (host, port), mover=mover), peer.pid
    finally:
        peer.stdin.close()
        peer.wait(30)
        peer.stdout.close()


def coordinator_of(agents: Mapping[str, Any]) -> Coordinator:
    return Coordinator("bench", agents, replicas=1, unit_bytes=64 << 20, segment_bytes=1 << 30)


def measure(num_bytes: int, repeats: int) -> dict[str, Any]:
    """Rows by shape of the model."""
    import torch

    torch.set_num_threads(1)
    return {shape: _measure(Model(manifest_of(shape, num_bytes)), repeats) for shape in SHAPES}


def _measure(model: Model, repeats: int) -> dict[str, Row]:
    gc.freeze()  # as agents and engines do when they have started
    rows: dict[str, Row] = {}
    with ExitStack() as stack:
        base = Path(tempfile.mkdtemp(prefix="rollout-bench-", dir=SHARED_MEMORY))
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        here = StoreAgent(AgentSettings("here", str(base / "local"), "bench", spare_bytes=0))
        stack.callback(here.close, clear=True)
        rows |= _local(model, coordinator_of({"here": here}), repeats)
    rows["restore_half_remote"] = _half(model, repeats, None)
    if mover := _mooncake():
        rows["restore_half_mooncake"] = _half(model, repeats, mover)
    rows |= _disk(model, repeats)
    return rows


def _mooncake() -> Mover | None:
    try:
        return open_mooncake("127.0.0.1")
    except WeightsUnavailable:
        return None


def _half(model: Model, repeats: int, mover: Mover | None) -> Row:
    with ExitStack() as stack:
        base = Path(tempfile.mkdtemp(prefix="rollout-bench-", dir=SHARED_MEMORY))
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        there, pid = stack.enter_context(remote_agent("there", base / "there", mover))
        here = StoreAgent(AgentSettings("here", str(base / "here"), "bench", spare_bytes=0))
        stack.callback(here.close, clear=True)
        coordinator = coordinator_of({"here": here, "there": there})
        coordinator.write(1, model.manifest, [model.contents()])
        row = _restore(model, coordinator, repeats, [pid])
        coordinator.close()
        return row


def _local(model: Model, coordinator: Coordinator, repeats: int) -> dict[str, Row]:
    versions = iter(range(1, 1000))

    def write() -> None:
        coordinator.write(next(versions), model.manifest, [model.contents()])

    rows = {"write_first": rate(write, model.num_bytes, 1)}
    write()  # the other slot's turn: its pages are mapped for the first time too
    rows["write_reused"] = rate(write, model.num_bytes, repeats)
    left_to_the_engine = Wanted(is_proved=False)
    rows["restore_local"] = _restore(model, coordinator, repeats, [], wanted=left_to_the_engine)
    rows["restore_local_proved_before"] = _restore(model, coordinator, repeats, [])
    rows["restore_local_safe_open"] = _restore(
        model, coordinator, repeats, [], model.load_by_safe_open
    )
    rows["prove_local"] = rate(lambda: _assemble(coordinator), model.num_bytes, repeats)
    return rows


def _restore(
    model: Model,
    coordinator: Coordinator,
    repeats: int,
    others: list[int],
    load: Callable[[Path], object] | None = None,
    wanted: Wanted = _PROVED,
) -> Row:
    def restore() -> None:
        _assemble(coordinator, load or model.load, wanted)

    row = rate(restore, model.num_bytes, repeats, others=others)
    model.check()
    return row


def _assemble(
    coordinator: Coordinator,
    use: Callable[[Path], object] = lambda _: None,
    wanted: Wanted = _PROVED,
) -> None:
    write = coordinator.counting()
    assert write is not None
    assembled = coordinator.assemble(coordinator.record_of(write.version), "here", wanted)
    try:
        use(Path(assembled.path))
    finally:
        coordinator.give_back("here", assembled.path)


def _disk(model: Model, repeats: int) -> dict[str, Row]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DISK")) as name:
        folder = Path(name)
        model.save(folder)
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())

        def forget() -> None:
            """Out of the page cache: what a machine that has just booted has to read."""
            for path in folder.iterdir():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            time.sleep(0.1)

        rows: dict[str, Row] = {}
        for name, load in (
            ("disk_warm", model.load),
            ("disk_warm_proved", model.load_and_prove),
            ("disk_warm_safe_open", model.load_by_safe_open),
        ):
            load(folder)
            rows[name] = rate(lambda load=load: load(folder), model.num_bytes, repeats)  # type: ignore[misc]
            model.check()
        rows["disk_cold"] = rate(
            lambda: model.load(folder), model.num_bytes, min(repeats, 3), before=forget
        )
        return rows
