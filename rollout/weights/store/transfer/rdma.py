"""Transfers units with a library that reads another process's memory, as RDMA does.

Always true: other processes can access only this module's buffers, never the store's files; a
buffer is reused only when every transfer into it has ended, so late bytes do no harm; every wait
has a deadline; received bytes are unverified, as with any transport.

The extra copy on both sides costs about a tenth of a CPU-second per GiB.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from engines.process.background import in_own_thread
from engines.protocol.plain_text import describe
from rollout.core.errors import WeightsUnavailable

_PIECE_BYTES = 16 << 20
# For reads, as many as the streams of one assembly; and as many for exports.
_NUM_BUFFERS = 4
# Of one transfer; all transfers of a buffer run at once.  Their number is far below 1024, the
# default limit of the library's queues.
_TRANSFER_BYTES = 4 << 20
_DEADLINE_S = 10.0
_POLL_S = 0.0003
_MAX_POLL_S = 1.0
_FAILED = -1
_ENDED = (1, _FAILED)


class TransferEngine(Protocol):
    """The methods of Mooncake's ``TransferEngine`` that are used, after its initialization."""

    def get_rpc_port(self) -> int: ...

    def register_memory(self, address: int, num_bytes: int) -> int:
        """Let other processes access it; a result other than 0 is a failure."""
        ...

    def batch_transfer_async_read(
        self,
        session: str,
        addresses: Sequence[int],
        peer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Start to read a peer's memory into local memory; 0 is a failure."""
        ...

    def transfer_check_status(self, batch: int) -> int:
        """1: ended, -1: failed; not called again after those. Else it still runs."""
        ...


@dataclass(frozen=True, slots=True)
class RdmaBuffer:
    """Memory that other processes can access."""

    address: int
    view: memoryview


class RdmaTransfer:
    """The transfers of one process.

    Args:
        host: address of this node for other nodes.
        deadline_s: for the transfer of one buffer, and for a buffer to become free.
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
        # Anonymous memory: pages are allocated at first use.
        self._memory = mmap.mmap(-1, 2 * _NUM_BUFFERS * piece_bytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        if engine.register_memory(start, len(self._memory)):
            raise WeightsUnavailable(
                f"the transfer engine does not take {len(self._memory)} bytes of memory"
            )
        self.session = f"{host}:{engine.get_rpc_port()}"
        self._to_read = queue.SimpleQueue[RdmaBuffer]()
        self._to_export = queue.SimpleQueue[RdmaBuffer]()
        view = memoryview(self._memory)
        for number in range(2 * _NUM_BUFFERS):
            at = number * piece_bytes
            buffer = RdmaBuffer(start + at, view[at : at + piece_bytes])
            (self._to_read if number % 2 else self._to_export).put(buffer)

    @contextmanager
    def exported(self) -> Iterator[RdmaBuffer]:
        """A buffer for another process to read from.  A late read gets other bytes, and fails
        verification."""
        buffer = self._take(self._to_export)
        try:
            yield buffer
        finally:
            self._to_export.put(buffer)

    def fetch(self, session: str, address: int, into: memoryview) -> None:
        """Read what another process exports, up to one buffer.

        Raises:
            WeightsUnavailable: it failed, or took too long.
        """
        buffer = self._take(self._to_read)
        done = self._transfer(session, address, buffer, len(into))
        try:
            is_complete = done.result(self._deadline_s)
        except TimeoutError:
            done.add_done_callback(lambda _: self._to_read.put(buffer))
            raise WeightsUnavailable(
                f"{len(into)} bytes from {session} did not come within {self._deadline_s:g} s"
            ) from None
        except Exception as error:  # transfers may still run: the buffer is not reused
            raise WeightsUnavailable(f"the transfer from {session}: {describe(error)}") from error
        if is_complete:
            into[:] = buffer.view[: len(into)]
        self._to_read.put(buffer)
        if not is_complete:
            raise WeightsUnavailable(f"the transfer from {session} failed")

    def _take(self, buffers: queue.SimpleQueue[RdmaBuffer]) -> RdmaBuffer:
        try:
            return buffers.get(timeout=self._deadline_s)
        except queue.Empty:
            raise WeightsUnavailable(
                f"no memory for a transfer became free within {self._deadline_s:g} s"
            ) from None

    def _transfer(
        self, session: str, address: int, buffer: RdmaBuffer, num_bytes: int
    ) -> Future[bool]:
        """Read in a new thread, because the library's calls have no deadline."""
        read = partial(self._read, session, address, buffer, num_bytes)
        return in_own_thread(read, "store-move")

    def _read(self, session: str, address: int, buffer: RdmaBuffer, num_bytes: int) -> bool:
        """Returns when all transfers have ended; whether all succeeded."""
        running: list[int] = []
        is_complete = True
        for at in range(0, num_bytes, _TRANSFER_BYTES):
            length = min(_TRANSFER_BYTES, num_bytes - at)
            batch = self._engine.batch_transfer_async_read(
                session, [buffer.address + at], [address + at], [length]
            )
            is_complete &= bool(batch)
            if batch:
                running.append(batch)
        since = time.monotonic()
        while running:
            states = [(batch, self._engine.transfer_check_status(batch)) for batch in running]
            is_complete &= all(state != _FAILED for _, state in states)
            running = [batch for batch, state in states if state not in _ENDED]
            if running:
                # A transfer that never ends must cost no CPU time.
                time.sleep(min(_MAX_POLL_S, max(_POLL_S, (time.monotonic() - since) / 20)))
        return is_complete
