"""What choosing an engine costs, by policy and number of engines: no sockets, one process.

A request ends somewhere and the next one is chosen an engine for, with eight requests on each
engine; so a figure is nanoseconds of CPU per request for the choice and both of its entries in
the books.
"""

from __future__ import annotations

import statistics
import time
from random import Random

from engines.protocol import Endpoint
from rollout.choosing import policy_of
from rollout.routing import Hint, InFlight, Member

POLICIES = ("least_in_flight", "power_of_two", "round_robin", "session", "prefix")
NUMS_OF_ENGINES = (4, 64, 1024)
_PER_ENGINE = 8
_NUM_REQUESTS = 3000
_NUM_HINTS = 1024
_BEGINNINGS = 64


def measure_choice(repeats: int) -> dict[str, dict[str, int]]:
    """Per policy and number of engines; the median of ``repeats``."""
    return {
        policy: {str(num): _choice_ns(policy, num, repeats) for num in NUMS_OF_ENGINES}
        for policy in POLICIES
    }


def _choice_ns(name: str, num_engines: int, repeats: int) -> int:
    rng = Random(1)
    policy = policy_of(name, session_ttl_s=3600.0, max_sessions=100_000)
    beginnings = [rng.randbytes(1024) for _ in range(_BEGINNINGS)]
    hints = [
        Hint(
            f"session {rng.randrange(4 * num_engines)}" if policy.wants_session else "",
            rng.choice(beginnings) + rng.randbytes(512) if policy.wants_prompt else b"",
        )
        for _ in range(_NUM_HINTS)
    ]
    in_flight: InFlight[int] = InFlight()
    (candidates,) = in_flight.offer(
        Member(f"engine-{number}", Endpoint("127.0.0.1", 9000)) for number in range(num_engines)
    )
    live: list[tuple[str, int]] = []
    for number in range(_PER_ENGINE * num_engines):
        member = policy.choose(candidates, hints[number % _NUM_HINTS])
        live.append((member.engine_id, number))
        in_flight.add(member.engine_id, number)
    costs = []
    for _ in range(repeats):
        ending = [rng.randrange(len(live)) for _ in range(_NUM_REQUESTS)]
        began_s = time.process_time()
        for number, place in enumerate(ending, start=len(live)):
            in_flight.discard(*live[place])
            member = policy.choose(candidates, hints[number % _NUM_HINTS])
            live[place] = (member.engine_id, number)
            in_flight.add(member.engine_id, number)
        costs.append((time.process_time() - began_s) / _NUM_REQUESTS)
    return round(statistics.median(costs) * 1e9)
