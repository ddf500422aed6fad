"""The process in which long requests are read: its answers, its end, and who waits meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout.agents.wire.messages import BadChat, read_messages
from rollout.router.http.reading_process import ReadingFailed, ReadingProcess

pytestmark = pytest.mark.slow


@pytest.fixture
async def reading() -> AsyncIterator[ReadingProcess]:
    process = ReadingProcess(deadline_s=20.0)
    yield process
    process.close()


async def test_it_answers_with_what_the_function_returns_or_raises(
    reading: ReadingProcess,
) -> None:
    messages = [{"role": "user", "content": "x" * (1 << 20)}]
    assert await reading.call(read_messages, messages) == messages
    with pytest.raises(BadChat, match="a list of 1 to"):
        await reading.call(read_messages, [])
    assert await reading.call(os.getpid) != os.getpid()


async def test_what_a_library_prints_is_no_answer(reading: ReadingProcess) -> None:
    await reading.call(os.write, 1, b"printed\n")
    await reading.call(print, "printed")
    assert await reading.call(len, "abc") == 3


async def test_calls_are_answered_in_their_order_and_the_loop_goes_on(
    reading: ReadingProcess, tmp_path: Path
) -> None:
    order: list[str] = []
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def call(name: str, work: Callable[[Any], Any], argument: Any) -> None:
        await reading.call(work, argument)
        order.append(name)

    first = asyncio.create_task(call("first", Path.read_bytes, gate))
    second = asyncio.create_task(call("second", len, ""))
    # It is opened here while the process waits in it.
    await asyncio.to_thread(gate.write_bytes, b"")
    await asyncio.gather(first, second)
    assert order == ["first", "second"]


async def test_clients_take_turns_whatever_one_of_them_has_sent(
    reading: ReadingProcess, tmp_path: Path
) -> None:
    order: list[str] = []
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    async def call(client: str, work: Callable[[Any], Any], argument: Any) -> None:
        await reading.call(work, argument, client=client)
        order.append(client)

    calls = [call("long", Path.read_bytes, gate), *(call("long", len, "") for _ in range(8))]
    calls += [call("other", len, ""), call("third", len, ""), call("other", len, "")]
    running = [asyncio.create_task(one) for one in calls]
    await asyncio.to_thread(gate.write_bytes, b"")
    await asyncio.gather(*running)
    assert order[:5] == ["long", "other", "third", "long", "other"]
    assert order[5:] == ["long"] * 7


async def test_what_waits_for_a_client_that_left_is_not_read(
    reading: ReadingProcess, tmp_path: Path
) -> None:
    gate, read = tmp_path / "gate", tmp_path / "read"
    os.mkfifo(gate)
    first = asyncio.create_task(reading.call(Path.read_bytes, gate))
    left = asyncio.create_task(reading.call(read.write_bytes, b"", client="left"))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.to_thread(gate.write_bytes, b"")
    await first
    assert await reading.call(len, "abc") == 3
    assert not read.exists()


async def test_a_call_whose_client_left_is_ended(reading: ReadingProcess, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    left = asyncio.create_task(reading.call(Path.read_bytes, gate, client="left"))
    # Opened for writing it has begun: the process waits in its read, which never ends.
    with await asyncio.to_thread(open, gate, "wb"):
        left.cancel()
        assert await asyncio.wait_for(reading.call(len, "abc", client="other"), 20) == 3


async def test_a_process_that_is_late_is_killed_and_the_next_call_starts_another() -> None:
    reading = ReadingProcess(deadline_s=60.0)
    pid = await reading.call(os.getpid)
    reading._deadline_s = 1.0
    with pytest.raises(ReadingFailed, match="not read within 1 s"):
        await reading.call(signal.pause)
    reading._deadline_s = 60.0
    assert not psutil.pid_exists(pid)
    assert await reading.call(os.getpid) != pid
    reading.close()


async def test_a_process_that_crashes_fails_its_call_alone(reading: ReadingProcess) -> None:
    with pytest.raises(ReadingFailed):
        await reading.call(os._exit, 3)
    assert await reading.call(len, "abc") == 3


async def test_it_ends_with_its_router() -> None:
    reading = ReadingProcess()
    process = psutil.Process(await reading.call(os.getpid))
    reading.close()
    assert not process.is_running()


async def test_it_ends_when_its_router_is_gone() -> None:
    """Of a router that was killed, the pipe is closed."""
    reading = ReadingProcess()
    process = psutil.Process(await reading.call(os.getpid))
    assert reading._process is not None
    assert reading._process.stdin is not None
    reading._process.stdin.close()
    assert await asyncio.to_thread(process.wait, 20) == 0
    reading.close()
