"""What is true of every route."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest

from rollout.config import Transport
from rollout.weights.routes.adapter import ADAPTER
from rollout.weights.routes.choice import ROUTES
from rollout.weights.routes.rank_end import RouteRow
from rollout.weights.routes.route import Chosen, EnginePlace, PushTarget, RankPlace, Stage

ROWS = list(ROUTES.values())
NEAR = EnginePlace("e", "n0", ("GPU-0",))


@pytest.fixture(params=ROWS, ids=lambda row: str(row.transport))
def row(request: pytest.FixtureRequest) -> RouteRow:
    found: RouteRow = request.param
    return found


def chosen(row: RouteRow) -> Chosen:
    found = row.reach([RankPlace("n0", 0, "0")], NEAR)
    assert isinstance(found, Chosen), found
    return found


def test_an_engine_beside_a_rank_is_reached_by_the_routes_own_name(row: RouteRow) -> None:
    assert chosen(row).transport == row.transport
    assert chosen(row).payload.startswith(row.transport)


def test_the_engines_end_is_a_value_that_can_be_pickled_and_compared(row: RouteRow) -> None:
    route = row.route(chosen(row))
    assert pickle.loads(pickle.dumps(route)) == route
    assert hash(route) == hash(row.route(chosen(row)))


def test_the_engines_end_needs_no_torch(row: RouteRow) -> None:
    pickled = pickle.dumps(row.route(chosen(row))).hex()
    code = (
        "import sys; sys.modules['torch'] = None; import pickle; "
        f"pickle.loads(bytes.fromhex('{pickled}'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_engine_out_of_reach_is_refused_with_a_reason_or_reached_from_anywhere(
    row: RouteRow,
) -> None:
    away = EnginePlace(
        "e", "n9", is_reached=False, why_no_groups="no groups", why_no_handles="no handles"
    )
    found = row.reach([RankPlace("n0")], away)
    is_anywhere = row.transport in (Transport.BY_VALUE, Transport.DISK, ADAPTER)
    assert isinstance(found, Chosen) is is_anywhere
    assert found


def test_only_routes_that_read_the_trainers_memory_cannot_send_copies() -> None:
    streamed = {row.transport for row in ROWS if not row.is_copy}
    assert streamed == {Transport.CUDA_IPC, Transport.DISTRIBUTED}


def test_the_last_route_reaches_every_engine() -> None:
    assert ROWS[-1].transport == Transport.BY_VALUE
    assert Path(sys.modules[ROWS[-1].route.__module__].__file__ or "").name == "by_value.py"


class Recorder:
    """An engine that says what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*_: Any, **settings: Any) -> None:
            self.calls.append((name, settings))

        return call


async def test_the_last_bucket_alone_clears_what_old_weights_computed(row: RouteRow) -> None:
    """Each engine then clears the prefixes that it cached."""
    if row.transport == ADAPTER:
        pytest.skip("a version of an adapter has a name of its own")
    engine, route = Recorder(), row.route(chosen(row))
    target = PushTarget(cast("Any", engine))
    flushes = []
    for is_last in (False, True):
        engine.calls.clear()
        await route.send(target, defaultdict(str), Stage(1, is_last=is_last))
        flushes.append(
            any(name == "flush_cache" or given.get("flush_cache") for name, given in engine.calls)
        )
    assert flushes == [False, True]
