"""A push by every rank of a trainer, see ``rollout.weights.ranks``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from rollout.config import ServerConfig
from rollout.control.server.server import RolloutServer
from rollout.core.arguments import check_kind, check_number
from rollout.core.errors import RolloutError
from rollout.core.pending import Pending
from rollout.core.types import StepReport
from rollout.runtime.calls.caller import Caller
from rollout.runtime.handle.load_costs import LoadCosts
from rollout.runtime.handle.offload_window import BeforeKv, check_before_kv
from rollout.runtime.handle.push_builder import check_name_map
from rollout.runtime.handle.rank_work import RankWork
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.held_buffers import StoreCopies
from rollout.weights.push.push_version import checked_version
from rollout.weights.push.shm_buffers import ShmBufferPool
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.ranks.makers.broadcast_sender import SenderGroup
from rollout.weights.ranks.own_gpu import pinned
from rollout.weights.ranks.rank_link import RankLink
from rollout.weights.ranks.rank_protocol import AwaitEngines, Offload, PushRound, Step
from rollout.weights.ranks.rank_sources import TensorList, digest_of
from rollout.weights.tensors import Dtype, KeptGroup, NamedTensors, NameMap, PushPlanCache

_REPORT = TypeAdapter(StepReport)
# Words of so many pushes and offloads stay for ranks that are late.
_ROUNDS_REMEMBERED = 4


class Pusher:
    """Pushes a trainer's weights from all of its ranks; ``ServerHandle.pusher`` makes it.

    Every rank calls ``push`` with the same arguments, and gets the same report or the same error.

    Args:
        timeout_s: for a rank that is silent, see ``rank_protocol``.
        with_expected: adds the log-probs that the handle was told to expect of the next push.
    """

    def __init__(
        self,
        config: ServerConfig,
        caller: Caller,
        link: RankLink,
        *,
        timeout_s: float,
        with_expected: Callable[[WeightPush], WeightPush] = lambda push: push,
    ) -> None:
        self.config = config
        self.caller = caller
        self.link = link
        self.timeout_s = timeout_s
        self.with_expected = with_expected
        self.pool = ShmBufferPool(config.weights.shared_memory_path, pinned)
        self.copies = StoreCopies(self.pool)
        self.loads = LoadCosts(config)
        self.plans = PushPlanCache()
        self.kept = KeptGroup()
        self.sender_group = SenderGroup()
        self.tensors: TensorList = ()
        # For each rank, the lowest one that shares its host's memory.
        self.hosts = link.hosts(config.weights.shared_memory_path)
        self._is_closed = False
        self._num_rounds = 0
        self._words_left: list[tuple[str, ...]] = []

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"Pusher(rank {self.link.rank} of {self.link.num_ranks}{state})"

    def push(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | None = None,
        name_map: NameMap | None = None,
        dtype: Dtype | None = None,
        before_kv: BeforeKv | None = None,
    ) -> StepReport:
        """``ServerHandle.serve_weights`` from all ranks: these weights, verified and serving.

        In whatever phase the engines are: released memory is resumed, serving ones are paused.

        Args:
            named_tensors: the same names on every rank: whole tensors, or DTensors, which are
                gathered here.  An iterator is consumed bucket by bucket: it yields whole tensors,
                in the same order on every rank, and may gather them itself.
            version: the new weight version; by default one more than the server's.
            name_map: see ``ServerHandle.serve_weights``.
            dtype: of float tensors, which are cast before they are gathered.
            before_kv: frees memory of this rank that the KV caches need.  It runs on every rank
                that gives one, after the engines have verified the weights; the KV caches are
                resumed after it has run on all.  It has as long as a rank may be silent.  If it
                raises, so does the push on all ranks: the engines hold the new weights and do not
                serve, and ``serve()`` continues.  If the engines were not offloaded, it runs
                after the push, while they serve.

        Raises:
            ConfigError: an argument is wrong; the other ranks find this one silent.
            WeightMismatch: the tensors do not fit the model, or differ between ranks.
            RankFailure: a rank failed, or is silent.
            RolloutError: the pusher is closed.
        """
        self._check_open()
        check_before_kv(before_kv)
        check_name_map(name_map)
        if dtype is not None:
            check_kind("dtype", dtype, Dtype, "a torch.dtype such as torch.bfloat16")
        link, turn = self.link, self._round("push")
        work = RankWork(self, named_tensors, name_map, dtype, before_kv)
        chosen = None if version is None else checked_version(version)
        ready = {
            "knows": digest_of(self.tensors),
            "version": chosen,
            "has_turn": before_kv is not None,
            "node": self.caller.own_node(),
            "gpu": work.gpu,
            "group": self.sender_group.kept,
        }
        try:
            steps = turn.lead(ready) if link.rank == 0 else turn.follow(ready)
            report = link.run(steps, work.do)
            work.keep()
            work.record()
        finally:
            work.close()
            self._forget(turn)
        return _REPORT.validate_python(report)

    def give_memory(self, *, rank_timeout_s: float | None = None) -> StepReport:
        """Free the engines' memory for the trainer, as ``ServerHandle.give_memory``.

        Every rank calls it when it needs the engines no more.  Rank 0 offloads when all have, and
        all return when the memory is free.

        Args:
            rank_timeout_s: how long the ranks wait for the last one; by default as in a push.  Name
                it if the ranks generate samples, which takes some longer than others.

        Raises:
            ConfigError: ``rank_timeout_s`` is wrong.
            RankFailure: a rank is silent; nothing was offloaded, unless that is rank 0.
            RolloutError: the pusher is closed.
        """
        self._check_open()
        if rank_timeout_s is not None:
            check_number("rank_timeout_s", rank_timeout_s, least=1)
        link, turn = self.link, self._round("offload", rank_timeout_s)
        work = OffloadWork(self.caller)
        try:
            steps = turn.lead_offload() if link.rank == 0 else turn.follow({})
            report = link.run(steps, work.do)
        finally:
            self._forget(turn)
        return _REPORT.validate_python(report)

    def _round(self, call: str, timeout_s: float | None = None) -> PushRound:
        """The next call of all ranks, which no call of another name can join."""
        self._num_rounds += 1
        link = self.link
        name = f"{call}-{self._num_rounds}"
        return PushRound(name, link.rank, link.num_ranks, timeout_s or self.timeout_s, call)

    def close(self) -> None:
        """Free this rank's shared memory, and leave the broadcast groups; for good."""
        self._is_closed = True
        self.kept.close()
        self.sender_group.close()
        self.pool.close()

    @property
    def writers(self) -> list[int]:
        """The ranks that write into the memory of this rank's host."""
        own = self.hosts[self.link.rank]
        return [rank for rank, host in enumerate(self.hosts) if host == own]

    @cached_property
    def expected(self) -> Manifest | None:
        """The tensors of a full push; None if the checkpoint has no list."""
        return self.caller.call(RolloutServer.expected_manifest).result()

    def __enter__(self) -> Pusher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RolloutError("this pusher is closed; policy.pusher() makes another, on all ranks")

    def _forget(self, turn: PushRound) -> None:
        """Delete the words of earlier calls."""
        self._words_left.append(turn.words_left())
        if len(self._words_left) > _ROUNDS_REMEMBERED:
            keys = self._words_left.pop(0)
            if self.link.rank == 0:
                self.link.words.delete(keys)


class OffloadWork:
    """What rank 0 does in an offload by all ranks; the others only wait."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._pending: Pending[StepReport] | None = None

    def do(self, step: Step) -> Any:
        """Carry out one step."""
        match step:
            case Offload():
                self._pending = self._caller.call(RolloutServer.give_memory)
                return None
            case AwaitEngines(_, timeout_s):
                assert self._pending is not None
                return _reported(self._pending, timeout_s)
        raise AssertionError(step)


def _reported(pending: Pending[StepReport], timeout_s: float) -> dict[str, Any] | None:
    """The report as a word; None if there is none yet."""
    try:
        report = pending.result(timeout_s)
    except TimeoutError:
        if pending.done():
            raise
        return None
    word: dict[str, Any] = _REPORT.dump_python(report, mode="json")
    return word
