"""Units between two nodes by a library that reads another process's memory, as RDMA does.

Always true: the only memory that others can reach is this module's own, never the store's files;
bytes land in a piece of it that is used again only when every transfer into it has ended, so what
comes late lands where nobody looks; every wait has an end; what arrives is unproved, as over any
other way.

Both ends copy each byte once more for that, which costs about a tenth of a CPU-second per GiB.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rollout.errors import WeightsUnavailable
from rollout.fanout import describe

_PIECE_BYTES = 16 << 20
# As many as the streams of one assembly: to read into, and as many to lend to others.
_NUM_PIECES = 4
# One transfer; all of a piece travel at once.  Far below the 1024 in a batch that the library's
# queues hold by default.
_TRANSFER_BYTES = 4 << 20
_DEADLINE_S = 10.0
_POLL_S = 0.0003
_MAX_POLL_S = 1.0
_ENDED_BADLY = -1
_ENDED = (1, _ENDED_BADLY)


class TransferEngine(Protocol):
    """What is used of Mooncake's ``TransferEngine``, once it is initialized."""

    def get_rpc_port(self) -> int: ...

    def register_memory(self, address: int, num_bytes: int) -> int:
        """Others may reach it; not 0 is a failure."""
        ...

    def batch_transfer_async_read(
        self,
        session: str,
        addresses: Sequence[int],
        peer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Begin to read another's memory into one's own; 0 is a failure."""
        ...

    def transfer_check_status(self, batch: int) -> int:
        """1 it has ended, -1 it has failed; asked no more after those.  Else it goes on."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Memory that others can reach."""

    address: int
    view: memoryview


class Mover:
    """One process's end of such transfers.

    Args:
        host: address under which other nodes reach this one.
        deadline_s: for the transfer of one piece, and for a piece to become free.
    """

    def __init__(
        self,
        engine: TransferEngine,
        host: str,
        *,
        piece_bytes: int = _PIECE_BYTES,
        deadline_s: float = _DEADLINE_S,
    ) -> None:
        self._engine = engine
        self.piece_bytes = piece_bytes
        self._deadline_s = deadline_s
        # Anonymous memory: a page of it is there when it is first used.
        self._memory = mmap.mmap(-1, 2 * _NUM_PIECES * piece_bytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if engine.register_memory(start, len(self._memory)):
            raise WeightsUnavailable(
                f"the transfer engine does not take {len(self._memory)} bytes of memory"
            )
        self.session = f"{host}:{engine.get_rpc_port()}"
        self._to_read = queue.SimpleQueue[Piece]()
        self._to_lend = queue.SimpleQueue[Piece]()
        view = memoryview(self._memory)
        for number in range(2 * _NUM_PIECES):
            at = number * piece_bytes
            piece = Piece(start + at, view[at : at + piece_bytes])
            (self._to_read if number % 2 else self._to_lend).put(piece)

    @contextmanager
    def lent(self) -> Iterator[Piece]:
        """A piece for another process to read from; what it may still read of it later is not
        what it wanted, and does not prove."""
        piece = self._take(self._to_lend)
        try:
            yield piece
        finally:
            self._to_lend.put(piece)

    def fetch(self, session: str, address: int, into: memoryview) -> None:
        """Read what another process has lent; not more than a piece.

        Raises:
            WeightsUnavailable: it failed, or took too long.
        """
        piece = self._take(self._to_read)
        done = self._transfer(session, address, piece, len(into))
        try:
            has_come = done.result(self._deadline_s)
        except TimeoutError:
            done.add_done_callback(lambda _: self._to_read.put(piece))
            raise WeightsUnavailable(
                f"{len(into)} bytes from {session} did not come within {self._deadline_s:g} s"
            ) from None
        except Exception as error:  # nobody knows what is still to come: the piece is lost
            raise WeightsUnavailable(f"the transfer from {session}: {describe(error)}") from error
        if has_come:
            into[:] = piece.view[: len(into)]
        self._to_read.put(piece)
        if not has_come:
            raise WeightsUnavailable(f"the transfer from {session} failed")

    def _take(self, pieces: queue.SimpleQueue[Piece]) -> Piece:
        try:
            return pieces.get(timeout=self._deadline_s)
        except queue.Empty:
            raise WeightsUnavailable(
                f"no memory for a transfer became free within {self._deadline_s:g} s"
            ) from None

    def _transfer(self, session: str, address: int, piece: Piece, num_bytes: int) -> Future[bool]:
        """In a thread of its own: the library's calls end when they like."""
        done: Future[bool] = Future()

        def run() -> None:
            try:
                has_come = self._read(session, address, piece, num_bytes)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(has_come)

        threading.Thread(target=run, name="store-move", daemon=True).start()
        return done

    def _read(self, session: str, address: int, piece: Piece, num_bytes: int) -> bool:
        """Returns when nothing more can come; whether all has."""
        under_way: list[int] = []
        has_come = True
        for at in range(0, num_bytes, _TRANSFER_BYTES):
            length = min(_TRANSFER_BYTES, num_bytes - at)
            batch = self._engine.batch_transfer_async_read(
                session, [piece.address + at], [address + at], [length]
            )
            has_come &= bool(batch)
            if batch:
                under_way.append(batch)
        since = time.monotonic()
        while under_way:
            states = [(batch, self._engine.transfer_check_status(batch)) for batch in under_way]
            has_come &= all(state != _ENDED_BADLY for _, state in states)
            under_way = [batch for batch, state in states if state not in _ENDED]
            if under_way:
                # One that never ends is to cost nothing.
                time.sleep(min(_MAX_POLL_S, max(_POLL_S, (time.monotonic() - since) / 20)))
        return has_come
