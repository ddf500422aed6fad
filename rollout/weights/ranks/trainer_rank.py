"""What one rank of a trainer keeps from push to push, and its server as a push sees it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from rollout.config import ServerConfig, WeightUpdate
from rollout.core.machine import room_on
from rollout.core.pending import Pending
from rollout.core.types import ServerStatus, StepReport
from rollout.observability.timeline.span import Span
from rollout.rules.lifecycle import Command
from rollout.weights.format.checkpoint_config import read_checkpoint_config
from rollout.weights.format.manifest import Manifest, check_contents
from rollout.weights.push.encodings import ENCODINGS
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.buffers import SPARE_BYTES, ShmBufferPool, StoreCopies
from rollout.weights.routes.choice import loads_at_once, stream_note, why_loads_cost
from rollout.weights.routes.cuda_ipc import pinned
from rollout.weights.routes.route import EnginePlace
from rollout.weights.routes.trainer_groups import IdleGroup
from rollout.weights.tensors.aliases import Ties
from rollout.weights.tensors.push_plan import PushPlanCache
from rollout.weights.tensors.sources import TensorList

logger = logging.getLogger(__name__)


class ServerPort(Protocol):
    """The calls of a push to its server.

    Attributes:
        own_host: address of this machine that the server can reach.
        own_node: names this machine, as ``places`` names those of the engines that get a push.
        expected: the tensors of a full push, or None if the checkpoint has no list.
    """

    @property
    def own_host(self) -> str: ...
    @property
    def own_node(self) -> str: ...
    @property
    def expected(self) -> Manifest | None: ...
    def status(self) -> ServerStatus: ...
    def places(self, status: ServerStatus) -> list[EnginePlace]: ...
    def fingerprint_method(self, *, writes_files: bool) -> str: ...
    def make_way_in_store(self, folder: str) -> int | None: ...
    def push(self, push: WeightPush, until: Command) -> Pending[StepReport]: ...
    def serve(self) -> Pending[StepReport]: ...
    def offer_to_store(self, push: WeightPush) -> Pending[None]: ...
    def record_push(self, spans: Sequence[Span]) -> Pending[None]: ...


class TrainerRank:
    """One rank of a trainer, over all its pushes to one server.

    Args:
        hosts: for each rank, the lowest one that shares its host's memory.
        idle_group: of all pushes from this process; by default, those through this object.

    Attributes:
        tensors: of the last push, as rank 0 has planned them.
        encodings: by name, the best first.
        ties: the tensors that its checkpoint has under several names.
        num_compared: tensors that ranks have compared so far; the next push goes on after them.
    """

    def __init__(
        self,
        config: ServerConfig,
        rank: int = 0,
        hosts: Sequence[int] = (0,),
        idle_group: IdleGroup | None = None,
    ) -> None:
        self.config = config
        self.rank = rank
        self.hosts = list(hosts)
        self.pool = ShmBufferPool(config.weights.shared_memory_path, pinned)
        self.copies = StoreCopies()
        self.encodings = {name: make() for name, make in ENCODINGS.items()}
        self.plans = PushPlanCache()
        self.idle_group = idle_group or IdleGroup()
        self.loads = LoadCosts(config)
        self.ties = Ties(config.model_path)
        self.tensors: TensorList = ()
        self.num_compared = 0
        self._checked: tuple[Manifest | None, WeightUpdate | None] = None, None

    @property
    def num_ranks(self) -> int:
        return len(self.hosts)

    @property
    def writers(self) -> list[int]:
        """The ranks that write into the memory of this rank's host."""
        own = self.hosts[self.rank]
        return [rank for rank, host in enumerate(self.hosts) if host == own]

    def room_bytes(self) -> int:
        """What it can copy into shared memory: its pool, and its part of what the host has."""
        try:
            more = room_on(self.config.weights.shared_memory_path).usable_bytes(SPARE_BYTES)
        except OSError:  # the folder is not there, which a copy reports
            more = 0
        return self.pool.num_bytes() + more // len(self.writers)

    def check(self, manifest: Manifest, expected: Manifest | None, contents: WeightUpdate) -> None:
        """Check a push against the model, unless the last one was the same.

        Raises:
            WeightMismatch: it does not fit.
        """
        last, last_contents = self._checked
        if manifest is not last or contents is not last_contents:
            check_contents(manifest, expected, self.config.weights, contents)
            self._checked = manifest, contents

    def close(self) -> None:
        """Free shared memory, but what the store reads, and leave the broadcast group."""
        for encoding in self.encodings.values():
            encoding.begin(None)
        self.idle_group.leave()
        self.copies.close()
        self.pool.close()


class LoadCosts:
    """What loads cost the engines of one server; the reason is read and logged once."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._has_logged = False

    @cached_property
    def is_at_once(self) -> bool:
        """Whether all buckets of a push through shared memory are loaded in one call."""
        settings = self._config.weights
        return loads_at_once(settings.transport, self._why, streams=settings.stream)

    def log(self) -> None:
        """A push goes through shared memory."""
        if self._has_logged:
            return
        self._has_logged = True
        settings = self._config.weights
        if note := stream_note(settings.transport, self._why, streams=settings.stream):
            logger.warning("%s", note)
        elif self.is_at_once:
            logger.info("engines load all buckets of a push in one call: %s", self._why)

    @cached_property
    def _why(self) -> str:
        kinds = {group.engine.kind for group in self._config.groups.values()}
        return why_loads_cost(kinds, read_checkpoint_config(self._config.model_path))
