"""The store as a source of weights for a restarted engine.

Always true: an engine gets the current version of the store, complete and verified, or nothing;
after a failure the next source is tried; after ``max_failures`` failures in a row this source
switches itself off and logs that.

An engine that verifies what it loads reads every byte once; for other engines the agent reads all
bytes before.  If that engine finds a difference, the agent looks for the damaged unit and fetches
it from another node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from engines.protocol import Engine
from engines.protocol.errors import EngineError, EngineRejected
from engines.protocol.plain_text import describe, size_text
from rollout.core.errors import WeightsUnavailable
from rollout.core.fanout import run_to_completion
from rollout.core.types import EngineSlot
from rollout.observability.timeline.recorder import engine_span
from rollout.weights.format.manifest import Manifest
from rollout.weights.store.agents import Agents, StoreTerms
from rollout.weights.store.coordinator import Coordinator
from rollout.weights.store.layout.record import StoreRecord
from rollout.weights.store.node.assembly import AssembledFolder, AssemblyRequest, FoldersOnNodes
from rollout.weights.store.node.writer import AGENT_ERRORS
from rollout.weights.store.weight_source import Restored

logger = logging.getLogger(__name__)


class StoreSource:
    """A ``WeightSource``.

    Args:
        model_path: checkpoint that the engines started from, for config and tokenizer.
    """

    def __init__(self, terms: StoreTerms, agents: Agents, model_path: str) -> None:
        self._terms = terms
        self._agents = agents
        self._model_path = model_path
        self._num_failures = 0
        self._coordinator: Coordinator | None = None

    async def restore(self, engine: Engine, version: int, slot: EngineSlot) -> Restored | None:
        engine_id = slot.engine_id
        # Each rank reads the same path, on its own node.
        nodes = list(dict.fromkeys(share.node_id for share in slot.shares))
        if self._is_off:
            return None
        try:
            coordinator = await self._connected()
            try:
                record = await asyncio.to_thread(coordinator.record_of, version)
            except WeightsUnavailable as error:  # another version is not a failure
                logger.info("store: %s", error)
                return None
            load = partial(self._load, engine, engine_id, coordinator, record, nodes)
            if await _verifies_loads(engine):
                try:
                    origin = await load(is_verified=False)
                except EngineRejected as error:
                    logger.warning("store: engine %s: %s; all units are verified", engine_id, error)
                    origin = await load(is_verified=True)
            else:
                origin = await load(is_verified=True)
        except (*AGENT_ERRORS, EngineError) as error:
            where = ", ".join(nodes)
            self._has_failed(f"weight version {version} for node {where}: {describe(error)}")
            return None
        self._num_failures = 0
        logger.info("store: engine %s has weight version %d: %s", engine_id, version, origin)
        tensors = (tensor for unit in record.units for tensor in unit.tensors)
        return Restored(Manifest({tensor.name: tensor for tensor in tensors}, record.fingerprints))

    async def why_lacks(self, version: int) -> str:
        if self._is_off:
            return f"the store has failed {self._num_failures} times in a row"
        try:
            coordinator = await self._connected()
            await asyncio.to_thread(coordinator.record_of, version)
        except AGENT_ERRORS as error:
            return describe(error)
        return ""

    @property
    def _is_off(self) -> bool:
        return self._num_failures >= self._terms.config.max_failures

    async def _connected(self) -> Coordinator:
        if self._coordinator is None:
            self._coordinator = await asyncio.to_thread(self._terms.coordinator, self._agents)
        return self._coordinator

    async def _load(
        self,
        engine: Engine,
        engine_id: str,
        coordinator: Coordinator,
        record: StoreRecord,
        nodes: Sequence[str],
        *,
        is_verified: bool,
    ) -> str:
        """Assemble and load; returns where the bytes came from, as text."""
        wanted = AssemblyRequest(self._model_path, is_verified=is_verified)
        made: FoldersOnNodes | None = None

        def assemble() -> FoldersOnNodes:
            nonlocal made  # a cancelled call returns nothing, and its folders must be released
            made = coordinator.assemble(record, nodes, wanted)
            return made

        try:
            with engine_span(engine_id, "assemble", 0.0) as span:
                made = await run_to_completion(asyncio.to_thread(assemble))
                origin = _origin_text(made)
                if span is not None:
                    span.said, span.num_bytes = origin, record.num_bytes
            await engine.update_weights_from_disk(
                made.path, weight_version=str(record.write.version)
            )
            return origin
        finally:
            if made is not None:
                failed = await asyncio.to_thread(coordinator.give_back, made)
                # A restarted agent removes it itself.
                for node, why in failed.items():
                    logger.warning(
                        "store: %s was not released on node %s: %s", made.path, node, why
                    )

    def _has_failed(self, reason: str) -> None:
        self._num_failures += 1
        logger.warning("store: not restored: %s", reason)
        if self._is_off:
            logger.error(
                "store: no engine is restored from it any more, after %d failures in a row",
                self._num_failures,
            )


async def _verifies_loads(engine: Engine) -> bool:
    """Whether it rejects weights that differ from the file ``FINGERPRINTS`` beside them."""
    try:
        info = await engine.server_info()
    except EngineError:
        return False
    return info.raw.get("proves_loads") is True


def _origin_text(made: FoldersOnNodes) -> str:
    """Where the bytes came from, and what failed."""
    if len(made.folders) == 1:
        return "; ".join(_node_origin_text(folder) for folder in made.folders.values())
    texts = {node: _node_origin_text(folder) for node, folder in made.folders.items()}
    return "; ".join(f"node {node}: {text}" for node, text in texts.items())


def _node_origin_text(assembled: AssembledFolder) -> str:
    by = ", ".join(f"{size_text(num_bytes)} by {way}" for way, num_bytes in assembled.by.items())
    text = f"{size_text(assembled.local_bytes)} from this node, "
    text += f"{size_text(assembled.fetched_bytes)} from peers"
    text += f" ({by})" if by else ""
    return "; ".join((text, *assembled.troubles))
