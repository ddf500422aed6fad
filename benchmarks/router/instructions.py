"""Machine instructions of the router per request, which other work on a machine does not change.

``python -m benchmarks.router.instructions [TREE ...]`` needs valgrind.  It counts what the router
of each tree (a checkout of this project; by default this one) spends on requests that come one
after the other, so two commits can be compared to a percent.  The ratios are to the first tree.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.router.load import connect, requests

KINDS = {"ours": ("small", "fresh", "sse"), "ours_failover": ("small", "sse")}
NUM_WARM, NUM_COUNTED = 300, 500
_WITHIN_S = 120.0


@contextmanager
def started(command: list[str], tree: Path, stderr: Path) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
    with (
        stderr.open("w") as errors,
        subprocess.Popen(
            command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


def said_by(process: subprocess.Popen[str]) -> object:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r:.200} ended before it printed its port")
    return json.loads(line)


async def send(port: int, kind: str, num: int) -> None:
    client, stream = await connect(port), requests(kind)
    for _ in range(num):
        if not await asyncio.wait_for(client.send(next(stream), kind), _WITHIN_S):
            raise RuntimeError(f"a reply of {kind} was wrong")
    assert client.transport is not None
    client.transport.close()


def count(tree: Path, target: str, kind: str) -> float:
    """Instructions per request."""
    with tempfile.TemporaryDirectory() as folder:
        log, out = Path(folder, "log"), Path(folder, "out")
        stub = [sys.executable, "-m", "benchmarks.router.stub", "2"]
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        server = [sys.executable, "-m", "benchmarks.router.serve", target]
        with started(stub, tree, Path(folder, "stub")) as engines:
            ports = said_by(engines)
            assert isinstance(ports, list)
            command = [*valgrind, f"--callgrind-out-file={out}", *server, *map(str, ports)]
            with started(command, tree, log) as router:
                port = said_by(router)
                assert isinstance(port, int)
                asyncio.run(send(port, kind, NUM_WARM))
                control = ["callgrind_control", "-i"]
                subprocess.run([*control, "on", str(router.pid)], check=True, capture_output=True)
                asyncio.run(send(port, kind, NUM_COUNTED))
                subprocess.run([*control, "off", str(router.pid)], check=True, capture_output=True)
        collected = re.search(r"Collected : (\d+)", log.read_text())
        if collected is None:
            raise RuntimeError(f"valgrind counted nothing:\n{log.read_text()[-2000:]}")
        return int(collected[1]) / NUM_COUNTED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs="*", type=Path, default=[Path(__file__).parents[2]])
    trees = [tree.resolve() for tree in parser.parse_args().trees]
    for target, kinds in KINDS.items():
        for kind in kinds:
            counts = [count(tree, target, kind) for tree in trees]
            ratios = "".join(f"{num / counts[0]:8.3f}" for num in counts[1:])
            print(f"{target:14}{kind:7}", *(f"{num:9.0f}" for num in counts), ratios, flush=True)


if __name__ == "__main__":
    main()
