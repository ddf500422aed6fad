"""Who joins the group of a broadcast, as trainer and server groups tell one another.

Always true: a group is kept from one push to the next only if its ranks are the same processes of
the same engines, every one of them says that it is in it, and the push that made it ended well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engines.protocol import ProcessIdentity


@dataclass(frozen=True, slots=True)
class Joiner:
    """One engine.

    Attributes:
        process: what tells its process from any other; empty where nobody knows, as of an attached
            engine, which its owner may have started again behind the same address.
        held: the group that it is in already; empty for none.
        takes_flat: it takes many tensors in one broadcast.
    """

    engine_id: str
    num_ranks: int = 1
    process: str = ""
    held: str = ""
    takes_flat: bool = False

    @property
    def rank_of(self) -> tuple[str, str, int]:
        """Equal in two pushes if the engine has the same ranks in both."""
        return self.engine_id, self.process, self.num_ranks


def to_json(joiners: Iterable[Joiner]) -> list[dict[str, Any]]:
    return [asdict(one) for one in joiners]


def from_json(said: Iterable[dict[str, Any]]) -> tuple[Joiner, ...]:
    return tuple(Joiner(**one) for one in said)


def may_keep(joiners: Sequence[Joiner]) -> bool:
    """Whether a group of these can be known again at the next push."""
    return bool(joiners) and all(one.process for one in joiners)


def is_still(group_name: str, before: Sequence[Joiner], now: Sequence[Joiner]) -> bool:
    """Whether the group that ``before`` joined is one that ``now`` can be sent to."""
    same = {one.rank_of for one in before} == {one.rank_of for one in now}
    return same and may_keep(now) and all(one.held == group_name for one in now)


def process_text(processes: Iterable[ProcessIdentity]) -> str:
    """What tells the processes of one engine from all others, in every boot of every machine."""
    return " ".join(f"{one.boot_id}/{one.pid}/{one.started}" for one in processes)
