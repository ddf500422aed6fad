"""The DRAM store's agents as detached actors, one per node.

Detached, for what they keep is to outlive whoever made it; restarted by Ray when they crash, and
then they go on with the files they find.  A run that ends takes them with it; one that is killed
leaves them to the end of their lease, when they give the memory back and end themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.actors.process import keep_what_is_loaded
from rollout.weights.store.agent import AgentSettings, StoreAgent
from rollout.weights.store.agents import RemoteAgents, StoreTerms
from rollout.weights.store.client import Address
from rollout.weights.store.coordinator import Agent
from rollout.weights.store.mooncake import mover_of
from rollout.weights.store.serving import AgentServer
from rollout.weights.store.writer import FAILURES

# Whoever asks wants to go on without the node, if it is gone.
_FIND_TIMEOUT_S = 3.0
_MOST_AT_ONCE = 16


class StoreAgentActor:
    """Holds the agent of one node and its door."""

    def __init__(self, settings: AgentSettings, name: str, namespace: str) -> None:
        agent = StoreAgent(settings, on_end=lambda: _end(name, namespace))
        host = ray.util.get_node_ip_address()
        self._server = AgentServer(agent, host, mover=mover_of(settings.transfer, host))
        keep_what_is_loaded()

    async def address(self) -> Address:
        return self._server.address


def _end(name: str, namespace: str) -> None:
    """For good: an actor that only exits would be started again."""
    ray.kill(ray.get_actor(name, namespace))


@dataclass(frozen=True, slots=True)
class FindAgent:
    """Asks an agent's actor where it listens now; blocks, so not for an event loop."""

    name: str
    namespace: str

    def __call__(self) -> Address:
        try:
            actor: Any = ray.get_actor(self.name, self.namespace)
            # Not ray.get, which takes every thread of an async actor for its event loop.
            found: Any = actor.address.remote().future().result(_FIND_TIMEOUT_S)
        except (RayError, ValueError, TimeoutError) as error:
            told = str(error).strip().partition("\n")[0]
            raise ConnectionError(f"actor {self.name}: {told}") from None
        host, port = found
        return host, port


def place_agents(
    terms: StoreTerms, nodes: Sequence[str], namespace: str, owns: Callable[[Any], Any]
) -> RemoteAgents:
    """Make one agent per node; returns at once.

    Args:
        owns: told of each actor, to kill it when the run ends.
    """
    found: dict[str, Callable[[], Address]] = {}
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
        found[node] = FindAgent(name, namespace)
    return RemoteAgents(found, terms.token)


def end_agents(agents: RemoteAgents) -> None:
    """Have those that are still there give their memory back: one that is killed cannot."""

    def end(agent: Agent) -> None:
        with suppress(*FAILURES):  # it has ended with its server
            agent.close(clear=True)

    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        list(pool.map(end, agents.agents().values()))
