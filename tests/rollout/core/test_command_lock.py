"""One command at a time; a command that waits too long names the one before it."""

import asyncio

import pytest

from rollout.core.command_lock import CommandLock
from rollout.core.errors import LifecycleError
from tests.support.virtual_time import pass_time, virtual_time


async def test_the_owner_is_named_while_it_holds_the_lock() -> None:
    lock = CommandLock(10)
    async with lock.held("offload"):
        assert lock.owner == "offload"
    assert lock.owner == ""


@virtual_time
async def test_a_command_waits_for_the_one_before_it() -> None:
    lock, order = CommandLock(10), []

    async def run(command: str) -> None:
        async with lock.held(command):
            order.append(command)
            await pass_time(3)
            order.append(command)

    await asyncio.gather(run("offload"), run("onload"))
    assert order == ["offload", "offload", "onload", "onload"]


@virtual_time
async def test_a_command_that_waited_too_long_is_refused_with_the_owner() -> None:
    lock = CommandLock(900)
    async with lock.held("offload"):
        message = "^cannot onload: offload has been running for 900 s$"
        with pytest.raises(LifecycleError, match=message):
            async with lock.held("onload"):
                pytest.fail("two commands at once")
    async with lock.held("onload"):
        pass


async def test_a_command_that_fails_leaves_the_lock_free() -> None:
    lock = CommandLock(10)
    with pytest.raises(ValueError, match="boom"):
        async with lock.held("offload"):
            raise ValueError("boom")
    async with lock.held("onload"):
        assert lock.owner == "onload"


@virtual_time
async def test_after_a_stop_a_command_is_refused_at_once_also_while_another_one_hangs() -> None:
    lock = CommandLock(900)
    async with lock.held("offload"):
        lock.why_ended = "the server was stopped"
        began = asyncio.get_running_loop().time()
        with pytest.raises(LifecycleError, match=r"^cannot onload: the server was stopped$"):
            async with lock.held("onload"):
                pytest.fail("a stopped server runs commands")
        assert asyncio.get_running_loop().time() == began


@virtual_time
async def test_commands_wait_until_they_may_begin() -> None:
    lock = CommandLock(900)
    lock.opened.clear()
    asyncio.get_running_loop().call_later(5, lock.opened.set)
    async with lock.held("offload"):
        assert asyncio.get_running_loop().time() >= 5
