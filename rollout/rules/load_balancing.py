"""The routing policies: each chooses an engine for a request.

Always true: the cost of a choice does not depend on the number of engines; only the cost of a
change of the membership does.

Bounded load: a policy with a preferred engine (affinity, prefix) uses it only while it has less
than its share of all requests, plus some slack.  So an engine that many requests prefer is not
overloaded.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from hashlib import blake2b

from rollout.rules.routing import NO_HINT, Backend, Candidates, Hint, RoutingPolicy


class _RoutingPolicy:
    wants_affinity = False
    wants_prompt = False


class LeastInFlight(_RoutingPolicy):
    """The engine with the fewest live requests; among equals, the next in turn.

    Without turns, the first of several idle engines would get every request at low load.
    """

    def choose(self, candidates: Candidates, hint: Hint = NO_HINT) -> Backend:
        return candidates.least()


class _BoundedLoad(_RoutingPolicy):
    """Base of the policies with a preferred engine.

    Args:
        at_least: the bound is never lower than this.
    """

    _SLACK = 1.25

    def __init__(self, at_least: int) -> None:
        self._at_least = at_least

    def _bound(self, candidates: Candidates) -> int:
        """A preferred engine is chosen only if it has fewer live requests than this."""
        share = (candidates.total + 1) / len(candidates.members)
        return max(self._at_least, math.ceil(self._SLACK * share))


class Affinity(_BoundedLoad):
    """All requests with one affinity go to one engine, by consistent hashing with bounded load.

    An affinity keeps its engine when engines are added.  While its engine is unavailable, all its
    requests go to one other engine; they return when it is available again.  Affinities without a
    request for ``ttl_s``, and the oldest beyond ``max_num``, are removed.
    """

    wants_affinity = True
    _POINTS = 64

    def __init__(self, *, ttl_s: float = 3600.0, max_num: int = 100_000, at_least: int = 4) -> None:
        super().__init__(at_least)
        self._ttl_s = ttl_s
        self._max_num = max_num
        self._homes: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._ring: list[tuple[int, str]] = []
        self._on_ring: set[str] = set()
        self._ring_is_for: Candidates | None = None

    def choose(self, candidates: Candidates, hint: Hint = NO_HINT) -> Backend:
        if not hint.affinity:
            return candidates.least()
        self._forget(hint.now_s)
        bound = self._bound(candidates)
        home = self._homes.get(hint.affinity, ("", 0.0))[0]
        chosen = candidates.get(home)
        if chosen is None or candidates.load(home) >= bound:
            chosen = self._walk(candidates, hint.affinity, bound)
        self._homes[hint.affinity] = (home or chosen.engine_id, hint.now_s)
        self._homes.move_to_end(hint.affinity)
        return chosen

    @property
    def num_kept(self) -> int:
        return len(self._homes)

    def _forget(self, now_s: float) -> None:
        while self._homes:
            affinity, (_, seen_s) = next(iter(self._homes.items()))
            if len(self._homes) <= self._max_num and seen_s > now_s - self._ttl_s:
                return
            del self._homes[affinity]

    def _walk(self, candidates: Candidates, affinity: str, bound: int) -> Backend:
        """The first candidate under the bound, from the position of the affinity on the ring."""
        if candidates is not self._ring_is_for:
            self._extend_ring(candidates)
        ring, load = self._ring, candidates.load
        start = bisect_right(ring, (_hash(affinity.encode()), ""))
        for step in range(len(ring)):
            member = candidates.get(ring[(start + step) % len(ring)][1])
            if member is not None and load(member.engine_id) < bound:
                return member
        return candidates.least()

    def _extend_ring(self, candidates: Candidates) -> None:
        """Put all candidates on the ring.

        Engines that are no candidates now stay on the ring and are skipped, so an engine that
        leaves and returns costs nothing.  They are removed once they are the majority.
        """
        ids = {member.engine_id for member in candidates.members}
        new = ids - self._on_ring
        if len(self._on_ring) + len(new) > 2 * len(ids):
            self._ring = [point for point in self._ring if point[1] in ids]
            self._on_ring &= ids
        if new:
            self._ring += [
                (_hash(f"{engine_id}#{point}".encode()), engine_id)
                for engine_id in new
                for point in range(self._POINTS)
            ]
            self._ring.sort()
            self._on_ring |= new
        self._ring_is_for = candidates


class PrefixAffinity(_BoundedLoad):
    """The engine that received the longest beginning of the prompt before, with bounded load.

    The prompt is cut into blocks; the hash of a block includes the blocks before it.  For the
    ``max_blocks`` most recent hashes, the policy keeps the engine that last received that
    beginning.  This is an approximation: engines are not queried for their caches.
    """

    wants_prompt = True

    def __init__(
        self, *, block_bytes: int = 256, max_blocks: int = 100_000, at_least: int = 4
    ) -> None:
        super().__init__(at_least)
        self._block_bytes = block_bytes
        self._max_blocks = max_blocks
        self._engines: OrderedDict[bytes, str] = OrderedDict()

    def choose(self, candidates: Candidates, hint: Hint = NO_HINT) -> Backend:
        blocks = self._blocks(hint.prompt)
        chosen = self._preferred(candidates, blocks) or candidates.least()
        for block in blocks:
            self._engines[block] = chosen.engine_id
            self._engines.move_to_end(block)
        while len(self._engines) > self._max_blocks:
            self._engines.popitem(last=False)
        return chosen

    def _preferred(self, candidates: Candidates, blocks: list[bytes]) -> Backend | None:
        bound = self._bound(candidates)
        for block in reversed(blocks):
            member = candidates.get(self._engines.get(block, ""))
            if member is not None and candidates.load(member.engine_id) < bound:
                return member
        return None

    def _blocks(self, prompt: bytes) -> list[bytes]:
        chain = blake2b(digest_size=8)
        blocks = []
        for start in range(0, len(prompt) - self._block_bytes + 1, self._block_bytes):
            chain.update(prompt[start : start + self._block_bytes])
            blocks.append(chain.digest())
        return blocks


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest())


def make_policy(name: str, *, affinity_ttl_s: float, max_affinities: int) -> RoutingPolicy:
    """The policy for a value of ``router.policy``."""
    if name == "affinity":
        return Affinity(ttl_s=affinity_ttl_s, max_num=max_affinities)
    return PrefixAffinity() if name == "prefix" else LeastInFlight()
