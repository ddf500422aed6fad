"""Agents behind TCP: the same store, with connections that break and agents that move."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import WeightsUnavailable
from rollout.core.wire import Connection, Listener
from rollout.weights.store.node.agent import StoreAgent
from rollout.weights.store.node.assembly import AssemblyRequest
from rollout.weights.store.transfer.unit_client import AgentClient
from tests.support.store_worlds import Served, contents


@pytest.fixture(params=[True, False], ids=["same-host", "streamed"])
def served(request: pytest.FixtureRequest, shared_memory: Path) -> Iterator[Served]:
    served = Served(shared_memory, shares_files=request.param)
    yield served
    served.close()


def restored(served: Served, version: int, node: str) -> dict[str, bytes]:
    return served.world.restore(version, node)


def test_versions_are_written_and_restored_through_the_doors(served: Served) -> None:
    for version in (1, 2, 3):
        served.world.write(version)
    for node in served.servers:
        assert restored(served, 3, node) == contents(served.world.manifest, 3)
    with pytest.raises(WeightsUnavailable, match="not weight version 2"):
        restored(served, 2, "node-0")


def test_an_agent_that_was_started_again_elsewhere_is_found(served: Served) -> None:
    served.world.write(1)
    old = served.servers["node-1"]
    old.close()
    old.agent.close(clear=False)
    served.open(StoreAgent(old.agent.settings))
    assert restored(served, 1, "node-1") == contents(served.world.manifest, 1)
    served.world.write(2)
    assert restored(served, 2, "node-1") == contents(served.world.manifest, 2)


def test_a_node_that_goes_down_while_it_is_written_to_is_left_out(served: Served) -> None:
    served.world.write(1)
    wanted = list(contents(served.world.manifest, 2).items())

    def tensors() -> Iterator[tuple[str, bytes]]:
        yield from wanted[:5]
        served.servers["node-1"].close()
        yield from wanted[5:]

    served.world.coordinator.write(2, served.world.manifest, [tensors()])
    assert restored(served, 2, "node-0") == contents(served.world.manifest, 2)
    served.open(served.servers["node-1"].agent)
    served.world.write(3)
    assert restored(served, 3, "node-1") == contents(served.world.manifest, 3)


def test_whoever_does_not_know_the_token_is_told_nothing(served: Served) -> None:
    served.world.write(1)
    stranger = served.client("node-0", token="guess")
    for call in (stranger.state, stranger.num_bytes, lambda: stranger.close(clear=True)):
        with pytest.raises(WeightsUnavailable, match="wrong token"):
            call()
    stranger.connections.disconnect()
    assert restored(served, 1, "node-0") == contents(served.world.manifest, 1)


def test_a_peer_that_breaks_off_in_a_unit_is_replaced_by_the_other(served: Served) -> None:
    served.world.write(1)
    record = served.world.coordinator.record_of(1)
    asked = []

    def break_off(connection: Connection) -> None:
        fields, _ = connection.receive()
        asked.append(fields["call"])
        connection.announce({}, record.units[fields["unit"]].num_bytes)
        connection.write(b"the begin")

    peer = Listener(break_off, "", name="breaks-off", timeout_s=10)
    peers: dict[str, Any] = {
        "node-1": AgentClient("node-1", peer.address),
        "node-2": served.client("node-2"),
    }
    # Units on node-1 and node-2 only: half of them are read from node-1 first.
    agent = served.servers["node-0"].agent
    assembled = agent.assemble(record, peers, AssemblyRequest())
    assert set(asked) == {"read"}
    assert assembled.fetched_bytes
    agent.give_back(assembled.path)
    for client in peers.values():
        client.connections.disconnect()
    peer.close(wait_s=10)
