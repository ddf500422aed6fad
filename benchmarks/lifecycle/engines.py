"""Fake engines behind HTTP, all in one process: ``python -m benchmarks.lifecycle.engines 64``.

The program prints their URLs as one JSON line and serves until its input ends.  The engines reply
at once and record every request.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from engines.fake.http_fake import HttpFakeLauncher
from engines.launch import EngineSpec
from engines.protocol import NO_ACCESS


@contextmanager
def fake_engines(num: int) -> Iterator[list[str]]:
    """URLs of ``num`` engines in another process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.lifecycle.engines", str(num)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


async def main(num: int) -> None:
    launcher = HttpFakeLauncher()
    engines = [
        await launcher.launch(
            EngineSpec(f"fake-{index}", "fake", "/nowhere", "/nowhere", access=NO_ACCESS)
        )
        for index in range(num)
    ]
    print(json.dumps([engine.endpoint.url for engine in engines]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for engine in engines:
        await engine.stop(0)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
