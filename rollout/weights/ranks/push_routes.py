"""Which route each engine gets a push by, from what all ranks say of themselves."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollout.config import Transport, WeightUpdate
from rollout.weights.format.encoding import FULL, EncodingTerms
from rollout.weights.format.manifest import Manifest
from rollout.weights.ranks.messages import Ready
from rollout.weights.ranks.trainer_rank import TrainerRank
from rollout.weights.routes.choice import (
    ROUTES,
    by_value_note,
    choose,
    encoded_for,
)
from rollout.weights.routes.route import Chosen, EnginePlace, EngineRoute, RankPlace
from rollout.weights.routes.shared_memory import stream_bytes, why_no_room_for
from rollout.weights.tensors.sources import PlannedSource, StreamedSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PushRoutes:
    """The routes of one push.

    Attributes:
        chosen: one for each payload.
        ranks: where the ranks are.
        assigned: of each engine, by its name.
    """

    chosen: tuple[Chosen, ...] = ()
    ranks: Sequence[RankPlace] = ()
    assigned: Mapping[str, EngineRoute] = field(default_factory=dict)


def sizes_of(source: PlannedSource | StreamedSource, expected: Manifest | None) -> tuple[int, int]:
    """Bytes of the whole push, and of its largest tensor; 0 if unknown."""
    if isinstance(source, PlannedSource):
        return source.num_bytes, source.largest_bytes
    sizes = [spec.num_bytes for spec in expected.tensors.values()] if expected else []
    return sum(sizes), max(sizes, default=0)


def choose_routes(
    rank: TrainerRank,
    readies: Sequence[Ready],
    engines: Sequence[EnginePlace],
    sizes: tuple[int, int],
    *,
    contents: WeightUpdate,
    may_stream: bool,
    hosts_with_all: Collection[int],
) -> PushRoutes:
    """The routes of all engines.

    Args:
        rank: rank 0.
        readies: of all ranks.
        sizes: bytes of the push, and of its largest tensor.
        hosts_with_all: hosts (each by its lowest rank) whose files stay until the push has ended.

    Raises:
        ConfigError: the configured transport does not reach an engine.
    """
    wanted = rank.config.weights.transport
    ranks = _places(rank, readies, sizes, hosts_with_all)
    encoding = rank.config.weights.encoding if contents is WeightUpdate.FULL else FULL
    terms = EncodingTerms(encoding, rank.num_ranks)
    by_name = rank.encodings
    chosen = choose(wanted, ranks, engines, is_copy=not may_stream, terms=terms, encodings=by_name)
    if note := by_value_note(wanted, chosen, sizes[0]):
        logger.warning("%s", note)
    assigned = {
        name: EngineRoute(choice.payload, ROUTES[choice.transport].route(choice))
        for name, choice in chosen.items()
    }
    if not chosen:  # engines that come later get what an engine on this host would
        near = Chosen(Transport.SHARED_MEMORY if wanted is Transport.AUTO else wanted)
        later = EnginePlace("of a later engine", "", encodings=tuple(by_name))
        chosen = {"": encoded_for(later, near, terms, by_name)}
    by_payload: dict[str, Chosen] = {}
    for choice in chosen.values():
        first = by_payload.setdefault(choice.payload, replace(choice, why=""))
        gpus = tuple(dict.fromkeys((*first.gpus, *choice.gpus)))
        encoding = first.encoding if first.is_read else choice.encoding
        by_payload[choice.payload] = replace(first, gpus=gpus, encoding=encoding)
    return PushRoutes(tuple(by_payload.values()), ranks, assigned)


def _places(
    rank: TrainerRank,
    readies: Sequence[Ready],
    sizes: tuple[int, int],
    hosts_with_all: Collection[int],
) -> list[RankPlace]:
    """Where the ranks are, and which hosts lack the room for the files of the push."""
    num_bytes, largest_bytes = sizes
    largest_bucket = max(rank.config.weights.bucket_bytes, largest_bytes)
    room: defaultdict[int, list[int]] = defaultdict(list)
    for ready, host in zip(readies, rank.hosts, strict=True):
        room[host].append(ready.room_bytes)
    why_not = {}
    for host, of_ranks in room.items():
        streamed = min(num_bytes, stream_bytes(largest_bucket, len(of_ranks)))
        where = f"{rank.config.weights.shared_memory_path} on the host of rank {host}"
        why_not[host] = why_no_room_for(
            num_bytes if host in hosts_with_all else streamed, of_ranks, where
        )
    return [
        RankPlace(ready.node, host, ready.gpu, why_not[host])
        for ready, host in zip(readies, rank.hosts, strict=True)
    ]
