"""An agent's door: other processes of the run call it over TCP, and read units as streams.

Always true: nobody is answered who does not show the run's token; a call that fails is answered
with its error in words; units go from the page cache into the socket without passing through this
process; ``close`` ends every connection.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rollout.errors import WeightsUnavailable
from rollout.fanout import describe
from rollout.weights.store import wire
from rollout.weights.store.agent import StoreAgent
from rollout.weights.store.assembling import Wanted
from rollout.weights.store.commit import Write
from rollout.weights.store.layout import ranges
from rollout.weights.store.moving import Mover
from rollout.weights.store.records import dump, load

logger = logging.getLogger(__name__)

# A peer that is silent in the middle of a message is gone.
_TIMEOUT_S = 60.0


class AgentServer:
    """Serves one agent; a thread per connection, for all it does is move bytes.

    Args:
        host: address to bind; other nodes must be able to reach it.
        mover: by which units also travel.
    """

    def __init__(
        self,
        agent: StoreAgent,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        mover: Mover | None = None,
    ) -> None:
        self.agent = agent
        self._mover = mover
        self._socket = socket.create_server((host, port))
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._connections: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="store-agent", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every connection; the agent itself lives on."""
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
                _Session(self.agent, connection, self._mover).run()
        except (OSError, ValueError, KeyError, TypeError, WeightsUnavailable) as error:
            logger.debug("store: connection ended: %s", describe(error))
        finally:
            self._connections.discard(connection)


