"""A stream of buckets: the trainer makes them one by one and sends them to every server group.

    reader -> {"token", "reader", "num_readers", "joiners"}          once
    server -> {"terms"} or {"error"}                                 when all readers are connected
    reader -> {"next": index, "keeps"}                               earlier buckets are applied
    server -> {"payload" or "num_bytes", "is_last", "fingerprints"}  then ``num_bytes`` bytes

Each message is a line of JSON.  A payload that is a mapping may have bytes under one of its keys:
``bytes_of`` names it, and the bytes come after the message.

Always true: the trainer makes a bucket when every reader has applied the one before the last, so at
most two are in memory; if a reader does not connect, no reader gets a bucket; every wait has a
deadline, and ends at once when the connection ends.

This module is the reader, beside the engines; ``stream_server`` runs in the trainer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.protocol.plain_text import describe
from rollout.core.errors import WeightsUnavailable
from rollout.weights.routes.broadcast import BroadcastMember, to_json
from rollout.weights.routes.route import Payload

MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class PushStreamAddress:
    """The address of one push's stream.

    Attributes:
        token: readers send it; a connection without it is refused.
        num_readers: number of groups that will connect; the trainer does not know it.
        timeout_s: for each bucket, including the time to make it.
    """

    host: str
    port: int
    token: str
    timeout_s: float
    num_readers: int = 1


def encode_message(fields: Mapping[str, Any]) -> bytes:
    """One message of the stream: a line of JSON."""
    return json.dumps(fields).encode() + b"\n"


def split_payload(payload: Payload) -> tuple[bytes, dict[str, Any]]:
    """A payload as the bytes after a message, and the fields of the message."""
    if isinstance(payload, bytes):
        return payload, {"num_bytes": len(payload)}
    rest = {key: part for key, part in payload.items() if not isinstance(part, bytes)}
    if len(rest) == len(payload):
        return b"", {"payload": rest}
    (key,) = payload.keys() - rest.keys()
    return payload[key], {"payload": rest, "bytes_of": key, "num_bytes": len(payload[key])}


def join_payload(message: Mapping[str, Any], body: bytes | None) -> Payload:
    """The payload that ``split_payload`` has split."""
    if body is None:
        joined: Payload = message["payload"]
        return joined
    return {**message["payload"], message["bytes_of"]: body} if "bytes_of" in message else body


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
    """One reader of a stream."""

    def __init__(self, address: PushStreamAddress, reader: str) -> None:
        super().__init__()
        self._address = address
        self._name = reader
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self, members: Sequence[BroadcastMember]) -> None:
        """Connect, and wait until all readers are connected.

        Raises:
            WeightsUnavailable: the trainer cannot be reached, or another reader did not connect.
        """
        address = self._address
        try:
            async with asyncio.timeout(address.timeout_s):
                self._streams = await asyncio.open_connection(
                    address.host, address.port, limit=MAX_LINE_BYTES
                )
        except (OSError, TimeoutError) as error:
            raise self._lost("cannot be reached", error) from None
        reply, _ = await self._request(
            {
                "token": address.token,
                "reader": self._name,
                "num_readers": address.num_readers,
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
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _request(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], bytes | None]:
        assert self._streams is not None
        stream, writer = self._streams
        try:
            async with asyncio.timeout(self._address.timeout_s):
                writer.write(encode_message(fields))
                await writer.drain()
                line = await stream.readline()
                if not line:
                    raise ConnectionError("it closed the connection")
                reply = json.loads(line)
                if "error" in reply:
                    raise WeightsUnavailable(reply["error"])
                size = reply.get("num_bytes")
                return reply, None if size is None else await stream.readexactly(size)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            raise self._lost("gave no bucket", error) from None

    def _lost(self, what: str, error: BaseException) -> WeightsUnavailable:
        address = self._address
        late = f"within {address.timeout_s:g} s" if isinstance(error, TimeoutError) else ""
        why = late or describe(error)
        return WeightsUnavailable(f"the trainer at {address.host}:{address.port} {what}: {why}")
