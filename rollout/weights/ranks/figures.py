"""Seconds and bytes of a push: what each rank did with each bucket, and how long engines took.

Always true: no clocks of two hosts are compared.  A rank measures only seconds, from the moment
when it reads rank 0's go, and rank 0 places them on its own clock, from the moment when it says go.
The number of spans is bounded: neighbouring buckets are merged, and all sums stay exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rollout.core.types import PushStage
from rollout.observability.timeline.span import COPY, ENGINE, GATHER, Kind, Outcome, Span
from rollout.weights.ranks.messages import Share
from rollout.weights.tensors.sources import Pairs

MOST_SPANS = 1024


@dataclass(slots=True)
class _Round:
    """Neighbouring buckets.

    Attributes:
        start_s, end_s: on rank 0: from its go until the engines wanted the next bucket.
        engine_s: seconds that rank 0 waited for the engines.
        gather_s, copy_s, sent: of each rank; ``sent`` are bytes.
    """

    first: int
    last: int
    start_s: float
    end_s: float
    num_bytes: int
    engine_s: float
    gather_s: Sequence[float]
    copy_s: Sequence[float]
    sent: Sequence[int]

    def joined(self, later: _Round) -> _Round:
        return _Round(
            self.first,
            later.last,
            self.start_s,
            later.end_s,
            self.num_bytes + later.num_bytes,
            self.engine_s + later.engine_s,
            _sums(self.gather_s, later.gather_s),
            _sums(self.copy_s, later.copy_s),
            _sums(self.sent, later.sent),
        )


class PushFigures:
    """The figures of one push; on ranks other than 0 those of the bucket that is made.

    Args:
        most_spans: of all ranks together; more only if there are more ranks.
        clock: of ``time.monotonic``.

    Attributes:
        density: the share of the elements that were changed so far, if only these are sent.
    """

    def __init__(
        self,
        num_ranks: int,
        most_spans: int = MOST_SPANS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._most_rounds = max(1, most_spans // (2 * num_ranks + 1))
        self._num_offered = 0
        self.density: float | None = None
        self._rounds: list[_Round] = []
        self._per_round = 1
        self._open: _Round | None = None
        self._start_s = self._gathered_s = 0.0

    # -- every rank -------------------------------------------------------------------------

    def begin(self) -> None:
        """This rank begins a bucket."""
        self._start_s = self._clock()

    def gathered(self) -> None:
        """This rank has the bucket's whole tensors."""
        self._gathered_s = self._clock()

    def measured(self, pairs: Pairs, changes: Pairs) -> tuple[float, float, int, int | None]:
        """This rank's share of the bucket: seconds of its gather and of its copies, its bytes, and
        the bytes that were sent in their place."""
        gather_s, copy_s = self._gathered_s - self._start_s, self._clock() - self._gathered_s
        sent_bytes = None if changes is pairs else _num_bytes(changes)
        return round(gather_s, 6), round(copy_s, 6), _num_bytes(pairs), sent_bytes

    # -- rank 0 -----------------------------------------------------------------------------

    def offered(self, shares: Sequence[Share], *, rank_0_sends: bool = False) -> None:
        """The engines can take the bucket that all ranks have made.

        Args:
            rank_0_sends: also when it has no share.
        """
        num_bytes = shares[0].num_bytes
        senders = {rank for rank, share in enumerate(shares) if share.made}
        if rank_0_sends or not senders:
            senders.add(0)
        index, self._num_offered = self._num_offered, self._num_offered + 1
        self._open = _Round(
            index,
            index,
            self._start_s,
            # A rank may read the go before rank 0 begins the bucket itself.
            max(
                self._clock(),
                self._start_s + max(share.gather_s + share.copy_s for share in shares),
            ),
            num_bytes,
            0.0,
            [share.gather_s for share in shares],
            [share.copy_s if rank in senders else 0.0 for rank, share in enumerate(shares)],
            [
                (num_bytes if share.sent_bytes is None else share.sent_bytes)
                if rank in senders
                else 0
                for rank, share in enumerate(shares)
            ],
        )

    def wanted(self, at_s: float) -> None:
        """The engines want the next bucket, or have applied the last, since ``at_s``."""
        done, self._open = self._open, None
        if done is None:
            return
        at_s = max(at_s, done.end_s)
        done.engine_s, done.end_s = at_s - done.end_s, at_s
        last = self._rounds[-1] if self._rounds else None
        if last is not None and last.last - last.first + 1 < self._per_round:
            self._rounds[-1] = last.joined(done)
        else:
            self._rounds.append(done)
        if len(self._rounds) > self._most_rounds:
            self._per_round *= 2
            self._rounds = list(_in_twos(self._rounds))

    def stages(self, route: str) -> tuple[PushStage, ...]:
        """The sums of the push, by rank and stage."""
        if not self._rounds:
            return ()
        whole = self._rounds[0]
        for later in self._rounds[1:]:
            whole = whole.joined(later)
        found = []
        for rank, sent in enumerate(whole.sent):
            found.append(PushStage(rank, GATHER, "", whole.num_bytes, whole.gather_s[rank]))
            density = None if rank else self.density
            found.append(PushStage(rank, COPY, route, sent, whole.copy_s[rank], density))
        found.append(PushStage(0, ENGINE, route, whole.num_bytes, whole.engine_s))
        return tuple(found)

    def spans(self, version: int, route: str) -> list[Span]:
        """The same over time, for the server's timeline; times are Unix seconds of rank 0."""
        offset_s = time.time() - self._clock()
        found = []
        for round_ in self._rounds:
            buckets = f"buckets {round_.first} to {round_.last}"
            message = buckets if round_.last > round_.first else f"bucket {round_.first}"
            for rank, name, start_s, elapsed_s, num_bytes in _parts(round_):
                span = Span(Kind.RANK, name, "", offset_s + start_s, elapsed_s, Outcome.OK)
                span.rank, span.num_bytes, span.said = rank, num_bytes, message
                span.weight_version = version
                if name != GATHER:
                    span.route = route
                if name == COPY and not rank:
                    span.density = self.density
                found.append(span)
        return found


def _parts(round_: _Round) -> Iterator[tuple[int, str, float, float, int]]:
    """Rank, stage, start, seconds and bytes; those of a rank follow one another."""
    for rank, (gather_s, copy_s, sent) in enumerate(
        zip(round_.gather_s, round_.copy_s, round_.sent, strict=True)
    ):
        yield rank, GATHER, round_.start_s, gather_s, round_.num_bytes
        if sent:
            yield rank, COPY, round_.start_s + gather_s, copy_s, sent
    yield 0, ENGINE, round_.end_s - round_.engine_s, round_.engine_s, round_.num_bytes


def _in_twos(rounds: Sequence[_Round]) -> Iterator[_Round]:
    for first in range(0, len(rounds), 2):
        pair = rounds[first : first + 2]
        yield pair[0].joined(pair[1]) if len(pair) > 1 else pair[0]


def _num_bytes(pairs: Pairs) -> int:
    return sum(map(attrgetter("nbytes"), pairs.tensors))


def _sums(mine: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    return [first + second for first, second in zip(mine, other, strict=True)]
