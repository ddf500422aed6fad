"""The process in which long requests are read: its answers, its end, and who waits meanwhile."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

import psutil
import pytest

from rollout.router.http.reading_process import ReadingFailed, ReadingProcess
from rollout.router.sessions.messages import BadChat, read_messages

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
    reading: ReadingProcess,
) -> None:
    order: list[str] = []

    async def call(name: str, for_s: float) -> None:
        await reading.call(time.sleep, for_s)
        order.append(name)

    calls = asyncio.gather(call("first", 0.3), call("second", 0.0))
    beats = 0
    while not calls.done():
        await asyncio.sleep(0.01)
        beats += 1
    assert order == ["first", "second"]
    assert beats > 3


async def test_a_process_that_is_late_is_killed_and_the_next_call_starts_another() -> None:
    reading = ReadingProcess(deadline_s=3.0)
    pid = await reading.call(os.getpid)
    with pytest.raises(ReadingFailed, match="not read within 3 s"):
        await reading.call(time.sleep, 600.0)
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
