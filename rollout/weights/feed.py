"""Buckets handed out by the trainer as it makes them, to every group that pushes them.

    reader -> {"token", "reader", "num_readers", "joiners"}        once, a line of JSON
    feed   -> {"terms"} or {"error"}                               when all readers are there
    reader -> {"next": index, "keeps"}                             it has applied those before
    feed   -> {"payload" or "num_bytes", "is_last", "fingerprints"} and so many bytes

Always true: a bucket is made when every reader has applied the one before the last, so at most
two are alive; if one reader does not come, none is given anything; whoever waits has a deadline,
and learns of the other's end at once, for it is that of the connection.

This file is the readers' end, beside the engines; ``feeding.py`` is the trainer's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.errors import WeightsUnavailable
from rollout.fanout import describe
from rollout.weights.joining import Joiner, to_json
from rollout.weights.transports.carrier import Payload

MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class FeedAddress:
    """Where a trainer hands out one push.

    Attributes:
        token: shown by readers, so that nobody else is served.
        num_readers: groups that will read; known to the server only.
        timeout_s: for each bucket, the trainer's work on it included.
    """

    host: str
    port: int
    token: str
    timeout_s: float
    num_readers: int = 1


class Source(Protocol):
    """Where the buckets of a push come from.

    Attributes:
        terms: what the trainer says before the first, such as where to join.
        fingerprints: of the tensors that have come so far.
        keeps: whether all that joined a group stay in it, told with the last bucket.
    """

    terms: Mapping[str, Any]
    fingerprints: dict[str, str]
    keeps: bool

    async def open(self, joiners: Sequence[Joiner]) -> None: ...
    def __aiter__(self) -> AsyncIterator[tuple[Payload, bool]]: ...
    async def close(self) -> None: ...


class StaticSource:
    """Buckets that are all there, or can be awaited one by one."""

    def __init__(self, buckets: Sequence[Payload | Awaitable[Payload]]) -> None:
        self.terms: Mapping[str, Any] = {}
        self.fingerprints: dict[str, str] = {}
        self.keeps = False
        self._buckets = buckets

    async def open(self, joiners: Sequence[Joiner]) -> None:
        """Nothing to open."""

    async def __aiter__(self) -> AsyncIterator[tuple[Payload, bool]]:
        for index, bucket in enumerate(self._buckets):
            payload = bucket if isinstance(bucket, bytes | Mapping) else await bucket
            yield payload, index == len(self._buckets) - 1

    async def close(self) -> None:
        """Nothing to close."""


class FeedReader:
    """One reader of a feed."""

    def __init__(self, address: FeedAddress, reader: str) -> None:
        self.terms: Mapping[str, Any] = {}
        self.fingerprints: dict[str, str] = {}
        self.keeps = False
        self._address = address
        self._name = reader
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self, joiners: Sequence[Joiner]) -> None:
        """Connect, and wait until all readers have.

        Raises:
            WeightsUnavailable: the trainer cannot be reached, or another reader did not come.
        """
        address = self._address
        try:
            async with asyncio.timeout(address.timeout_s):
                self._streams = await asyncio.open_connection(
                    address.host, address.port, limit=MAX_LINE_BYTES
                )
        except (OSError, TimeoutError) as error:
            raise self._lost("cannot be reached", error) from None
        answer, _ = await self._ask(
            {
                "token": address.token,
                "reader": self._name,
                "num_readers": address.num_readers,
                "joiners": to_json(joiners),
            }
        )
        self.terms = answer["terms"]

    async def __aiter__(self) -> AsyncIterator[tuple[Payload, bool]]:
        index, is_last = 0, False
        while not is_last:
            answer, body = await self._ask({"next": index})
            self.fingerprints.update(answer["fingerprints"])
            is_last = answer["is_last"]
            yield answer["payload"] if body is None else body, is_last
            index += 1
        await self._ask({"next": index, "keeps": self.keeps})  # the last is applied too

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _ask(self, words: Mapping[str, Any]) -> tuple[dict[str, Any], bytes | None]:
        assert self._streams is not None
        stream, writer = self._streams
        try:
            async with asyncio.timeout(self._address.timeout_s):
                writer.write(json.dumps(words).encode() + b"\n")
                await writer.drain()
                line = await stream.readline()
                if not line:
                    raise ConnectionError("it closed the connection")
                answer = json.loads(line)
                if "error" in answer:
                    raise WeightsUnavailable(answer["error"])
                size = answer.get("num_bytes")
                return answer, None if size is None else await stream.readexactly(size)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            raise self._lost("gave no bucket", error) from None

    def _lost(self, what: str, error: BaseException) -> WeightsUnavailable:
        address = self._address
        late = f"within {address.timeout_s:g} s" if isinstance(error, TimeoutError) else ""
        why = late or describe(error)
        return WeightsUnavailable(f"the trainer at {address.host}:{address.port} {what}: {why}")
