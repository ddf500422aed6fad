"""A store over several nodes of this machine, whose processes can die at any step."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.tensors.file_mapping import FileMapping
from rollout.core.errors import WeightsUnavailable
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.store.coordinator import Coordinator
from rollout.weights.store.node.agent import AgentSettings, StoreAgent
from rollout.weights.store.node.assembly import FoldersOnNodes
from rollout.weights.store.node.files import Files, PendingCopy
from rollout.weights.store.transfer.rdma import RdmaTransfer
from rollout.weights.store.transfer.unit_client import AgentClient
from rollout.weights.store.transfer.unit_server import AgentServer

Tensors = dict[str, bytes]


def moe_manifest(num_layers: int = 2, num_experts: int = 5) -> Manifest:
    """A small mixture of experts, in two dtypes."""
    specs = [TensorSpec("model.embed_tokens.weight", "bfloat16", (64, 16))]
    for layer in range(num_layers):
        at = f"model.layers.{layer}"
        specs += [
            TensorSpec(f"{at}.self_attn.q_proj.weight", "bfloat16", (16, 16)),
            TensorSpec(f"{at}.mlp.gate.weight", "float32", (num_experts, 16)),
            TensorSpec(f"{at}.input_layernorm.weight", "bfloat16", (17,)),
        ]
        specs += [
            TensorSpec(f"{at}.mlp.experts.{expert}.{part}.weight", "bfloat16", (8, 16))
            for expert in range(num_experts)
            for part in ("up_proj", "down_proj")
        ]
    return Manifest.of(specs)


def contents(manifest: Manifest, version: int) -> Tensors:
    """Bytes of every tensor, others for every version."""

    return {
        name: random.Random(f"{name} {version}").randbytes(spec.num_bytes)
        for name, spec in manifest.tensors.items()
    }


class Crash(BaseException):
    """The process was killed: no code catches this."""


def copy_one_by_one(
    incoming: Sequence[PendingCopy], act: Callable[[Callable[[Any], None], Any], None]
) -> list[str]:
    """``Files.copy`` in as many steps as there are tensors.

    Args:
        act: takes what copies the first bytes of a tensor, and all its bytes.
    """
    found: list[str] = []
    for pending in incoming:

        def copy(some: Any, pending: PendingCopy = pending) -> None:
            found.extend(Files().copy([pending._replace(num_bytes=len(some))]))

        source = (ctypes.c_char * pending.num_bytes).from_address(pending.source)
        act(copy, memoryview(source).cast("B"))
    return found


class DyingFiles(Files):
    """The file system of a process that is killed at one step, and does nothing from then on."""

    def __init__(self, die_at: int | None = None) -> None:
        self.num_steps = 0
        self.die_at = die_at
        self.is_dead = False

    def _step(self) -> bool:
        """Whether it dies in this step."""
        if self.is_dead:
            raise Crash
        self.num_steps += 1
        self.is_dead = self.num_steps == self.die_at
        return self.is_dead

    def _bytes(self, act: Callable[[Any], None], data: Any) -> None:
        if self._step():
            act(memoryview(data)[: len(data) // 2])
            raise Crash
        act(data)

    def _whole(self, act: Callable[[], None]) -> None:
        if self._step():
            raise Crash
        act()

    def write(self, path: Path, data: Any) -> None:
        self._bytes(lambda some: Files.write(self, path, some), data)

    def write_at(self, path: Path, offset: int, data: Any) -> None:
        self._bytes(lambda some: Files.write_at(self, path, offset, some), data)

    def put(self, region: FileMapping, offset: int, data: memoryview) -> None:
        self._bytes(lambda some: Files.put(self, region, offset, some), data)

    def copy(self, incoming: Sequence[PendingCopy]) -> list[str]:
        return copy_one_by_one(incoming, self._bytes)

    def make_folder(self, path: Path) -> None:
        self._whole(lambda: Files.make_folder(self, path))

    def rename(self, old: Path, new: Path) -> None:
        self._whole(lambda: Files.rename(self, old, new))

    def remove(self, path: Path) -> None:
        self._whole(lambda: Files.remove(self, path))

    def allocate(self, path: Path, num_bytes: int) -> None:
        self._whole(lambda: Files.allocate(self, path, num_bytes))


class Node:
    """An agent in a process of its own, as others see it: it answers, or it cannot be reached."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.files = DyingFiles()
        self.agent: StoreAgent | None = None
        self.start()

    def start(self) -> None:
        """Start a new process for the same node."""
        if self.agent is None:
            self.files = DyingFiles()
            self.agent = StoreAgent(self.settings, self.files)

    def kill(self) -> None:
        """The process is gone."""
        if self.agent is not None:
            self.files.is_dead = True
            self.agent._is_closed.set()
            self.agent._hold.release()  # as the kernel does
            self.agent = None

    def unit_readers(self) -> dict[str, Any]:
        return {"memory": lambda *args: self.read(*args)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **more: Any) -> Any:
            if self.agent is None:
                raise ConnectionRefusedError(f"node {self.settings.node} is down")
            try:
                answer = getattr(self.agent, name)(*args, **more)
            except Crash:
                self.kill()
                raise ConnectionResetError(f"node {self.settings.node} went down") from None
            return _Sink(self, answer) if name == "sink" else answer

        return call


