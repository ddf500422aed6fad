"""The client of an agent in another process or on another node.

Always true: every call ends within its deadline; a failed call raises OSError or
WeightsUnavailable and nothing else; units are received directly into their place.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rollout.core import wire
from rollout.core.errors import WeightsUnavailable
from rollout.weights.store.layout.commit import NodeState, Write
from rollout.weights.store.layout.placement import TensorRange
from rollout.weights.store.layout.record import StoreRecord, dump, load
from rollout.weights.store.node.assembly import AssembledFolder, AssemblyRequest, ReadUnit
from rollout.weights.store.node.files import Files, MappedSegments
from rollout.weights.store.node.writer import FileSink, NodeSink
from rollout.weights.store.transfer.rdma import RdmaTransfer

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5.0
# For calls that allocate space or hash a share of the model.
_LONG_TIMEOUT_S = 300.0
_MAX_REPLY = 1 << 30


class AgentConnections:
    """The connections to one agent; an idle one is used again.

    Args:
        find: returns the agent's address; called again when the agent is unreachable.
    """

    def __init__(self, node: str, find: Callable[[], wire.Address], token: str) -> None:
        self._node = node
        self._find = find
        self._address: wire.Address | None = None
        self._token = token
        self._lock = threading.Lock()
        self._idle: list[wire.Connection] = []

    def address(self) -> wire.Address:
        if self._address is None:
            self._address = self._find()
        return self._address

    def call(
        self,
        call: str,
        fields: Mapping[str, Any] | None = None,
        body: bytes = b"",
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> tuple[dict[str, Any], bytes]:
        with self.connection(timeout_s) as connection:
            connection.send({**(fields or {}), "call": call}, body)
            reply, num_bytes = reply_head(connection)
            return reply, connection.body(num_bytes, _MAX_REPLY)

    @contextmanager
    def connection(self, timeout_s: float) -> Iterator[wire.Connection]:
        connection = self.take(timeout_s)
        try:
            yield connection
        except BaseException:
            # A reply may still arrive on this connection, or it has ended.
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)

    def take(self, timeout_s: float) -> wire.Connection:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None and connection.has_ended():
            connection.close()
            self.disconnect()
            connection = None
        if connection is None:
            try:
                connection = self._connect()
            except wire.Refused as refusal:
                raise WeightsUnavailable(
                    f"the store's agent of node {self._node}: {refusal}"
                ) from None
        connection.timeout_s = timeout_s
        return connection

    def _connect(self) -> wire.Connection:
        known = self._address
        try:
            return self._connect_to(self.address())
        except OSError:
            self._address = None
            if known is None or self.address() == known:
                raise
            return self._connect_to(self.address())

    def _connect_to(self, address: wire.Address) -> wire.Connection:
        return wire.connect(
            address, self._token, connect_s=_CONNECT_TIMEOUT_S, timeout_s=_CALL_TIMEOUT_S
        )

    def disconnect(self) -> None:
        """Close the idle connections. Later calls connect again."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()


def reply_head(connection: wire.Connection) -> tuple[wire.Head, int]:
    """The head of a reply, and the length of its body.

    Raises:
        WeightsUnavailable: the agent's own words.
    """
    reply, num_bytes = connection.receive()
    if "error" in reply:
        raise WeightsUnavailable(reply["error"])
    return reply, num_bytes


