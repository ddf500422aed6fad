"""A stream of buckets: the trainer makes them one by one and sends them to every server group.

    reader -> {"reader", "num_readers", "joiners"}           once
    server -> {"terms"} or {"error"}                         when all readers are connected
    reader -> {"next": index, "keeps"}                       earlier buckets are applied
    server -> {"payload", "is_last", "fingerprints"}         or ``error``

These are heads of ``core.wire``.  A payload that is bytes is the body.  A payload that is a mapping
may have bytes under one of its keys: ``bytes_of`` names it, and the body has the bytes.

Always true: the trainer makes a bucket when every reader has applied the one before the last, so at
most two are in memory; if a reader does not connect, no reader gets a bucket; every wait has a
deadline, and ends at once when the connection ends.

This module is the reader, beside the engines; ``stream_server`` runs in the trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from engines.process.background import in_own_thread
from engines.protocol.plain_text import describe
from rollout.core import wire
from rollout.core.errors import WeightsUnavailable
from rollout.weights.routes.route import BroadcastMember, Payload, to_json

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PushStreamAddress:
    """The address of one push's stream.

    Attributes:
        token: a reader without it is refused.
        num_readers: number of groups that will connect; the trainer does not know it.
        timeout_s: for each bucket, including the time to make it.
    """

    host: str
    port: int
    token: str
    timeout_s: float
    num_readers: int = 1


def split_payload(payload: Payload) -> tuple[dict[str, Any], bytes]:
    """A payload as fields of the head, and the body."""
    if isinstance(payload, bytes):
        return {}, payload
    rest = {key: part for key, part in payload.items() if not isinstance(part, bytes)}
    if len(rest) == len(payload):
        return {"payload": rest}, b""
    (key,) = payload.keys() - rest.keys()
    return {"payload": rest, "bytes_of": key}, payload[key]


def join_payload(head: Mapping[str, Any], body: bytes) -> Payload:
    """The payload that ``split_payload`` has split."""
    if "payload" not in head:
        return body
    rest: dict[str, Any] = head["payload"]
    return {**rest, head["bytes_of"]: body} if "bytes_of" in head else rest


class BucketSource:
    """A source of the buckets of a push; iterating gives each bucket, and whether it is the last.

    Attributes:
        terms: from the trainer, before the first bucket: for example the group to join.
        fingerprints: of the tensors received so far.
        keeps: whether the engines stay in the group; sent after the last bucket.
    """

    def __init__(self) -> None:
        self.terms: Mapping[str, Any] = {}
        self.fingerprints: dict[str, str] = {}
        self.keeps = False

    async def open(self, members: Sequence[BroadcastMember]) -> None:
        """Wait for the terms."""

    def __aiter__(self) -> AsyncIterator[tuple[Payload, bool]]:
        raise NotImplementedError

    async def close(self) -> None:
        """Release the connection."""


class StaticBuckets(BucketSource):
    """Buckets that are all available, or awaitable one by one."""

    def __init__(self, buckets: Sequence[Payload | Awaitable[Payload]]) -> None:
        super().__init__()
        self._buckets = buckets

    async def __aiter__(self) -> AsyncIterator[tuple[Payload, bool]]:
        for index, bucket in enumerate(self._buckets):
            payload = bucket if isinstance(bucket, bytes | Mapping) else await bucket
            yield payload, index == len(self._buckets) - 1


class PushStreamReader(BucketSource):
    """One reader of a stream.  It waits in threads, so that it needs no framing of its own."""

    def __init__(self, address: PushStreamAddress, reader: str) -> None:
        super().__init__()
        self._address = address
        self._name = reader
        self._connection: wire.Connection | None = None
        self._waiting: Future[Any] | None = None
        self._is_closed = False

    async def open(self, members: Sequence[BroadcastMember]) -> None:
        """Connect, and wait until all readers are connected.

        Raises:
            WeightsUnavailable: the trainer cannot be reached, or another reader did not connect.
        """
        await self._in_thread(self._connect, "cannot be reached")
        reply, _ = await self._request(
            {
                "reader": self._name,
                "num_readers": self._address.num_readers,
                "joiners": to_json(members),
            }
        )
        self.terms = reply["terms"]

    async def __aiter__(self) -> AsyncIterator[tuple[Payload, bool]]:
        index, is_last = 0, False
        while not is_last:
            reply, body = await self._request({"next": index})
            self.fingerprints.update(reply["fingerprints"])
            is_last = reply["is_last"]
            yield join_payload(reply, body), is_last
            index += 1
        await self._request({"next": index, "keeps": self.keeps})  # the last one is applied

    async def close(self) -> None:
        self._is_closed = True
        if self._connection is not None and self._waiting is not None:
            self._connection.end()
            ended = asyncio.wrap_future(self._waiting)
            await asyncio.wait([ended])
            ended.exception()  # of a wait that was ended here
            self._connection.close()

    def _connect(self) -> None:
        address = self._address
        connection = wire.connect(
            (address.host, address.port),
            address.token,
            connect_s=address.timeout_s,
            timeout_s=address.timeout_s,
        )
        self._connection = connection
        if self._is_closed:  # the reader was closed meanwhile
            connection.close()

    async def _request(self, head: Mapping[str, Any]) -> tuple[wire.Head, bytes]:
        reply, body = await self._in_thread(partial(self._exchange, head), "gave no bucket")
        if "error" in reply:
            raise WeightsUnavailable(reply["error"])
        return reply, body

    def _exchange(self, head: Mapping[str, Any]) -> tuple[wire.Head, bytes]:
        assert self._connection is not None
        self._connection.send(head)
        reply, num_bytes = self._connection.receive()
        return reply, self._connection.body(num_bytes)

    async def _in_thread(self, wait: Callable[[], T], what: str) -> T:
        waiting = self._waiting = in_own_thread(wait, "push-stream-read")
        try:
            return await asyncio.wrap_future(waiting)
        except OSError as error:
            address = self._address
            raise WeightsUnavailable(
                f"the trainer at {address.host}:{address.port} {what}: {describe(error)}"
            ) from None
