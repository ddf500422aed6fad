"""A server's pushes by broadcast, and the group that is kept between them.

Always true: one push at a time uses a group; a group is kept only after a push that every engine
received; it is closed if it is not kept, if other engines join, or with the handle.

A new group costs a request to every engine, a connection for each pair of engines and, with NCCL,
seconds.  A kept group costs idle connections and, with NCCL, buffers on each GPU.  Firewalls drop
idle connections, some after 350 s, and then a push would fail at its deadline.  So a group that was
idle for some minutes is created again.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch

from engines.tensors.fingerprint import BYTES
from engines.tensors.flattened_bucket import FLATTENED_BUCKET
from rollout.config import WeightsConfig
from rollout.core.errors import ConfigError
from rollout.weights.push.stream_server import StreamedBucket
from rollout.weights.push.transport_choice import NCCL_CUMEM, choose_backend, why_cumem_differs
from rollout.weights.tensors.broadcast_root import BroadcastRoot
from rollout.weights.tensors.bucket_writer import fingerprints_of
from rollout.weights.tensors.flat_buffers import (
    FlatLayoutCache,
    Flattener,
    describe_tensors,
    is_worth_flattening,
    split_bucket,
)
from rollout.weights.tensors.tensor_sources import BucketsOfTensors, Pairs
from rollout.weights.transports.broadcast_group import BroadcastMember, can_be_kept, is_same_group

logger = logging.getLogger(__name__)

_MOST_IDLE_S = 240.0


@dataclass(frozen=True, slots=True)
class _Group:
    """A group that all ranks have joined, and those in which other ranks of the trainer send.

    Attributes:
        members: the engines of all its ranks but the trainer's.
        num_senders: ranks of the trainer that send, each in a group of its own.
        idle_since: when its last push ended.
    """

    root: BroadcastRoot
    members: Sequence[BroadcastMember]
    num_senders: int = 1
    idle_since: float = 0.0

    @property
    def names(self) -> str:
        """Of all groups, with blanks between."""
        return " ".join(group_name(self.root.name, sender) for sender in range(self.num_senders))

    @property
    def takes_flat(self) -> bool:
        return all(member.takes_flat for member in self.members)


def group_name(first: str, sender: int) -> str:
    """Name of the group in which this one of the trainer's senders sends.

    Args:
        first: name of the first sender's group.
    """
    return f"{first}.{sender}" if sender else first


class KeptGroup:
    """The group of a server's last push, if it is kept. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.layouts = FlatLayoutCache()
        self._clock = clock
        self._lock = threading.Lock()
        self._group: _Group | None = None
        self._is_closed = False

    @property
    def name(self) -> str:
        """Name of the kept group; empty for none."""
        group = self._group
        return "" if group is None else group.root.name

    def take(self) -> _Group | None:
        """Take the group out; the caller owns it."""
        with self._lock:
            group, self._group = self._group, None
        return group

    def is_fresh(self, group: _Group) -> bool:
        """Whether it was used recently enough for its connections to work."""
        return self._clock() - group.idle_since <= _MOST_IDLE_S

    def keep(self, group: _Group) -> None:
        """Keep the group for the next push."""
        group = replace(group, idle_since=self._clock())
        with self._lock:
            over = group if self._is_closed else self._group
            if not self._is_closed:
                self._group = group
        if over is not None:  # another push kept it meanwhile
            over.root.close()

    def close(self) -> None:
        """Close the group and keep no other; engines notice that the trainer has left."""
        with self._lock:
            group, self._group, self._is_closed = self._group, None, True
        if group is not None:
            group.root.close()


@dataclass(frozen=True, slots=True)
class NcclTerms:
    """What NCCL needs to know of a server's engines.

    Attributes:
        why_not: why they cannot be in one NCCL group with the trainer; empty if they can.
        cumem: group -> ``NCCL_CUMEM_ENABLE`` of its engines; None if only their owner knows it.
    """

    why_not: str = ""
    cumem: Mapping[str, str | None] = field(default_factory=dict)


