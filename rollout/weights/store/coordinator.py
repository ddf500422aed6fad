"""Writes a version to all nodes in two phases: prepare everywhere, then commit.

Always true: no node commits before every unit is sealed on some node; a node knows the current
write before it is written to; failed nodes are left out as long as the others keep every unit.

Its methods block; one write runs at a time.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from rollout.core.errors import WeightMismatch, WeightsUnavailable
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.store.layout.commit import NodeState, Write, current_write, nodes_to_commit
from rollout.weights.store.layout.placement import assign_replicas, make_units
from rollout.weights.store.layout.record import StoreRecord
from rollout.weights.store.node.agent import StoreAgent
from rollout.weights.store.node.assembly import AssembledFolder, AssemblyRequest, FoldersOnNodes
from rollout.weights.store.node.writer import (
    AGENT_ERRORS,
    NodeSink,
    SegmentWriter,
    TensorContent,
    check_covered,
    failure_text,
)
from rollout.weights.store.transfer.unit_client import AgentClient

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Here or behind a connection; every call ends within its deadline.
Agent = StoreAgent | AgentClient


class Coordinator:
    """Writes versions, and determines the current one.

    Args:
        agents: by node; the order does not matter.

    Attributes:
        sent_bytes: of the last write, to nodes whose files this process cannot map.
    """

    def __init__(
        self,
        run: str,
        agents: Mapping[str, Agent],
        *,
        replicas: int,
        unit_bytes: int,
        segment_bytes: int,
    ) -> None:
        self._run = run
        self._agents = dict(agents)
        self._replicas = replicas
        self._unit_bytes = unit_bytes
        self._segment_bytes = segment_bytes
        self._last: tuple[list[str], Mapping[str, TensorSpec], StoreRecord] | None = None
        self._kept: StoreRecord | None = None
        self.sent_bytes = 0

    # -- current write ----------------------------------------------------------------------

    def states(self) -> tuple[dict[str, NodeState], dict[str, str]]:
        """The state of each node, and why other nodes do not reply."""
        return self._call_all({node: agent.state for node, agent in self._agents.items()})

    def current_write(self) -> Write | None:
        return current_write(self.states()[0])

    def record_of(self, version: int) -> StoreRecord:
        """The record of ``version``, if that is current.

        Raises:
            WeightsUnavailable: another version is current, or none, or no node has its record.
        """
        states, failed = self.states()
        write = current_write(states)
        if write is None or write.version != version:
            kept = "nothing" if write is None else str(write)
            raise WeightsUnavailable(
                f"the store keeps {kept}, not weight version {version}{failure_text(failed)}"
            )
        for node, state in states.items():
            if write in state.sealed:
                try:
                    record = self._agents[node].record(write)
                except AGENT_ERRORS as error:
                    failed[node] = str(error)
                    continue
                return record
        raise WeightsUnavailable(f"no node has the record of {write}{failure_text(failed)}")

    def assemble(
        self, record: StoreRecord, nodes: Sequence[str], wanted: AssemblyRequest | None = None
    ) -> FoldersOnNodes:
        """Folders with all of ``record``, with the same path on all of these nodes.

        Raises:
            WeightsUnavailable: a node failed; the folders on the others are removed.
        """
        wanted = wanted or AssemblyRequest()
        with ExitStack() as stack:
            # Also on nodes without a reply: they may have made the folder.
            stack.callback(self._give_back, nodes, wanted.name)
            made, failed = self._call_all(
                {node: partial(self._assemble, record, node, wanted) for node in nodes}
            )
            paths = {node: folder.path for node, folder in made.items()}
            if failed or len(set(paths.values())) > 1:
                why = failure_text(failed) or f": its path is not the same there: {paths}"
                raise WeightsUnavailable(f"{record.write} cannot be had on every node{why}")
            stack.pop_all()
            return FoldersOnNodes(paths[nodes[0]], made)

    def _assemble(self, record: StoreRecord, node: str, wanted: AssemblyRequest) -> AssembledFolder:
        agent = self._agents.get(node)
        if agent is None:
            names = ", ".join(sorted(self._agents))
            raise WeightsUnavailable(f"node {node} is not in the store; it has {names}")
        peers = {name: peer for name, peer in self._agents.items() if name != node}
        return agent.assemble(record, peers, wanted)

    def give_back(self, made: FoldersOnNodes) -> dict[str, str]:
        """Release the folders, which are loaded; returns the nodes that failed, and why."""
        return self._give_back(made.folders, made.path)

    def _give_back(self, nodes: Iterable[str], name: str) -> dict[str, str]:
        agents = {node: self._agents[node] for node in nodes if node in self._agents}
        return self._call_all(
            {node: partial(agent.give_back, name) for node, agent in agents.items()}
        )[1]

    # -- writing ----------------------------------------------------------------------------

    def write(
        self,
        version: int,
        manifest: Manifest,
        buckets: Iterable[Iterable[tuple[str, TensorContent]]],
        fingerprints: Mapping[str, str] | None = None,
        after: Callable[[int], Callable[[str], bytes | None] | None] = lambda _: None,
    ) -> StoreRecord:
        """Write a version; it is current when this returns.

        Args:
            buckets: name and bytes of every tensor; a bucket's bytes must not change until the
                next one is taken.
            fingerprints: of the push.  The bytes read now must have the same, because their
                memory may have been overwritten meanwhile.
            after: returns, for a version that nodes keep, what they get in place of a tensor, or
                None for the whole one; or None if all get whole tensors.

        Raises:
            WeightsUnavailable: it cannot be kept; the current version stays.
            WeightMismatch: the tensors are not those of the manifest.
        """
        states, failed = self.states()
        current = current_write(states)
        for node in nodes_to_commit(states):
            assert current is not None
            self._try(node, failed, lambda agent: agent.commit(current))
        number = 1 + max(
            (write.number for state in states.values() for write in _writes(state)), default=0
        )
        write = Write(number, version, uuid.uuid4().hex[:12])
        record, paths = self._begin(write, manifest, current, failed)
        changes_of = None if current is None else after(current.version)
        based = self._nodes_with(record, current, states) if changes_of is not None else []
        sinks: dict[str, NodeSink] = {}
        for node, files in paths.items():
            base = current if node in based else None
            try:
                sinks[node] = self._agents[node].sink(record, files, base)
            except AGENT_ERRORS as error:
                failed[node] = str(error)
        check_covered(record, sinks, failed)
        writer = SegmentWriter(record, sinks, changes_of, based)
        try:
            for bucket in buckets:
                writer.take(bucket)
        finally:
            writer.close()
        record = writer.finish()
        _check_unchanged(fingerprints or {}, record.fingerprints)
        failed |= writer.failed
        sealed = self._each(writer.nodes, failed, lambda agent: agent.seal(record))
        check_covered(record, sealed, failed)
        if not self._each(sealed, failed, lambda agent: agent.commit(write)):
            raise WeightsUnavailable(f"{write} was committed by no node{failure_text(failed)}")
        self._kept, self.sent_bytes = record, writer.sent_bytes
        if failed:
            logger.warning("store: %s is kept without some nodes%s", write, failure_text(failed))
        return record

    def _begin(
        self, write: Write, manifest: Manifest, current: Write | None, failed: dict[str, str]
    ) -> tuple[StoreRecord, dict[str, Mapping[str, str]]]:
        """Allocate space on the nodes that have it; the units are assigned to those."""
        nodes = [node for node in self._agents if node not in failed]
        while nodes:
            record = self._outline(write, manifest, nodes)
            paths, refused = self._call_all(
                {node: partial(self._agents[node].begin, record, current) for node in nodes}
            )
            failed |= refused
            if not refused:
                return record, paths
            nodes = [node for node in nodes if node not in refused]
        raise WeightsUnavailable(f"no node can keep {write}{failure_text(failed)}")

    def _nodes_with(
        self, record: StoreRecord, current: Write | None, states: Mapping[str, NodeState]
    ) -> list[str]:
        """The nodes that keep, of the current write, the same units that they get of this one."""
        kept = self._kept
        if kept is None or kept.write != current or kept.units != record.units:
            return []
        return [
            node
            for node, units in record.kept.items()
            if current in states[node].sealed and kept.kept.get(node) == units
        ]

    def _outline(self, write: Write, manifest: Manifest, nodes: list[str]) -> StoreRecord:
        """The record to write. The last plan is reused if nothing has changed: planning many
        small tensors takes time."""
        if self._last is not None and self._last[:2] == (nodes, manifest.tensors):
            return self._last[2].again(write)
        units = make_units(manifest, self._unit_bytes)
        record = StoreRecord(
            run=self._run,
            write=write,
            units=units,
            kept=assign_replicas(units, nodes, self._replicas),
            segment_bytes=self._segment_bytes,
        )
        self._last = nodes, manifest.tensors, record
        return record

    # -- nodes ------------------------------------------------------------------------------

    def num_bytes(self) -> dict[str, int]:
        """Bytes on each node that replies."""
        return self._call_all({node: agent.num_bytes for node, agent in self._agents.items()})[0]

    def close(self) -> None:
        """Remove everything on every node."""
        failed = self._call_all(
            {node: partial(agent.close, clear=True) for node, agent in self._agents.items()}
        )[1]
        for node, why in failed.items():
            logger.warning("store: node %s keeps its bytes until its agent ends: %s", node, why)

    def _each(
        self, nodes: Iterable[str], failed: dict[str, str], call: Callable[[Agent], None]
    ) -> list[str]:
        """Call nodes one by one; returns those that succeeded."""
        return [node for node in nodes if self._try(node, failed, call)]

    def _try(self, node: str, failed: dict[str, str], call: Callable[[Agent], None]) -> bool:
        try:
            call(self._agents[node])
        except AGENT_ERRORS as error:
            failed[node] = str(error)
            return False
        return True

    def _call_all(
        self, calls: Mapping[str, Callable[[], T]]
    ) -> tuple[dict[str, T], dict[str, str]]:
        """Call all nodes at once, so that a late one delays no other. Returns results, errors."""
        if not calls:
            return {}, {}
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = {node: pool.submit(call) for node, call in calls.items()}
        results: dict[str, T] = {}
        failed: dict[str, str] = {}
        for node, future in futures.items():
            error = future.exception()
            if isinstance(error, AGENT_ERRORS):
                failed[node] = str(error)
            else:
                results[node] = future.result()
        return results, failed


def _check_unchanged(pushed: Mapping[str, str], read: Mapping[str, str]) -> None:
    for name, fingerprint in pushed.items():
        if fingerprint.startswith("xxh3:") and read.get(name) != fingerprint:
            raise WeightMismatch(
                f"tensor {name!r} changed between its push and its copy into the store",
                tensor=name,
            )


def _writes(state: NodeState) -> set[Write]:
    return set(state.sealed) | ({state.committed} if state.committed else set())
