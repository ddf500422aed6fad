"""The client of a router: late replies are named, a dead router is replaced and gets the state."""

import asyncio
from typing import Any

import pytest

from engines.protocol import Endpoint
from rollout.control.server.router_client import RouterClient
from rollout.core.errors import ActorLost, PhaseTimeout
from rollout.rules.routing import Backend
from tests.support.builders import RecordingRouter
from tests.support.virtual_time import virtual_time

PORT = Endpoint("127.0.0.1", 30000)
MEMBERS = [Backend("main-0", Endpoint("127.0.0.1", 20000))]


class LostRouter(RecordingRouter):
    """Dead, or out of reach, from a given moment on."""

    error: ActorLost | None = None
    num_asked = 0

    def _check(self) -> None:
        self.num_asked += 1
        if self.error is not None:
            raise self.error

    async def set_gate(self, state: str, **why: Any) -> None:
        self._check()
        await super().set_gate(state, **why)

    async def set_members(self, epoch: int, members: list[Backend]) -> None:
        self._check()
        await super().set_members(epoch, members)

    async def failures(self, timeout_s: float) -> list[tuple[str, str]]:
        self._check()
        return await super().failures(timeout_s)


class Silent(RecordingRouter):
    async def set_gate(self, state: str, **why: Any) -> None:
        await asyncio.Event().wait()

    async def set_members(self, epoch: int, members: list[Backend]) -> None:
        await asyncio.Event().wait()

    async def stats(self) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}


def dead() -> ActorLost:
    return ActorLost("actor policy/router: died", actor="policy/router", is_dead=True)


async def linked() -> tuple[RouterClient, LostRouter, list[RecordingRouter]]:
    """A client that has sent its router something, and the routers made in its place."""
    made: list[RecordingRouter] = []

    async def remake(endpoint: Endpoint) -> RecordingRouter:
        assert endpoint == PORT
        made.append(RecordingRouter())
        return made[-1]

    router = LostRouter()
    link = RouterClient("policy", router, 15.0, remake)
    await link.start()
    await link.set_members(7, MEMBERS)
    await link.set_gate("open", weight_version=3)
    return link, router, made


@virtual_time
async def test_every_call_has_a_deadline_and_its_error_names_the_router() -> None:
    link = RouterClient("policy", Silent(), 15.0)
    await link.start()
    calls = {
        "set_gate": lambda: link.set_gate("open"),
        "set_members": lambda: link.set_members(1, []),
        "stats": link.stats,
    }
    for name, call in calls.items():
        began = asyncio.get_running_loop().time()
        with pytest.raises(
            PhaseTimeout,
            match=rf"router of server policy at http://127.0.0.1:30000 did not answer {name}",
        ) as caught:
            await call()
        assert asyncio.get_running_loop().time() - began == pytest.approx(15.0)
        assert caught.value.late == {"router of server policy": name}


@virtual_time
async def test_a_dead_router_is_replaced_and_knows_what_the_last_one_knew() -> None:
    link, router, made = await linked()
    router.error = dead()
    await link.set_gate("holding", reason="paused", phase="pause")
    (new,) = made
    assert [one["state"] for one in new.gates] == ["closed", "open", "holding"]
    assert new.gates[1]["weight_version"] == 3
    assert (new.epochs, new.members) == ([7], MEMBERS)


@virtual_time
async def test_a_router_in_the_place_of_a_dead_one_knows_the_adapter_too() -> None:
    link, router, made = await linked()
    weights = {"weight_version": 4, "base_version": 1, "adapter": "policy"}
    await link.set_gate("open", **weights)
    await link.set_gate("holding", reason="paused")
    router.error = dead()
    await link.set_gate("closed")
    assert made[0].gates[1] == {"state": "holding", "reason": "paused", **weights}


@virtual_time
async def test_the_loss_is_seen_without_any_command_and_only_once() -> None:
    link, router, made = await linked()
    router.error = dead()
    told = await asyncio.gather(link.failures(5.0), link.failures(5.0))
    assert told == [[], []]
    assert len(made) == 1
    assert made[0].gate == "open"


@virtual_time
async def test_a_router_out_of_reach_is_not_replaced_for_two_would_serve() -> None:
    link, router, made = await linked()
    router.error = ActorLost("actor policy/router: unavailable", actor="policy/router")
    with pytest.raises(ActorLost, match="unavailable"):
        await link.set_gate("closed")
    assert made == []
    router.error = None
    await link.set_gate("holding")
    assert router.gate == "holding"


@virtual_time
async def test_a_router_that_cannot_be_replaced_is_told_with_what_to_do() -> None:
    async def remake(endpoint: Endpoint) -> RecordingRouter:
        return RecordingRouter(start_error=OSError("port 30000 is taken"))

    router = LostRouter()
    link = RouterClient("policy", router, 15.0, remake)
    await link.start()
    router.error = dead()
    with pytest.raises(ActorLost, match=r"port 30000 is taken; the engines run.* launch it again"):
        await link.set_gate("open")
