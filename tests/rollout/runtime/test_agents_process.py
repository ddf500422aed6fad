"""A worker of agents as a child: its address outlives it, and it does not outlive its owner."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from engines.process.locks import make_held
from engines.protocol import Endpoint
from rollout.agents.worker.settings import WorkerSettings
from rollout.config import AgentsConfig
from rollout.control.server import agents_client
from rollout.control.server.agents_client import AgentsClient
from rollout.core.errors import ConfigError
from rollout.runtime.agents_process import AgentsProcess
from tests.support.processes import program, wait_until
from tests.support.waits import until

ROUTER = "http://127.0.0.1:9"
TIMEOUT_S = 60.0
ID = "d"  # of worker 0 of two


def settings(folder: Path, number: int = 0, **config: Any) -> WorkerSettings:
    return WorkerSettings(
        AgentsConfig.model_validate({"host": "127.0.0.1", **config}),
        number=number,
        num_workers=2,
        folder=str(folder / "agents" / str(number)),
        client_key="key-of-clients",
        control_key="key-of-control",
    )


async def health(endpoint: Endpoint) -> int:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as client,
        client.get(f"{endpoint.url}/health") as response,
    ):
        return response.status


async def pid_of(worker: AgentsProcess) -> int:
    found = (await worker.stats())["process"]
    return 0 if found is None else int(found.pid)


Make = Callable[..., Awaitable[tuple[AgentsProcess, Endpoint]]]


@pytest.fixture
async def make_worker(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[AgentsProcess] = []

    async def make(*program: str, **config: Any) -> tuple[AgentsProcess, Endpoint]:
        options = {"program": program} if program else {}
        worker = AgentsProcess(settings(tmp_path, **config), **options)
        made.append(worker)
        return worker, await worker.start(ROUTER)

    hold = make_held(tmp_path / "agents")
    yield make
    for worker in made:
        await worker.stop(0.0)
    hold.release()
    assert not (tmp_path / "agents").exists()


async def test_one_that_is_killed_serves_at_its_address_again(make_worker: Make) -> None:
    """The process that connects meanwhile waits for the next one."""
    worker, endpoint = await make_worker()
    assert await health(endpoint) == 200
    killed = await pid_of(worker)
    os.kill(killed, signal.SIGKILL)
    assert await health(endpoint) == 200
    assert await pid_of(worker) not in (0, killed)


async def test_a_stop_leaves_neither_process_nor_socket(make_worker: Make) -> None:
    worker, endpoint = await make_worker()
    assert await health(endpoint) == 200
    process = psutil.Process(await pid_of(worker))
    await worker.stop(TIMEOUT_S)
    assert not process.is_running()
    with socket.create_server(("127.0.0.1", endpoint.port)):
        pass
    assert await worker.stats() == {"process": None}
    await worker.stop(TIMEOUT_S)


async def test_a_stop_lets_a_request_end_that_has_begun(make_worker: Make) -> None:
    worker, endpoint = await make_worker()
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    head = f"POST /sessions/{ID}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2"
    key = "authorization: Bearer key-of-clients"
    writer.write(f"{head}\r\n{key}\r\nexpect: 100-continue\r\n\r\n".encode())
    assert b" 100 " in await reader.readline()  # it reads the body
    stopping = asyncio.create_task(worker.stop(TIMEOUT_S))
    await until(lambda: is_refused(endpoint), TIMEOUT_S)
    assert not stopping.done()
    writer.write(b"{}")
    assert b" 400 " in await reader.readuntil(b"400 Bad Request\r\n")
    writer.close()
    await stopping


def is_refused(endpoint: Endpoint) -> bool:
    try:
        socket.create_connection(endpoint, 1.0).close()
    except ConnectionRefusedError:
        return True
    return False


async def test_a_stop_does_not_wait_for_one_that_is_still_starting(make_worker: Make) -> None:
    """It has no turns, and ends by the signal itself."""
    worker, _ = await make_worker("-c", "import signal; signal.pause()")
    process = psutil.Process(await until(lambda: pid_of(worker), TIMEOUT_S))
    await worker.stop(TIMEOUT_S)
    assert not process.is_running()


async def test_one_that_does_not_stop_is_killed(make_worker: Make) -> None:
    worker, endpoint = await make_worker()
    assert await health(endpoint) == 200
    process = psutil.Process(await pid_of(worker))
    process.suspend()
    await worker.stop(0.1)
    assert not process.is_running()


async def test_its_keys_are_in_no_command_line_and_no_environment(make_worker: Make) -> None:
    worker, endpoint = await make_worker()
    assert await health(endpoint) == 200
    process = Path(f"/proc/{await pid_of(worker)}")
    shown = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
    assert b"rollout.runtime.agents_program" in shown
    assert b"key-of" not in shown


async def test_one_that_cannot_start_is_named_with_its_status_and_started_again(
    make_worker: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts = tmp_path / "starts"
    starts.touch()
    with caplog.at_level(logging.ERROR):
        await make_worker("-c", f"open({str(starts)!r}, 'a').write('x'); raise SystemExit(3)")
        await until(lambda: len(starts.read_text()) == 2, TIMEOUT_S)
    assert "worker 0 of agents ended with status 3" in caplog.text
    assert "it starts again" in caplog.text


async def test_a_port_that_is_taken_is_named(make_worker: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"agents cannot bind 127.0.0.1:{port}: .*in use"):
            await make_worker(port=port)


@pytest.mark.slow
async def test_one_that_hangs_is_killed_and_another_serves_at_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agents_client, "_WATCH_EVERY_S", 0.05)
    monkeypatch.setattr(agents_client, "_CALL_TIMEOUT_S", 2.0)
    workers = [AgentsProcess(settings(tmp_path, number)) for number in range(2)]
    client = AgentsClient("policy", workers, tmp_path / "agents")
    await client.start(ROUTER)
    try:
        endpoints = [Endpoint.of_url(url) for url in client.urls]
        for endpoint in endpoints:
            assert await health(endpoint) == 200
        await until(lambda: all(watch.has_answered for watch in client.watches))
        before = [await pid_of(worker) for worker in workers]
        os.kill(before[1], signal.SIGSTOP)
        assert await health(endpoints[1]) == 200
        after = [await pid_of(worker) for worker in workers]
        assert (after[0], after[1] != before[1]) == (before[0], True)
        assert f"worker 1 of agents of server policy at {client.urls[1]} hangs" in caplog.text
    finally:
        await client.stop(0.0)
    assert not (tmp_path / "agents").exists()


OWNER = """
import asyncio, os, signal, sys
from pathlib import Path
from rollout.agents.worker.settings import WorkerSettings
from rollout.config import AgentsConfig
from rollout.runtime.agents_process import AgentsProcess

async def main():
    worker = AgentsProcess(WorkerSettings(AgentsConfig(host="127.0.0.1"), 0, 1, sys.argv[1]))
    endpoint = await worker.start("http://127.0.0.1:9")
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    writer.write(b"GET /health HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n")
    await reader.readline()
    pid = (await worker.stats())["process"].pid
    if sys.argv[2:]:  # one that has what its owner had open, and lives on
        if os.fork() == 0:
            signal.pause()
    print("worker", pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("forks", [(), ("forks",)], ids=["alone", "forked"])
def test_one_whose_owner_is_killed_ends(tmp_path: Path, forks: tuple[str, ...]) -> None:
    with program("-c", OWNER, str(tmp_path / "0"), *forks) as owner:
        owner.wait_for("worker", TIMEOUT_S)
        pid = int(owner.output.split("worker ")[1].split()[0])
        assert psutil.pid_exists(pid)
        owner.process.kill()
        assert wait_until(lambda: not psutil.pid_exists(pid), TIMEOUT_S)
        assert bool(owner.descendants()) == bool(forks)
