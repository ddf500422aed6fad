"""The router as an object: started, steered from any loop, stopped."""

import asyncio
import socket
import threading
import urllib.request

import aiohttp
import pytest

from engines.protocol import Endpoint
from rollout.config import RouterConfig
from rollout.core.errors import ConfigError, PhaseTimeout, RolloutError
from rollout.router import Backend, ConnectionFailure, RouterHost

from .conftest import hold_one, router_config
from .stub_engine import Hold, hold_then_reply, reply, stream


async def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        host = RouterHost(router_config(port=port))
        with pytest.raises(ConfigError, match=f"router cannot bind 127.0.0.1:{port}: .*in use"):
            await host.start()


async def test_an_address_of_another_machine_is_named():
    with pytest.raises(ConfigError, match=r"router cannot bind 203\.0\.113\.1:0"):
        await RouterHost(router_config(host="203.0.113.1")).start()


async def test_a_router_config_is_all_it_needs():
    host = RouterHost(RouterConfig())
    endpoint = await host.start()
    await host.stop(0)
    assert (endpoint.host, endpoint.port > 0) == ("127.0.0.1", True)


async def test_the_same_port_can_be_bound_again_after_stop(make_bench):
    bench = await make_bench(reply())
    await bench.ask()
    await bench.host.stop(1)
    again = RouterHost(router_config(port=bench.endpoint.port))
    assert (await again.start()).port == bench.endpoint.port
    await again.stop(0)
    bench.host = await started_idle()


async def started_idle() -> RouterHost:
    host = RouterHost(router_config())
    await host.start()
    return host


async def test_a_router_that_is_not_running_raises_instead_of_waiting():
    host = RouterHost(router_config())
    with pytest.raises(RolloutError, match="not running"):
        await host.set_gate("open")
    await host.stop(1)
    await host.start()
    with pytest.raises(RolloutError, match="started once"):
        await host.start()
    await host.stop(0)
    await host.stop(0)
    with pytest.raises(RolloutError, match="not running"):
        await host.stats()


async def test_a_state_that_does_not_exist_is_refused():
    host = await started_idle()
    with pytest.raises(ValueError, match="ajar"):
        await host.set_gate("ajar")
    await host.stop(0)


async def test_a_caller_whose_loop_is_stuck_delays_no_request(make_bench):
    bench = await make_bench()
    with urllib.request.urlopen(f"{bench.url}/health", timeout=5) as response:  # noqa: ASYNC210
        assert response.status == 200


async def test_it_can_be_controlled_from_another_loop_than_the_one_that_started_it(make_bench):
    bench = await make_bench(reply())
    done: list[bool] = []

    async def steer() -> None:
        await bench.host.set_gate("closed", reason="from elsewhere")
        done.append(await bench.host.set_members(2, []))

    thread = threading.Thread(target=lambda: asyncio.run(steer()))
    thread.start()
    await asyncio.to_thread(thread.join)
    stats = await bench.host.stats()
    assert (done, stats["gate"]["reason"], stats["epoch"]) == ([True], "from elsewhere", 2)


async def test_failures_are_reported_on_the_loop_that_started_it():
    reported: asyncio.Queue = asyncio.Queue()

    def report(failure: ConnectionFailure) -> None:
        reported.put_nowait((failure.engine_id, asyncio.get_running_loop()))

    host = RouterHost(router_config(), on_engine_failure=report)
    endpoint = await host.start()
    await host.set_members(1, [Backend("e-0", Endpoint("127.0.0.1", 1))])
    await host.set_gate("open")
    async with (
        aiohttp.ClientSession() as client,
        client.post(endpoint.url + "/generate") as response,
    ):
        assert response.status == 502
    assert await reported.get() == ("e-0", asyncio.get_running_loop())
    await host.stop(0)


async def test_drained_waits_until_no_engine_has_a_request(make_bench):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold))
    await bench.host.drained(0)
    pending = bench.begin()
    await hold.entered.wait()
    drained = asyncio.ensure_future(bench.host.drained(5))
    await bench.host.stats()
    assert not drained.done()
    hold.opened.set()
    await drained
    await pending


async def test_drained_names_who_is_late_and_with_how_many(make_bench):
    bench, hold, pending = await hold_one(make_bench)
    with pytest.raises(PhaseTimeout, match="e-0 has 1 requests in flight") as late:
        await bench.host.drained(0.02)
    assert late.value.late == {"e-0": "1 requests in flight"}
    hold.opened.set()
    await pending


async def test_drained_of_one_engine_looks_at_no_other(make_bench):
    bench, hold, pending = await hold_one(make_bench)
    await bench.host.drained(0, "e-1")
    with pytest.raises(PhaseTimeout, match="e-0 has 1 requests in flight"):
        await bench.host.drained(0.02, "e-0")
    drained = asyncio.ensure_future(bench.host.drained(5, "e-0"))
    await bench.host.stats()
    hold.opened.set()
    await drained
    await pending


async def test_held_requests_do_not_keep_it_from_being_drained(make_bench):
    bench = await make_bench(reply())
    await bench.host.set_gate("holding")
    pending = bench.begin()
    await bench.wait_until_held(1)
    await bench.host.drained(0)
    await bench.host.set_gate("open")
    await pending


async def test_stop_lets_finish_what_is_in_flight(make_bench):
    bench, hold, pending = await hold_one(make_bench)
    stopped = asyncio.ensure_future(bench.host.stop(5))
    while (await bench.host.stats())["gate"]["state"] != "closed":
        pass
    hold.opened.set()
    assert (await pending).status == 200
    await stopped
    bench.host = await started_idle()


async def test_stop_refuses_held_requests(make_bench):
    bench = await make_bench(reply())
    await bench.host.set_gate("holding")
    pending = bench.begin()
    await bench.wait_until_held(1)
    await bench.host.stop(5)
    response = await pending
    assert (response.status, response.json["error"]["reason"]) == (
        503,
        "the router is stopping",
    )
    bench.host = await started_idle()


async def test_stop_cuts_what_does_not_finish_within_the_budget(make_bench, caplog):
    hold = Hold()
    bench = await make_bench(hold_then_reply(hold), stream(b"data: 1\n\n", hold))
    whole = bench.begin()
    await hold.entered.wait()
    streamed = await bench.client.post("/generate", json={})
    await bench.host.stop(0.05)
    response = await whole
    assert (response.status, b"stopping" in response.body) == (503, True)
    with pytest.raises(Exception, match=r"not completed|not enough data|closed"):
        await streamed.read()
    assert not any(record.exc_info for record in caplog.records)
    await asyncio.wait_for(bench.engines[0].peer_closed.wait(), 2)
    bench.host = await started_idle()


async def test_calls_that_wait_when_it_stops_raise(make_bench):
    bench, _, pending = await hold_one(make_bench)
    waiting = [asyncio.ensure_future(bench.host.drained(30)) for _ in range(2)]
    await bench.host.stats()
    await bench.host.stop(0)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, RolloutError) for outcome in outcomes)
    await pending
    bench.host = await started_idle()


async def test_a_cancelled_caller_leaves_nothing_behind(make_bench):
    bench, hold, pending = await hold_one(make_bench)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bench.host.drained(30), 0.02)
    hold.opened.set()
    await pending
    await bench.host.drained(1)
