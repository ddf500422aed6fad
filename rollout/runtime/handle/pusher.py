"""A push by every rank of a trainer, see ``rollout.weights.ranks``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from engines.protocol.plain_text import describe
from rollout.config import ServerConfig, Transport
from rollout.control.server.server import RolloutServer
from rollout.core.errors import ConfigError, RankFailure, RolloutError, WeightMismatch
from rollout.core.pending import Pending
from rollout.core.types import ServerStatus, StepReport
from rollout.runtime.handle.load_costs import LoadCosts
from rollout.runtime.handle.offload_window import WITHOUT_KV, BeforeKv, check_before_kv
from rollout.runtime.handle.push_builder import (
    fingerprint_method,
    keeps_copies,
    make_sender,
    naming_path,
    remote_engines,
    version_in_store,
)
from rollout.runtime.handle.transport import Caller
from rollout.weights.format.manifest import Manifest, check_contents
from rollout.weights.push.copied_push import CopiedPush
from rollout.weights.push.held_buffers import HeldBuffers, StoreCopies
from rollout.weights.push.push_version import checked_version
from rollout.weights.push.shm_buffers import ShmBufferPool, why_no_room
from rollout.weights.push.stream_server import PushStreamServer
from rollout.weights.push.transport_choice import choose_transport
from rollout.weights.push.weight_push import WeightPush, default_contents
from rollout.weights.ranks.bucket_check import BucketCheck
from rollout.weights.ranks.bucket_handover import BucketHandover, GatheredWeights
from rollout.weights.ranks.bucket_makers import (
    BucketMaker,
    RankZeroMaker,
    SharedMemoryMaker,
    check_same,
    with_content,
)
from rollout.weights.ranks.folder_makers import CheckpointMaker, JoinedMaker
from rollout.weights.ranks.rank_link import RankLink
from rollout.weights.ranks.rank_protocol import (
    AwaitEngines,
    Begin,
    Finish,
    Make,
    Offer,
    Plan,
    Prepare,
    PushRound,
    Step,
    TakeTurn,
)
from rollout.weights.ranks.rank_sources import (
    PlannedSource,
    StreamedSource,
    TensorList,
    cast_to,
    digest_of,
    make_source,
)
from rollout.weights.ranks.store_share import ShareCopier, add_bucket
from rollout.weights.tensors import (
    Dtype,
    KeptGroup,
    NamedTensors,
    NameMap,
    OutgoingPush,
    PushPlanCache,
    PushSender,
)
from rollout.weights.tensors.tensor_sources import Pairs
from rollout.weights.transports.carriers import MOST_BUCKET_BYTES, ByPath

logger = logging.getLogger(__name__)

_REPORT = TypeAdapter(StepReport)
# Words of so many pushes stay for ranks that are late.
_PUSHES_REMEMBERED = 4
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
        self.copies = StoreCopies(self.pool)
        self.loads = LoadCosts(config)
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
        before_kv: BeforeKv | None = None,
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
            before_kv: frees memory of this rank that the KV caches need.  It runs on every rank
                that gives one, after the engines have verified the weights; the KV caches are
                resumed after it has run on all.  It has as long as a rank may be silent.  If it
                raises, so does the push on all ranks: the engines hold the new weights and do not
                serve, and ``onload()`` continues.  If the engines were not offloaded, it runs
                after the push, while they serve.

        Raises:
            WeightMismatch: the tensors do not fit the model, or differ between ranks.
            RankFailure: a rank failed, or is silent.
        """
        check_before_kv(before_kv)
        self._num_pushes += 1
        link = self.link
        turn = PushRound(str(self._num_pushes), link.rank, link.num_ranks, self.timeout_s)
        work = _RankWork(self, named_tensors, name_map, dtype, before_kv)
        chosen = None if version is None else checked_version(version)
        ready = {
            "knows": digest_of(self.tensors),
            "version": chosen,
            "has_turn": before_kv is not None,
        }
        try:
            steps = turn.lead(ready) if link.rank == 0 else turn.follow(ready)
            report = link.run(steps, work.do)
            work.keep()
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
        before_kv: BeforeKv | None,
    ) -> None:
        self._pusher = pusher
        self._config = pusher.config.weights
        self._caller = pusher.caller
        self._named_tensors = named_tensors
        self._name_map = name_map
        self._dtype = dtype
        self._before_kv = before_kv
        # Whether the engines serve when the push begins, and get the trainer's turn after it.
        self._is_serving = False
        self._has_turn = False
        self._verified: StepReport | None = None
        self._source: PlannedSource | StreamedSource | None = None
        self._buckets: Iterator[tuple[Pairs, bool]] = iter(())
        self._maker: BucketMaker | None = None
        self._held: HeldBuffers | None = None
        self._copier: ShareCopier | None = None
        self._copied: CopiedPush | None = None
        self._check = BucketCheck(pusher.expected, self._config)
        self._version = 0
        self._transport = Transport.TENSOR
        # Whether the engines get one folder, when all buckets are written.
        self._is_one_load = False
        self._fingerprints = ""
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
            case TakeTurn():
                return self._take_turn()
            case Finish():
                return self._finish()
        raise AssertionError(step)

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
        if self._held is not None:
            self._held.release()

    def keep(self) -> None:
        """After the push: leave this rank's copies to the store; rank 0 says where all are."""
        self._held = None
        push = None if self._copied is None else self._copied.push(self._version)
        if push is not None:
            try:
                self._caller.call(RolloutServer.offer_to_store, push).result()
            except RolloutError as error:
                logger.warning("store: weight version %d is not kept: %s", self._version, error)

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
        self._transport = Transport(plan["transport"])
        self._is_serving = plan["is_serving"]
        with naming_path(self._config, self._transport):
            self._maker = self._make_maker(plan)
        return {}

    def _make_maker(self, plan: Word) -> BucketMaker:
        pusher, keeps = self._pusher, plan["store"] is not None
        if keeps:
            self._held = pusher.copies.begin(plan["store"]["version"], plan["store"]["reads"])
        if self._transport is Transport.DISK:
            is_writer = pusher.link.rank == 0
            return CheckpointMaker(
                self._sender().checkpoint_writer(self._version) if is_writer else None
            )
        if self._transport is Transport.SHARED_MEMORY:
            if plan["at_once"]:
                held = self._held or HeldBuffers(pusher.pool)
                return JoinedMaker(self._share(held, plan), held, releases=not keeps)
            return self._share(self._held or pusher.pool, plan)
        if self._held is not None:
            self._copier = ShareCopier(self._share(self._held, plan))
        return RankZeroMaker()

    def _share(self, pool: ShmBufferPool | HeldBuffers, plan: Word) -> SharedMemoryMaker:
        rank, writers = self._pusher.link.rank, self._pusher.writers
        return SharedMemoryMaker(
            pool,
            turn=writers.index(rank) if rank in writers else None,
            num_writers=len(writers),
            fingerprints=plan["fingerprints"],
        )

    def _make(self, index: int) -> Word:
        assert self._maker is not None
        pairs, is_last = next(self._buckets)
        self._check(pairs, is_last)
        if isinstance(self._source, StreamedSource):
            # The push announces the model's dtypes, because these are known only now.
            pairs = cast_to(pairs, self._pusher.expected)
        if self._copied is not None:
            self._copied.has_tensors(pairs.specs)
        copied = {} if self._copier is None else self._copier.copied(index, pairs)
        with naming_path(self._config, self._transport):
            made = self._maker.make(index, pairs)
        return with_content(made | copied, pairs, is_last)

    def _take_turn(self) -> Word:
        try:
            if self._before_kv is not None:
                self._before_kv()
        except Exception as error:
            state = "the engines serve the new weights" if self._is_serving else WITHOUT_KV
            raise RankFailure(f"{describe(error, with_type=True)}; {state}") from error
        return {}

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
        at_once = pusher.loads.is_at_once(self._transport)
        self._is_one_load = at_once or self._transport is Transport.DISK
        self._is_serving = status.gate == "open"
        self._has_turn = any(word["has_turn"] for word in words)
        plan: dict[str, Any] = {
            "is_serving": self._is_serving,
            "has_turn": self._has_turn,
            "is_streamed": is_streamed,
            "transport": self._transport.value,
            "at_once": at_once,
            "bucket_bytes": self._bucket_bytes(),
            "fingerprints": self._fingerprints,
        }
        if isinstance(self._source, PlannedSource):
            contents = default_contents(self._config.update)
            check_contents(self._source.manifest, expected, self._config, contents)
            tensors = self._source.tensors
            digest = digest_of(tensors)
            if any(word["knows"] != digest for word in words[1:]):
                plan["tensors"] = tensors
        plan["store"] = self._stored()
        return plan

    def _stored(self) -> Word | None:
        """What the ranks know to keep copies for the store; None if it keeps none."""
        if not keeps_copies(self._config, default_contents(self._config.update)):
            return None
        self._copied = CopiedPush()
        reads = version_in_store(self._caller, self._pusher.pool)
        return {"version": self._version, "reads": reads}

    def _bucket_bytes(self) -> int:
        most = MOST_BUCKET_BYTES if self._transport is Transport.TENSOR else sys.maxsize
        return min(self._config.bucket_bytes, most)

    def _choose_transport(self, status: ServerStatus) -> Transport:
        wanted = self._config.transport
        if wanted is Transport.CUDA_IPC and self._pusher.link.num_ranks > 1:
            raise ConfigError(
                "weights.transport = cuda_ipc: with several ranks use shared_memory or distributed",
                setting="weights.transport",
                value=wanted.value,
            )
        if wanted in (Transport.DISTRIBUTED, Transport.TENSOR, Transport.DISK):
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
        self._outgoing = self._streamed(self._manifest())
        push = self._caller.ship(self._outgoing.push)
        if self._is_serving:
            pending = self._caller.call(RolloutServer.update_and_continue, push)
        elif self._has_turn:
            pending = self._caller.call(RolloutServer.onload_verified, push)
        else:
            pending = self._caller.call(RolloutServer.onload, push)
        self._pending = pending.then(self._handover.close)

    def _manifest(self) -> Manifest:
        if isinstance(self._source, PlannedSource):
            return self._source.manifest
        return self._pusher.expected or Manifest({})

    def _streamed(self, manifest: Manifest) -> OutgoingPush:
        if self._transport in (Transport.SHARED_MEMORY, Transport.DISK):
            host = self._caller.own_host()
            timeout_s = self._pusher.config.lifecycle.update_timeout_s
            server = PushStreamServer(self._handover, host=host, timeout_s=timeout_s)
            push = WeightPush(self._version, manifest, carrier=ByPath(), stream=server.address)
            return OutgoingPush(push, server.close)
        is_on_cuda = isinstance(self._source, PlannedSource) and self._source.is_on_cuda
        weights = GatheredWeights(manifest, self._handover, is_on_cuda=is_on_cuda)
        return self._sender().stream(weights, self._version, self._transport)

    def _sender(self) -> PushSender:
        pusher = self._pusher
        return make_sender(
            pusher.config, self._caller, pusher.pool, pusher.kept, fingerprints=self._fingerprints
        )

    def _offer(self, words: Sequence[Word]) -> None:
        assert self._maker is not None
        check_same(words)
        with naming_path(self._config, self._transport):
            bucket = self._maker.joined(words, bool(words[0]["is_last"]))
        if self._copied is not None:
            add_bucket(self._copied, words, bucket)
        if bucket is not None:
            self._handover.put(bucket)

    def _await_engines(self, index: int | None, timeout_s: float) -> Word | None:
        assert self._pending is not None
        if self._is_one_load and index is not None:
            index = 0  # the only one that they get
        if index is not None and self._handover.is_wanted(index, timeout_s):
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
        if self._verified is not None:
            report = self._verified.merged(report)
        word: Word = _REPORT.dump_python(report, mode="json")
        return word

    def _finish(self) -> None:
        """Resume what waited for the turn of all ranks."""
        assert self._pending is not None
        if not self._is_serving:
            self._verified = self._pending.result(0)
            self._pending = self._caller.call(RolloutServer.onload, None)


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
