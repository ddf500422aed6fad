"""The messages of a push through a store of torch.distributed, which rank 0 hosts.

A store and not collectives of a CPU group: a wait for a key ends at its deadline without harm to
later pushes, it is known which rank is silent, and the end of rank 0 ends every wait at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from engines.process.background import in_own_thread
from engines.process.locks import make_held
from rollout.core.errors import RankFailure
from rollout.weights.ranks.messages import decode, encode
from rollout.weights.ranks.protocol import Claim, Delete, Get, Put, Step, Steps
from rollout.weights.routes.buffers import new_folder

T = TypeVar("T")

_CONNECT_S = 60.0


class TextStore(Protocol):
    """Where messages are, as text."""

    def put(self, key: str, text: str) -> None: ...
    def claim(self, key: str, text: str) -> str: ...
    def get(self, keys: Sequence[str], timeout_s: float) -> list[str | None]: ...
    def delete(self, keys: Sequence[str]) -> None: ...


class SharedTexts:
    """A ``TCPStore`` between the ranks.

    Its calls wait for ever while the process of rank 0 is frozen.  So each is made in a thread of
    its own.  It is left alone there if it does not end, and takes effect when rank 0 goes on:
    before anything that rank 0 does then, because it waits at rank 0 already.

    Args:
        waits: another connection for ``get``, which would hold up all others.
        answer_s: for an answer of rank 0's process.
    """

    def __init__(self, store: Any, waits: Any, answer_s: float) -> None:
        self._store = store
        self._waits = waits
        self._answer_s = answer_s

    def put(self, key: str, text: str) -> None:
        with suppress(TimeoutError):
            self._within(self._answer_s, lambda: self._store.set(key, text))

    def claim(self, key: str, text: str) -> str:
        """The text that the key has then.

        Raises:
            TimeoutError: there is no answer; the claim stands.
        """
        claim = partial(self._store.compare_set, key, "", text)
        stored: bytes = self._within(self._answer_s, claim)
        return stored.decode()

    def get(self, keys: Sequence[str], timeout_s: float) -> list[str | None]:
        if not keys:
            return []
        read = partial(self._read, list(keys), timeout_s)
        try:
            return self._within(timeout_s + self._answer_s, read)
        except TimeoutError:
            return [None for _ in keys]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(TimeoutError):
                self._within(self._answer_s, partial(self._store.delete_key, key))

    def _within(self, seconds: float, call: Callable[[], T]) -> T:
        """The call's result.

        Raises:
            TimeoutError: it did not end.
        """
        return in_own_thread(call, "rank-message").result(seconds)

    def _read(self, keys: list[str], timeout_s: float) -> list[str | None]:
        try:
            self._waits.wait(keys, timedelta(seconds=timeout_s))
        except dist.DistStoreError:  # the deadline
            return [
                self._waits.get(key).decode() if self._waits.check([key]) else None for key in keys
            ]
        return [text.decode() for text in self._waits.multi_get(keys)]


@dataclass(frozen=True, slots=True)
class RankLink:
    """The ranks that push together.

    Attributes:
        texts: where their messages are, or None for a single rank, which has none.
        group: their process group, or None for a single rank.
    """

    rank: int = 0
    num_ranks: int = 1
    texts: TextStore | None = None
    group: Any = None

    def run(self, steps: Steps[T], do: Callable[[Step], Any]) -> T:
        """Carry out the steps of this rank; ``do`` carries out those that are not exchanges.

        Raises:
            RolloutError: the push has failed.
        """
        try:
            step = next(steps)
            while True:
                try:
                    result = self._exchanged(step) if isinstance(step, _EXCHANGES) else do(step)
                except (Exception, KeyboardInterrupt) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as ended:
            value: T = ended.value
            return value

    def hosts(self, root: str) -> list[int]:
        """For each rank, the lowest rank that sees its files in this folder of tmpfs; every rank
        calls this.

        Raises:
            RankFailure: a rank did not call it, or rank 0 has ended.
        """
        if self.texts is None:
            return [0]
        ranks = range(self.num_ranks)
        token = make_held(new_folder(Path(root)))
        try:
            with _end_of_rank_0():
                self.texts.put(f"token/{self.rank}", str(token.folder))
                tokens = self._expect([f"token/{rank}" for rank in ranks])
                lowest = next(rank for rank in ranks if Path(tokens[rank]).exists())
                self.texts.put(f"host/{self.rank}", str(lowest))
                return [int(host) for host in self._expect([f"host/{rank}" for rank in ranks])]
        finally:
            token.release()

    def _expect(self, keys: Sequence[str]) -> list[str]:
        assert self.texts is not None
        texts = self.texts.get(keys, _CONNECT_S)
        if None in texts:
            raise RankFailure(f"not all ranks called pusher() within {_CONNECT_S:g} s")
        return [text for text in texts if text is not None]

    def _exchanged(self, step: Step) -> Any:
        if self.texts is None:
            return step.message if isinstance(step, Claim) else []
        with _end_of_rank_0():
            match step:
                case Put(key, message):
                    return self.texts.put(key, encode(message))
                case Claim(key, message):
                    return decode(self.texts.claim(key, encode(message)))
                case Get(keys, timeout_s):
                    texts = self.texts.get(keys, timeout_s)
                    return [None if text is None else decode(text) for text in texts]
                case Delete(keys):
                    return self.texts.delete(keys)
        raise AssertionError(step)


@contextmanager
def _end_of_rank_0() -> Iterator[None]:
    """One error for whatever its store says then, which is another text on each rank."""
    try:
        yield
    except (dist.DistError, RuntimeError):
        raise RankFailure("rank 0 has ended, and the push with it", ranks=(0,)) from None


_EXCHANGES = (Put, Claim, Get, Delete)


def link_ranks(own_host: str, group: Any = None, *, answer_s: float = 10.0) -> RankLink:
    """Link the ranks of a process group; every rank of it calls this.

    Args:
        own_host: address of this machine for the other ranks.
        group: None for all ranks, or for a single process without torch.distributed.
        answer_s: for an answer of rank 0's process.

    Raises:
        ValueError: this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError("pusher(group=...): torch.distributed is not initialized here")
        return RankLink()
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("pusher(group=...): this process is not a rank of that group")
    if num_ranks == 1:
        return RankLink(group=group)
    store = _meet(rank, own_host, group)
    return RankLink(rank, num_ranks, SharedTexts(store, store.clone(), answer_s), group)


def _meet(rank: int, own_host: str, group: Any) -> Any:
    """A store of these ranks alone; the group passes its address to them."""
    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    host = own_host if len(set(hosts)) > 1 else "127.0.0.1"
    store = None
    if rank == 0:
        store = _store("" if host != "127.0.0.1" else host, 0, is_master=True)
    where: list[Any] = [(host, store.port) if store else None]
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(where, source, group=group)
    host, port = where[0]
    return store or _store(host, port, is_master=False)


def _store(host: str, port: int, *, is_master: bool) -> Any:
    make: Any = getattr(dist, "TCPStore")  # noqa: B009  torch's types do not export it
    return make(
        host or "0.0.0.0",
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=_CONNECT_S),
    )
