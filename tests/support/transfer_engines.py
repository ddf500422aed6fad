"""A transfer engine within one process: addresses are real, what happens to bytes is chosen."""

import ctypes
import threading
from collections.abc import Sequence
from enum import StrEnum


class Act(StrEnum):
    """What becomes of a transfer."""

    COPY = "copy"
    REFUSE = "refuse"
    FAIL = "fail"
    SPOIL = "spoil"
    HANG = "hang"


class FakeEngine:
    """Copies from any address of this process."""

    def __init__(self, act: Act = Act.COPY) -> None:
        self.act = act
        self.lengths: list[int] = []
        self.opened = threading.Event()
        self._under_way: dict[int, tuple[Act, int, int, int]] = {}
        self._lock = threading.Lock()

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 1

    def register_memory(self, address: int, num_bytes: int) -> int:
        return 0

    def batch_transfer_async_read(
        self,
        session: str,
        addresses: Sequence[int],
        peer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        (into,), (source,), (length,) = addresses, peer_addresses, lengths
        if self.act is Act.REFUSE:
            return 0
        with self._lock:
            self.lengths.append(length)
            batch = len(self.lengths)
            self._under_way[batch] = self.act, into, source, length
        return batch

    def transfer_check_status(self, batch: int) -> int:
        act, into, source, length = self._under_way[batch]
        if act is Act.HANG and not self.opened.is_set():
            return 0
        # It is not called after the end: the library has freed the batch by then.
        del self._under_way[batch]
        if act is Act.FAIL:
            return -1
        ctypes.memmove(into, source, length)
        if act is Act.SPOIL:
            ctypes.memset(into, ctypes.c_ubyte.from_address(into).value ^ 1, 1)
        return 1
