"""The store's agents end with the server's actor, and free the memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout.config import StoreConfig
from rollout.weights.store.agents import StoreTerms
from tests.support.processes import wait_until
from tests.support.ray_worlds import World

TIMEOUT_S = 60.0


class Server:
    """The actor of a server."""

    async def is_up(self) -> bool:
        return True


def test_agents_end_with_a_server_that_has_ended_for_good_and_free_the_memory(
    world: World, tmp_path: Path
) -> None:
    ray, module = world.ray, world.load("store_agents")
    names = world.load("engine_handle")
    terms = StoreTerms.of(StoreConfig(path=str(tmp_path), spare_bytes=0), "run", "main")
    node = ray.get_runtime_context().get_node_id()
    server = names.ActorName("of-this-test", "server-of-a-store")
    module.place_agents(terms, [node], server, lambda actor: actor)
    options = {"name": server.name, "namespace": server.namespace, "num_cpus": 0}
    actor = ray.remote(Server).options(**options).remote()
    assert ray.get(actor.is_up.remote(), timeout=TIMEOUT_S)
    agent = names.ActorName(server.namespace, f"store-{terms.run}-{node}")
    folder = terms.settings(node).folder
    assert wait_until(folder.is_dir, TIMEOUT_S)
    assert not wait_until(lambda: not folder.exists(), 5.0), "its server lives"
    ray.kill(actor)
    assert wait_until(lambda: not list(tmp_path.iterdir()), TIMEOUT_S)
    assert wait_until(lambda: agent.find() is None, TIMEOUT_S)


class Found:
    """The name of an actor, and what is found by it, look by look."""

    def __init__(self, looks: Sequence[Any]) -> None:
        self.looks = list(looks)

    def find(self) -> Any:
        look = self.looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return look


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([None, None, None], id="never there"),
        pytest.param([None, None, "a", None, "a", None, None], id="created late, then restarted"),
        pytest.param(["a", RuntimeError(), RuntimeError(), None, None], id="no answer"),
        pytest.param(["a", "b", "b"], id="of another launch"),
    ],
)
def test_an_actor_has_ended_for_good_when_it_was_missed_often_enough(
    world: World, looks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = world.load("engine_handle")
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    server = Found(looks)
    asyncio.run(asyncio.wait_for(module.ended_for_good(server, appears_s=0.03), 20))
    assert server.looks == []
