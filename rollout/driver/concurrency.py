"""How many samples to have in flight, from what the engines say of their load.

Always true: the limit stays within its bounds; it falls by a part of itself and rises by a part
of itself, never by more than a quarter at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollout.driver.door import Load

# Above this the engine soon has to retract requests and compute them again.
_KV_FULL = 0.95
_KV_BUSY = 0.85
# A short queue in an engine keeps it busy when a request ends; a long one only ages.
_QUEUE_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where the limit may be.

    Attributes:
        lowest_per_engine: so that every engine stays busy whatever it says.
        highest: of all engines together.
    """

    lowest_per_engine: int = 4
    highest: int = 512


def next_limit(limit: int, num_used: int, load: Load, bounds: Bounds) -> int:
    """The limit from now on.

    Args:
        num_used: of the limit; one that is not reached does not rise.
    """
    lowest = min(bounds.highest, max(1, bounds.lowest_per_engine * load.num_engines))
    kv_use = load.kv_use or 0.0
    if not load.num_engines:
        wanted = limit  # nobody serves: that says nothing of how many would be too many
    elif kv_use >= _KV_FULL:
        wanted = int(limit * 0.75)
    elif load.num_waiting > _QUEUE_SHARE * max(1, load.num_running):
        wanted = int(limit * 0.9)
    elif kv_use < _KV_BUSY and num_used >= limit:
        wanted = limit + max(1, limit // 4)
    else:
        wanted = limit
    return max(lowest, min(bounds.highest, wanted))