class BroadcastPush:
    """One push by broadcast.

    Args:
        is_on_cuda: whether the tensors are on a GPU.
        host: address of this machine for the engines.
        kept: keeps the group for the next push; None closes it.
        others: of each other rank of the trainer that sends, the name that ``KeptGroup`` would have
            for the groups that it has kept.
        fingerprints: the method of the fingerprints that are taken; empty takes none.

    Raises:
        ConfigError: NCCL would fail; nothing was sent.
    """

    def __init__(
        self,
        version: int,
        settings: WeightsConfig,
        host: str,
        kept: KeptGroup | None,
        nccl: NcclTerms | None = None,
        fingerprints: str = BYTES,
        *,
        is_on_cuda: bool,
        others: Sequence[str] = (),
    ) -> None:
        self._version = version
        self._settings = settings
        self._host = host
        self._kept = kept
        self._fingerprints = fingerprints
        self._flattener = Flattener(FlatLayoutCache() if kept is None else kept.layouts)
        self._others = others
        self._group: _Group | None = None
        # For the other senders, if they must join new groups.
        self.terms_of_others: Mapping[str, Any] = {}
        self._must_join = True
        self._backend = _backend(settings, nccl or NcclTerms(), is_on_cuda=is_on_cuda)

    def terms(self, members: Sequence[BroadcastMember]) -> Mapping[str, Any]:
        """Terms of the group for this push: the kept one if it fits, else a new one."""
        before = None if self._kept is None else self._kept.take()
        keeps = self._kept is not None and can_be_kept(members)
        if before is not None and self._can_go_on(before, members):
            self._group, self._must_join = before, False
            return {"group_name": before.names, "is_new": False, "keeps": keeps, "over": ""}
        if before is not None:
            before.root.close()
        timeout_s = self._settings.group_timeout_s
        root = BroadcastRoot(
            f"push-{self._version}-{secrets.token_hex(4)}",
            self._backend,
            host=self._host,
            join_timeout_s=timeout_s,
            send_timeout_s=timeout_s,
        )
        where = root.terms(sum(member.num_ranks for member in members))
        group = self._group = _Group(root, tuple(members), 1 + len(self._others))
        terms = {**where, "backend": self._backend, "keeps": keeps}
        if self._others:
            cumem = os.environ.get(NCCL_CUMEM)
            more = {"first": root.name, "takes_flat": group.takes_flat, "cumem": cumem}
            self.terms_of_others = {**terms, **more}
        over = "" if before is None else before.names
        return {**terms, "group_name": group.names, "is_new": True, "over": over}

    def _can_go_on(self, group: _Group, members: Sequence[BroadcastMember]) -> bool:
        assert self._kept is not None
        return (
            group.root.is_there
            and group.root.backend == self._backend
            and group.num_senders == 1 + len(self._others)
            and all(name == group.root.name for name in self._others)
            and self._kept.is_fresh(group)
            and is_same_group(group.names, group.members, members)
        )

    def buckets(self, weights: BucketsOfTensors) -> Iterator[StreamedBucket]:
        """The buckets, after all readers have the terms; each is broadcast when all have it."""
        self.join()
        for pairs, is_last in weights.gathered():
            parts = self.parts(pairs, is_last)
            del pairs  # frees gathered tensors early
            yield from parts
            del parts

    def join(self) -> None:
        """Wait until the engines are in the group, after all readers have the terms."""
        assert self._group is not None
        if self._must_join:
            self._group.root.join()

    def parts(self, pairs: Pairs, is_last: bool) -> Iterator[StreamedBucket]:
        """One bucket, in parts if it is large; ``is_last`` is that of its last part."""
        assert self._group is not None
        root = self._group.root
        parts = broadcast_parts(
            pairs,
            root,
            repeat(self._flattener),
            takes_flat=self._group.takes_flat,
            method=self._fingerprints,
        )
        del pairs
        for part in parts:
            send = partial(root.send, part.tensors)
            yield StreamedBucket(part.payload, is_last and part.is_last, part.fingerprints, send)
            del part, send

    def ended(self, is_kept: bool) -> None:
        """The push has ended. ``is_kept``: all engines got it and stay in the group."""
        group, self._group = self._group, None
        self._flattener.free()
        if group is None:
            return
        if is_kept and self._kept is not None:
            self._kept.keep(group)
        else:
            group.root.close()


@dataclass(frozen=True, slots=True)
class BroadcastPart:
    """What goes to the engines in one request, and one broadcast or several.

    Attributes:
        payload: the arguments of the request.
    """

    payload: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    tensors: Sequence[torch.Tensor]
    is_last: bool = True


def broadcast_parts(
    pairs: Pairs,
    root: BroadcastRoot,
    flatteners: Iterable[Flattener],
    *,
    takes_flat: bool,
    method: str,
) -> Iterator[BroadcastPart]:
    """The parts of a bucket, made one by one; ``is_last`` of the last one of the bucket.

    Args:
        flatteners: one for each part.  A part is valid until its flattener takes another one.
        takes_flat: the engines accept many tensors in one broadcast.
        method: of the fingerprints; empty takes none.
    """
    if not (takes_flat and is_worth_flattening(pairs)):
        payload = {**describe_tensors(pairs.specs), "group_name": root.name}
        yield BroadcastPart(payload, fingerprints_of(pairs, method), pairs.tensors)
        return
    device = pairs.tensors[0].device if root.backend == "nccl" else torch.device("cpu")
    parts = split_bucket(pairs, device)
    del pairs
    for flattener in flatteners:
        flat = flattener.flatten(parts.pop(0), device, method=method)
        payload = {**flat.description, "group_name": root.name, "load_format": FLATTENED_BUCKET}
        yield BroadcastPart(payload, flat.fingerprints, [flat.tensor], not parts)
        if not parts:
            return


def _backend(settings: WeightsConfig, nccl: NcclTerms, *, is_on_cuda: bool) -> str:
    backend = choose_backend(settings.backend, nccl.why_not, is_on_cuda=is_on_cuda)
    if backend != "nccl":
        if is_on_cuda and settings.backend == "auto":
            logger.warning(
                "weights.transport = distributed sends by gloo, through host memory: %s; "
                "cuda_ipc or shared_memory is faster",
                nccl.why_not,
            )
        return backend
    if why := why_cumem_differs(os.environ.get(NCCL_CUMEM), nccl.cumem):
        raise ConfigError(why, setting="weights.backend", value=settings.backend)
    return backend
