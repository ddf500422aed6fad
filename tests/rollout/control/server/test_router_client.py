"""The client of a router: late replies are named, a lost router is replaced and gets the state."""

import asyncio
import os
from typing import Any

import pytest

from engines.process.process_identity import identify
from engines.protocol import Endpoint
from rollout.control.server.router_client import RouterClient
from rollout.core.errors import ActorLost, PhaseTimeout
from rollout.router.gate.gate import Gate
from rollout.rules.routing import Backend
from tests.support.builders import RecordingRouter
from tests.support.virtual_time import pass_time, virtual_time

PORT = Endpoint("127.0.0.1", 30000)
HERE = identify(os.getpid())
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


class Slow(LostRouter):
    """Never has a failure to report; from a moment on it answers nothing."""

    is_silent_from_s = float("inf")

    async def failures(self, timeout_s: float) -> list[tuple[str, str]]:
        self._check()
        await asyncio.Event().wait()
        return []

    async def stats(self) -> dict[str, Any]:
        self._check()
        if asyncio.get_running_loop().time() > self.is_silent_from_s:
            await asyncio.Event().wait()
        return await super().stats() | {"process": HERE}


def lost() -> ActorLost:
    return ActorLost("actor policy/router: unavailable", actor="policy/router")


def begin_again(client: RouterClient, router: LostRouter) -> None:
    """What a router does that was started again."""
    port, members, state, why = client.serves()
    assert port == 30000
    if members is not None:
        router.epochs.append(members[0])
        router.members = members[1]
    router.metrics = why.pop("metrics")
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
async def test_a_router_that_was_lost_knows_the_adapters_and_the_metrics_too() -> None:
    link, router = await linked()
    weights = {"weight_version": 4, "base_version": 1, "adapters": {"": "policy@4"}}
    await link.set_gate("open", metrics={"seconds": 1.0}, **weights)
    await link.set_gate("holding", reason="paused")
    router.metrics = {}
    begin_again(link, router)
    assert router.gates[-1] == {"state": "holding", "reason": "paused", **weights}
    assert router.metrics == {"seconds": 1.0}  # and what drivers read of the last step boundary


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


@virtual_time
async def test_a_router_that_hangs_is_ended_within_a_minute_of_its_last_answer() -> None:
    ended: list[tuple[Any, float]] = []
    loop, router = asyncio.get_running_loop(), Slow()
    link = RouterClient("policy", router, lambda process: ended.append((process, loop.time())))
    await link.start()
    router.is_silent_from_s = 1.0
    began = loop.time()
    with pytest.raises(PhaseTimeout, match="did not answer failures within 45 s"):
        await link.failures(30.0)
    ((process, at_s),) = ended
    assert process == HERE
    assert at_s - began == pytest.approx(60.0)


@virtual_time
async def test_a_router_that_was_lost_or_is_slow_for_once_is_not_ended() -> None:
    ended: list[Any] = []
    for error in (None, lost()):
        router = Slow()
        link = RouterClient("policy", router, ended.append)
        await link.start()
        await link.stats()
        router.error = error
        with pytest.raises(PhaseTimeout):
            await link.failures(30.0)
    assert ended == []


@virtual_time
async def test_a_server_in_the_place_of_a_lost_one_knows_what_drivers_were_given() -> None:
    _, router = await linked()
    router.metrics = {"server/lost_s": 2.0}
    link = RouterClient("policy", router)
    await link.rejoin(PORT)
    *_, why = link.serves()
    assert why["metrics"] == {"server/lost_s": 2.0}


@virtual_time
async def test_members_that_a_lost_server_had_sent_are_older_than_those_of_its_successor() -> None:
    """However late they come: the router takes the greatest number that it has seen."""
    _, router = await linked()
    router.epochs = [7]
    of_successor = await RouterClient("policy", router).rejoin(PORT) + 1
    for first, second in ((8, of_successor), (of_successor, 8)):
        gate = Gate(on_failure=lambda failure: None)
        gate.set_members(7, MEMBERS)
        for epoch in (first, second):
            gate.set_members(epoch, MEMBERS if epoch == 8 else [])
        assert gate.members.epoch == of_successor
        assert not list(gate.members)
