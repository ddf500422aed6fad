"""What a route is where the engines are called; ``rank_end`` has its end in the trainer's ranks.

Always true: a ``Route`` is a plain value, so that it can be sent to where the engines are; it
imports no tensor library and handles one engine per call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pybase64

from engines.protocol import Engine, unverified_text
from rollout.config import Transport
from rollout.core.errors import WeightMismatch
from rollout.weights.format.encoding import FULL

# A bucket may be made while engines apply the one before it.
BUCKETS_AHEAD = 1

Payload = bytes | Mapping[str, Any]
"""A bucket: the bytes of its tensors, or a mapping that describes where they are."""


@dataclass(frozen=True, slots=True)
class PushTarget:
    """One engine of a push.

    Attributes:
        payload_copies: its number of tensor-parallel ranks; SGLang needs a payload for each.
        has_session: updates go between begin and end (SGLang 0.5.21 and later).
        process: identifies its processes, or empty if unknown.
        reports_groups: it reports which broadcast groups it is a member of.
        is_compared: its fingerprints are compared with the trainer's after the push.
        weight_version: what it holds before the push, verified, or None for none.
    """

    engine: Engine
    payload_copies: int = 1
    has_session: bool = True
    process: str = ""
    reports_groups: bool = False
    is_compared: bool = False
    weight_version: int | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """The position of a bucket in its push.

    Attributes:
        is_path_check: the engine has not yet shown that it holds the pushed weights.
    """

    version: int
    is_last: bool = True
    is_path_check: bool = False

    @property
    def weight_version(self) -> str | None:
        """The version that the engine reports from now on, or None before the last bucket."""
        text = unverified_text(self.version) if self.is_path_check else str(self.version)
        return text if self.is_last else None


class Route:
    """Sends the buckets of one push to engines. The defaults are for routes without a group.

    Attributes:
        needs_session: whether its updates go between begin and end of a weight update.
        joins: whether the engines must join a group before the first bucket.
        loads_files: whether the engines load files that are in the folder ``path`` of a bucket.
    """

    __slots__ = ()
    needs_session = False
    joins = False
    loads_files = False

    async def join(self, target: PushTarget, terms: Mapping[str, Any]) -> None:
        """Join the broadcast group; ``terms``: the trainer's, and this engine's first rank."""

    def pack(self, payload: Payload) -> Any:
        """Encode a bucket for ``send``: once for all engines, in a thread."""
        return payload

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        """Send a bucket to an engine; the last one also sets the version and flushes the cache."""
        raise NotImplementedError

    async def leave(self, target: PushTarget, group_name: str) -> None:
        """Undo ``join``, also after a failure. No error if the engine is not a member."""


@dataclass(frozen=True, slots=True)
class EngineRoute:
    """The route of one engine in a push that has several.

    Attributes:
        payload: what the engine gets of a bucket, which is a mapping of such names.
    """

    payload: str
    route: Route


@dataclass(frozen=True, slots=True)
class StreamedBucket:
    """One bucket as the trainer made it.

    Attributes:
        then: called when every reader has it: the trainer's part of a broadcast.
    """

    payload: Payload
    is_last: bool
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    then: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class BroadcastMember:
    """One engine in a broadcast group.

    Attributes:
        process: identifies its processes, or empty if unknown.  An attached engine's is unknown:
            its owner may have restarted it behind the same address.
        group: the group that it is a member of, or empty for none.
    """

    engine_id: str
    num_ranks: int = 1
    process: str = ""
    group: str = ""

    @property
    def rank_of(self) -> tuple[str, str, int]:
        """Equal in two pushes if the ranks are the same processes."""
        return self.engine_id, self.process, self.num_ranks


def to_json(members: Iterable[BroadcastMember]) -> list[dict[str, Any]]:
    return [asdict(member) for member in members]


def from_json(values: Iterable[dict[str, Any]]) -> tuple[BroadcastMember, ...]:
    return tuple(BroadcastMember(**value) for value in values)


def encoded(payload: Payload, expectation: str) -> str:
    """Bytes as base64.

    Raises:
        WeightMismatch: it is no bytes.
    """
    if not isinstance(payload, bytes):
        raise WeightMismatch(f"{expectation}, not {payload!r:.80}")
    return pybase64.b64encode_as_string(payload)


# -- how it is chosen ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank of the trainer runs.

    Attributes:
        node: its node, as ``Caller.node_of`` names those of engines.
        host: the lowest rank that shares its tmpfs.
        gpu: UUID of the GPU with its tensors, or empty if they are in host memory.
        why_no_room: why its host has no room for a copy.
    """

    node: str
    host: int = 0
    gpu: str = ""
    why_no_room: str = ""


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Where one engine runs.

    Attributes:
        node: empty if its processes run on several machines.
        gpus: UUIDs in the order of its ranks, or empty if it has none, or they are not known.
        num_payloads: tensor-parallel ranks, each of which gets a handle of its own.
        is_reached: it can connect to the trainer, as each member of a broadcast group does.
        why_no_groups: why it joins no broadcast groups.
        why_no_handles: why it takes no CUDA IPC handles.
        encodings: encodings of tensors that it applies besides whole tensors.
        is_compared: its fingerprints are compared with the trainer's after a push.
        weight_version: what it holds, verified, or None for none.
    """

    engine_id: str
    node: str
    gpus: tuple[str, ...] = ()
    num_payloads: int = 1
    is_reached: bool = True
    why_no_groups: str = ""
    why_no_handles: str = ""
    encodings: tuple[str, ...] = ()
    is_compared: bool = True
    weight_version: int | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """How one engine gets a push.

    Attributes:
        transport: the row of ``choice``.
        host: for shared memory, the lowest of the ranks that write for it.
        gpus: for CUDA IPC, UUIDs of its GPUs as the ranks name them, in the order of its ranks.
        why: for a choice of the last resort, why no other route reaches it.
        encoding: has a part in the push; see ``Encoding.name``.
        is_full: it gets whole tensors; an encoding may prepare the next push.
        adapter, config: name and configuration of a pushed adapter.
    """

    transport: str
    host: int = 0
    gpus: tuple[str, ...] = ()
    why: str = ""
    encoding: str = FULL
    is_full: bool = True
    adapter: str = ""
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def payload(self) -> str:
        """The name of its payload in a bucket: equal for engines that get the same."""
        suffix = f" {self.host}" if self.transport == Transport.SHARED_MEMORY else ""
        return f"{self.text}{suffix}"

    @property
    def text(self) -> str:
        """The route, and the encoding if it is not whole tensors."""
        return self.transport if self.is_full else f"{self.transport} {self.encoding}"

    @property
    def is_read(self) -> bool:
        """Whether an encoding reads what it gets."""
        return self.encoding != FULL


@dataclass(frozen=True, slots=True)
class PushTerms:
    """What the ends of all routes in one push have in common.

    Attributes:
        fingerprints: the method of those that are taken of a bucket; empty takes none.
        hashing_host: the host whose ranks take them, if files are written; None: rank 0 does.
        checks_values: writers of files check the values as they copy them, and no rank does else.
    """

    version: int
    fingerprints: str = ""
    hashing_host: int | None = None
    checks_values: bool = False

    @property
    def hashed_by_broadcast(self) -> str:
        """The method of the fingerprints that a broadcast takes, or empty if writers of files
        do."""
        return self.fingerprints if self.hashing_host is None else ""
