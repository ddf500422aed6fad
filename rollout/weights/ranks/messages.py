"""The messages of a push between the ranks of a trainer, and how they travel.

    each rank -> rank 0   Ready, Fits, Share, MemoryFreed, or Failed in their place;
                          EnginesNotNeeded for an offload
    rank 0 -> each rank   PushPlan, MakeBucket, FreeMemory, Done or Stop at the end; Wait whenever
                          it waits

A message travels as its name, the version of the library and its fields as JSON.  Ranks run one
version of the library: what another version has sent is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from engines.protocol.plain_text import describe
from rollout.config import Transport, WeightUpdate
from rollout.core import VERSION, errors
from rollout.core.errors import RankFailure, RolloutError
from rollout.core.types import StepReport
from rollout.weights.ranks.delivery import Delivery
from rollout.weights.routes.route import Chosen, PushTerms


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank calls ``push``.

    Attributes:
        knows: digest of the tensors of the last push, which rank 0 need not send again.
        version: the weight version that it names.
        has_before_kv: it has ``before_kv``.
        node: where it runs.
        gpu: UUID of the GPU with its tensors, or empty if they are in host memory.
        room_bytes: of the model, that it has room for in shared memory.
    """

    knows: str
    version: int | None
    has_before_kv: bool
    node: str
    gpu: str
    room_bytes: int


@dataclass(frozen=True, slots=True)
class StorePlan:
    """The ranks of rank 0's host keep copies for the store.

    Attributes:
        reads: the version whose copies the store reads now.
        is_offered: rank 0 offers them; else the store reads the buckets of the push.
    """

    reads: int | None
    is_offered: bool


@dataclass(frozen=True, slots=True)
class PushPlan:
    """What rank 0 has decided.

    Attributes:
        contents: the part of the model that is pushed.
        from_iterator: the tensors come from an iterator.
        is_serving: the engines serve when the push begins, so ``before_kv`` runs after it.
        has_before_kv: a rank has ``before_kv``.
        routes: one for each payload of a bucket.
        tensors: those of rank 0, if another rank does not know them; None: as in the last push.
        compared: names of tensors that other ranks may have too: the ranks compare their values.
    """

    terms: PushTerms
    contents: WeightUpdate
    from_iterator: bool
    delivery: Delivery
    is_serving: bool
    has_before_kv: bool
    routes: tuple[Chosen, ...]
    bucket_bytes: int
    store: StorePlan | None = None
    tensors: Any = None
    compared: tuple[str, ...] = ()

    @property
    def is_copied(self) -> bool:
        """Whether all buckets are made before the server is called."""
        return self.delivery is not Delivery.STREAMED

    @property
    def broadcast(self) -> Chosen | None:
        """The route of all engines that take a broadcast, or None for none."""
        found = (route for route in self.routes if route.transport == Transport.DISTRIBUTED)
        return next(found, None)

    @property
    def is_hashed_by_rank_0(self) -> bool:
        """Whether no route takes the fingerprints while it copies."""
        own = (Transport.DISTRIBUTED, Transport.DISK)
        is_taken = self.terms.hashing_host is not None or any(
            route.transport in own and route.is_full for route in self.routes
        )
        return bool(self.terms.fingerprints) and not is_taken


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank has made of a bucket.

    Attributes:
        content: equal on two ranks that gathered the same tensors.
        made: transport -> its share for that route; see ``RouteRow``.
        copy: of its copy for the store: ``path``, or ``why_not``.
        gather_s, copy_s, num_bytes: see ``PushFigures``.
        sent_bytes: of its payloads, if they are not the whole tensors.
        digests: of one of the bucket's tensors, if they come from an iterator.
    """

    content: str
    is_last: bool
    made: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    copy: Mapping[str, Any] = field(default_factory=dict)
    gather_s: float = 0.0
    copy_s: float = 0.0
    num_bytes: int = 0
    sent_bytes: int | None = None
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EnginesNotNeeded:
    """A rank calls ``offload``."""


@dataclass(frozen=True, slots=True)
class Fits:
    """A rank's tensors fit the plan.

    Attributes:
        digests: of those that are compared, by name and shard.
    """

    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryFreed:
    """A rank's ``before_kv`` has run, if it has one."""


@dataclass(frozen=True, slots=True)
class ErrorText:
    """An error for the other ranks; they may not unpickle what comes over the network.

    Attributes:
        kind: the name of its type in ``rollout.core.errors``.
        fields: its attributes.
    """

    kind: str
    message: str
    fields: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException, prefix: str = "") -> ErrorText:
        kind = type(error) if isinstance(error, RolloutError) else RankFailure
        is_own = kind is type(error)
        return cls(
            kind.__name__,
            prefix + describe(error, with_type=not is_own),
            {
                name: value
                for name, value in vars(error).items()
                if is_own and isinstance(value, str | int | float | bool)
            },
        )

    def error(self) -> RolloutError:
        """The error that it describes."""
        kind = getattr(errors, self.kind, RankFailure)
        if not (isinstance(kind, type) and issubclass(kind, RolloutError)):
            kind = RankFailure
        error: RolloutError = kind(self.message)
        for name in self.fields.keys() & vars(error).keys():
            setattr(error, name, self.fields[name])
        return error


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank could not do what rank 0 has asked for.

    Attributes:
        has_waited: a gather of it was late, so most of the time is over.
        has_lost_rank: the connection to another rank broke, which has ended and reports nothing.
    """

    error: ErrorText
    has_waited: bool = False
    has_lost_rank: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Rank 0 waits, and lives."""


@dataclass(frozen=True, slots=True)
class MakeBucket:
    """All ranks gather this bucket, and make their shares."""

    index: int


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The engines hold the weights: all ranks run ``before_kv``."""


@dataclass(frozen=True, slots=True)
class Done:
    """The call has succeeded on all ranks."""

    report: StepReport


@dataclass(frozen=True, slots=True)
class Stop:
    """The call has failed on all ranks."""

    error: ErrorText


Answer = Ready | EnginesNotNeeded | Fits | Share | MemoryFreed | Failed
"""From each rank to rank 0."""
Order = PushPlan | MakeBucket | FreeMemory | Done | Stop | Wait
"""From rank 0 to each rank."""
Message = Answer | Order

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Ready, EnginesNotNeeded, Fits, Share, MemoryFreed, Failed),
        *(PushPlan, MakeBucket, FreeMemory, Done, Stop, Wait),
    )
}


def encode(message: Message) -> str:
    """A message as text."""
    name = type(message).__name__
    return f"{name} {VERSION} {_adapter(name).dump_json(message).decode()}"


def decode(text: str) -> Message:
    """The message that ``encode`` has made.

    Raises:
        RankFailure: another version of the library has made it.
    """
    name, _, rest = text.partition(" ")
    version, _, fields = rest.partition(" ")
    if version != VERSION or name not in _KINDS:
        raise RankFailure(
            f"a rank of the trainer runs rollout {version}, and this one {VERSION}: all ranks "
            "must run the same version"
        )
    try:
        message: Message = _adapter(name).validate_json(fields)
    except ValidationError as error:
        raise RankFailure(
            f"a message {name} has other fields than here ({error}): all ranks must run the same "
            "version of rollout"
        ) from None
    return message


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(_KINDS[name])
