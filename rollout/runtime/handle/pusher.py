"""A push by every rank of a trainer, see ``rollout.weights.ranks``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from rollout.config import ServerConfig, Transport, WeightUpdate
from rollout.control.server.server import RolloutServer
from rollout.core.errors import ConfigError, RolloutError, WeightMismatch
from rollout.core.pending import Pending
from rollout.core.types import ServerStatus, StepReport
from rollout.runtime.handle.push_builder import fingerprint_method, remote_engines
from rollout.runtime.handle.transport import Caller
from rollout.weights.format.manifest import Manifest, check_push
from rollout.weights.push.push_version import checked_version
from rollout.weights.push.shm_buffers import ShmBufferPool, why_no_room
from rollout.weights.push.stream_server import PushStreamServer
from rollout.weights.push.transport_choice import choose_transport
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.ranks.bucket_check import BucketCheck
from rollout.weights.ranks.bucket_handover import BucketHandover, GatheredWeights
from rollout.weights.ranks.bucket_makers import (
    BucketMaker,
    RankZeroMaker,
    SharedMemoryMaker,
    check_same,
    with_content,
)
from rollout.weights.ranks.push_figures import PushFigures
from rollout.weights.ranks.rank_link import RankLink
from rollout.weights.ranks.rank_protocol import (
    AwaitEngines,
    Begin,
    Make,
    Offer,
    Plan,
    Prepare,
    PushRound,
    Step,
)
from rollout.weights.ranks.rank_sources import (
    PlannedSource,
    StreamedSource,
    TensorList,
    cast_to,
    digest_of,
    make_source,
)
from rollout.weights.tensors import (
    Dtype,
    KeptGroup,
    NamedTensors,
    NameMap,
    NcclTerms,
    OutgoingPush,
    PushPlanCache,
    PushSender,
)
from rollout.weights.tensors.tensor_sources import Pairs
from rollout.weights.transports.carriers import MOST_BUCKET_BYTES, ByPath

_REPORT = TypeAdapter(StepReport)
# Words of so many pushes stay for ranks that are late.
_PUSHES_REMEMBERED = 4
_RECORD_S = 5.0
Word = Mapping[str, Any]


class Pusher:
    """Pushes a trainer's weights from all of its ranks; ``ServerHandle.pusher`` makes it.

    Every rank calls ``push`` with the same arguments, and gets the same report or the same error.

    Args:
        timeout_s: for a rank that is silent, see ``rank_protocol``.
    """

    def __init__(
        self, config: ServerConfig, caller: Caller, link: RankLink, *, timeout_s: float
    ) -> None:
        self.config = config
        self.caller = caller
        self.link = link
        self.timeout_s = timeout_s
        self.pool = ShmBufferPool(config.weights.shared_memory_path)
        self.plans = PushPlanCache()
        self.kept = KeptGroup()
        self.tensors: TensorList = ()
        # Which ranks share the memory of rank 0's host.
        self.writers = link.sharing(config.weights.shared_memory_path)
        self._num_pushes = 0
        self._words_left: list[tuple[str, ...]] = []

    def push(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | None = None,
        name_map: NameMap | None = None,
        dtype: Dtype | None = None,
    ) -> StepReport:
        """Push new weights from all ranks, and serve them.

        Offloaded engines are onloaded; serving ones are paused for the push.

        Args:
            named_tensors: the same names on every rank: whole tensors, or DTensors, which are
                gathered here.  An iterator is consumed bucket by bucket: it yields whole tensors,
                in the same order on every rank, and may gather them itself.
            version: the new weight version; by default one more than the server's.
            name_map: see ``ServerHandle.onload``.
            dtype: of float tensors, which are cast before they are gathered.

        Raises:
            WeightMismatch: the tensors do not fit the model, or differ between ranks.
            RankFailure: a rank failed, or is silent.
        """
        self._num_pushes += 1
        link = self.link
        turn = PushRound(str(self._num_pushes), link.rank, link.num_ranks, self.timeout_s)
        work = _RankWork(self, named_tensors, name_map, dtype)
        chosen = None if version is None else checked_version(version)
        ready = {"knows": digest_of(self.tensors), "version": chosen}
        try:
            steps = turn.lead(ready) if link.rank == 0 else turn.follow(ready)
            report = link.run(steps, work.do)
            work.record()
        finally:
            work.close()
            self._forget(turn)
        return _REPORT.validate_python(report)

    def close(self) -> None:
        """Free this rank's shared memory, and leave the broadcast group."""
        self.kept.close()
        self.pool.close()

    @cached_property
    def expected(self) -> Manifest | None:
        """The tensors of a full push; None if the checkpoint has no list."""
        return self.caller.call(RolloutServer.expected_manifest).result()

    def __enter__(self) -> Pusher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _forget(self, turn: PushRound) -> None:
        """Delete the words of earlier pushes."""
        self._words_left.append(turn.words_left())
        if len(self._words_left) > _PUSHES_REMEMBERED:
            keys = self._words_left.pop(0)
            if self.link.rank == 0:
                self.link.words.delete(keys)


