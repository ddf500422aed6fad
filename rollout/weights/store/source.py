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
from rollout.weights.store.agents import Agents, StoreTerms
from rollout.weights.store.assembling import Assembled
from rollout.weights.store.coordinator import FAILURES, Coordinator
from rollout.weights.store.limits import gib
from rollout.weights.store.records import Record

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

    async def restore(self, engine: Engine, version: int, node_id: str) -> bool:
        if self._num_failures >= self._terms.config.max_failures:
            return False
        started = asyncio.get_running_loop().time()
        coordinator: Coordinator | None = None
        assembled: Assembled | None = None
        try:
            coordinator = await asyncio.to_thread(self._coordinator)
            record = await asyncio.to_thread(_record_of, coordinator, version)
            if record is None:
                return False
            # To its end also when cancelled: somebody has to give back what was assembled.
            assembled = await finish(
                asyncio.to_thread(coordinator.assemble, record, node_id, self._model_path)
            )
            assembled_s = asyncio.get_running_loop().time() - started
            await engine.update_weights_from_disk(assembled.path, weight_version=str(version))
        except (*FAILURES, EngineError) as error:
            self._has_failed(f"weight version {version} for node {node_id}: {describe(error)}")
            return False
        finally:
            if coordinator is not None and assembled is not None:
                await _give_back(coordinator, node_id, assembled)
        self._num_failures = 0
        logger.info(
            "store: weight version %d on node %s: %s from here and %s from peers, proved in %.2f s",
            version,
            node_id,
            gib(assembled.local_bytes),
            gib(assembled.fetched_bytes),
            assembled_s,
        )
        return True

    def _has_failed(self, because: str) -> None:
        self._num_failures += 1
        logger.warning("store: not restored: %s", because)
        if self._num_failures >= self._terms.config.max_failures:
            logger.error(
                "store: no engine is restored from it any more, after %d failures in a row",
                self._num_failures,
            )


def _record_of(coordinator: Coordinator, version: int) -> Record | None:
    """What counts, if it is this version; that it is not yet, or no more, is no failure."""
    try:
        return coordinator.record_of(version)
    except WeightsUnavailable as error:
        logger.info("store: %s", error)
        return None


async def _give_back(coordinator: Coordinator, node_id: str, assembled: Assembled) -> None:
    try:
        await asyncio.to_thread(coordinator.give_back, node_id, assembled.path)
    except FAILURES as error:  # an agent that was started again has removed it by itself
        logger.warning("store: %s was not given back: %s", assembled.path, error)
