"""A client that writes bytes and reads bytes."""

import asyncio


async def connect(bench, *parts: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(bench.endpoint.host, bench.endpoint.port)
    writer.write(b"".join(parts))
    await writer.drain()
    return reader, writer


async def response_to(bench, *parts: bytes) -> bytes:
    """All that comes back until the router closes."""
    reader, writer = await connect(bench, *parts)
    whole = await reader.read()
    writer.close()
    return whole


def post(body: bytes, path: bytes = b"/generate", extra: bytes = b"") -> bytes:
    return (
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n%s\r\n%s" % (path, len(body), extra, body)
    )


def bodies(whole: bytes) -> list[bytes]:
    """The bodies of responses, none of which contains a head."""
    return [part.split(b"\r\n\r\n", 1)[1] for part in whole.split(b"HTTP/1.1 ")[1:]]