class AgentClient:
    """Calls one agent.

    Args:
        address: of the agent, or a function that returns it.  The function is called again when
            the agent is unreachable: a restarted agent may have another address.
        rdma: to read units with, before the stream is tried; after one failure it is not used
            again for this agent.
    """

    def __init__(
        self,
        node: str,
        address: wire.Address | Callable[[], wire.Address],
        token: str = "",
        *,
        mapped_files: MappedSegments | None = None,
        rdma: RdmaTransfer | None = None,
    ) -> None:
        self.node = node
        find = address if callable(address) else lambda: address
        self.connections = AgentConnections(node, find, token)
        self._rdma = rdma
        self._files = Files()
        self._mapped_files = mapped_files or MappedSegments(self._files)
        self._shares_files: tuple[wire.Address, bool] | None = None

    # -- calls, as ``StoreAgent`` has them --------------------------------------------------

    def state(self) -> NodeState:
        reply = self.connections.call("state")[0]["value"]
        committed = reply["committed"]
        return NodeState(
            committed and Write(*committed), frozenset(Write(*write) for write in reply["sealed"])
        )

    def record(self, write: Write) -> StoreRecord:
        return load(
            self.connections.call("record", {"write": write.to_json()})[1],
            where=f"node {self.node}",
        )

    def begin(self, record: StoreRecord, current: Write | None) -> Mapping[str, str]:
        fields = {"counts": current and current.to_json()}
        reply: dict[str, str] = self.connections.call(
            "begin", fields, dump(record), _LONG_TIMEOUT_S
        )[0]["value"]
        return reply

    def sink(
        self, record: StoreRecord, paths: Mapping[str, str], base: Write | None = None
    ) -> NodeSink:
        """Writes into its files if this process can map them, else over a stream.

        Args:
            base: a write that the node keeps, which changes of tensors begin from.
        """
        if self._has_its_files():
            return FileSink(paths, self._mapped_files, self._files)
        return _StreamSink(self, record, paths, base)

    def seal(self, record: StoreRecord) -> None:
        self.connections.call("seal", {}, dump(record))

    def commit(self, write: Write) -> None:
        self.connections.call("commit", {"write": write.to_json()})

    def unit_readers(self) -> Mapping[str, ReadUnit]:
        """Functions that read a unit, by name of the transport, in order of preference."""
        rdma = self._rdma
        if rdma is None:
            return {"tcp": self.read}
        return {"mooncake": partial(self._read_by, rdma), "tcp": self.read}

    def read(self, write: Write, unit: int, into: memoryview) -> None:
        with self.connections.connection(_CALL_TIMEOUT_S) as connection:
            self._request_unit(connection, "read", write, unit)
            _check_length(reply_head(connection)[1], into)
            connection.receive_into(into)

    def _read_by(self, rdma: RdmaTransfer, write: Write, unit: int, into: memoryview) -> None:
        """Read a unit, piece by piece, from memory that the agent exports."""
        try:
            with self.connections.connection(_CALL_TIMEOUT_S) as connection:
                self._request_unit(connection, "lend", write, unit)
                exported = reply_head(connection)[0]["value"]
                _check_length(exported["num_bytes"], into)
                step = min(rdma.piece_bytes, exported["piece_bytes"])
                for at in range(0, len(into), step):
                    part = into[at : at + step]
                    connection.send({"at": at, "length": len(part)})
                    reply_head(connection)
                    rdma.fetch(exported["session"], exported["address"], part)
                connection.send({"end": True})
        except (OSError, WeightsUnavailable) as error:
            if self._rdma is not None:
                self._rdma = None
                logger.warning("store: streams are used from node %s: %s", self.node, error)
            raise

    def _request_unit(
        self, connection: wire.Connection, call: str, write: Write, unit: int
    ) -> None:
        connection.send({"call": call, "write": write.to_json(), "unit": unit})

    def assemble(
        self, record: StoreRecord, peers: Mapping[str, Any], wanted: AssemblyRequest
    ) -> AssembledFolder:
        """``peers`` are clients too; the agent connects to them itself."""
        addresses = {}
        for node, peer in peers.items():
            with suppress(OSError, WeightsUnavailable):  # a peer without an address is not used
                addresses[node] = peer.connections.address()
        fields = {"peers": addresses, "wanted": asdict(wanted)}
        reply = self.connections.call("assemble", fields, dump(record), _LONG_TIMEOUT_S)[0]["value"]
        return AssembledFolder(**{**reply, "troubles": tuple(reply["troubles"])})

    def give_back(self, path: str) -> None:
        self.connections.call("give_back", {"path": path})

    def num_bytes(self) -> int:
        reply: int = self.connections.call("num_bytes")[0]["value"]
        return reply

    def close(self, *, clear: bool) -> None:
        try:
            self.connections.call("close", {"clear": clear})
        finally:
            self.connections.disconnect()
            self._mapped_files.close()

    def _has_its_files(self) -> bool:
        address = self.connections.address()
        if self._shares_files is None or self._shares_files[0] != address:
            path, mark = self.connections.call("mark")[0]["value"]
            is_same = bool(mark) and self._files.read(Path(path)) == mark.encode()
            self._shares_files = address, is_same
        return self._shares_files[1]


def _check_length(num_bytes: int, into: memoryview) -> None:
    if num_bytes != len(into):
        raise ConnectionError(f"the reply has {num_bytes} bytes, not {len(into)}")


class _StreamSink:
    """A node whose files cannot be mapped here: its agent writes the bytes it receives."""

    def __init__(
        self,
        client: AgentClient,
        record: StoreRecord,
        paths: Mapping[str, str],
        base: Write | None,
    ) -> None:
        self._connection = client.connections.take(_LONG_TIMEOUT_S)
        self._is_open = True
        fields = {"call": "fill", "paths": dict(paths), "base": base and base.to_json()}
        self._connection.send(fields, dump(record))
        reply_head(self._connection)

    def open(self, place: TensorRange) -> None:
        self._connection.announce({"tensor": place.tensor.name}, place.num_bytes)

    def put(self, piece: memoryview) -> None:
        self._connection.write(piece)

    def rebuild(self, place: TensorRange, changes: bytes, fingerprint: str) -> None:
        fields = {"tensor": place.tensor.name, "fingerprint": fingerprint}
        self._connection.send(fields, changes)

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._connection.send({"end": True})
            reply_head(self._connection)
        finally:
            self._connection.close()
