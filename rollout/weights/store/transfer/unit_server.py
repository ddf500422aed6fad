"""The TCP server of an agent: other processes of the run call it, and read units as streams.

Always true: a failed call returns its error as text; units go from the page cache into the socket
without a copy in this process; ``close`` ends every connection.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.protocol.plain_text import describe
from engines.tensors.file_mapping import FileMapping
from rollout.core import wire
from rollout.core.errors import WeightsUnavailable
from rollout.weights.store.layout.commit import Write
from rollout.weights.store.layout.placement import tensor_ranges
from rollout.weights.store.layout.record import StoreRecord, dump, load
from rollout.weights.store.node.agent import StoreAgent
from rollout.weights.store.node.assembly import AssemblyRequest
from rollout.weights.store.node.rebuilt import rebuild
from rollout.weights.store.transfer.rdma import RdmaTransfer
from rollout.weights.store.transfer.unit_client import AgentClient

# A peer that sends nothing in the middle of a message counts as lost.
_TIMEOUT_S = 60.0
_MAX_BODY = 1 << 30


class AgentServer:
    """Serves one agent, with a thread per connection.

    Args:
        host: address to bind; other nodes must be able to reach it.
        rdma: also transfers units, if given.
    """

    def __init__(
        self,
        agent: StoreAgent,
        host: str = "127.0.0.1",
        *,
        rdma: RdmaTransfer | None = None,
    ) -> None:
        self.agent = agent
        self._rdma = rdma
        self._listener = wire.Listener(
            self._serve, agent.settings.token, name="store-agent", host=host, timeout_s=_TIMEOUT_S
        )
        self.address = self._listener.address

    def close(self) -> None:
        """End every connection; the agent itself continues."""
        self._listener.close()

    def _serve(self, connection: wire.Connection) -> None:
        _AgentConnection(self.agent, connection, self._rdma).run()


class _AgentConnection:
    """One connection, with one call at a time."""

    def __init__(
        self, agent: StoreAgent, connection: wire.Connection, rdma: RdmaTransfer | None
    ) -> None:
        self._agent = agent
        self._rdma = rdma
        self._connection = connection
        self._calls: dict[str, Callable[[dict[str, Any], bytes], Any]] = {
            "state": self._state,
            "record": lambda fields, _: dump(agent.record(Write(*fields["write"]))),
            "begin": self._begin,
            "seal": lambda _, body: agent.seal(load(body)),
            "commit": lambda fields, _: agent.commit(Write(*fields["write"])),
            "assemble": self._assemble,
            "give_back": lambda fields, _: agent.give_back(fields["path"]),
            "num_bytes": lambda *_: agent.num_bytes(),
            "mark": lambda *_: agent.mark(),
            "close": lambda fields, _: agent.close(clear=fields["clear"]),
        }

    def run(self) -> None:
        while True:
            fields, num_bytes = self._connection.receive(may_idle=True)
            if fields["call"] in ("read", "lend"):
                self._send_unit(fields)
            elif fields["call"] == "fill":
                self._fill(fields, num_bytes)
            else:
                self._reply(fields, self._connection.body(num_bytes, _MAX_BODY))

    def _reply(self, fields: dict[str, Any], body: bytes) -> None:
        try:
            value = self._calls[fields["call"]](fields, body)
        except (OSError, WeightsUnavailable) as error:
            self._connection.send({"error": describe(error)})
            return
        if isinstance(value, bytes):
            self._connection.send({}, value)
        else:
            self._connection.send({"value": value})

    def _state(self, fields: dict[str, Any], _: bytes) -> dict[str, Any]:
        state = self._agent.state()
        return {
            "committed": state.committed and state.committed.to_json(),
            "sealed": [write.to_json() for write in state.sealed],
        }

    def _begin(self, fields: dict[str, Any], body: bytes) -> dict[str, str]:
        counts = fields["counts"]
        return self._agent.begin(load(body), None if counts is None else Write(*counts))

    def _assemble(self, fields: dict[str, Any], body: bytes) -> dict[str, Any]:
        peers = {
            node: AgentClient(node, tuple(address), self._agent.settings.token, rdma=self._rdma)
            for node, address in fields["peers"].items()
        }
        try:
            assembled = self._agent.assemble(load(body), peers, AssemblyRequest(**fields["wanted"]))
        finally:
            for peer in peers.values():
                peer.connections.disconnect()
        return asdict(assembled)

    def _send_unit(self, fields: dict[str, Any]) -> None:
        try:
            reading = self._agent.reading(Write(*fields["write"]), fields["unit"])
            if fields["call"] == "lend":
                self._export(reading)
                return
            with reading as (path, offset, num_bytes), path.open("rb") as stream:
                self._connection.announce({}, num_bytes)
                self._connection.send_file(stream.fileno(), offset, num_bytes)
        except WeightsUnavailable as error:
            self._connection.send({"error": describe(error)})

    def _export(self, reading: AbstractContextManager[tuple[Path, int, int]]) -> None:
        """Export a unit, piece by piece, in memory from which the peer reads it."""
        if self._rdma is None:
            raise WeightsUnavailable(f"node {self._agent.node} exports no memory")
        with (
            self._rdma.exported() as buffer,
            reading as (path, offset, num_bytes),
            path.open("rb") as stream,
        ):
            exported = {
                "session": self._rdma.session,
                "address": buffer.address,
                "piece_bytes": len(buffer.view),
                "num_bytes": num_bytes,
            }
            self._connection.send({"value": exported})
            self._put_pieces(stream.fileno(), offset, buffer.view)

    def _put_pieces(self, descriptor: int, offset: int, view: memoryview) -> None:
        while True:
            fields, _ = self._connection.receive()
            if fields.get("end"):
                return
            at, length = fields["at"], fields["length"]
            if os.preadv(descriptor, [view[:length]], offset + at) != length:
                raise ConnectionError("the file ended early")
            self._connection.send({"value": None})

    def _fill(self, fields: dict[str, Any], num_bytes: int) -> None:
        """Receive the tensors of a write, each into its place."""
        paths, base = fields["paths"], fields["base"]
        record = load(self._connection.body(num_bytes, _MAX_BODY))
        with ExitStack() as stack:
            kept: Mapping[str, memoryview] = {}
            try:
                if base is not None:
                    kept = stack.enter_context(self._agent.kept(Write(*base)))
                sink = self._agent.sink(record, paths)
                regions = {name: sink.region(name) for name in paths}
            except (OSError, WeightsUnavailable) as error:
                self._connection.send({"error": describe(error)})
                return
            self._connection.send({"value": None})
            why = self._receive_tensors(record, regions, kept)
            self._connection.send({"error": why} if why else {"value": None})

    def _receive_tensors(
        self,
        record: StoreRecord,
        regions: Mapping[str, FileMapping],
        kept: Mapping[str, memoryview],
    ) -> str:
        """Returns why a tensor could not be rebuilt of what is kept; empty if all were."""
        segments = record.segments_of(self._agent.node)
        places = {place.tensor.name: place for place in tensor_ranges(record.units, segments)}
        why = ""
        while True:
            fields, num_bytes = self._connection.receive()
            if fields.get("end"):
                return why
            place = places[fields["tensor"]]
            view = regions[place.file].view[place.offset : place.offset + place.num_bytes]
            if "fingerprint" in fields:
                changes = self._connection.body(num_bytes, place.num_bytes)
                old = kept[place.tensor.name]
                why = why or rebuild(place.tensor, old, changes, fields["fingerprint"], view)
                continue
            if num_bytes != place.num_bytes:
                raise ValueError(
                    f"{place.tensor.name} has {num_bytes} bytes, not {place.num_bytes}"
                )
            self._connection.receive_into(view)
