"""``python -m benchmarks.lifecycle.engines 64``: so many fake engines in one process, until EOF.

Prints their URLs as one JSON line.  They answer at once and count what they are asked.
"""

from __future__ import annotations

import asyncio
import json
import sys

from engines.fake.http import HttpFakeLauncher
from engines.launch import EngineSpec


async def main(num: int) -> None:
    launcher = HttpFakeLauncher()
    running = [
        await launcher.launch(
            EngineSpec(f"fake-{index}", "fake", "/nowhere", "/nowhere", memory_saver=True)
        )
        for index in range(num)
    ]
    print(json.dumps([one.endpoint.url for one in running]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for one in running:
        await one.stop(0)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
