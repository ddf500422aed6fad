"""Ways to choose an engine for a request, each a class with ``choose``.

Always true: a choice takes as long with a thousand engines as with four; only a change of the
membership costs more when there are more of them.

Bounded load: a policy with a preference (session, prefix) keeps to it only while the preferred
engine has less than its share of all requests, with some slack; so no engine ever drowns because
many sessions or prompts happen to prefer it.

Pure: values in, a choice out; no await, clock or socket.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from random import Random

from rollout.routing import NO_HINT, Candidates, Hint, Member, Policy


class _Policy:
    wants_session = False
    wants_prompt = False


class LeastInFlight(_Policy):
    """The engine with the fewest live requests; among equals, the next one in turn.

    Without the turn, the first of several idle engines would get every request of a quiet hour.
    """

    def choose(self, candidates: Candidates, hint: Hint = NO_HINT) -> Member:
        return candidates.least()


class RoundRobin(_Policy):
    """Each engine in turn, whatever its load."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Candidates, hint: Hint = NO_HINT) -> Member:
        members = candidates.members
        chosen = members[(candidates.place(self._last) + 1) % len(members)]
        self._last = chosen.engine_id
        return chosen


class PowerOfTwo(_Policy):
    """The less loaded of two engines drawn by chance; of equals the first drawn."""

    def __init__(self, random: Random | None = None) -> None:
        self._random = (random or Random()).random

    def choose(self, candidates: Candidates, hint: Hint = NO_HINT) -> Member:
        members, num = candidates.members, len(candidates.members)
        if num == 1:
            return members[0]
        place = int(self._random() * num)
        step = 1 + int(self._random() * (num - 1))
        one, other = members[place], members[(place + step) % num]
        load = candidates.load
        return other if load(other.engine_id) < load(one.engine_id) else one


def load_bound(candidates: Candidates, *, slack: float, at_least: int) -> int:
    """An engine with fewer live requests than this may be preferred."""
    share = (candidates.total + 1) / len(candidates.members)
    return max(at_least, math.ceil(slack * share))


class Sessions(_Policy):
    """All requests of a session to one engine, by consistent hashing with bounded load.

    A session stays where it began, also when engines are added.  While its engine cannot be
    chosen, its requests all go to the same other one, and come back with the engine.  Sessions
    unheard of for ``ttl_s``, and the oldest beyond ``max_sessions``, are forgotten.
    """

    wants_session = True
    _POINTS = 64

    def __init__(
        self,
        *,
        ttl_s: float = 3600.0,
        max_sessions: int = 100_000,
        slack: float = 1.25,
        at_least: int = 4,
    ) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._slack = slack
        self._at_least = at_least
        self._homes: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._ring: list[tuple[int, str]] = []
        self._on_ring: set[str] = set()
        self._ring_is_for: Candidates | None = None

    def choose(self, candidates: Candidates, hint: Hint = NO_HINT) -> Member:
        if not hint.session:
            return candidates.least()
        self._forget(hint.now_s)
        bound = load_bound(candidates, slack=self._slack, at_least=self._at_least)
        home = self._homes.get(hint.session, ("", 0.0))[0]
        chosen = candidates.get(home)
        if chosen is None or candidates.load(home) >= bound:
            chosen = self._walk(candidates, hint.session, bound)
        self._homes[hint.session] = (home or chosen.engine_id, hint.now_s)
        self._homes.move_to_end(hint.session)
        return chosen

    @property
    def num_sessions(self) -> int:
        return len(self._homes)

    def _forget(self, now_s: float) -> None:
        while self._homes:
            session, (_, seen_s) = next(iter(self._homes.items()))
            if len(self._homes) <= self._max_sessions and seen_s > now_s - self._ttl_s:
                return
            del self._homes[session]

    def _walk(self, candidates: Candidates, session: str, bound: int) -> Member:
        """The first candidate under the bound, from where the session stands on the ring."""
        if candidates is not self._ring_is_for:
            self._extend_ring(candidates)
        ring, load = self._ring, candidates.load
        start = bisect_right(ring, (_hash(session.encode()), ""))
        for step in range(len(ring)):
            member = candidates.get(ring[(start + step) % len(ring)][1])
            if member is not None and load(member.engine_id) < bound:
                return member
        return candidates.least()

    def _extend_ring(self, candidates: Candidates) -> None:
        """Put all candidates on the ring.

        Who is no candidate now is passed over there, which comes to the same as not being there:
        an engine that goes and comes back costs nothing.  They are taken off when they are many.
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


class PrefixAffinity(_Policy):
    """The engine that has seen most of a prompt's beginning, with bounded load.

    The beginning is cut into blocks; each block's hash includes those before it, and the engine
    that last got a prompt with that beginning is remembered, for the ``max_blocks`` used last.
    Approximate: what engines really keep in their caches is not asked.
    """

    wants_prompt = True

    def __init__(
        self,
        *,
        block_bytes: int = 256,
        max_blocks: int = 100_000,
        slack: float = 1.25,
        at_least: int = 4,
    ) -> None:
        self._block_bytes = block_bytes
        self._max_blocks = max_blocks
        self._slack = slack
        self._at_least = at_least
        self._engines: OrderedDict[bytes, str] = OrderedDict()

    def choose(self, candidates: Candidates, hint: Hint = NO_HINT) -> Member:
        blocks = self._blocks(hint.prompt)
        chosen = self._preferred(candidates, blocks) or candidates.least()
        for block in blocks:
            self._engines[block] = chosen.engine_id
            self._engines.move_to_end(block)
        while len(self._engines) > self._max_blocks:
            self._engines.popitem(last=False)
        return chosen

    def _preferred(self, candidates: Candidates, blocks: list[bytes]) -> Member | None:
        bound = load_bound(candidates, slack=self._slack, at_least=self._at_least)
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


def policy_of(name: str, *, session_ttl_s: float, max_sessions: int) -> Policy:
    """The policy of this name, as the configuration has it."""
    if name == "session":
        return Sessions(ttl_s=session_ttl_s, max_sessions=max_sessions)
    makers: dict[str, Callable[[], Policy]] = {
        "least_in_flight": LeastInFlight,
        "power_of_two": PowerOfTwo,
        "round_robin": RoundRobin,
        "prefix": PrefixAffinity,
    }
    return makers[name]()
