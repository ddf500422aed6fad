"""Where the agents of a store are: in this process, or behind their addresses.

Always true: whoever asks gets one agent per node that can be asked to do anything; nothing is
started by looking.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollout.config import StoreConfig
from rollout.weights.store.agent import AgentSettings, StoreAgent
from rollout.weights.store.client import Address, AgentClient
from rollout.weights.store.coordinator import Agent, Coordinator
from rollout.weights.store.files import Files, Regions


class Agents(Protocol):
    """The agents of one server's store, by node."""

    def agents(self) -> Mapping[str, Agent]: ...


@dataclass(frozen=True, slots=True)
class StoreTerms:
    """What all of one server's store share.

    Attributes:
        run: of this server in this life: what another life has stored is never read.
        token: shown by whoever calls an agent from another process.
    """

    config: StoreConfig
    run: str
    token: str

    @classmethod
    def of(cls, config: StoreConfig, run_id: str, server: str) -> StoreTerms:
        """Terms of a new life of a server."""
        return cls(config, f"{run_id}.{server}.{uuid.uuid4().hex[:8]}", uuid.uuid4().hex)

    def settings(self, node: str) -> AgentSettings:
        """Of the agent on one node."""
        return AgentSettings(
            node=node,
            base=str(Path(self.config.path) / f"rollout-store-{os.getuid()}"),
            run=self.run,
            token=self.token,
            transfer=self.config.transfer,
            lease_s=self.config.lease_s,
            spare_bytes=self.config.spare_bytes,
        )

    def coordinator(self, agents: Agents) -> Coordinator:
        """Whoever reads or writes; opens the agents."""
        return Coordinator(
            self.run,
            agents.agents(),
            replicas=self.config.replicas,
            unit_bytes=self.config.unit_bytes,
            segment_bytes=self.config.segment_bytes,
        )


class LocalAgents:
    """Agents in this process, begun when they are first asked for."""

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
        addresses: node -> who knows where its agent listens now.
    """

    addresses: Mapping[str, Callable[[], Address]]
    token: str

    def agents(self) -> Mapping[str, Agent]:
        regions = Regions(Files())
        return {
            node: AgentClient(node, find, self.token, regions=regions)
            for node, find in self.addresses.items()
        }