class _RankWork:
    """What one rank does in one push, besides exchanging words."""

    def __init__(
        self,
        pusher: Pusher,
        named_tensors: NamedTensors,
        name_map: NameMap | None,
        dtype: Dtype | None,
    ) -> None:
        self._pusher = pusher
        self._config = pusher.config.weights
        self._caller = pusher.caller
        self._named_tensors = named_tensors
        self._name_map = name_map
        self._dtype = dtype
        self._source: PlannedSource | StreamedSource | None = None
        self._buckets: Iterator[tuple[Pairs, bool]] = iter(())
        self._maker: BucketMaker | None = None
        self._check = BucketCheck(pusher.expected, self._config)
        self._version = 0
        self._transport = Transport.TENSOR
        self._fingerprints = ""
        self._figures = PushFigures(pusher.link.num_ranks)
        self._handover: BucketHandover[Any] = BucketHandover()
        self._outgoing: OutgoingPush | None = None
        self._pending: Pending[StepReport] | None = None

    def do(self, step: Step) -> Any:
        """Carry out one step."""
        match step:
            case Plan(words):
                return self._plan(words)
            case Prepare(plan):
                return self._prepare(plan)
            case Begin():
                return self._begin()
            case Make(index):
                return self._make(index)
            case Offer(index, words):
                return self._offer(words)
            case AwaitEngines(index, timeout_s):
                return self._await_engines(index, timeout_s)
        raise AssertionError(step)

    def record(self) -> None:
        """On rank 0: give the server the figures of all ranks, for its timeline."""
        if self._pusher.link.rank == 0:
            recorded = self._caller.call(
                RolloutServer.record_push, self._figures.spans(self._version)
            )
            with suppress(Exception):  # the weights are pushed: it succeeds without its spans
                recorded.result(_RECORD_S)

    def close(self) -> None:
        """Free what the push holds, also after a failure."""
        self._handover.close()
        if self._outgoing is not None:
            self._outgoing.close()
        if self._pending is not None:
            # After a failure here, the server ends the push too, before the next one begins.
            with suppress(Exception):
                self._pending.result(self._pusher.timeout_s)
        if self._maker is not None:
            self._maker.close()

    # -- all ranks --------------------------------------------------------------------------

    def _prepare(self, plan: Word) -> Word:
        pusher = self._pusher
        if "tensors" in plan:
            pusher.tensors = plan["tensors"]
        if self._source is None:
            self._source = make_source(
                self._named_tensors,
                expected=None,
                tensors=pusher.tensors,
                name_map=self._name_map,
                dtype=self._dtype,
                plans=pusher.plans,
            )
        if isinstance(self._source, StreamedSource) is not plan["is_streamed"]:
            raise WeightMismatch("it pushes an iterator and rank 0 does not, or the reverse")
        self._buckets = self._source.buckets(plan["bucket_bytes"])
        if plan["transport"] == Transport.SHARED_MEMORY:
            rank, writers = pusher.link.rank, pusher.writers
            self._maker = SharedMemoryMaker(
                pusher.pool,
                turn=writers.index(rank) if rank in writers else None,
                num_writers=len(writers),
                fingerprints=plan["fingerprints"],
            )
        else:
            self._maker = RankZeroMaker()
        return {}

    def _make(self, index: int) -> Word:
        assert self._maker is not None
        self._figures.begin()
        pairs, is_last = next(self._buckets)
        self._check(pairs, is_last)
        if isinstance(self._source, StreamedSource):
            # The push announces the model's dtypes, because these are known only now.
            pairs = cast_to(pairs, self._pusher.expected)
        self._figures.gathered()
        word = self._figures.with_figures(self._maker.make(index, pairs), pairs)
        return with_content(word, pairs, is_last)

    # -- rank 0 -----------------------------------------------------------------------------

    def _plan(self, words: Sequence[Word]) -> Word:
        pusher, config = self._pusher, self._pusher.config
        status = self._caller.call(RolloutServer.status).result()
        expected = pusher.expected
        self._version = _agreed_version(words) or status.weight_version + 1
        self._source = make_source(
            self._named_tensors,
            expected=expected,
            tensors=None,
            name_map=self._name_map,
            dtype=self._dtype,
            plans=pusher.plans,
        )
        is_streamed = isinstance(self._source, StreamedSource)
        self._fingerprints = fingerprint_method(config, self._caller)
        self._transport = self._choose_transport(status)
        plan: dict[str, Any] = {
            "is_streamed": is_streamed,
            "transport": self._transport.value,
            "bucket_bytes": self._bucket_bytes(),
            "fingerprints": self._fingerprints,
        }
        if isinstance(self._source, PlannedSource):
            if expected is not None and self._config.update is not WeightUpdate.FROZEN:
                check_push(
                    self._source.manifest,
                    expected,
                    must_be_complete=self._config.update is WeightUpdate.FULL,
                    casts=self._config.casts,
                    not_pushed=self._config.not_pushed,
                )
            tensors = self._source.tensors
            digest = digest_of(tensors)
            if any(word["knows"] != digest for word in words[1:]):
                plan["tensors"] = tensors
        if config.weights.store is not None:
            raise ConfigError(
                "weights.store: the store keeps the pushes of one process; leave it out, or push "
                "with onload(tensors) from rank 0",
                setting="weights.store",
            )
        return plan

    def _bucket_bytes(self) -> int:
        most = MOST_BUCKET_BYTES if self._transport is Transport.TENSOR else sys.maxsize
        return min(self._config.bucket_bytes, most)

    def _choose_transport(self, status: ServerStatus) -> Transport:
        wanted = self._config.transport
        if wanted is Transport.DISK:
            raise ConfigError(
                "weights.transport = disk: save the checkpoint from one rank with onload(tensors), "
                "or choose shared_memory, distributed or tensor",
                setting="weights.transport",
                value=wanted.value,
            )
        if wanted is Transport.CUDA_IPC and self._pusher.link.num_ranks > 1:
            raise ConfigError(
                "weights.transport = cuda_ipc: with several ranks use shared_memory or distributed",
                setting="weights.transport",
                value=wanted.value,
            )
        if wanted in (Transport.DISTRIBUTED, Transport.TENSOR):
            return wanted
        return choose_transport(wanted, remote_engines(status, self._caller), self._why_no_room())

    def _why_no_room(self) -> str:
        if not isinstance(self._source, PlannedSource):
            return ""
        share = self._source.num_bytes // len(self._pusher.writers) - self._pusher.pool.num_bytes()
        more = max(0, share) * len(self._pusher.writers)
        return why_no_room(more, self._config.shared_memory_path)

    def _begin(self) -> None:
        assert self._source is not None
        is_serving = self._caller.call(RolloutServer.status).result().gate == "open"
        self._outgoing = self._streamed(self._manifest())
        push = self._caller.ship(self._outgoing.push)
        send = RolloutServer.update_and_continue if is_serving else RolloutServer.onload
        self._pending = self._caller.call(send, push).then(self._handover.close)

    def _manifest(self) -> Manifest:
        if isinstance(self._source, PlannedSource):
            return self._source.manifest
        return self._pusher.expected or Manifest({})

    def _streamed(self, manifest: Manifest) -> OutgoingPush:
        pusher, host = self._pusher, self._caller.own_host()
        timeout_s = pusher.config.lifecycle.update_timeout_s
        if self._transport is Transport.SHARED_MEMORY:
            server = PushStreamServer(self._handover, host=host, timeout_s=timeout_s)
            push = WeightPush(self._version, manifest, carrier=ByPath(), stream=server.address)
            return OutgoingPush(push, server.close)
        is_on_cuda = isinstance(self._source, PlannedSource) and self._source.is_on_cuda
        sender = PushSender(
            self._config,
            pusher.pool,
            host=host,
            timeout_s=timeout_s,
            model_path=pusher.config.model_path,
            kept=pusher.kept,
            nccl=NcclTerms(pusher.config.why_no_nccl, pusher.config.nccl_cumem),
            fingerprints=self._fingerprints,
        )
        weights = GatheredWeights(manifest, self._handover, is_on_cuda=is_on_cuda)
        return sender.stream(weights, self._version, self._transport)

    def _offer(self, words: Sequence[Word]) -> None:
        assert self._maker is not None
        check_same(words)
        self._figures.offered(words)
        self._handover.put(self._maker.joined(words, bool(words[0]["is_last"])))

    def _await_engines(self, index: int | None, timeout_s: float) -> Word | None:
        assert self._pending is not None
        if index is not None and self._handover.is_wanted(index, timeout_s):
            self._figures.wanted(time.monotonic())
            return {}
        if index is not None and not self._handover.is_over:
            return None
        try:
            report = self._pending.result(timeout_s)
        except TimeoutError:
            if self._pending.done():
                raise
            return None
        if index is not None:
            raise RolloutError(f"the server ended the push before bucket {index}: {report}")
        self._figures.wanted(self._handover.over_s)
        report = replace(report, push_stages=self._figures.stages(self._transport.value))
        word: Word = _REPORT.dump_python(report, mode="json")
        return word


def _agreed_version(words: Sequence[Word]) -> int | None:
    """The version that all ranks push; None if none names one.

    Raises:
        WeightMismatch: they name different ones.
    """
    versions: list[int | None] = [word["version"] for word in words]
    for rank, version in enumerate(versions):
        if version != versions[0]:
            raise WeightMismatch(
                f"rank {rank} pushes weight version {version}, rank 0 version {versions[0]}"
            )
    return versions[0]
