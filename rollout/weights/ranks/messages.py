"""The messages of a push between the ranks of a trainer, and how they travel.

    Ready      each rank -> rank 0     at the begin
    PushPlan   rank 0 -> each rank     what rank 0 has decided
    Share      each rank -> rank 0     what it has made of a bucket

``protocol`` sends them as mappings, with fields of its own: which message it is, and errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from dataclasses import fields as fields_of
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from rollout.config import Transport, WeightUpdate
from rollout.core.errors import RankFailure
from rollout.weights.routes.route import Chosen, PushTerms

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank calls ``push``.

    Attributes:
        knows: digest of the tensors of the last push, which rank 0 need not send again.
        version: the weight version that it names.
        has_turn: it has ``before_kv``.
        node: where it runs.
        gpu: UUID of the GPU with its tensors; empty if they are in host memory.
        group: name of the first sender's group, if it still has one to broadcast in.
    """

    knows: str
    version: int | None
    has_turn: bool
    node: str
    gpu: str
    group: str


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
        is_streamed: the tensors come from an iterator.
        is_copied: all buckets are made before the server is called.
        is_serving: the engines serve when the push begins, so ``before_kv`` runs after it.
        has_turn: a rank has ``before_kv``.
        routes: one for each payload of a bucket.
        at_once: engines load all buckets in one call.
        tensors: those of rank 0, if another rank does not know them; None: as in the last push.
    """

    terms: PushTerms
    contents: WeightUpdate
    is_streamed: bool
    is_copied: bool
    is_serving: bool
    has_turn: bool
    routes: tuple[Chosen, ...]
    at_once: bool
    bucket_bytes: int
    store: StorePlan | None = None
    tensors: Any = None

    @property
    def is_hashed_by_rank_0(self) -> bool:
        """Whether no route takes the fingerprints while it copies."""
        own = (Transport.DISTRIBUTED, Transport.DISK)
        is_taken = self.terms.hashing_host is not None or any(
            one.transport in own for one in self.routes
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
    """

    content: str
    is_last: bool
    made: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    copy: Mapping[str, Any] = field(default_factory=dict)
    gather_s: float = 0.0
    copy_s: float = 0.0
    num_bytes: int = 0


def encode(message: object) -> dict[str, Any]:
    """A message as a mapping for JSON; large values are not copied."""
    return {one.name: _plain(getattr(message, one.name)) for one in fields_of(message)}  # type: ignore[arg-type]


def decode(kind: type[M], fields: Mapping[str, Any]) -> M:
    """The message that ``encode`` has made.

    Raises:
        RankFailure: it has other fields.
    """
    try:
        values = {one.name: fields[one.name] for one in fields_of(kind)}  # type: ignore[arg-type]
        found: M = _adapter(cast(Any, kind)).validate_python(values)
        return found
    except (KeyError, ValidationError) as error:
        raise RankFailure(
            f"a message {kind.__name__} has other fields than here ({error}): all ranks must run "
            "the same version of rollout"
        ) from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return encode(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value
