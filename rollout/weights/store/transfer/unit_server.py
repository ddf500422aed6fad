"""The TCP server of an agent: other processes of the run call it, and read units as streams.

Always true: a call without the run's token gets an error; a failed call returns its error as text;
units go from the page cache into the socket without a copy in this process; ``close`` ends every
connection.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines.protocol.plain_text import describe
from rollout.core.errors import WeightsUnavailable
from rollout.weights.store.layout.commit import Write
from rollout.weights.store.layout.placement import tensor_ranges
from rollout.weights.store.layout.record import dump, load
from rollout.weights.store.node.agent import StoreAgent
from rollout.weights.store.node.assembly import AssemblyRequest
from rollout.weights.store.transfer import wire
from rollout.weights.store.transfer.rdma import RdmaTransfer
from rollout.weights.store.transfer.unit_client import AgentClient

logger = logging.getLogger(__name__)

# A peer that sends nothing in the middle of a message counts as lost.
_TIMEOUT_S = 60.0


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
        self._socket = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="store-agent", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every connection; the agent itself continues."""
        with suppress(OSError):  # wakes the thread that waits in accept
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections.add(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="store-peer", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                _AgentConnection(self.agent, connection, self._rdma).run()
        except (OSError, ValueError, KeyError, TypeError, WeightsUnavailable) as error:
            logger.debug("store: connection ended: %s", describe(error))
        finally:
            self._connections.discard(connection)


class _AgentConnection:
    """One connection, with one call at a time."""

    def __init__(
        self, agent: StoreAgent, connection: socket.socket, rdma: RdmaTransfer | None
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
            "renew": lambda *_: agent.renew(),
            "num_bytes": lambda *_: agent.num_bytes(),
            "mark": lambda *_: agent.mark(),
            "close": lambda fields, _: agent.close(clear=fields["clear"]),
        }

    def run(self) -> None:
        while True:
            # Between two calls a connection may be idle without limit.
            self._connection.settimeout(None)
            message = wire.receive(self._connection)
            if message is None:
                return
            self._connection.settimeout(_TIMEOUT_S)
            fields, num_bytes = message
            if not hmac.compare_digest(
                str(fields.get("token", "")).encode(), self._agent.settings.token.encode()
            ):
                wire.send(
                    self._connection, {"error": "wrong token: this store belongs to another run"}
                )
                return
            if fields["call"] in ("read", "lend"):
                self._send_unit(fields)
            elif fields["call"] == "fill":
                self._fill(fields, num_bytes)
            else:
                self._reply(fields, wire.receive_body(self._connection, num_bytes))

    def _reply(self, fields: dict[str, Any], body: bytes) -> None:
        try:
            value = self._calls[fields["call"]](fields, body)
        except (OSError, WeightsUnavailable) as error:
            wire.send(self._connection, {"error": describe(error)})
            return
        if isinstance(value, bytes):
            wire.send(self._connection, {}, value)
        else:
            wire.send(self._connection, {"value": value})

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
                peer.disconnect()
        return asdict(assembled)

    def _send_unit(self, fields: dict[str, Any]) -> None:
        try:
            reading = self._agent.reading(Write(*fields["write"]), fields["unit"])
            if fields["call"] == "lend":
                self._export(reading)
                return
            with reading as (path, offset, num_bytes), path.open("rb") as stream:
                wire.announce(self._connection, {}, num_bytes)
                self._send_file(stream.fileno(), offset, num_bytes)
        except WeightsUnavailable as error:
            wire.send(self._connection, {"error": describe(error)})

    def _send_file(self, descriptor: int, offset: int, num_bytes: int) -> None:
        end = offset + num_bytes
        # Python's timeouts make a socket non-blocking, which sendfile does not handle.
        self._connection.settimeout(None)
        self._connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_TIMEOUT_S), 0)
        )
        while offset < end:
            sent = os.sendfile(self._connection.fileno(), descriptor, offset, end - offset)
            if not sent:
                raise ConnectionError("the file ended early")
            offset += sent

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
            wire.send(self._connection, {"value": exported})
            self._put_pieces(stream.fileno(), offset, buffer.view)

    def _put_pieces(self, descriptor: int, offset: int, view: memoryview) -> None:
        while (message := wire.receive(self._connection)) is not None:
            fields, _ = message
            if fields.get("end"):
                return
            at, length = fields["at"], fields["length"]
            if os.preadv(descriptor, [view[:length]], offset + at) != length:
                raise ConnectionError("the file ended early")
            wire.send(self._connection, {"value": None})
        raise ConnectionError("the reader disconnected")

    def _fill(self, fields: dict[str, Any], num_bytes: int) -> None:
        """Receive the tensors of a write, each into its place."""
        paths: dict[str, str] = fields["paths"]
        record = load(wire.receive_body(self._connection, num_bytes))
        places = {
            place.tensor.name: place
            for place in tensor_ranges(record.units, record.segments_of(self._agent.node))
        }
        sink = self._agent.sink(record, paths)
        mapped_files = {name: sink.region(name) for name in paths}
        wire.send(self._connection, {"value": None})
        while True:
            message = wire.receive(self._connection)
            if message is None:
                raise ConnectionError("the writer disconnected")
            fields, num_bytes = message
            if fields.get("end"):
                wire.send(self._connection, {"value": None})
                return
            place = places[fields["tensor"]]
            if num_bytes != place.num_bytes:
                raise ValueError(
                    f"{place.tensor.name} has {num_bytes} bytes, not {place.num_bytes}"
                )
            view = mapped_files[place.file].view[place.offset : place.offset + num_bytes]
            wire.receive_into(self._connection, view)