class _Sink:
    """The writer's end of a connection to a node that may die."""

    def __init__(self, node: Node, sink: Any) -> None:
        self._node = node
        self._sink = sink

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            try:
                return getattr(self._sink, name)(*args)
            except Crash:
                self._node.kill()
                raise ConnectionResetError("the node went down") from None

        return call


class World:
    """Nodes on one machine, and a coordinator."""

    def __init__(
        self,
        base: Path,
        num_nodes: int = 3,
        *,
        replicas: int = 2,
        manifest: Manifest | None = None,
        unit_bytes: int = 600,
        segment_bytes: int = 2000,
    ) -> None:
        self.base = base
        self.manifest = manifest or moe_manifest()
        self.nodes = {
            name: Node(AgentSettings(name, str(base), "run", returns=True, spare_bytes=0))
            for name in (f"node-{index}" for index in range(num_nodes))
        }
        self._options = {
            "replicas": replicas,
            "unit_bytes": unit_bytes,
            "segment_bytes": segment_bytes,
        }
        self.coordinator = self.new_coordinator()

    def new_coordinator(self, agents: Mapping[str, Any] | None = None) -> Coordinator:
        """Another process that coordinates the same nodes; what the old one knew is gone."""
        self.coordinator = Coordinator("run", agents or self.nodes, **self._options)
        return self.coordinator

    def write(self, version: int) -> None:
        self.coordinator.write(version, self.manifest, [contents(self.manifest, version).items()])

    def restore(self, version: int, node: str | None = None) -> Tensors:
        """What an engine on ``node`` would load; left out: on one that is up."""
        node = node or next(name for name, other in self.nodes.items() if other.agent is not None)
        record = self.coordinator.record_of(version)
        assembled = self.assemble(version, node)
        try:
            return read_folder(Path(assembled.path), self.manifest)
        finally:
            self.coordinator.give_back(assembled)
            assert record.write.version == version

    def assemble(self, version: int, node: str = "node-0") -> FoldersOnNodes:
        return self.coordinator.assemble(self.coordinator.record_of(version), [node])

    def restart_all(self) -> None:
        """Every process is killed and comes back."""
        for node in self.nodes.values():
            node.kill()
            node.start()
        self.new_coordinator()

    def restorable(self, versions: range) -> list[int]:
        """Versions that can be had, each byte of which is checked."""
        found = []
        for version in versions:
            try:
                restored = self.restore(version)
            except WeightsUnavailable:
                continue
            assert restored == contents(self.manifest, version)
            found.append(version)
        return found

    def close(self) -> None:
        for node in self.nodes.values():
            node.start()
        self.coordinator.close()
        assert self.left() == []

    def left(self) -> list[str]:
        """Files of the store that are there."""
        return [str(path) for path in self.base.rglob("*")] if self.base.exists() else []


class Served:
    """Agents in this process, each behind a door that can be shut and opened elsewhere."""

    def __init__(
        self,
        base: Path,
        *,
        shares_files: bool,
        same_base: bool = False,
        rdma: Callable[[str], RdmaTransfer | None] = lambda _: None,
        **options: Any,
    ) -> None:
        self.world = World(base / "coordinator", 0, **options)
        self._rdma = rdma
        self.servers: dict[str, AgentServer] = {}
        self.addresses: dict[str, tuple[str, int]] = {}
        for index in range(3):
            node = f"node-{index}"
            # Folders of their own, as nodes have them.
            of_node = base if same_base else base / node
            self.open(StoreAgent(AgentSettings(node, str(of_node), "run", "secret")))
        clients = {node: self.client(node) for node in self.servers}
        if not shares_files:
            for client in clients.values():
                client._has_its_files = lambda: False
        self.world.new_coordinator(clients)
        self.clients = clients

    def open(self, agent: StoreAgent) -> None:
        server = AgentServer(agent, rdma=self._rdma(agent.node))
        self.servers[agent.node] = server
        self.addresses[agent.node] = server.address

    def client(self, node: str, token: str = "secret") -> AgentClient:
        return AgentClient(node, lambda: self.addresses[node], token)

    def close(self) -> None:
        self.world.coordinator.close()
        for server in self.servers.values():
            server.close()


def read_folder(folder: Path, manifest: Manifest) -> Tensors:
    """The tensors of the safetensors files of a folder, read as the format says."""
    return dict(_read(folder, manifest))


def _read(folder: Path, manifest: Manifest) -> Iterator[tuple[str, bytes]]:
    import json
    import struct

    seen = set()
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            assert name not in seen, f"{name} is in two files"
            seen.add(name)
            assert tuple(entry["shape"]) == manifest.tensors[name].shape
            first, end = entry["data_offsets"]
            yield name, data[8 + length + first : 8 + length + end]
    assert seen == set(manifest.tensors)


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 4]))


def slot_of(made: World, node: str) -> Path:
    """The folder of the committed slot of a node."""
    agent = made.nodes[node].agent
    assert agent is not None
    write = made.coordinator.current_write()
    assert write is not None
    with agent.pinned(write) as kept:
        return kept.folder
