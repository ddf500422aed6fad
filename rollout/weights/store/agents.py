"""The agents of a store: in this process, or behind addresses.

Always true: there is one agent per node.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollout.config import StoreConfig
from rollout.core import wire
from rollout.weights.store.coordinator import Agent, Coordinator
from rollout.weights.store.node.agent import AgentSettings, StoreAgent
from rollout.weights.store.node.base_folder import base_folder
from rollout.weights.store.node.files import Files, MappedSegments
from rollout.weights.store.transfer.unit_client import AgentClient


@dataclass(frozen=True, slots=True)
class StoreTerms:
    """Settings of one server's store, equal on all nodes.

    Attributes:
        run: identifies this run of the server: weights of another run are never read.
        token: needed to call an agent from another process.
    """

    config: StoreConfig
    run: str
    token: str

    @classmethod
    def of(cls, config: StoreConfig, run_id: str, server: str) -> StoreTerms:
        """Terms of a new run of a server."""
        return cls(config, f"{run_id}.{server}.{uuid.uuid4().hex[:8]}", uuid.uuid4().hex)

    def settings(self, node: str, *, returns: bool = False) -> AgentSettings:
        """Settings of the agent on one node; see ``AgentSettings``."""
        return AgentSettings(
            node=node,
            base=str(base_folder(self.config.path)),
            run=self.run,
            token=self.token,
            transfer=self.config.transfer,
            returns=returns,
            spare_bytes=self.config.spare_bytes,
        )

    def coordinator(self, agents: Agents) -> Coordinator:
        """A reader and writer of the store; starts the agents or their clients."""
        return Coordinator(
            self.run,
            agents.agents(),
            replicas=self.config.replicas,
            unit_bytes=self.config.unit_bytes,
            segment_bytes=self.config.segment_bytes,
        )


class LocalAgents:
    """Agents in this process, started at first use."""

    def __init__(self, terms: StoreTerms, nodes: Sequence[str]) -> None:
        self._terms = terms
        self._nodes = tuple(nodes)
        self._agents: dict[str, StoreAgent] = {}
        self._lock = threading.Lock()

    def agents(self) -> Mapping[str, Agent]:
        with self._lock:
            for node in self._nodes:
                if node not in self._agents:
                    self._agents[node] = StoreAgent(self._terms.settings(node))
            return dict(self._agents)


@dataclass(frozen=True, slots=True)
class RemoteAgents:
    """Agents behind addresses.

    Attributes:
        addresses: node -> function that returns the current address of its agent.
    """

    addresses: Mapping[str, Callable[[], wire.Address]]
    token: str

    def agents(self) -> Mapping[str, Agent]:
        mapped_files = MappedSegments(Files())
        return {
            node: AgentClient(node, find, self.token, mapped_files=mapped_files)
            for node, find in self.addresses.items()
        }


Agents = LocalAgents | RemoteAgents
