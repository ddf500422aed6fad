"""Clients: raw HTTP/1.1 over kept connections, so that they need little CPU."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

IDS = list(range(1000, 1340))
CHAT = [{"role": "user", "content": "a word of a prompt " * 108}]  # 2 KB, of which no turn is known
LEAST_BYTES = {
    "small": 2 << 10,
    "fresh": 2 << 10,
    "medium": 64 << 10,
    "large": 1 << 20,
    "sse": 1 << 9,  # a router that can fail over may merge events
    "long": 2 << 10,
    "many": 2 << 10,
    "turn": 1 << 9,
    "turn_sse": 1 << 9,
    "agent": 1 << 8,
}
"""Least bytes of a right reply, so that a fast wrong reply counts as an error."""


def requests(kind: str) -> Iterator[bytes]:
    """Requests of 2 KB with token ids, as in training; a stop string names the kind of reply.

    All are the same, except in ``fresh``, where each head has a header of its own.  ``turn`` and
    ``turn_sse`` are turns of sessions, with a text of this length.
    """
    if kind.startswith("turn"):
        return itertools.repeat(_turn(kind))
    sampling = {"max_new_tokens": 128, "temperature": 1.0, "stop": [f"kind={kind}"]}
    payload = {"input_ids": IDS, "sampling_params": sampling, "stream": kind == "sse"}
    body = json.dumps(payload).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    rest = b"content-length: %d\r\n\r\n%s" % (len(body), body)
    if kind != "fresh":
        return itertools.repeat(head + rest)
    return (b"%sx-request-id: %d\r\n%s" % (head, number, rest) for number in itertools.count())


def _turn(kind: str) -> bytes:
    stop, is_streamed = [f"kind={kind}"], kind == "turn_sse"
    payload = {"messages": CHAT, "max_tokens": 128, "stop": stop, "stream": is_streamed}
    body = json.dumps(payload).encode()
    return b"POST /sessions/s/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n" + (
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )


@dataclass
class Outcome:
    """Result of a load."""

    latencies_s: list[float] = field(default_factory=list)
    num_errors: int = 0
    elapsed_s: float = 0.0
    cpu_s: float = 0.0


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._done: asyncio.Future[bool] | None = None
        self._buffer = bytearray()
        self._left = -1
        self._is_chunked = False
        self._least_bytes = self._num_bytes = 0
        self.transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def send(self, request: bytes, kind: str) -> asyncio.Future[bool]:
        """Send; the future is True for a complete reply of that kind with status 200."""
        assert self.transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._left = -1
        self._is_chunked = False
        self._least_bytes, self._num_bytes = LEAST_BYTES[kind], 0
        self._buffer.clear()
        self.transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._left > 0:
            self._left -= len(data)
        elif self._is_chunked:
            self._buffer = self._buffer[-8:] + data
        else:
            self._buffer += data
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            if not head.startswith(b"http/1.1 200"):
                self._finish(False)
                return
            at = head.find(b"content-length:")
            if at >= 0:
                length = int(head[at + 15 :].split(b"\r\n", 1)[0])
                self._left = length - (len(self._buffer) - end - 4)
            else:
                self._is_chunked = True
        if self._left == 0 or (self._is_chunked and self._buffer.endswith(b"\r\n0\r\n\r\n")):
            self._finish(self._num_bytes >= self._least_bytes)

    def _finish(self, is_good: bool) -> None:
        if not is_good and self.transport is not None:
            self.transport.abort()
        if self._done is not None and not self._done.done():
            self._done.set_result(is_good)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._finish(False)


async def connect(port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def closed_loop(port: int, kind: str, num_clients: int, for_s: float) -> Outcome:
    """Each client sends its next request when it has the reply to the last."""
    stream, outcome = requests(kind), Outcome()
    began = time.perf_counter()
    until = began + for_s

    async def work() -> None:
        client = await connect(port)
        while (sent := time.perf_counter()) < until:
            if client.transport is None:
                client = await connect(port)
            if await client.send(next(stream), kind):
                outcome.latencies_s.append(time.perf_counter() - sent)
            else:
                outcome.num_errors += 1
        if client.transport is not None:
            client.transport.close()

    await asyncio.gather(*(work() for _ in range(num_clients)))
    outcome.elapsed_s = time.perf_counter() - began
    return outcome


async def paced(
    port: int,
    kind: str,
    per_s: float,
    for_s: float,
    *,
    ramp_s: float = 0.0,
    cpu_s: Callable[[], float] = lambda: 0.0,
) -> Outcome:
    """Requests at a steady rate, whether or not replies come; latency counts from the due time.

    Args:
        ramp_s: seconds at that rate that do not count, in which the connections are opened.
        cpu_s: read at the end of the ramp and when the last request is sent; between the two as
            many requests end as are sent.
    """
    stream, outcome = requests(kind), Outcome()
    idle: list[Client] = []
    tasks = set()

    async def send(due: float, is_counted: bool) -> None:
        while idle and idle[-1].transport is None:
            idle.pop()
        try:
            client = idle.pop() if idle else await connect(port)
        except OSError:
            outcome.num_errors += 1
            return
        if await client.send(next(stream), kind):
            if is_counted:
                outcome.latencies_s.append(time.perf_counter() - due)
            idle.append(client)
        else:
            outcome.num_errors += 1

    first = int(per_s * ramp_s)
    began, used_s = time.perf_counter(), 0.0
    for number in range(first + int(per_s * for_s)):
        due = began + number / per_s
        if (wait_s := due - time.perf_counter()) > 0.0005:
            await asyncio.sleep(wait_s)
        if number == first:
            used_s = cpu_s()
        tasks.add(asyncio.create_task(send(due, number >= first)))
    outcome.cpu_s = cpu_s() - used_s
    await asyncio.gather(*tasks)
    outcome.elapsed_s = time.perf_counter() - began - ramp_s
    for client in idle:
        if client.transport is not None:
            client.transport.close()
    return outcome


async def burst(port: int, kind: str, num: int) -> Outcome:
    """``num`` requests in flight at the same time."""
    stream, outcome = requests(kind), Outcome()
    clients = []
    for start in range(0, num, 256):
        batch = (connect(port) for _ in range(min(256, num - start)))
        clients += await asyncio.gather(*batch)
    began = time.perf_counter()

    async def send(client: Client) -> None:
        sent = time.perf_counter()
        if await client.send(next(stream), kind):
            outcome.latencies_s.append(time.perf_counter() - sent)
        else:
            outcome.num_errors += 1

    await asyncio.gather(*map(send, clients))
    outcome.elapsed_s = time.perf_counter() - began
    for client in clients:
        if client.transport is not None:
            client.transport.close()
    return outcome
