"""The store as a source of weights for a restarted engine.

Always true: an engine is given what counts in the store, whole and proved, or nothing; a failure
here is a reason to try the next source and never more; after so many in a row this source has
switched itself off and says so.
"""

from __future__ import annotations

import asyncio
import logging

from engines.errors import EngineError
from engines.protocol import Engine
from rollout.errors import WeightsUnavailable
from rollout.fanout import describe, finish
from rollout.timeline.recorder import engine_span
from rollout.types import EngineSlot
from rollout.weights.manifest import Manifest
from rollout.weights.source import Restored
from rollout.weights.store.agents import Agents, StoreTerms
from rollout.weights.store.assembling import Assembled, Everywhere
from rollout.weights.store.coordinator import Coordinator
from rollout.weights.store.limits import gib
from rollout.weights.store.records import Record
from rollout.weights.store.writer import FAILURES

logger = logging.getLogger(__name__)


class StoreSource:
    """A ``WeightSource``.

    Args:
        model_path: checkpoint the engines started from, for what is beside the weights.
    """

    def __init__(self, terms: StoreTerms, agents: Agents, model_path: str) -> None:
        self._terms = terms
        self._agents = agents
        self._model_path = model_path
        self._num_failures = 0
        self._opened: Coordinator | None = None

    def _coordinator(self) -> Coordinator:
        if self._opened is None:
            self._opened = self._terms.coordinator(self._agents)
        return self._opened

    async def restore(self, engine: Engine, version: int, slot: EngineSlot) -> Restored | None:
        engine_id = slot.engine_id
        # Each rank reads the path that the first is told, on its own node.
        nodes = list(dict.fromkeys(share.node_id for share in slot.shares))
        if self._num_failures >= self._terms.config.max_failures:
            return None
        coordinator: Coordinator | None = None
        made: Everywhere | None = None
        try:
            coordinator = await asyncio.to_thread(self._coordinator)
            record = await asyncio.to_thread(_record_of, coordinator, version)
            if record is None:
                return None
            # To its end also when cancelled: somebody has to give back what was assembled.
            with engine_span(engine_id, "assemble", 0.0) as span:
                made = await finish(
                    asyncio.to_thread(
                        coordinator.assemble_everywhere, record, nodes, self._model_path
                    )
                )
                told = _told(made)
                if span is not None:
                    span.said, span.num_bytes = told, record.num_bytes
            await engine.update_weights_from_disk(made.path, weight_version=str(version))
        except (*FAILURES, EngineError) as error:
            where = ", ".join(nodes)
            self._has_failed(f"weight version {version} for node {where}: {describe(error)}")
            return None
        finally:
            if coordinator is not None and made is not None:
                await _give_back(coordinator, made)
        self._num_failures = 0
        logger.info("store: engine %s has weight version %d: %s", engine_id, version, told)
        tensors = (tensor for unit in record.units for tensor in unit.tensors)
        return Restored(Manifest({one.name: one for one in tensors}, record.fingerprints))

    def _has_failed(self, because: str) -> None:
        self._num_failures += 1
        logger.warning("store: not restored: %s", because)
        if self._num_failures >= self._terms.config.max_failures:
            logger.error(
                "store: no engine is restored from it any more, after %d failures in a row",
                self._num_failures,
            )


def _told(made: Everywhere) -> str:
    """Where the bytes came from, and what was wrong on the way."""
    if len(made.on) == 1:
        return "; ".join(_told_of(one) for one in made.on.values())
    return "; ".join(f"node {node}: {_told_of(one)}" for node, one in made.on.items())


def _told_of(assembled: Assembled) -> str:
    by = ", ".join(f"{gib(num_bytes)} by {way}" for way, num_bytes in assembled.by.items())
    told = f"{gib(assembled.local_bytes)} from here, {gib(assembled.fetched_bytes)} from peers"
    told += f" ({by})" if by else ""
    return "; ".join((told, *assembled.troubles))


def _record_of(coordinator: Coordinator, version: int) -> Record | None:
    """What counts, if it is this version; that it is not yet, or no more, is no failure."""
    try:
        return coordinator.record_of(version)
    except WeightsUnavailable as error:
        logger.info("store: %s", error)
        return None


async def _give_back(coordinator: Coordinator, made: Everywhere) -> None:
    failed = await asyncio.to_thread(coordinator.give_back_everywhere, made)
    # An agent that was started again has removed it by itself.
    for node, why in failed.items():
        logger.warning("store: %s was not given back on node %s: %s", made.path, node, why)
