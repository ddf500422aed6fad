"""An agent in another process, or on another node, as the coordinator and its peers see it.

Always true: every call ends within its deadline; one that fails raises OSError or
WeightsUnavailable and nothing else; units are received straight into their place.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rollout.errors import WeightsUnavailable
from rollout.weights.fingerprint import Buffer
from rollout.weights.store import wire
from rollout.weights.store.assembling import Assembled, Read, Wanted
from rollout.weights.store.commit import NodeState, Write
from rollout.weights.store.files import Files, Regions
from rollout.weights.store.layout import Range
from rollout.weights.store.moving import Mover
from rollout.weights.store.records import Record, dump, load
from rollout.weights.store.serving import as_list
from rollout.weights.store.writer import FileSink, Sink

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5.0
# Taking space zeroes it, and hashing a share of the model takes its time.
_LONG_TIMEOUT_S = 300.0

Address = tuple[str, int]


class AgentClient:
    """Calls one agent.

    Args:
        address: where it listens; asked again when it cannot be reached there, for an agent that
            was started again may be elsewhere.
        mover: to read units with, before the stream is tried; after one failure it is not used
            again for this agent.
    """

    def __init__(
        self,
        node: str,
        address: Address | Callable[[], Address],
        token: str = "",
        *,
        regions: Regions | None = None,
        mover: Mover | None = None,
    ) -> None:
        self.node = node
        self._find = address if callable(address) else lambda: address
        self._address: Address | None = None
        self._token = token
        self._mover = mover
        self._files = Files()
        self._regions = regions or Regions(self._files)
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._shares_files: bool | None = None

    # -- calls, as ``StoreAgent`` has them --------------------------------------------------

    def state(self) -> NodeState:
        answer = self._call("state")[0]["value"]
        committed = answer["committed"]
        return NodeState(
            committed and Write(*committed), frozenset(Write(*one) for one in answer["sealed"])
        )

    def record(self, write: Write) -> Record:
        return load(self._call("record", {"write": as_list(write)})[1], where=f"node {self.node}")

    def begin(self, record: Record, counts: Write | None) -> Mapping[str, str]:
        words = {"counts": counts and as_list(counts)}
        answer: dict[str, str] = self._call("begin", words, dump(record), _LONG_TIMEOUT_S)[0][
            "value"
        ]
        return answer

    def sink(self, record: Record, paths: Mapping[str, str]) -> Sink:
        """Straight into its files where they can be mapped, else over a stream."""
        if self._has_its_files():
            return FileSink(paths, self._regions, self._files)
        return _StreamSink(self, record, paths)

    def seal(self, record: Record) -> None:
        self._call("seal", {}, dump(record))

    def commit(self, write: Write) -> None:
        self._call("commit", {"write": as_list(write)})

    def ways(self) -> Mapping[str, Read]:
        """How a unit can be read."""
        mover = self._mover
        if mover is None:
            return {"tcp": self.read}
        return {"mooncake": partial(self._read_by, mover), "tcp": self.read}

    def read(self, write: Write, unit: int, into: memoryview) -> None:
        """One unit as a stream."""
        with self._connection(_CALL_TIMEOUT_S) as connection:
            self._ask(connection, "read", write, unit)
            _check_length(self._begin_of_answer(connection)[1], into)
            wire.receive_into(connection, into)

    def _read_by(self, mover: Mover, write: Write, unit: int, into: memoryview) -> None:
        """One unit, piece by piece, from memory that the agent lends."""
        try:
            with self._connection(_CALL_TIMEOUT_S) as connection:
                self._ask(connection, "lend", write, unit)
                lent = self._begin_of_answer(connection)[0]["value"]
                _check_length(lent["num_bytes"], into)
                step = min(mover.piece_bytes, lent["piece_bytes"])
                for at in range(0, len(into), step):
                    part = into[at : at + step]
                    wire.send(connection, {"at": at, "length": len(part)})
                    self._begin_of_answer(connection)
                    mover.fetch(lent["session"], lent["address"], part)
                wire.send(connection, {"end": True})
        except (OSError, WeightsUnavailable) as error:
            if self._mover is not None:
                self._mover = None
                logger.warning("store: streams are used from node %s: %s", self.node, error)
            raise

    def _ask(self, connection: socket.socket, call: str, write: Write, unit: int) -> None:
        words = {"call": call, "write": as_list(write), "unit": unit, "token": self._token}
        wire.send(connection, words)

    def assemble(self, record: Record, peers: Mapping[str, Any], wanted: Wanted) -> Assembled:
        """``peers``: clients too; the agent speaks to them itself."""
        addresses = {}
        for node, peer in peers.items():
            with suppress(OSError, WeightsUnavailable):  # one that is nowhere cannot help
                addresses[node] = peer.address()
        words = {"peers": addresses, "wanted": asdict(wanted)}
        answer = self._call("assemble", words, dump(record), _LONG_TIMEOUT_S)[0]["value"]
        return Assembled(
            answer["path"],
            answer["local_bytes"],
            answer["fetched_bytes"],
            answer["by"],
            tuple(answer["troubles"]),
        )

    def give_back(self, path: str) -> None:
        self._call("give_back", {"path": path})

    def renew(self) -> None:
        self._call("renew")

    def num_bytes(self) -> int:
        answer: int = self._call("num_bytes")[0]["value"]
        return answer

    def close(self, *, clear: bool) -> None:
        try:
            self._call("close", {"clear": clear})
        finally:
            self.disconnect()
            self._regions.close()

    def address(self) -> Address:
        """Where the agent listens now."""
        if self._address is None:
            self._address = self._find()
        return self._address

    # -- connections ------------------------------------------------------------------------

    def _has_its_files(self) -> bool:
        if self._shares_files is None:
            path, mark = self._call("mark")[0]["value"]
            found = self._files.read(Path(path))
            self._shares_files = bool(mark) and found == mark.encode()
        return self._shares_files

    def _call(
        self,
        call: str,
        words: Mapping[str, Any] | None = None,
        body: Buffer = b"",
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> tuple[dict[str, Any], bytes]:
        with self._connection(timeout_s) as connection:
            wire.send(connection, {**(words or {}), "call": call, "token": self._token}, body)
            answer, num_bytes = self._begin_of_answer(connection)
            return answer, wire.receive_body(connection, num_bytes)

    def _begin_of_answer(self, connection: socket.socket) -> tuple[dict[str, Any], int]:
        message = wire.receive(connection)
        if message is None:
            raise ConnectionError(f"the store's agent of node {self.node} closed the connection")
        if "error" in message[0]:
            raise WeightsUnavailable(message[0]["error"])
        return message

    @contextmanager
    def _connection(self, timeout_s: float) -> Iterator[socket.socket]:
        connection = self._take(timeout_s)
        try:
            yield connection
        except BaseException:
            # Nobody knows what is still to come on this one, or whether it is at its end.
            connection.close()
            raise
        self._give(connection)

    def _take(self, timeout_s: float) -> socket.socket:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None and _has_ended(connection):
            connection.close()
            self.disconnect()
            connection = None
        if connection is None:
            connection = self._connect()
        connection.settimeout(timeout_s)
        return connection

    def _connect(self) -> socket.socket:
        known = self._address
        try:
            connection = socket.create_connection(self.address(), timeout=_CONNECT_TIMEOUT_S)
        except OSError:
            self._address = self._shares_files = None
            if known is None or self.address() == known:
                raise
            connection = socket.create_connection(self.address(), timeout=_CONNECT_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _give(self, connection: socket.socket) -> None:
        with self._lock:
            self._idle.append(connection)

    def disconnect(self) -> None:
        """Close the connections that rest; it can be called again all the same."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()


def _check_length(num_bytes: int, into: memoryview) -> None:
    if num_bytes != len(into):
        raise ConnectionError(f"{num_bytes} bytes come, not {len(into)}")


def _has_ended(connection: socket.socket) -> bool:
    """The other side has closed it while it rested: its agent was started again."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


class _StreamSink:
    """A node whose files are out of reach: its agent writes what it is sent."""

    def __init__(self, client: AgentClient, record: Record, paths: Mapping[str, str]) -> None:
        self._client = client
        self._connection = client._take(_LONG_TIMEOUT_S)
        self._is_open = True
        words = {"call": "fill", "paths": dict(paths), "token": client._token}
        wire.send(self._connection, words, dump(record))
        client._begin_of_answer(self._connection)

    def open(self, place: Range) -> None:
        wire.announce(self._connection, {"tensor": place.tensor.name}, place.num_bytes)

    def put(self, piece: memoryview) -> None:
        self._connection.sendall(piece)

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            wire.send(self._connection, {"end": True})
            self._client._begin_of_answer(self._connection)
        finally:
            self._connection.close()
