"""Each run has a name for the prefixes that engines cache, which outlives its router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engines.protocol import Endpoint
from rollout.config import RouterConfig
from tests.support.ray_worlds import World


class Router:
    """What is killed in the place of a router."""


async def test_the_router_in_the_place_of_a_lost_one_has_its_run_and_no_other_run_has(
    world: World,
) -> None:
    made: list[tuple[str, Any]] = []

    def make(config: RouterConfig, *, run: str) -> Any:
        made.append((run, world.ray.remote(Router).remote()))
        return made[-1][1]

    parts = SimpleNamespace(router_class=SimpleNamespace(remote=make), groups={})
    servers = world.load("actor_factory").ServerActors
    first = servers("policy", RouterConfig(), parts)
    await first.make_router(Endpoint("127.0.0.1", 1))
    second = servers("policy", RouterConfig(), parts)
    first.end()
    second.end()
    (run, again, other), _ = zip(*made, strict=True)
    assert run
    assert (run == again, run == other) == (True, False)
