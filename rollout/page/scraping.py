"""``/metrics`` of router and engines, fetched for the one page that has them all.

Always true: whoever does not answer in time is left out, and counted; nothing waits for it twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp

_TIMEOUT_S = 4.0
_AT_ONCE = 64
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """One page to fetch.

    Attributes:
        labels: that its samples get.
        key: bearer key it wants; empty for none.
    """

    url: str
    labels: Mapping[str, str]
    key: str = ""


async def scrape(targets: Sequence[Target]) -> list[tuple[Mapping[str, str], str]]:
    """The pages of those that answer, with their labels."""
    limit = asyncio.Semaphore(_AT_ONCE)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(
        timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
    ) as session:
        pages = await asyncio.gather(*(_fetch(session, one, limit) for one in targets))
    return [
        (target.labels, text)
        for target, text in zip(targets, pages, strict=True)
        if text is not None
    ]


async def _fetch(
    session: aiohttp.ClientSession, target: Target, limit: asyncio.Semaphore
) -> str | None:
    headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
    try:
        async with (
            limit,
            session.get(target.url, headers=headers, allow_redirects=False) as response,
        ):
            if response.status != 200:
                return None
            raw = await response.content.read(_MAX_BYTES)
            return raw.decode(errors="replace")
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
