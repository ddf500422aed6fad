"""One write over all nodes, and what counts on them: prepare everywhere, then commit.

Always true: nothing is committed anywhere before every unit is sealed on some node; before a node
is written to, it has been told which write counts; nodes that fail are left out as long as the
rest keeps every unit.

Its methods block; one write runs at a time.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from rollout.errors import WeightMismatch, WeightsUnavailable
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.store.assembling import Assembled, Everywhere, Peer, Wanted
from rollout.weights.store.commit import NodeState, Write, counting, to_promote
from rollout.weights.store.records import Record
from rollout.weights.store.spread import spread
from rollout.weights.store.units import make_units
from rollout.weights.store.writer import FAILURES, Content, Sink, Writing, check_covered

logger = logging.getLogger(__name__)

_PROVED = Wanted()
T = TypeVar("T")


class Agent(Peer, Protocol):
    """A ``StoreAgent``, here or behind a connection; every call ends within its deadline."""

    def state(self) -> NodeState: ...
    def record(self, write: Write) -> Record: ...
    def begin(self, record: Record, counts: Write | None) -> Mapping[str, str]: ...
    def sink(self, record: Record, paths: Mapping[str, str]) -> Sink: ...
    def seal(self, record: Record) -> None: ...
    def commit(self, write: Write) -> None: ...
    def assemble(self, record: Record, peers: Mapping[str, Any], wanted: Wanted) -> Assembled: ...
    def give_back(self, path: str) -> None: ...
    def renew(self) -> None: ...
    def num_bytes(self) -> int: ...
    def close(self, *, clear: bool) -> None: ...


class Coordinator:
    """Writes versions and knows which counts.

    Args:
        agents: by node, in the order of which nothing depends.
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
        self._last: tuple[list[str], Mapping[str, TensorSpec], Record] | None = None

    # -- what counts ------------------------------------------------------------------------

    def states(self) -> tuple[dict[str, NodeState], dict[str, str]]:
        """What each node keeps, and why the others cannot be asked."""
        return self._ask({node: agent.state for node, agent in self._agents.items()})

    def counting(self) -> Write | None:
        """The write that counts."""
        return counting(self.states()[0])

    def record_of(self, version: int) -> Record:
        """The record of ``version``, if that is what counts.

        Raises:
            WeightsUnavailable: another version counts, or none, or nobody has its record.
        """
        states, failed = self.states()
        write = counting(states)
        if write is None or write.version != version:
            kept = "nothing" if write is None else str(write)
            raise WeightsUnavailable(
                f"the store keeps {kept}, not weight version {version}{_told(failed)}"
            )
        for node, state in states.items():
            if write in state.sealed:
                try:
                    record = self._agents[node].record(write)
                except FAILURES as error:
                    failed[node] = str(error)
                    continue
                return record
        raise WeightsUnavailable(f"no node has the record of {write}{_told(failed)}")

    def assemble(self, record: Record, node: str, wanted: Wanted = _PROVED) -> Assembled:
        """A folder on ``node`` with all of ``record``."""
        agent = self._agents.get(node)
        if agent is None:
            raise WeightsUnavailable(f"node {node} is not in the store; it has {self._names()}")
        peers = {name: peer for name, peer in self._agents.items() if name != node}
        try:
            return agent.assemble(record, peers, wanted)
        except OSError as error:
            raise WeightsUnavailable(f"the agent of node {node}: {error}") from error

    def give_back(self, node: str, path: str) -> None:
        """The engine has read it."""
        self._agents[node].give_back(path)

    def assemble_everywhere(
        self, record: Record, nodes: Sequence[str], wanted: Wanted = _PROVED
    ) -> Everywhere:
        """Folders on all of these nodes with one path on all of them.

        Raises:
            WeightsUnavailable: one node cannot; nothing is left on the others.
        """
        name = f"for-{uuid.uuid4().hex}"
        wanted = replace(wanted, name=name)
        with ExitStack() as stack:
            # Also where nothing comes back: it may be made all the same.
            stack.callback(self._give_back_on, nodes, name)
            made, failed = self._ask(
                {node: partial(self.assemble, record, node, wanted) for node in nodes}
            )
            paths = {node: one.path for node, one in made.items()}
            if failed or len(set(paths.values())) > 1:
                why = _told(failed) or f": its path is not the same there: {paths}"
                raise WeightsUnavailable(f"{record.write} cannot be had on every node{why}")
            stack.pop_all()
            return Everywhere(paths[nodes[0]], made)

    def give_back_everywhere(self, everywhere: Everywhere) -> dict[str, str]:
        """The engine has read it; returns who could not be told, and why."""
        return self._give_back_on(list(everywhere.on), everywhere.path)

    def _give_back_on(self, nodes: Sequence[str], path: str) -> dict[str, str]:
        return self._ask(
            {
                node: partial(self._agents[node].give_back, path)
                for node in nodes
                if node in self._agents
            }
        )[1]

    # -- writing ----------------------------------------------------------------------------

    def write(
        self,
        version: int,
        manifest: Manifest,
        buckets: Iterable[Iterable[tuple[str, Content]]],
        fingerprints: Mapping[str, str] | None = None,
    ) -> Record:
        """Keep a version; when this returns, it counts.

        Args:
            buckets: name and bytes of every tensor; one bucket's bytes stay as they are until the
                next is asked for.
            fingerprints: taken when it was pushed; what is read now must have the same, for the
                memory it comes from may have been written again meanwhile.

        Raises:
            WeightsUnavailable: it cannot be kept; what counted before still does.
            WeightMismatch: the tensors are not those of the manifest.
        """
        states, failed = self.states()
        counts = counting(states)
        for node in to_promote(states):
            assert counts is not None
            self._try(node, failed, lambda one: one.commit(counts))
        number = 1 + max(
            (write.number for state in states.values() for write in _writes(state)), default=0
        )
        write = Write(number, version, uuid.uuid4().hex[:12])
        record, paths = self._begin(write, manifest, counts, failed)
        sinks: dict[str, Sink] = {}
        for node, files in paths.items():
            try:
                sinks[node] = self._agents[node].sink(record, files)
            except FAILURES as error:
                failed[node] = str(error)
        check_covered(record, sinks, failed)
        writing = Writing(record, sinks)
        try:
            for bucket in buckets:
                writing.take(bucket)
        finally:
            writing.close()
        record = writing.finish()
        _check_unchanged(fingerprints or {}, record.fingerprints)
        failed |= writing.failed
        sealed = self._each(writing.nodes, failed, lambda agent: agent.seal(record))
        check_covered(record, sealed, failed)
        if not self._each(sealed, failed, lambda agent: agent.commit(write)):
            raise WeightsUnavailable(f"{write} was committed by no node{_told(failed)}")
        if failed:
            logger.warning("store: %s is kept without some nodes%s", write, _told(failed))
        return record

    def _begin(
        self, write: Write, manifest: Manifest, counts: Write | None, failed: dict[str, str]
    ) -> tuple[Record, dict[str, Mapping[str, str]]]:
        """Space on every node that has it; the units are spread over those."""
        nodes = [node for node in self._agents if node not in failed]
        while nodes:
            record = self._outline(write, manifest, nodes)
            paths, refused = self._ask(
                {node: _begin_on(self._agents[node], record, counts) for node in nodes}
            )
            failed |= refused
            if not refused:
                return record, paths
            nodes = [node for node in nodes if node not in refused]
        raise WeightsUnavailable(f"{write} is not kept: no node can{_told(failed)}")

    def _outline(self, write: Write, manifest: Manifest, nodes: list[str]) -> Record:
        """What goes where: as last time if nothing else has changed, for it takes a while to
        plan many small tensors."""
        if self._last is not None and self._last[:2] == (nodes, manifest.tensors):
            return self._last[2].again(write)
        units = make_units(manifest, self._unit_bytes)
        record = Record(
            run=self._run,
            write=write,
            units=units,
            kept=spread(units, nodes, self._replicas),
            segment_bytes=self._segment_bytes,
        )
        self._last = nodes, manifest.tensors, record
        return record

    # -- nodes ------------------------------------------------------------------------------

    def renew(self) -> dict[str, str]:
        """Keep the leases; returns who could not be told, and why."""
        return self._ask({node: agent.renew for node, agent in self._agents.items()})[1]

    def num_bytes(self) -> dict[str, int]:
        """What each node that answers holds."""
        return self._ask({node: agent.num_bytes for node, agent in self._agents.items()})[0]

    def close(self) -> None:
        """Give everything back on every node."""
        failed = self._ask(
            {node: _closing(agent) for node, agent in self._agents.items()},
        )[1]
        for node, why in failed.items():
            logger.warning("store: node %s keeps its bytes until its lease ends: %s", node, why)

    def _each(
        self, nodes: Iterable[str], failed: dict[str, str], ask: Callable[[Agent], None]
    ) -> list[str]:
        """Ask one after the other; those that did it."""
        return [node for node in nodes if self._try(node, failed, ask)]

    def _try(self, node: str, failed: dict[str, str], ask: Callable[[Agent], None]) -> bool:
        try:
            ask(self._agents[node])
        except FAILURES as error:
            failed[node] = str(error)
            return False
        return True

    def _ask(self, calls: Mapping[str, Callable[[], T]]) -> tuple[dict[str, T], dict[str, str]]:
        """All at once: a node that is late must not make the others late."""
        if not calls:
            return {}, {}
        with ThreadPoolExecutor(len(calls)) as pool:
            asked = {node: pool.submit(call) for node, call in calls.items()}
        answers: dict[str, T] = {}
        failed: dict[str, str] = {}
        for node, one in asked.items():
            error = one.exception()
            if isinstance(error, FAILURES):
                failed[node] = str(error)
            else:
                answers[node] = one.result()
        return answers, failed

    def _names(self) -> str:
        return ", ".join(sorted(self._agents))


def _check_unchanged(pushed: Mapping[str, str], read: Mapping[str, str]) -> None:
    for name, fingerprint in pushed.items():
        if fingerprint.startswith("xxh3:") and read.get(name) != fingerprint:
            raise WeightMismatch(
                f"tensor {name!r} changed between its push and its copy into the store",
                tensor=name,
            )


def _begin_on(
    agent: Agent, record: Record, counts: Write | None
) -> Callable[[], Mapping[str, str]]:
    return lambda: agent.begin(record, counts)


def _closing(agent: Agent) -> Callable[[], None]:
    return lambda: agent.close(clear=True)


def _writes(state: NodeState) -> set[Write]:
    return set(state.sealed) | ({state.committed} if state.committed else set())


def _told(failed: Mapping[str, str]) -> str:
    """Nodes that could not be used, in brackets."""
    return f" ({'; '.join(f'{node}: {why}' for node, why in failed.items())})" if failed else ""
