"""The engines in a broadcast group, as trainer and server groups exchange them.

Always true: a group is kept for the next push only if its ranks are the same processes of the same
engines, every engine reports that it is a member, and the push that created it succeeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engines.protocol import ProcessIdentity


@dataclass(frozen=True, slots=True)
class BroadcastMember:
    """One engine in a broadcast group.

    Attributes:
        process: identifies its processes; empty if unknown.  An attached engine's is unknown:
            its owner may have restarted it behind the same address.
        held: the groups that it is a member of, as the terms named them; empty for none.
        takes_flat: it accepts many tensors in one broadcast.
    """

    engine_id: str
    num_ranks: int = 1
    process: str = ""
    held: str = ""
    takes_flat: bool = False

    @property
    def rank_of(self) -> tuple[str, str, int]:
        """Equal in two pushes if the ranks are the same processes."""
        return self.engine_id, self.process, self.num_ranks


def to_json(members: Iterable[BroadcastMember]) -> list[dict[str, Any]]:
    return [asdict(member) for member in members]


def from_json(values: Iterable[dict[str, Any]]) -> tuple[BroadcastMember, ...]:
    return tuple(BroadcastMember(**value) for value in values)


def can_be_kept(members: Sequence[BroadcastMember]) -> bool:
    """Whether the next push can recognise a group of these engines."""
    return bool(members) and all(member.process for member in members)


def is_same_group(
    group_name: str, before: Sequence[BroadcastMember], now: Sequence[BroadcastMember]
) -> bool:
    """Whether the group that ``before`` joined can send to the engines in ``now``."""
    same = {member.rank_of for member in before} == {member.rank_of for member in now}
    return same and can_be_kept(now) and all(member.held == group_name for member in now)


def process_text(processes: Iterable[ProcessIdentity]) -> str:
    """Identifies an engine's processes, over all machines and boots."""
    return " ".join(f"{process.boot_id}/{process.pid}/{process.started}" for process in processes)
