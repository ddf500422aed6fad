"""The store as a source of weights for a restarted engine.

Always true: an engine is given what counts in the store, whole and proved, or nothing; a failure
here is a reason to try the next source and never more; after so many in a row this source has
switched itself off and says so.

An engine that proves what it loads reads every byte once, where otherwise the agent has read all of
it before.  Only when that fails does the agent look for the unit that is damaged, to bring it from
another node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from engines.errors import EngineError, EngineRejected
from engines.protocol import Engine
from rollout.errors import WeightsUnavailable
from rollout.fanout import describe, finish
from rollout.timeline.recorder import engine_span
from rollout.types import EngineSlot
from rollout.weights.manifest import Manifest
from rollout.weights.source import Restored
from rollout.weights.store.agents import Agents, StoreTerms
from rollout.weights.store.assembling import Assembled, Everywhere, Wanted
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
        try:
            coordinator = await asyncio.to_thread(self._coordinator)
            record = await asyncio.to_thread(_record_of, coordinator, version)
            if record is None:
                return None
            load = partial(self._load, engine, engine_id, coordinator, record, nodes)
            if await _proves_loads(engine):
                try:
                    told = await load(is_proved=False)
                except EngineRejected as error:
                    logger.warning("store: engine %s: %s; all is looked at", engine_id, error)
                    told = await load(is_proved=True)
            else:
                told = await load(is_proved=True)
        except (*FAILURES, EngineError) as error:
            where = ", ".join(nodes)
            self._has_failed(f"weight version {version} for node {where}: {describe(error)}")
            return None
        self._num_failures = 0
        logger.info("store: engine %s has weight version %d: %s", engine_id, version, told)
        tensors = (tensor for unit in record.units for tensor in unit.tensors)
        return Restored(Manifest({one.name: one for one in tensors}, record.fingerprints))

    async def _load(
        self,
        engine: Engine,
        engine_id: str,
        coordinator: Coordinator,
        record: Record,
        nodes: Sequence[str],
        *,
        is_proved: bool,
    ) -> str:
        """Assemble and load; returns where the bytes came from."""
        wanted = Wanted(self._model_path, is_proved=is_proved)
        made: Everywhere | None = None
        try:
            # To its end also when cancelled: somebody has to give back what was assembled.
            with engine_span(engine_id, "assemble", 0.0) as span:
                made = await finish(
                    asyncio.to_thread(coordinator.assemble_everywhere, record, nodes, wanted)
                )
                told = _told(made)
                if span is not None:
                    span.said, span.num_bytes = told, record.num_bytes
            await engine.update_weights_from_disk(
                made.path, weight_version=str(record.write.version)
            )
            return told
        finally:
            if made is not None:
                await _give_back(coordinator, made)

    def _has_failed(self, because: str) -> None:
        self._num_failures += 1
        logger.warning("store: not restored: %s", because)
        if self._num_failures >= self._terms.config.max_failures:
            logger.error(
                "store: no engine is restored from it any more, after %d failures in a row",
                self._num_failures,
            )


async def _proves_loads(engine: Engine) -> bool:
    """Whether it refuses bytes that are not what ``FINGERPRINTS`` beside them says."""
    try:
        info = await engine.server_info()
    except EngineError:
        return False
    return info.raw.get("proves_loads") is True


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
