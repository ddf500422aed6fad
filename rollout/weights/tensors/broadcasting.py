"""A server's pushes by broadcast, and the group that is kept from one to the next.

Always true: a group is sent to by one push at a time; it is kept only after a push that every
engine took, and closed when it is not kept, when other engines join, or with the handle.

Making a group is a round through every engine, a connection between any two of them, and with NCCL
seconds; keeping one costs idle connections, and with NCCL its buffers on each GPU.  Firewalls
forget connections that say nothing, some after 350 s, and then the deadline of a push would pass in
vain: a group that was idle for some minutes is made anew, which is little beside those.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from engines.flat import FLATTENED_BUCKET
from rollout.config import WeightsConfig
from rollout.weights.feeding import Bucket
from rollout.weights.joining import Joiner, is_still, may_keep
from rollout.weights.tensors.broadcast import BroadcastRoot
from rollout.weights.tensors.gathering import Gatherer, Orders, is_worth_gathering, say, split
from rollout.weights.tensors.sources import Pairs, Weights
from rollout.weights.tensors.writing import fingerprints_of

_MOST_IDLE_S = 240.0


@dataclass(frozen=True, slots=True)
class _Group:
    """A group whose ranks are there.

    Attributes:
        joiners: the engines of all its ranks but the trainer's.
        idle_since: when the last push that went through it ended.
    """

    root: BroadcastRoot
    joiners: Sequence[Joiner]
    idle_since: float = 0.0


class KeptGroup:
    """The group of a server's last push, if it is kept.  For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.orders = Orders()
        self._clock = clock
        self._lock = threading.Lock()
        self._group: _Group | None = None
        self._is_closed = False

    @property
    def name(self) -> str:
        """Of the group that is kept; empty for none."""
        group = self._group
        return "" if group is None else group.root.name

    def take(self) -> _Group | None:
        """The group, which is the caller's from now on."""
        with self._lock:
            group, self._group = self._group, None
        return group

    def is_fresh(self, group: _Group) -> bool:
        """Whether its connections can be trusted."""
        return self._clock() - group.idle_since <= _MOST_IDLE_S

    def keep(self, group: _Group) -> None:
        """It is there for the next push."""
        group = replace(group, idle_since=self._clock())
        with self._lock:
            over = group if self._is_closed else self._group
            if not self._is_closed:
                self._group = group
        if over is not None:  # of a push that ended beside this one
            over.root.close()

    def close(self) -> None:
        """Keep none, now and later: the engines notice that the trainer's end is gone."""
        with self._lock:
            group, self._group, self._is_closed = self._group, None, True
        if group is not None:
            group.root.close()


class Broadcast:
    """One push.

    Args:
        host: address of this machine that the engines can reach.
        kept: where a group is left for the next push; None leaves none.
    """

    def __init__(
        self,
        weights: Weights,
        version: int,
        settings: WeightsConfig,
        host: str,
        kept: KeptGroup | None,
    ) -> None:
        self._weights = weights
        self._version = version
        self._settings = settings
        self._host = host
        self._kept = kept
        self._gatherer = Gatherer(Orders() if kept is None else kept.orders)
        self._group: _Group | None = None
        self._must_join = True
        backend = settings.backend
        if backend == "auto":
            backend = "nccl" if weights.is_on_cuda else "gloo"
        self._backend: str = backend

    def terms(self, joiners: Sequence[Joiner]) -> Mapping[str, Any]:
        """The group that these are sent to: the one that was kept, or a new one."""
        before = None if self._kept is None else self._kept.take()
        keeps = self._kept is not None and may_keep(joiners)
        if before is not None and self._can_go_on(before, joiners):
            self._group, self._must_join = before, False
            return {"group_name": before.root.name, "is_new": False, "keeps": keeps, "over": ""}
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
        where = root.terms(sum(one.num_ranks for one in joiners))
        self._group = _Group(root, tuple(joiners))
        return {
            **where,
            "group_name": root.name,
            "backend": self._backend,
            "is_new": True,
            "keeps": keeps,
            "over": "" if before is None else before.root.name,
        }

    def _can_go_on(self, group: _Group, joiners: Sequence[Joiner]) -> bool:
        assert self._kept is not None
        return (
            group.root.is_there
            and group.root.backend == self._backend
            and self._kept.is_fresh(group)
            and is_still(group.root.name, group.joiners, joiners)
        )

    def buckets(self) -> Iterator[Bucket]:
        """What is handed out and sent, once all readers have the terms."""
        assert self._group is not None
        root = self._group.root
        if self._must_join:
            root.join()
        is_flat = all(one.takes_flat for one in self._group.joiners)
        for pairs, is_last in self._weights.gathered():
            if is_flat and is_worth_gathering(pairs):
                buckets = self._flat(root, pairs, is_last)
            else:
                buckets = iter([self._one_by_one(root, pairs, is_last)])
            del pairs  # the tensors of a shard are alive only as long as they are needed
            yield from buckets
            del buckets

    def ended(self, is_kept: bool) -> None:
        """The push is over: whether all engines took it, and stay in the group."""
        group, self._group = self._group, None
        self._gatherer.rest()
        if group is None:
            return
        if is_kept and self._kept is not None:
            self._kept.keep(group)
        else:
            group.root.close()

    def _flat(self, root: BroadcastRoot, pairs: Pairs, is_last: bool) -> Iterator[Bucket]:
        device = pairs.tensors[0].device if self._backend == "nccl" else torch.device("cpu")
        parts = split(pairs, device)
        del pairs
        while parts:
            hashed = self._settings.fingerprint
            one = self._gatherer.gather(parts.pop(0), device, fingerprint=hashed)
            said = {**one.said, "group_name": root.name, "load_format": FLATTENED_BUCKET}
            send = partial(root.send, [one.tensor])
            yield Bucket(said, is_last and not parts, one.fingerprints, send)

    def _one_by_one(self, root: BroadcastRoot, pairs: Pairs, is_last: bool) -> Bucket:
        found = fingerprints_of(pairs) if self._settings.fingerprint else {}
        said = {**say(pairs.specs), "group_name": root.name}
        return Bucket(said, is_last, found, partial(root.send, pairs.tensors))
