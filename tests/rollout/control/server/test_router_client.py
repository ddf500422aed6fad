"""The client of a router: late replies are named, a lost router is replaced and gets the state."""

import asyncio
from typing import Any

import pytest

from engines.protocol import Endpoint
from rollout.control.server.router_client import RouterClient
from rollout.core.errors import ActorLost, PhaseTimeout
from rollout.rules.routing import Backend
from tests.support.builders import RecordingRouter
from tests.support.virtual_time import pass_time, virtual_time

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


def lost() -> ActorLost:
    return ActorLost("actor policy/router: unavailable", actor="policy/router")


def begin_again(client: RouterClient, router: LostRouter) -> None:
    """What a router does that was started again."""
    port, members, state, why = client.serves()
    assert port == 30000
    if members is not None:
        router.epochs.append(members[0])
        router.members = members[1]
    router.gates.append({"state": state, **why})
    router.error = None


async def linked() -> tuple[RouterClient, LostRouter]:
    """A client that has sent its router something."""
    router = LostRouter()
    link = RouterClient("policy", router)
    await link.start()
    await link.set_members(7, MEMBERS)
    await link.set_gate("open", weight_version=3)
    router.gates.clear()
    router.epochs.clear()
    return link, router


@virtual_time
async def test_every_call_has_a_deadline_and_its_error_names_the_router() -> None:
    link = RouterClient("policy", Silent())
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
async def test_a_call_that_a_lost_router_got_is_repeated_when_it_serves_again() -> None:
    link, router = await linked()
    router.error = lost()
    shutting = asyncio.create_task(
        link.set_gate("holding", reason="paused", phase="pause_generation")
    )
    await pass_time(1.0)
    assert not shutting.done()
    begin_again(link, router)
    await shutting
    # The gate was open, and a command was under way that shuts it.
    assert [one["state"] for one in router.gates] == ["holding", "holding"]
    assert router.gates[0]["weight_version"] == 3
    assert (router.epochs, router.members) == ([7], MEMBERS)


@virtual_time
async def test_a_gate_that_was_to_open_opens_at_a_router_that_was_lost_only_then() -> None:
    link, router = await linked()
    await link.set_gate("closed", reason="paused")
    router.error = lost()
    opening = asyncio.create_task(link.set_gate("open", weight_version=4))
    await pass_time(1.0)
    begin_again(link, router)
    assert router.gate == "closed"
    await opening
    assert router.gates[-1] == {"state": "open", "weight_version": 4}


@virtual_time
async def test_a_router_that_was_lost_knows_the_adapters_too() -> None:
    link, router = await linked()
    weights = {"weight_version": 4, "base_version": 1, "adapters": {"": "policy@4"}}
    await link.set_gate("open", metrics={"seconds": 1.0}, **weights)
    await link.set_gate("holding", reason="paused")
    begin_again(link, router)
    assert router.gates[-1] == {"state": "holding", "reason": "paused", **weights}


@virtual_time
async def test_engines_that_failed_are_reported_by_a_router_that_was_lost() -> None:
    link, router = await linked()
    router.error = lost()
    listening = asyncio.create_task(link.failures(5.0))
    await pass_time(1.0)
    begin_again(link, router)
    router.fail("main-0")
    assert await listening == [("main-0", "connection reset")]


@virtual_time
async def test_a_router_that_was_lost_before_it_had_a_port_has_nothing_to_begin_with() -> None:
    port, members, state, _ = RouterClient("policy", LostRouter()).serves()
    assert (port, members, state) == (0, None, "closed")


@virtual_time
async def test_a_router_out_of_reach_is_called_again_until_the_deadline() -> None:
    link, router = await linked()
    router.error = lost()
    with pytest.raises(PhaseTimeout, match=r"router of server policy at .* did not answer set_ga"):
        await link.set_gate("closed")
    assert not router.gates
    router.error = None
    await link.set_gate("holding")
    assert router.gate == "holding"


@virtual_time
async def test_a_router_that_was_ended_is_an_error_at_once() -> None:
    link, router = await linked()
    router.error = ActorLost("actor policy/router: died", actor="policy/router", is_dead=True)
    with pytest.raises(ActorLost, match="died"):
        await link.set_gate("open")
