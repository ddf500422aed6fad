"""``python -m benchmarks.timeline.clients URL``: reads numbers from stdin, sends as many requests.

A line on stdout follows the last reply, so that both sides of a comparison get the same work.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp

_AT_ONCE = 16
_BODY = {"input_ids": [7] * 64, "sampling_params": {"max_new_tokens": 16}}


async def main(url: str) -> None:
    slots = asyncio.Semaphore(_AT_ONCE)
    async with aiohttp.ClientSession() as session:

        async def send() -> None:
            async with slots, session.post(f"{url}/generate", json=_BODY) as response:
                response.raise_for_status()
                await response.read()

        while line := await asyncio.to_thread(sys.stdin.readline):
            await asyncio.gather(*(send() for _ in range(int(line))))
            print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
