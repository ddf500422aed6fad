"""The routing policies: each chooses an engine for a request.

Always true: the cost of a choice does not depend on the number of engines; only the cost of a
change of the membership does.  An engine that many requests prefer gets no more of them than a
bound that grows with the load of all.
"""

from __future__ import annotations

import math
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


class Affinity(_RoutingPolicy):
    """Requests with one affinity go to the engine that has their prefix, while that is cheap.

    It is the engine that got the last of them, their home.  The first of them, and every request
    without an affinity, goes to the least loaded engine.

    What another engine would have to compute again grows with the prompt, so the longer the prompt,
    the more live requests the home may have beyond the least loaded engine: two, and one more for
    each ``_BYTES_A_REQUEST`` of the body, up to half an average engine's load and four.  Past it,
    or if the home cannot be chosen, the least loaded engine is the new home: the newest prefix is
    there.  ``benchmarks.router --families affinity`` is where these numbers come from.

    Affinities without a request for ``ttl_s``, and the oldest beyond ``max_num``, are forgotten.
    """

    wants_affinity = True
    _LEAST = 2
    _BYTES_A_REQUEST = 256
    _MOST = 4
    _MOST_OF_SHARE = 0.5

    def __init__(self, *, ttl_s: float = 3600.0, max_num: int = 100_000) -> None:
        self._ttl_s = ttl_s
        self._max_num = max_num
        self._homes: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def choose(self, candidates: Candidates, hint: Hint = NO_HINT) -> Backend:
        least = candidates.least()
        if not hint.affinity:
            return least
        self._forget(hint.now_s)
        home = self._homes.get(hint.affinity)
        chosen = None if home is None else candidates.get(home[0])
        if chosen is None or self._is_dear(candidates, chosen, least, hint.num_bytes):
            chosen = least
        self._homes[hint.affinity] = (chosen.engine_id, hint.now_s)
        self._homes.move_to_end(hint.affinity)
        return chosen

    @property
    def num_kept(self) -> int:
        return len(self._homes)

    def _is_dear(
        self, candidates: Candidates, home: Backend, least: Backend, num_bytes: int
    ) -> bool:
        """Whether to wait at the home costs more than to compute the prompt elsewhere."""
        more = candidates.load(home.engine_id) - candidates.load(least.engine_id)
        if more <= self._LEAST:
            return False
        share = candidates.total / len(candidates.members)
        most = self._MOST + self._MOST_OF_SHARE * share
        return more > min(self._LEAST + num_bytes / self._BYTES_A_REQUEST, most)

    def _forget(self, now_s: float) -> None:
        while self._homes:
            affinity, (_, seen_s) = next(iter(self._homes.items()))
            if len(self._homes) <= self._max_num and seen_s > now_s - self._ttl_s:
                return
            del self._homes[affinity]


class PrefixAffinity(_RoutingPolicy):
    """The engine that received the longest beginning of the prompt before, with bounded load.

    The prompt is cut into blocks; the hash of a block includes the blocks before it.  For the
    ``max_blocks`` most recent hashes, the policy keeps the engine that last received that
    beginning.  This is an approximation: engines are not queried for their caches.

    Bounded load: an engine that many beginnings prefer is used only while it has less than its
    share of all requests, plus some slack.

    Args:
        at_least: the bound is never lower than this.
    """

    wants_prompt = True
    _SLACK = 1.25

    def __init__(
        self, *, block_bytes: int = 256, max_blocks: int = 100_000, at_least: int = 4
    ) -> None:
        self._at_least = at_least
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

    def _bound(self, candidates: Candidates) -> int:
        """A preferred engine is chosen only if it has fewer live requests than this."""
        share = (candidates.total + 1) / len(candidates.members)
        return max(self._at_least, math.ceil(self._SLACK * share))

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


def make_policy(name: str, *, affinity_ttl_s: float, max_affinities: int) -> RoutingPolicy:
    """The policy for a value of ``router.policy``."""
    if name == "affinity":
        return Affinity(ttl_s=affinity_ttl_s, max_num=max_affinities)
    return PrefixAffinity() if name == "prefix" else LeastInFlight()
