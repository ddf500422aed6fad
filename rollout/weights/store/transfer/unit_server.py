"""The TCP server of an agent: other processes of the run call it, and read units as streams.

Always true: a failed call returns its error as text; units go from the page cache into the socket
without a copy in this process; ``close`` ends every connection.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from engines.protocol.plain_text import describe
from rollout.core import wire
from rollout.core.errors import WeightsUnavailable
from rollout.core.wire import Head
from rollout.weights.store.layout.commit import Write
from rollout.weights.store.layout.placement import tensor_ranges
from rollout.weights.store.layout.record import StoreRecord, dump, load
from rollout.weights.store.node.agent import StoreAgent
from rollout.weights.store.node.assembly import AssemblyRequest
from rollout.weights.store.node.rebuilt import rebuild
from rollout.weights.store.node.writer import FileSink
from rollout.weights.store.transfer.rdma import RdmaTransfer
from rollout.weights.store.transfer.unit_client import AgentClient

# A peer that sends nothing in the middle of a message counts as lost.
_TIMEOUT_S = 60.0
_MAX_BODY = 1 << 30


class AgentServer:
    """Serves one agent, with a thread per connection, which has one call at a time.

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
        self._calls: dict[str, Callable[[Head, bytes], Any]] = {
            "state": self._state,
            "record": lambda head, _: dump(agent.record(Write(*head["write"]))),
            "begin": self._begin,
            "seal": lambda _, body: agent.seal(load(body)),
            "commit": lambda head, _: agent.commit(Write(*head["write"])),
            "assemble": self._assemble,
            "give_back": lambda head, _: agent.give_back(head["path"]),
            "num_bytes": lambda *_: agent.num_bytes(),
            "mark": lambda *_: agent.mark(),
            "close": lambda head, _: agent.close(clear=head["clear"]),
        }
        self._streams: dict[str, Callable[[wire.Connection, Head, int], None]] = {
            "read": self._send_unit,
            "lend": self._export_unit,
            "fill": self._fill,
        }
        self._listener = wire.Listener(
            self._serve, agent.settings.token, name="store-agent", host=host, timeout_s=_TIMEOUT_S
        )
        self.address = self._listener.address

    def close(self) -> None:
        """End every connection; the agent itself continues."""
        self._listener.close()

    def _serve(self, connection: wire.Connection) -> None:
        while True:
            head, num_bytes = connection.receive(may_idle=True)
            try:
                if (stream := self._streams.get(head["call"])) is not None:
                    stream(connection, head, num_bytes)
                else:
                    self._reply(connection, head, connection.body(num_bytes, _MAX_BODY))
            except WeightsUnavailable as error:  # nothing else was sent
                connection.send({"error": describe(error)})

    def _reply(self, connection: wire.Connection, head: Head, body: bytes) -> None:
        with _in_words():
            value = self._calls[head["call"]](head, body)
        if isinstance(value, bytes):
            connection.send({}, value)
        else:
            connection.send({"value": value})

    def _state(self, head: Head, _: bytes) -> Head:
        state = self.agent.state()
        return {
            "committed": state.committed and state.committed.to_json(),
            "sealed": [write.to_json() for write in state.sealed],
        }

    def _begin(self, head: Head, body: bytes) -> dict[str, str]:
        current = head["counts"]
        return self.agent.begin(load(body), None if current is None else Write(*current))

    def _assemble(self, head: Head, body: bytes) -> Head:
        peers = {
            node: AgentClient(node, tuple(address), self.agent.settings.token, rdma=self._rdma)
            for node, address in head["peers"].items()
        }
        try:
            wanted = AssemblyRequest(**head["wanted"])
            return asdict(self.agent.assemble(load(body), peers, wanted))
        finally:
            for peer in peers.values():
                peer.connections.disconnect()

    # -- units ------------------------------------------------------------------------------

    def _send_unit(self, connection: wire.Connection, head: Head, _: int) -> None:
        reading = self.agent.reading(Write(*head["write"]), head["unit"])
        with reading as (path, offset, num_bytes), path.open("rb") as stream:
            connection.announce({}, num_bytes)
            connection.send_file(stream.fileno(), offset, num_bytes)

    def _export_unit(self, connection: wire.Connection, head: Head, _: int) -> None:
        """Export a unit, piece by piece, in memory from which the peer reads it."""
        if self._rdma is None:
            raise WeightsUnavailable(f"node {self.agent.node} exports no memory")
        reading = self.agent.reading(Write(*head["write"]), head["unit"])
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
            connection.send({"value": exported})
            for piece, _ in _until_end(connection):
                at, length = piece["at"], piece["length"]
                if os.preadv(stream.fileno(), [buffer.view[:length]], offset + at) != length:
                    raise ConnectionError("the file ended early")
                connection.send({"value": None})

    # -- a write ----------------------------------------------------------------------------

    def _fill(self, connection: wire.Connection, head: Head, num_bytes: int) -> None:
        """Receive the tensors of a write, each into its place."""
        record = load(connection.body(num_bytes, _MAX_BODY))
        paths, base = head["paths"], head["base"]
        with ExitStack() as stack:
            kept: Mapping[str, memoryview] = {}
            with _in_words():
                if base is not None:
                    kept = stack.enter_context(self.agent.kept(Write(*base)))
                sink = self.agent.sink(record, paths)
            connection.send({"value": None})
            why = self._receive_tensors(connection, record, sink, kept)
            connection.send({"error": why} if why else {"value": None})

    def _receive_tensors(
        self,
        connection: wire.Connection,
        record: StoreRecord,
        sink: FileSink,
        kept: Mapping[str, memoryview],
    ) -> str:
        """Returns why a tensor could not be rebuilt of what is kept, or empty if all were."""
        segments = record.segments_of(self.agent.node)
        places = {place.tensor.name: place for place in tensor_ranges(record.units, segments)}
        why = ""
        for head, num_bytes in _until_end(connection):
            place = places[head["tensor"]]
            view = sink.region(place.file).view[place.offset : place.offset + place.num_bytes]
            if "fingerprint" in head:
                changes = connection.body(num_bytes, place.num_bytes)
                old = kept[place.tensor.name]
                why = why or rebuild(place.tensor, old, changes, head["fingerprint"], view)
            elif num_bytes == place.num_bytes:
                connection.receive_into(view)
            else:
                raise ValueError(
                    f"{place.tensor.name} has {num_bytes} bytes, not {place.num_bytes}"
                )
        return why


def _until_end(connection: wire.Connection) -> Iterator[tuple[Head, int]]:
    """The messages of a call that has several."""
    while True:
        head, num_bytes = connection.receive()
        if head.get("end"):
            return
        yield head, num_bytes


@contextmanager
def _in_words() -> Iterator[None]:
    """An error of the agent, as the caller gets it."""
    try:
        yield
    except OSError as error:
        raise WeightsUnavailable(describe(error)) from error
