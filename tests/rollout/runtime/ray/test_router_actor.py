"""A router that Ray has started again: what it does until it serves, over the stub of Ray."""

import asyncio
import logging
from typing import Any

import pytest

from engines.process import background
from engines.process.background import Then, keep_thread
from rollout.config import RouterConfig
from tests.support.ray_worlds import World
from tests.support.virtual_time import virtual_time


def router(world: World) -> Any:
    return world.load("router_actor").RouterActor(RouterConfig(), run="r", server=("ns", "policy"))


def test_one_that_cannot_serve_ends_with_its_reason_so_that_ray_starts_another(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is left that holds a port or a lock, and waits."""
    ended: list[int] = []
    actor = router(world)  # of a server that there is not
    monkeypatch.setattr(background.os, "_exit", ended.append)
    with caplog.at_level(logging.CRITICAL):
        keep_thread(actor._begin_again, "the start of this router", Then.PROCESS_ENDS).join(20)
    assert ended == [1]
    (record,) = [one for one in caplog.records if one.levelno == logging.CRITICAL]
    assert "the start of this router failed" in record.message
    assert record.exc_info is not None
    assert "policy" in str(record.exc_info[1])


class Server:
    """Answers its router at the third call; the first never ends, and then it knows no port."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.router_serves = self

    def options(self, **options: Any) -> Any:
        return self

    async def remote(self) -> tuple[int, None, str, dict[str, Any]]:
        self.num_calls += 1
        if self.num_calls == 1:
            await asyncio.Event().wait()
        return (0 if self.num_calls == 2 else 4711), None, "closed", {}


def test_one_whose_server_hangs_says_so_and_goes_on_when_it_answers(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    actor, server = router(world), Server()
    actor.why_not_serving = "it has just been started again"
    module = world.load("router_actor")
    monkeypatch.setattr(module.ray, "get_actor", lambda name, namespace: server)

    @virtual_time
    async def ask() -> None:
        assert (await actor._ask_server())[0] == 4711

    ask()
    assert server.num_calls == 3
    assert "server policy has not answered" in caplog.text
