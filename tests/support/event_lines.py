"""The lines of a streamed reply.  They end in newlines: httpx's own lines end at characters of the
text as well, such as U+2028, which may stand in a JSON string."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx


def lines_of(response: httpx.Response) -> Iterator[str]:
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        yield from (line.decode() for line in lines)
    yield rest.decode()


async def async_lines_of(response: httpx.Response) -> AsyncIterator[str]:
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode()
    yield rest.decode()
