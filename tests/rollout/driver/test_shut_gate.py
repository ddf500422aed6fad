"""A gate that stays shut: at once an error where only a push can open it, else the reason again."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollout
from engines.fake.http_fake import HttpFakeLauncher
from rollout.core.errors import LifecycleError, PhaseFailed
from rollout.driver.client.session import Session
from rollout.driver.stream.options import RolloutOptions
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.support.builders import push
from tests.support.driving import SAMPLING, always, driving, engines, numbers, prompts, source
from tests.support.processes import wait_until
from tests.support.served_fakes import TIMEOUT_S, config, engines_of
from tests.support.virtual_time import pass_time, virtual_time

BATCH: dict[str, Any] = {"group_size": 2, "sampling": SAMPLING}
EXPECTED = r"only a push of weight version 7 or a newer one opens it: .*the engines hold 0"


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[ServerHandle]:
    """It waits for a push of version 7."""
    settings = config(tmp_path, {"main": {"num_engines": 2}})
    with launch_local(settings, launcher=HttpFakeLauncher(), expect_version=7) as run:
        yield run["policy"]


async def one_turn(session: Session) -> None:
    await session.generate()


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("generate", [None, one_turn])
def test_a_rollout_before_the_push_that_was_expected_says_so_and_loses_nothing(
    policy: ServerHandle, mode: Any, generate: Any
) -> None:
    hooks = rollout.Hooks(reward=always(1.0), generate=generate)
    batch: dict[str, Any] = {**BATCH, "options": RolloutOptions(mode=mode, max_failed_share=1.0)}
    with rollout.Driver(policy.url, hooks=hooks) as driver:
        data = source(8)
        for prompts_of in (data, data, prompts(4)):
            began_s = time.monotonic()
            more = {"num_groups": 4} if prompts_of is data else {}
            with pytest.raises(LifecycleError, match=EXPECTED):
                driver.rollout(8, prompts_of, **batch, **more).result(TIMEOUT_S)
            assert time.monotonic() - began_s < 3.0  # 0.1 s on a machine that is not busy
        policy.push(push(7)).result(TIMEOUT_S)
        groups = driver.rollout(8, data, num_groups=4, **batch).result(TIMEOUT_S)
        assert numbers(groups) == [1, 2, 3, 4]
        assert {version for group in groups for one in group for version in one.versions} == {7}


def test_an_evaluation_before_the_push_that_was_expected_says_so(policy: ServerHandle) -> None:
    data = {"all": rollout.EvalDataset(prompts(2))}
    with (
        rollout.Driver(policy.url, always(1.0)) as driver,
        pytest.raises(LifecycleError, match=EXPECTED),
    ):
        driver.evaluate(0, data).result(TIMEOUT_S)


def test_a_command_that_needs_the_push_first_does_not_hide_that(policy: ServerHandle) -> None:
    with pytest.raises(PhaseFailed, match="cannot continue"):
        policy.serve().result(TIMEOUT_S)
    with (
        rollout.Driver(policy.url, always(1.0)) as driver,
        pytest.raises(LifecycleError, match=EXPECTED),
    ):
        driver.rollout(8, prompts(2), **BATCH).result(TIMEOUT_S)


def test_a_rollout_waits_for_the_push_of_another_thread_that_has_begun(
    policy: ServerHandle,
) -> None:
    policy.offload().result(TIMEOUT_S)
    with rollout.Driver(policy.url, always(1.0)) as driver:
        call = driver.rollout(8, source(8), num_groups=2, **BATCH)
        with pytest.raises(TimeoutError):
            call.result(0.5)
        trainer = threading.Thread(target=lambda: policy.push(push(7)).result(TIMEOUT_S))
        trainer.start()
        assert numbers(call.result(TIMEOUT_S)) == [1, 2]
        trainer.join()


def test_a_first_push_that_failed_half_way_leaves_the_reason_and_the_next_one_serves(
    policy: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines_of(policy) as served:
        for engine in served.values():
            engine._post("/fake/fault", fault="update_weights_from_tensor#1:reject")
    with pytest.raises(PhaseFailed):
        policy.push(push(7)).result(TIMEOUT_S)
    with rollout.Driver(policy.url, always(1.0), adapt_every_s=0.1) as driver:
        call = driver.rollout(8, source(8), num_groups=2, **BATCH)
        assert wait_until(lambda: "which is closed: " in driver._inner.why_waiting, TIMEOUT_S)
        with pytest.raises(TimeoutError, match=r"turned away .* closed: .*update_weights"):
            call.result(0.1)
        policy.push(push(7)).result(TIMEOUT_S)
        assert numbers(call.result(TIMEOUT_S)) == [1, 2]
        assert wait_until(lambda: not driver._inner.why_waiting, TIMEOUT_S)


@virtual_time
async def test_a_gate_that_is_closed_is_warned_of_every_ten_seconds_while_a_call_meets_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with driving(engines(0.01), always(1.0), adapt_every_s=1.0) as (driver, client):
        await driver.rollout(0, prompts(2), **BATCH)
        client.is_closed = True
        await pass_time(60.0)  # no call is under way
        assert not caplog.messages
        call = asyncio.create_task(driver.rollout(0, prompts(2), **BATCH))
        await pass_time(35.0)
        assert len(caplog.messages) == 3
        assert all(message.endswith(" s, the gate is closed") for message in caplog.messages)
        client.is_closed = False
        assert len(await call) == 2
        await pass_time(60.0)
    assert len(caplog.messages) == 3


@virtual_time
async def test_a_gate_that_only_a_push_opens_ends_a_call_at_once_and_loses_nothing() -> None:
    async with driving(engines(0.01, 0.5), always(1.0)) as (driver, client):
        data = source(8)
        client.needs_push = 7
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(LifecycleError, match="weight version 7"):
            await driver.rollout(0, data, num_groups=2, **BATCH)
        assert asyncio.get_running_loop().time() - began_s < 1.0
        client.needs_push = None
        assert numbers(await driver.rollout(0, data, num_groups=2, **BATCH)) == [1, 2]
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []
