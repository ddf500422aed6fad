"""Policies of a simulation: ours, as the router runs them, and others as their documents say.

``sticky_hash``: a session's engine is the hash of its name, as vLLM's production-stack routes with
``--routing-logic session`` (docs.vllm.ai/projects/production-stack, session routing).

``bounded_hash``: consistent hashing with bounded load, our ``affinity`` before this policy: the
engine of the hash, or the next one on the ring with less than 1.25 of an average load, or four.

``sglang_cache_aware``: SGLang's router (docs.sglang.ai/router/router.html): where the most loaded
engine has over ``balance_abs_threshold`` (32) more requests than the least loaded and over
``balance_rel_threshold`` (1.0001) times as many, the least loaded; else the engine whose tree of
sent prompts matches most, if that is over ``cache_threshold`` (0.5) of the prompt, else the engine
with the smallest tree.  ``smg_cache_aware`` is the same with the defaults of its successor
(github.com/lightseekorg/smg, docs/getting-started/load-balancing.md): 64, 1.5 and 0.3.

``kv_aware``: vLLM's production-stack with ``kvaware`` (use_cases/kv-aware-routing): the engine that
holds the longest prefix in its cache now, of equals the least loaded; where over 2000 tokens of the
prompt are missing, by session.  ``llm_d``: the highest of 3 x share of the prompt that was sent
there and 2 x (1 - queue / longest queue), the weights of its default (docs.redhat.com, llm-d,
Configuring scheduler settings).

``clairvoyant`` knows all turns to come: each session begins on the engine with the least work left,
by its lengths, and stays, or (``moves``) leaves where the difference is over twice its prefill.
It is a good schedule, not a bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b

from benchmarks.router.simulation.engine import Costs, Turn
from benchmarks.router.simulation.run import Fleet, Policy
from benchmarks.router.simulation.traces import Session
from rollout.rules.load_balancing import make_policy
from rollout.rules.routing import Hint

_BYTES_A_TOKEN = 5
"""Of ids in a body."""


def ours(name: str) -> Policy:
    """A policy of the router, which knows a session's name and the bytes of its prompt."""
    policy = make_policy(name, affinity_ttl_s=3600.0, max_affinities=100_000)

    def choose(fleet: Fleet, turn: Turn) -> int:
        affinity = f"session {turn.session}" if policy.wants_affinity else ""
        hint = Hint(affinity, b"", fleet.now_s, _BYTES_A_TOKEN * turn.prompt)
        return int(policy.choose(fleet.candidates, hint).engine_id)

    return choose


def sticky_hash(fleet: Fleet, turn: Turn) -> int:
    numbers = fleet.numbers
    return numbers[_hash(f"session {turn.session}") % len(numbers)]


def bounded_hash() -> Policy:
    homes: dict[int, int] = {}

    def choose(fleet: Fleet, turn: Turn) -> int:
        numbers = fleet.numbers
        bound = max(4.0, 1.25 * (fleet.candidates.total + 1) / len(numbers))
        home = homes.get(turn.session, -1)
        if home in numbers and fleet.load(home) < bound:
            return home
        ring = _ring(tuple(numbers))
        start = bisect_right(ring, (_hash(f"session {turn.session}"), -1))
        order = [ring[(start + step) % len(ring)][1] for step in range(len(ring))]
        chosen = next((number for number in order if fleet.load(number) < bound), order[0])
        homes.setdefault(turn.session, chosen)
        return chosen

    return choose


def cache_aware(threshold: float, absolute: int, relative: float) -> Policy:
    sent: dict[int, dict[int, int]] = defaultdict(dict)
    sizes: dict[int, int] = defaultdict(int)

    def choose(fleet: Fleet, turn: Turn) -> int:
        numbers = fleet.numbers
        least = min(numbers, key=fleet.load)
        low, high = fleet.load(least), max(map(fleet.load, numbers))
        if high - low > absolute and high > relative * low:
            chosen = least
        else:
            best = max(numbers, key=lambda number: _sent(sent[number], turn))
            is_match = _sent(sent[best], turn) > threshold * turn.prompt
            chosen = best if is_match else min(numbers, key=lambda number: sizes[number])
        sizes[chosen] += turn.prompt - _sent(sent[chosen], turn)
        sent[chosen][turn.session] = turn.prompt
        return chosen

    return choose


def kv_aware(fleet: Fleet, turn: Turn) -> int:
    def held(number: int) -> int:
        engine = fleet.engines[number]
        return min(turn.root, engine.root) + engine.cached.get(turn.session, 0)

    best = max(fleet.numbers, key=lambda number: (held(number), -fleet.load(number)))
    return sticky_hash(fleet, turn) if held(best) < turn.prompt - 2000 else best


def llm_d() -> Policy:
    sent: dict[int, dict[int, int]] = defaultdict(dict)

    def choose(fleet: Fleet, turn: Turn) -> int:
        numbers = fleet.numbers
        longest = max(1, *(len(fleet.engines[number].waiting) for number in numbers))

        def score(number: int) -> tuple[float, int]:
            queue = len(fleet.engines[number].waiting) / longest
            match = _sent(sent[number], turn) / turn.prompt
            return 3 * match + 2 * (1 - queue), -fleet.load(number)

        chosen = max(numbers, key=score)
        sent[chosen][turn.session] = turn.prompt
        return chosen

    return choose


def clairvoyant(sessions: Sequence[Session], costs: Costs, *, moves: bool) -> Policy:
    homes: dict[int, int] = {}
    left_s: dict[int, float] = {}
    totals: dict[int, float] = defaultdict(float)

    def choose(fleet: Fleet, turn: Turn) -> int:
        parts = sessions[turn.session].turns[turn.number :]
        step_s = costs.sequence_s + costs.step_s / _TYPICAL_BATCH
        work_s = sum(part.new * costs.prefill_s + part.output * step_s for part in parts)
        home = homes.get(turn.session, -1)
        if home >= 0:
            totals[home] -= left_s[turn.session]
        best = min(fleet.numbers, key=lambda number: totals[number])
        again_s = 2 * (turn.prompt - turn.root) * costs.prefill_s + work_s
        if home not in fleet.numbers or (moves and totals[home] - totals[best] > again_s):
            home = best
        homes[turn.session], left_s[turn.session] = home, work_s
        totals[home] += work_s
        return home

    return choose


POLICIES: dict[str, Callable[[], Policy]] = {
    "affinity": lambda: ours("affinity"),
    "least_in_flight": lambda: ours("least_in_flight"),
    "sticky_hash": lambda: sticky_hash,
    "bounded_hash": bounded_hash,
    "sglang_cache_aware": lambda: cache_aware(0.5, 32, 1.0001),
    "smg_cache_aware": lambda: cache_aware(0.3, 64, 1.5),
    "kv_aware": lambda: kv_aware,
    "llm_d": llm_d,
}
_RING = range(64)
_TYPICAL_BATCH = 32


@lru_cache
def _ring(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    return sorted((_hash(f"{number}#{point}"), number) for number in numbers for point in _RING)


def _sent(sent: dict[int, int], turn: Turn) -> int:
    """Tokens of a prompt that were sent there: of its session, or the root that all have."""
    return sent.get(turn.session, turn.root if sent else 0)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