class _Session:
    """One connection: calls, one after the other."""

    def __init__(self, agent: StoreAgent, connection: socket.socket, mover: Mover | None) -> None:
        self._agent = agent
        self._mover = mover
        self._connection = connection
        self._calls: dict[str, Callable[[dict[str, Any], bytes], Any]] = {
            "state": self._state,
            "record": lambda words, _: dump(agent.record(Write(*words["write"]))),
            "begin": self._begin,
            "seal": lambda _, body: agent.seal(load(body)),
            "commit": lambda words, _: agent.commit(Write(*words["write"])),
            "assemble": self._assemble,
            "give_back": lambda words, _: agent.give_back(words["path"]),
            "renew": lambda *_: agent.renew(),
            "num_bytes": lambda *_: agent.num_bytes(),
            "mark": lambda *_: agent.mark(),
            "close": lambda words, _: agent.close(clear=words["clear"]),
        }

    def run(self) -> None:
        while True:
            # Between two calls a connection may rest as long as it likes.
            self._connection.settimeout(None)
            message = wire.receive(self._connection)
            if message is None:
                return
            self._connection.settimeout(_TIMEOUT_S)
            words, num_bytes = message
            if not hmac.compare_digest(
                str(words.get("token", "")).encode(), self._agent.settings.token.encode()
            ):
                wire.send(self._connection, {"error": "wrong token: this is another run's store"})
                return
            if words["call"] == "read":
                self._read(words)
            elif words["call"] == "lend":
                self._lend(words)
            elif words["call"] == "fill":
                self._fill(words, num_bytes)
            else:
                self._answer(words, wire.receive_body(self._connection, num_bytes))

    def _answer(self, words: dict[str, Any], body: bytes) -> None:
        try:
            value = self._calls[words["call"]](words, body)
        except (OSError, WeightsUnavailable) as error:
            wire.send(self._connection, {"error": describe(error)})
            return
        if isinstance(value, bytes):
            wire.send(self._connection, {}, value)
        else:
            wire.send(self._connection, {"value": value})

    def _state(self, words: dict[str, Any], _: bytes) -> dict[str, Any]:
        state = self._agent.state()
        return {
            "committed": state.committed and as_list(state.committed),
            "sealed": [as_list(write) for write in state.sealed],
        }

    def _begin(self, words: dict[str, Any], body: bytes) -> dict[str, str]:
        counts = words["counts"]
        return self._agent.begin(load(body), None if counts is None else Write(*counts))

    def _assemble(self, words: dict[str, Any], body: bytes) -> dict[str, Any]:
        from rollout.weights.store.client import AgentClient

        peers = {
            node: AgentClient(node, tuple(address), self._agent.settings.token, mover=self._mover)
            for node, address in words["peers"].items()
        }
        try:
            assembled = self._agent.assemble(load(body), peers, Wanted(**words["wanted"]))
        finally:
            for peer in peers.values():
                peer.disconnect()
        return {
            "path": assembled.path,
            "local_bytes": assembled.local_bytes,
            "fetched_bytes": assembled.fetched_bytes,
            "by": assembled.by,
            "troubles": list(assembled.troubles),
        }

    def _read(self, words: dict[str, Any]) -> None:
        try:
            reading = self._agent.reading(Write(*words["write"]), words["unit"])
            with reading as (path, offset, num_bytes), path.open("rb") as stream:
                wire.announce(self._connection, {}, num_bytes)
                self._send_file(stream.fileno(), offset, num_bytes)
        except WeightsUnavailable as error:
            wire.send(self._connection, {"error": describe(error)})

    def _send_file(self, descriptor: int, offset: int, num_bytes: int) -> None:
        end = offset + num_bytes
        # Python's timeouts make a socket non-blocking, which sendfile is not told of.
        self._connection.settimeout(None)
        self._connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_TIMEOUT_S), 0)
        )
        while offset < end:
            sent = os.sendfile(self._connection.fileno(), descriptor, offset, end - offset)
            if not sent:
                raise ConnectionError("the file ended early")
            offset += sent

    def _lend(self, words: dict[str, Any]) -> None:
        """A unit, piece by piece, in memory from which the other side reads it."""
        try:
            if self._mover is None:
                raise WeightsUnavailable(f"node {self._agent.node} lends no memory")
            reading = self._agent.reading(Write(*words["write"]), words["unit"])
            with (
                self._mover.lent() as piece,
                reading as (path, offset, num_bytes),
                path.open("rb") as stream,
            ):
                lent = {
                    "session": self._mover.session,
                    "address": piece.address,
                    "piece_bytes": len(piece.view),
                    "num_bytes": num_bytes,
                }
                wire.send(self._connection, {"value": lent})
                self._put_pieces(stream.fileno(), offset, piece.view)
        except WeightsUnavailable as error:
            wire.send(self._connection, {"error": describe(error)})

    def _put_pieces(self, descriptor: int, offset: int, view: memoryview) -> None:
        while (message := wire.receive(self._connection)) is not None:
            words, _ = message
            if words.get("end"):
                return
            at, length = words["at"], words["length"]
            if os.preadv(descriptor, [view[:length]], offset + at) != length:
                raise ConnectionError("the file ended early")
            wire.send(self._connection, {"value": None})
        raise ConnectionError("the reader went away")

    def _fill(self, words: dict[str, Any], num_bytes: int) -> None:
        """Tensors of a write that has begun, one after the other, each into its place."""
        paths: dict[str, str] = words["paths"]
        record = load(wire.receive_body(self._connection, num_bytes))
        places = {
            place.tensor.name: place
            for place in ranges(record.units, record.segments_of(self._agent.node))
        }
        sink = self._agent.sink(record, paths)
        regions = {name: sink.region(name) for name in paths}
        wire.send(self._connection, {"value": None})
        while True:
            message = wire.receive(self._connection)
            if message is None:
                raise ConnectionError("the writer went away")
            words, num_bytes = message
            if words.get("end"):
                wire.send(self._connection, {"value": None})
                return
            place = places[words["tensor"]]
            if num_bytes != place.num_bytes:
                raise ValueError(f"{place.tensor.name} comes with {num_bytes} bytes")
            view = regions[place.file].view[place.offset : place.offset + num_bytes]
            wire.receive_into(self._connection, view)


def as_list(write: Write) -> list[Any]:
    """A write in JSON."""
    return [write.number, write.version, write.write_id]
