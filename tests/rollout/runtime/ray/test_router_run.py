"""Each run has a name for the prefixes that engines cache, which outlives its router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rollout.config import RouterConfig
from tests.support.ray_worlds import World


class Router:
    """What is killed in the place of a router."""


def test_all_routers_of_a_server_have_its_run_and_no_other_server_has(world: World) -> None:
    made: list[tuple[str, Any]] = []

    def make(config: RouterConfig, *, run: str, **_: Any) -> Any:
        made.append((run, world.ray.remote(Router).remote()))
        return made[-1][1]

    parts = SimpleNamespace(
        router_class=SimpleNamespace(remote=make),
        routers=None,
        groups={},
        placement=SimpleNamespace(owner=("", "")),
    )
    servers = world.load("actor_factory").ServerActors
    for server in [servers("policy", RouterConfig(), parts) for _ in range(2)]:
        server.end()
    (run, again, other, more), _ = zip(*made, strict=True)
    assert run
    assert (run == again, other == more, run == other) == (True, True, False)
