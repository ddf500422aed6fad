"""CPU of choosing an engine, by policy and number of engines: no sockets, one process.

Each engine has eight requests in flight.  A request ends and an engine is chosen for the next, so a
figure is nanoseconds of CPU per request for the choice and for counting the request in and out.
"""

from __future__ import annotations

import statistics
import time
from random import Random

from engines.protocol import Endpoint
from rollout.rules.load_balancing import make_policy
from rollout.rules.routing import Backend, Hint, InFlight

POLICIES = ("least_in_flight", "affinity", "prefix")
NUMS_OF_ENGINES = (4, 64, 1024)
_PER_ENGINE = 8
_NUM_REQUESTS = 3000
_NUM_HINTS = 1024
_NUM_PREFIXES = 64


def measure_choice(repeats: int) -> dict[str, dict[str, int]]:
    """Nanoseconds by policy and number of engines; medians of ``repeats``."""
    return {
        policy: {str(num): _choice_ns(policy, num, repeats) for num in NUMS_OF_ENGINES}
        for policy in POLICIES
    }


def _choice_ns(name: str, num_engines: int, repeats: int) -> int:
    rng = Random(1)
    policy = make_policy(name, affinity_ttl_s=3600.0, max_affinities=100_000)
    prefixes = [rng.randbytes(1024) for _ in range(_NUM_PREFIXES)]
    hints = [
        Hint(
            f"affinity {rng.randrange(4 * num_engines)}" if policy.wants_affinity else "",
            rng.choice(prefixes) + rng.randbytes(512) if policy.wants_prompt else b"",
        )
        for _ in range(_NUM_HINTS)
    ]
    in_flight: InFlight[int] = InFlight()
    (candidates,) = in_flight.offer(
        [Backend(f"engine-{number}", Endpoint("127.0.0.1", 9000)) for number in range(num_engines)]
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
