"""Each run has a name for the prefixes that engines cache, which outlives its router."""

from typing import Any

from rollout.config import RouterConfig
from rollout.router.state.state_file import StateFile
from tests.support.ray_worlds import World


def test_all_routers_of_a_server_have_its_run_and_no_other_server_has(world: World) -> None:
    def run_of(config: RouterConfig, *, run: str, **_: Any) -> str:
        return run

    terms = run_of, RouterConfig(), StateFile(""), ("", "")
    (run, again), (other, more) = (world.load("launch").make_routers(*terms) for _ in range(2))
    assert run
    assert (run == again, other == more, run == other) == (True, True, False)
