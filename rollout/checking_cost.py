"""What it cost to read the weights of engines for their fingerprints, per GiB.

Always true: nothing is told that was not measured: bytes that one engine does not tell make the
sum unknown, and what depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Read:
    """What one engine read.

    Attributes:
        elapsed_s: from the question to its answer.
        num_bytes: by its own word; None where it does not tell.
        cpu_s: of its process, by its own word.
    """

    elapsed_s: float
    num_bytes: int | None = None
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class CheckingCost:
    """What engines read side by side.

    Attributes:
        wall_s: until the slowest was done.
        engine_s: seconds of all engines together.
        num_bytes, cpu_s: of all together; None where one did not tell.
    """

    num_engines: int
    wall_s: float
    engine_s: float
    num_bytes: int | None
    cpu_s: float | None

    @property
    def gib_per_s(self) -> float | None:
        """Of all engines together, by the clock."""
        return self.num_bytes / _GIB / self.wall_s if self.num_bytes and self.wall_s else None

    @property
    def s_per_gib(self) -> float | None:
        """What a GiB took the engine that holds it."""
        return self.engine_s / (self.num_bytes / _GIB) if self.num_bytes else None

    @property
    def cpu_s_per_gib(self) -> float | None:
        if not self.num_bytes or self.cpu_s is None:
            return None
        return self.cpu_s / (self.num_bytes / _GIB)

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON; ``said`` is the sentence."""
        return asdict(self) | {
            "gib_per_s": self.gib_per_s,
            "s_per_gib": self.s_per_gib,
            "cpu_s_per_gib": self.cpu_s_per_gib,
            "said": str(self),
        }

    def __str__(self) -> str:
        engines = f"{self.num_engines} engine{'' if self.num_engines == 1 else 's'}"
        took = f"fingerprints of {engines} in {self.wall_s:.3f} s"
        if self.gib_per_s is None or self.s_per_gib is None:
            return f"{took}, bytes unknown"
        size = (self.num_bytes or 0) / 2**20
        of = f"{size / 1024:.2f} GiB" if size >= 1024 else f"{size:.1f} MiB"
        cpu = self.cpu_s_per_gib
        told = "unknown" if cpu is None else f"{cpu:.3f} s per GiB"
        return (
            f"{took}: {of}, {self.gib_per_s:.2f} GiB/s, {self.s_per_gib:.3f} s per GiB, CPU {told}"
        )


def cost_of(reads: Iterable[Read], wall_s: float) -> CheckingCost | None:
    """The cost of these, side by side; None if nothing was read."""
    known = list(reads)
    if not known:
        return None
    sizes = [one.num_bytes for one in known if one.num_bytes is not None]
    cpu = [one.cpu_s for one in known if one.cpu_s is not None]
    return CheckingCost(
        len(known),
        wall_s,
        sum(one.elapsed_s for one in known),
        sum(sizes) if len(sizes) == len(known) else None,
        sum(cpu) if len(cpu) == len(known) else None,
    )
