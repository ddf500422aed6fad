"""The DRAM store's agents as detached actors, one per node.

Detached, so that an agent outlives its server to free the memory: it does when the server's actor
has ended for good.  Ray restarts a crashed agent, which continues with the files on its node.  A
run stops its agents at its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from engines.process.background import Then, keep_task
from engines.protocol.plain_text import first_line
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.config.sources.environment import options_of_actors
from rollout.core import wire
from rollout.rules.placement import ELSEWHERE
from rollout.runtime.ray.engine_handle import ActorName, ended_for_good
from rollout.runtime.worker_process import keep_what_is_loaded
from rollout.weights.store.agents import RemoteAgents, StoreTerms
from rollout.weights.store.coordinator import Agent
from rollout.weights.store.node.agent import AgentSettings, StoreAgent
from rollout.weights.store.node.writer import AGENT_ERRORS
from rollout.weights.store.transfer.mooncake import open_transfer
from rollout.weights.store.transfer.unit_server import AgentServer

logger = logging.getLogger(__name__)

# In which a launch creates the server's actor.
_APPEARS_S = 60.0
# Short, so that the caller soon continues without a lost node.
_FIND_TIMEOUT_S = 3.0
_MOST_AT_ONCE = 16


class StoreAgentActor:
    """The agent of one node, and its server.

    Args:
        name: its own.
        server: of whose weights it keeps a part; when that actor has ended for good, it removes
            its files and ends itself.
    """

    def __init__(self, settings: AgentSettings, name: ActorName, server: ActorName) -> None:
        self._agent = StoreAgent(settings)
        host = ray.util.get_node_ip_address()
        self._server = AgentServer(self._agent, host, rdma=open_transfer(settings.transfer, host))
        work = partial(self._end_with, server, name)
        self._watching = keep_task(work, f"end-with:{server.name}", Then.STARTS_AGAIN)
        keep_what_is_loaded()

    async def address(self) -> wire.Address:
        return self._server.address

    async def _end_with(self, server: ActorName, name: ActorName) -> None:
        await ended_for_good(server, _APPEARS_S)
        logger.warning("actor %s has ended, and %s frees its memory", server.name, name.name)
        try:
            await asyncio.to_thread(self._agent.close, clear=True)
        finally:  # not by an exit, after which Ray would restart it
            ray.kill(await asyncio.to_thread(name.find))


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
    terms: StoreTerms, nodes: Sequence[str], server: ActorName, owns: Callable[[Any], Any]
) -> RemoteAgents:
    """Create one agent per node; returns immediately.  That of attached engines is on this node.

    Args:
        server: an actor that may be created later.
        owns: called with each actor, to kill it when the run ends.
    """
    here = ray.get_runtime_context().get_node_id()
    found: dict[str, Callable[[], wire.Address]] = {}
    for node in nodes:
        name = f"store-{terms.run}-{node}"
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": -1,
            "lifetime": "detached",
            "name": name,
            "namespace": server.namespace,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(
                here if node == ELSEWHERE else node, soft=False
            ),
            **options_of_actors(),
        }
        actor: Any = ray.remote(StoreAgentActor)
        own, settings = ActorName(server.namespace, name), terms.settings(node, returns=True)
        owns(actor.options(**options).remote(settings, own, server))
        found[node] = partial(find_agent, name, server.namespace)
    return RemoteAgents(found, terms.token)


def end_agents(agents: RemoteAgents) -> None:
    """Make running agents free their memory; a killed agent could not."""

    def end(agent: Agent) -> None:
        with suppress(*AGENT_ERRORS):  # it has ended with its server
            agent.close(clear=True)

    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        list(pool.map(end, agents.agents().values()))
