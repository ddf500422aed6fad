"""What drivers tell of their steps, for whoever looks at the server: a bounded board.

The router is the one thing that every driver knows and reaches; it neither reads nor keeps more
than this of what is put here.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

_NUM_KEPT = 32
_MAX_NAMES = 512
_MAX_NAME_CHARACTERS = 200


class Figures:
    """The last steps that were told, oldest first; each has a serial number."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._told: deque[dict[str, Any]] = deque(maxlen=_NUM_KEPT)
        self._num_told = 0

    def put(self, told: Any) -> None:
        """Keep ``{"step": 3, "metrics": {name: number}}``, with ``lengths`` if it has them.

        Raises:
            ValueError: it is not that.
        """
        if not isinstance(told, Mapping) or not isinstance(told.get("step"), int):
            raise ValueError("figures are an object with 'step', a whole number, and 'metrics'")
        self._num_told += 1
        self._told.append(
            {
                "serial": self._num_told,
                "at_s": round(self._clock(), 3),
                "step": told["step"],
                "metrics": _numbers(told.get("metrics", {})),
                "lengths": _numbers(told.get("lengths", {})),
            }
        )

    def last(self) -> list[dict[str, Any]]:
        """All that is kept."""
        return list(self._told)


def _numbers(told: Any) -> dict[str, float]:
    if not isinstance(told, Mapping) or len(told) > _MAX_NAMES:
        raise ValueError(f"figures are an object of at most {_MAX_NAMES} numbers")
    for name, value in told.items():
        if len(name) > _MAX_NAME_CHARACTERS:
            raise ValueError(f"a figure's name has {len(name)} characters: {name[:40]}...")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"figure {name!r} is no number: {value!r:.60}")
        if not math.isfinite(value):
            raise ValueError(f"figure {name!r} is {value}")
    return dict(told)
