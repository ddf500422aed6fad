"""What one rank does in a push of all ranks, see ``rollout.weights.ranks``."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from engines.protocol.plain_text import describe
from rollout.config import Transport
from rollout.control.server.server import RolloutServer
from rollout.core.errors import RankFailure, RolloutError, WeightMismatch
from rollout.core.pending import Pending
from rollout.core.types import ServerStatus, StepReport
from rollout.rules.lifecycle import Command
from rollout.runtime.handle.offload_window import WITHOUT_KV, BeforeKv
from rollout.runtime.handle.push_builder import (
    fingerprint_method,
    keeps_copies,
    make_sender,
    naming_path,
    version_in_store,
)
from rollout.runtime.handle.push_places import engine_places
from rollout.weights.format.manifest import Manifest, check_contents
from rollout.weights.push.copied_push import CopiedPush
from rollout.weights.push.held_buffers import HeldBuffers
from rollout.weights.push.shm_buffers import why_no_room
from rollout.weights.push.stream_server import PushStreamServer
from rollout.weights.push.weight_push import WeightPush, default_contents
from rollout.weights.ranks.bucket_check import BucketCheck
from rollout.weights.ranks.bucket_handover import BucketHandover
from rollout.weights.ranks.carrier_choice import Chosen, RankPlace, by_value_note, choose_carriers
from rollout.weights.ranks.makers.broadcast_sender import BroadcastSender
from rollout.weights.ranks.makers.bucket_makers import (
    BucketMaker,
    HandleMaker,
    SharedMemoryMaker,
    check_same,
    with_content,
)
from rollout.weights.ranks.makers.folder_makers import CheckpointMaker, JoinedFolders, OneFolder
from rollout.weights.ranks.makers.store_share import ShareCopier, add_copies
from rollout.weights.ranks.offered_buckets import (
    OfferedBucket,
    OfferedStream,
    join_words,
    mixed_carrier,
)
from rollout.weights.ranks.own_gpu import gpu_with
from rollout.weights.ranks.push_figures import PushFigures
from rollout.weights.ranks.rank_protocol import (
    Answer,
    AwaitEngines,
    Begin,
    Broadcast,
    Finish,
    Make,
    Offer,
    Plan,
    Prepare,
    Step,
    TakeTurn,
    gather_timeout_s,
)
from rollout.weights.ranks.rank_sources import (
    PlannedSource,
    StreamedSource,
    cast_to,
    digest_of,
    make_source,
)
from rollout.weights.tensors import (
    Dtype,
    NamedTensors,
    NameMap,
    NcclTerms,
    OutgoingPush,
    PushSender,
)
from rollout.weights.tensors.broadcast_sender import BroadcastPush
from rollout.weights.tensors.tensor_sources import Pairs
from rollout.weights.transports.carriers import MOST_BUCKET_BYTES

if TYPE_CHECKING:
    from rollout.runtime.handle.pusher import Pusher

logger = logging.getLogger(__name__)

_REPORT = TypeAdapter(StepReport)
_RECORD_S = 5.0
Word = Mapping[str, Any]


class RankWork:
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
        self._keeps_copies = False
        self._has_turn = False
        self._verified: StepReport | None = None
        self._source: PlannedSource | StreamedSource | None = None
        self._buckets: Iterator[tuple[Pairs, bool]] = iter(())
        self._makers: list[BucketMaker] = []
        self._broadcasts: BroadcastSender | None = None
        self._pairs: Pairs | None = None
        # What the engines load in one call, when all buckets are written.
        self._folder: OneFolder | None = None
        self._held: HeldBuffers | None = None
        self._copied: CopiedPush | None = None
        self._check = BucketCheck(pusher.expected, self._config)
        self._version = 0
        self.gpu = gpu_with(named_tensors)
        self._ranks: list[RankPlace] = []
        self._groups_kept: list[str] = []
        self._chosen: Mapping[str, Chosen] = {}
        self._fingerprints = ""
        self._figures = PushFigures(pusher.link.num_ranks)
        self._handover: BucketHandover[OfferedBucket] = BucketHandover()
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
            case Broadcast(task):
                return {} if self._broadcasts is None else self._broadcasts.carry_out(task)
            case Answer(words):
                return self._handover.answer(words)
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
        self._pairs = None
        for maker in self._makers:
            maker.close()
        if self._held is not None:
            self._held.release()

    def record(self) -> None:
        """On rank 0: give the server the figures of all ranks, for its timeline."""
        if self._pusher.link.rank == 0:
            recorded = self._caller.call(
                RolloutServer.record_push, self._figures.spans(self._version)
            )
            with suppress(Exception):  # the weights are pushed: it succeeds without its spans
                recorded.result(_RECORD_S)

    def keep(self) -> None:
        """After the push: leave this rank's copies to the store; rank 0 says where all are."""
        if self._broadcasts is not None:
            self._broadcasts.keep()
        if self._keeps_copies:
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
                expected=pusher.expected,
                tensors=pusher.tensors,
                name_map=self._name_map,
                dtype=self._dtype,
                plans=pusher.plans,
                gather_timeout_s=gather_timeout_s(pusher.timeout_s),
            )
        if isinstance(self._source, StreamedSource) is not plan["is_streamed"]:
            raise WeightMismatch("it pushes an iterator and rank 0 does not, or the reverse")
        self._buckets = self._source.buckets(plan["bucket_bytes"])
        self._is_serving = plan["is_serving"]
        with self._naming_path():
            self._makers = list(self._made_here(plan))
        return {}

    def _made_here(self, plan: Word) -> Iterator[BucketMaker]:
        pusher, writers = self._pusher, self._pusher.writers
        own_host, store = writers[0], plan["store"]
        self._keeps_copies = store is not None and own_host == 0
        if self._keeps_copies:
            self._held = pusher.copies.begin(store["version"], store["reads"])
        elif plan["at_once"]:
            self._held = HeldBuffers(pusher.pool)
        if self._config.transport is Transport.DISK and pusher.link.rank == 0:
            writer = self._sender().checkpoint_writer(self._version)
            self._folder = CheckpointMaker(writer)
            yield self._folder
        if own_host in plan["hosts"]:
            hashes = own_host == plan["hosts"][0]
            yield self._share(plan["fingerprints"] if hashes else "")
        elif self._keeps_copies:
            yield ShareCopier(self._share(plan["fingerprints"]))
        if plan["at_once"] and pusher.link.rank == 0:
            assert self._held is not None
            self._folder = JoinedFolders(self._held)
        if self.gpu and self.gpu in plan["gpus"]:
            yield HandleMaker()
        is_sender = pusher.link.rank in plan["senders"][1:]
        if not is_sender or plan["group"] != pusher.sender_group.first:
            pusher.sender_group.close()  # rank 0 has not kept it, or will not
        if is_sender:
            self._broadcasts = self._broadcast_sender(plan)
            yield self._broadcasts

    def _broadcast_sender(self, plan: Word) -> BroadcastSender:
        pusher = self._pusher
        rank, senders = pusher.link.rank, plan["senders"]
        return BroadcastSender(
            pusher.sender_group,
            rank=rank,
            turn=senders.index(rank),
            num_senders=len(senders),
            # Rank 0 hears of an engine that is late before it counts this rank as silent.
            timeout_s=min(self._config.group_timeout_s, gather_timeout_s(pusher.timeout_s)),
            fingerprints=plan["stream_fingerprints"],
        )

    def _share(self, fingerprints: str) -> SharedMemoryMaker:
        rank, writers = self._pusher.link.rank, self._pusher.writers
        return SharedMemoryMaker(
            self._held or self._pusher.pool,
            turn=writers.index(rank),
            num_writers=len(writers),
            fingerprints=fingerprints,
        )

    def _make(self, index: int) -> Word:
        self._figures.begin()
        pairs, is_last = next(self._buckets)
        self._check(pairs, is_last)
        if isinstance(self._source, StreamedSource):
            # The push announces the model's dtypes, because these are known only now.
            pairs = cast_to(pairs, self._pusher.expected)
        self._figures.gathered()
        if self._copied is not None:
            self._copied.has_tensors(pairs.specs)
        word: dict[str, Any] = {}
        with self._naming_path():
            for maker in self._makers:
                word |= maker.make(index, pairs)
        if self._pusher.link.rank == 0:
            self._pairs = pairs
            if self._uses(Transport.TENSOR) or self._has_turn_to_broadcast(index):
                word["sends"] = True
        return with_content(self._figures.with_figures(word, pairs), pairs, is_last)

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
        agreed = _agreed_version(words)
        self._version = status.weight_version + 1 if agreed is None else agreed
        self._source = make_source(
            self._named_tensors,
            expected=expected,
            tensors=None,
            name_map=self._name_map,
            dtype=self._dtype,
            plans=pusher.plans,
            gather_timeout_s=gather_timeout_s(pusher.timeout_s),
        )
        is_streamed = isinstance(self._source, StreamedSource)
        self._fingerprints = fingerprint_method(config, self._caller)
        self._choose_carriers(status, words)
        self._groups_kept = [word["group"] for word in words]
        # Only rank 0 joins folders, so only those of its own host.
        only_here = self._is_only(Transport.SHARED_MEMORY) and self._hosts == [0]
        at_once = only_here and pusher.loads.is_at_once(Transport.SHARED_MEMORY)
        self._is_serving = status.gate == "open"
        self._has_turn = any(word["has_turn"] for word in words)
        plan: dict[str, Any] = {
            "is_serving": self._is_serving,
            "has_turn": self._has_turn,
            "is_streamed": is_streamed,
            "hosts": self._hosts,
            "gpus": sorted({gpu for one in self._chosen.values() for gpu in one.gpus}),
            "at_once": at_once,
            "bucket_bytes": self._bucket_bytes(),
            "fingerprints": self._fingerprints,
            "stream_fingerprints": self._fingerprints_of_stream,
            "senders": self._senders,
            "group": pusher.kept.name,
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

    def _uses(self, transport: Transport) -> bool:
        return any(one.transport is transport for one in self._chosen.values())

    def _is_only(self, transport: Transport) -> bool:
        return all(one.transport is transport for one in self._chosen.values())

    @property
    def _hosts(self) -> list[int]:
        """The hosts whose ranks write into shared memory."""
        hosts = {
            one.host for one in self._chosen.values() if one.transport is Transport.SHARED_MEMORY
        }
        return sorted(hosts)

    @property
    def _senders(self) -> list[int]:
        """The ranks that broadcast buckets in turn, the first of each host; rank 0 is one."""
        return sorted(set(self._pusher.hosts)) if self._uses(Transport.DISTRIBUTED) else []

    def _has_turn_to_broadcast(self, index: int) -> bool:
        return bool(self._senders) and index % len(self._senders) == 0

    def _bucket_bytes(self) -> int:
        most = MOST_BUCKET_BYTES if self._uses(Transport.TENSOR) else sys.maxsize
        return min(self._config.bucket_bytes, most)

    def _choose_carriers(self, status: ServerStatus, words: Sequence[Word]) -> None:
        wanted = self._config.transport
        self._ranks = [
            RankPlace(word["node"], host, word["gpu"])
            for word, host in zip(words, self._pusher.hosts, strict=True)
        ]
        places = engine_places(status, self._caller)
        self._chosen = choose_carriers(wanted, self._ranks, places, self._why_no_room())
        if note := by_value_note(wanted, self._chosen, self._num_bytes()):
            logger.warning("%s", note)

    def _num_bytes(self) -> int:
        """Of the model; 0 if unknown."""
        if isinstance(self._source, PlannedSource):
            return self._source.num_bytes
        expected = self._pusher.expected
        return sum(spec.num_bytes for spec in expected.tensors.values()) if expected else 0

    def _why_no_room(self) -> str:
        if not isinstance(self._source, PlannedSource):
            return ""
        share = self._source.num_bytes // len(self._pusher.writers) - self._pusher.pool.num_bytes()
        more = max(0, share) * len(self._pusher.writers)
        return why_no_room(more, self._config.shared_memory_path)

    def _begin(self) -> None:
        assert self._source is not None
        self._outgoing = self._streamed(self._manifest())
        push = self._caller.ship(self._pusher.with_expected(self._outgoing.push))
        waits = self._has_turn and not self._is_serving
        until = Command.VERIFY if waits else Command.CONTINUE
        pending = self._caller.call(RolloutServer.serve_weights, push, until)
        self._pending = pending.then(self._handover.close)

    def _manifest(self) -> Manifest:
        if isinstance(self._source, PlannedSource):
            return self._source.manifest
        return self._pusher.expected or Manifest({})

    def _streamed(self, manifest: Manifest) -> OutgoingPush:
        host, timeout_s = self._caller.own_host(), self._pusher.config.lifecycle.update_timeout_s
        broadcast = self._broadcast() if self._uses(Transport.DISTRIBUTED) else None
        stream = OfferedStream(
            self._handover,
            broadcast,
            is_by_value=self._uses(Transport.TENSOR),
            fingerprints=self._fingerprints_of_stream,
        )
        if broadcast is None:
            server = PushStreamServer(stream, host=host, timeout_s=timeout_s)
        else:
            server = PushStreamServer(
                stream,
                host=host,
                timeout_s=timeout_s,
                terms=broadcast.terms,
                when_ended=broadcast.ended,
            )
        carrier = mixed_carrier(self._chosen)
        push = WeightPush(self._version, manifest, carrier=carrier, stream=server.address)
        return OutgoingPush(push, server.close)

    @property
    def _fingerprints_of_stream(self) -> str:
        """The method of those that the stream takes; empty if they are taken where files are."""
        return "" if self._hosts or self._uses(Transport.DISK) else self._fingerprints

    def _broadcast(self) -> BroadcastPush:
        pusher = self._pusher
        assert self._source is not None
        return BroadcastPush(
            self._version,
            self._config,
            self._caller.own_host(),
            pusher.kept,
            NcclTerms(pusher.config.why_no_nccl, pusher.config.nccl_cumem),
            self._fingerprints_of_stream,
            is_on_cuda=self._source.is_on_cuda,
            others=[self._groups_kept[rank] for rank in self._senders[1:]],
        )

    def _sender(self) -> PushSender:
        pusher = self._pusher
        return make_sender(
            pusher.config, self._caller, pusher.pool, pusher.kept, fingerprints=self._fingerprints
        )

    def _naming_path(self) -> AbstractContextManager[None]:
        is_disk = self._config.transport is Transport.DISK
        return naming_path(self._config, Transport.DISK if is_disk else Transport.SHARED_MEMORY)

    def _offer(self, words: Sequence[Word]) -> None:
        check_same(words)
        self._figures.offered(words)
        pairs, self._pairs = self._pairs, None
        assert pairs is not None
        bucket: OfferedBucket | None = join_words(words, self._ranks, pairs)
        assert bucket is not None
        if self._copied is not None:
            add_copies(self._copied, words, self._pusher.hosts)
        if self._folder is not None:
            with self._naming_path():
                bucket = self._folder.joined(bucket)
        if bucket is not None:
            self._handover.put(bucket)

    def _await_engines(self, index: int | None, timeout_s: float) -> Word | None:
        assert self._pending is not None
        if self._folder is not None and index is not None:
            index = 0  # the only one that they get
        if index is not None and self._handover.is_wanted(index, timeout_s):
            self._figures.wanted(time.monotonic())
            return {}
        if index is None:
            self._handover.await_end(timeout_s)
        if (task := self._handover.take_task()) is not None:
            return {"broadcast": task}
        if not self._handover.is_over:
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
        if self._verified is not None:
            report = self._verified.merged(report)
        carriers = "+".join(sorted({one.transport.value for one in self._chosen.values()}))
        report = replace(report, push_stages=self._figures.stages(carriers))
        word: Word = _REPORT.dump_python(report, mode="json")
        return word

    def _finish(self) -> None:
        """Resume what waited for the turn of all ranks."""
        assert self._pending is not None
        if not self._is_serving:
            self._verified = self._pending.result(0)
            self._pending = self._caller.call(RolloutServer.serve)


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
