"""The DRAM store's agents as detached actors, one per node.

Detached, because the stored weights must outlive the driver.  Ray restarts a crashed agent, which
continues with the files on its node.  A run stops its agents at its end.  After a killed run they
free the memory and exit when their lease expires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from engines.protocol.plain_text import first_line
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.core import wire
from rollout.runtime.worker_process import keep_what_is_loaded
from rollout.weights.store.agents import RemoteAgents, StoreTerms
from rollout.weights.store.coordinator import Agent
from rollout.weights.store.node.agent import AgentSettings, StoreAgent
from rollout.weights.store.node.writer import AGENT_ERRORS
from rollout.weights.store.transfer.mooncake import open_transfer
from rollout.weights.store.transfer.unit_server import AgentServer

# Short, so that the caller soon continues without a lost node.
_FIND_TIMEOUT_S = 3.0
_MOST_AT_ONCE = 16


class StoreAgentActor:
    """The agent of one node, and its server."""

    def __init__(self, settings: AgentSettings, name: str, namespace: str) -> None:
        agent = StoreAgent(settings, on_end=lambda: _end(name, namespace))
        host = ray.util.get_node_ip_address()
        self._server = AgentServer(agent, host, rdma=open_transfer(settings.transfer, host))
        keep_what_is_loaded()

    async def address(self) -> wire.Address:
        return self._server.address


def _end(name: str, namespace: str) -> None:
    """Kill the actor: Ray would restart one that only exits."""
    ray.kill(ray.get_actor(name, namespace))


def find_agent(name: str, namespace: str) -> wire.Address:
    """Queries the current address of an agent's actor; blocks, so not for an event loop."""
    try:
        actor: Any = ray.get_actor(name, namespace)
        # Not ray.get, which takes every thread of an async actor for its event loop.
        found: Any = actor.address.remote().future().result(_FIND_TIMEOUT_S)
    except (RayError, ValueError, TimeoutError) as error:
        raise ConnectionError(f"actor {name}: {first_line(error)}") from None
    host, port = found
    return host, port


def place_agents(
    terms: StoreTerms, nodes: Sequence[str], namespace: str, owns: Callable[[Any], Any]
) -> RemoteAgents:
    """Create one agent per node; returns immediately.

    Args:
        owns: called with each actor, to kill it when the run ends.
    """
    found: dict[str, Callable[[], wire.Address]] = {}
    for node in nodes:
        name = f"store-{terms.run}-{node}"
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": -1,
            "lifetime": "detached",
            "name": name,
            "namespace": namespace,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        actor: Any = ray.remote(StoreAgentActor)
        owns(actor.options(**options).remote(terms.settings(node), name, namespace))
        found[node] = partial(find_agent, name, namespace)
    return RemoteAgents(found, terms.token)


def end_agents(agents: RemoteAgents) -> None:
    """Make running agents free their memory; a killed agent could not."""

    def end(agent: Agent) -> None:
        with suppress(*AGENT_ERRORS):  # it has ended with its server
            agent.close(clear=True)

    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        list(pool.map(end, agents.agents().values()))
