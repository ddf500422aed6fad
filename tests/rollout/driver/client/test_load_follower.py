"""A rollout that waits at the gate says so, once, and a caller that gives up gets the reason."""

import asyncio
import logging

import pytest

from rollout.core.pending import LoopThread
from rollout.driver.driver import Driver
from tests.support.driving import SAMPLING, always, driving, engines, prompts
from tests.support.virtual_time import pass_time, virtual_time
from tests.support.waits import forever


@virtual_time
async def test_a_long_wait_at_the_gate_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with driving(engines(0.01), always(1.0), adapt_every_s=2.0) as (driver, client):
        for _ in range(2):
            client.hold()
            call = asyncio.create_task(
                driver.rollout(0, prompts(2), group_size=2, sampling=SAMPLING)
            )
            await pass_time(9.0)
            assert not caplog.messages
            await pass_time(600.0)
            (message,) = caplog.messages
            assert message.endswith("s, 4 requests wait at the gate")
            assert driver.why_waiting == "4 requests wait at the gate"
            client.open()
            await call
            await pass_time(5.0)
            assert driver.why_waiting == ""
            caplog.clear()


def test_a_caller_that_gives_up_is_given_the_reason() -> None:
    loop = LoopThread("driver")
    waiting = loop.submit(forever(), lambda: "4 requests wait at the gate")
    with pytest.raises(
        TimeoutError, match=r"^no answer within 0.01 s; 4 requests wait at the gate;"
    ):
        waiting.result(0.01)
    loop.close()


def test_the_results_of_a_call_are_not_the_call() -> None:
    with Driver("http://127.0.0.1:1") as driver:
        call = driver.rollout(0, prompts(1), group_size=1, sampling=SAMPLING)
        with pytest.raises(TypeError, match="its result is that of result"):
            for _ in call:
                pass
        call.cancel()
