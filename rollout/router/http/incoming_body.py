"""Bodies of requests that are still arriving.

Always true: together they take at most ``max_bytes``, and those of one client half of it.  A body
arrives at a least rate, or its request ends.
"""

from __future__ import annotations

import io
from collections.abc import Callable

STALLED_S = 10.0
"""The longest time to the first part of a body, and between two parts."""
LEAST_BYTES_PER_S = 64 << 10
"""Least speed of a body, after its first ``STALLED_S`` seconds."""


class IncomingBodies:
    """All bodies of one router that have not arrived completely.

    Attributes:
        num_bytes: that they take together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._of_clients: dict[str, int] = {}
        # A body does not refer to its request: both would wait for the garbage collector.
        self._on_late: dict[IncomingBody, Callable[[], None]] = {}

    def begin(self, client: str, on_late: Callable[[], None], now_s: float) -> IncomingBody:
        """A new body.

        Args:
            client: address that shares a bound.
            on_late: called if it arrives too slowly.
        """
        body = IncomingBody(self, client, now_s)
        self._on_late[body] = on_late
        return body

    def why_full(self, client: str, num_bytes: int) -> str:
        """Why there is no room for so many bytes."""
        of_client = self._of_clients.get(client, 0)
        if self.num_bytes + num_bytes > self.max_bytes:
            return f"unfinished requests already take {self.num_bytes} bytes"
        if of_client + num_bytes > self.max_bytes // 2:
            return f"unfinished requests of {client} already take {of_client} bytes"
        return ""

    def count(self, client: str, num_bytes: int) -> None:
        """So many bytes more, or fewer, have arrived and are not complete."""
        of_client = self._of_clients.get(client, 0) + num_bytes  # all changes come after all calls
        self.num_bytes += num_bytes
        self._of_clients[client] = of_client
        if not of_client:
            del self._of_clients[client]

    def forget(self, body: IncomingBody) -> None:
        """Count a body no longer.  Idempotent."""
        if body in self._on_late:
            self.count(body.client, -body.num_bytes)
            del self._on_late[body]

    def expire(self, now_s: float) -> None:
        """End the requests whose bodies arrive too slowly."""
        for body in [body for body in self._on_late if body.is_late(now_s)]:
            if on_late := self._on_late.get(body):  # it may end with one before it
                on_late()


class IncomingBody:
    """One body.

    Attributes:
        num_bytes: that have arrived so far.
    """

    def __init__(
        self,
        all_bodies: IncomingBodies,
        client: str,
        now_s: float,
    ) -> None:
        self.client = client
        self.num_bytes = 0
        self._all = all_bodies
        self._data = io.BytesIO()
        self._began_s = self._last_s = now_s

    def add(self, data: bytes, now_s: float) -> str:
        """Take a part.  Returns why there is no room for it, or empty."""
        num_bytes = len(data)
        if why := self._all.why_full(self.client, num_bytes):
            return why
        self._all.count(self.client, num_bytes)
        self.num_bytes += num_bytes
        self._last_s = now_s
        self._data.write(data)
        return ""

    def is_late(self, now_s: float) -> bool:
        allowed_s = STALLED_S + self.num_bytes / LEAST_BYTES_PER_S
        return now_s - self._last_s > STALLED_S or now_s - self._began_s > allowed_s

    def take(self) -> bytes:
        """All of it, which is not copied."""
        self._all.forget(self)
        data, self._data = self._data.getvalue(), io.BytesIO()
        return data

    def drop(self) -> None:
        """It is not needed."""
        self.take()
