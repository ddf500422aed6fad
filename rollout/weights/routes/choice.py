"""Chooses the route of each engine in a push, and how it is used.  Nothing else chooses.

Engines and ranks are matched by GPU and by node, never by their order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from engines.kinds import kind_of
from rollout.config import Transport, WeightsConfig
from rollout.config.compatibility import of_window, why_no_copy
from rollout.core.errors import ConfigError
from rollout.weights.format.checkpoint_config import has_experts, quantisation_of
from rollout.weights.format.encoding import EncodingTerms
from rollout.weights.routes import adapter, broadcast, by_value, cuda_ipc, disk, shared_memory
from rollout.weights.routes.rank_end import Encoding, RouteRow, why_far
from rollout.weights.routes.route import Chosen, EnginePlace, RankPlace

ROUTES: dict[str, RouteRow] = {
    row.transport: row
    for row in (cuda_ipc.ROW, shared_memory.ROW, broadcast.ROW, disk.ROW, adapter.ROW, by_value.ROW)
}
"""The best first.  ``auto`` takes the first that reaches an engine."""

WHOLE = EncodingTerms()
"""Whole tensors for all engines."""

NEAR_ONLY = (Transport.SHARED_MEMORY, Transport.CUDA_IPC)
"""They reach engines on hosts of the trainer alone."""
# A copy by value passes through a dozen buffers of the trainer, the server and the engine.
MOST_BYTES_BY_VALUE = 8 << 30


def choose(
    wanted: Transport,
    ranks: Sequence[RankPlace],
    engines: Sequence[EnginePlace],
    *,
    is_copy: bool = False,
    terms: EncodingTerms = WHOLE,
    encodings: Mapping[str, Encoding] = MappingProxyType({}),
) -> dict[str, Chosen]:
    """Engine id -> its route, and its encoding.

    ``auto``: CUDA IPC for an engine all of whose GPUs are held by ranks; else shared memory where
    a rank is on its host; else broadcast; by value where nothing else reaches it.  An engine gets
    none that it does not take.

    Args:
        wanted: a route that is named is for all engines.
        is_copy: the tensors are copied before the engines are called.
        encodings: rank 0's, the best first.

    Raises:
        ConfigError: the named route does not reach an engine, or sends no copies; or the named
            encoding is not for an engine.
    """
    if is_copy and is_only_streamed(wanted):
        raise ConfigError(why_no_copy(wanted), setting="weights.transport", value=wanted.value)
    if wanted is Transport.AUTO:
        rows = [row for row in ROUTES.values() if row.is_automatic and row.is_copy >= is_copy]
        found = {engine.engine_id: _best(rows, ranks, engine) for engine in engines}
    else:
        found = {engine.engine_id: _named(wanted, ranks, engine) for engine in engines}
    return _same_for_members(
        {
            engine.engine_id: encoded_for(engine, found[engine.engine_id], terms, encodings)
            for engine in engines
        }
    )


def _same_for_members(chosen: dict[str, Chosen]) -> dict[str, Chosen]:
    """The routes, with one encoding for all engines of the broadcast: the best that all apply."""
    members = {
        name: choice for name, choice in chosen.items() if choice.transport == Transport.DISTRIBUTED
    }
    if not members:
        return chosen
    least = min(members.values(), key=lambda choice: (choice.is_read, not choice.is_full))
    return chosen | dict.fromkeys(members, least)


def encoded_for(
    engine: EnginePlace, chosen: Chosen, terms: EncodingTerms, encodings: Mapping[str, Encoding]
) -> Chosen:
    """The route with the best encoding that the engine applies and the route carries.

    Raises:
        ConfigError: the named encoding is not for this engine.
    """
    for name, encoding in encodings.items():
        if not terms.wants(name):
            continue
        of_engine = why = _why_only_whole(engine, name)
        if not why and not ROUTES[chosen.transport].is_encoded:
            why = f"{chosen.transport} carries whole tensors only"
        goes = why or encoding.goes(chosen.transport, engine.weight_version, terms)
        if not isinstance(goes, str):
            return replace(chosen, encoding=name, is_full=not goes)
        if terms.wanted == name:
            raise ConfigError(
                f"weights.encoding = {name}: engine {engine.engine_id}: {goes}; use auto or "
                f"full{'' if of_engine else ', or weights.transport = by_value'}",
                setting="weights.encoding",
                value=name,
            )
    return chosen


def _why_only_whole(engine: EnginePlace, encoding: str) -> str:
    """Why an engine takes no tensors that are encoded so, by any route."""
    if encoding not in engine.encodings:
        return "it applies whole tensors only"
    return "" if engine.is_compared else "its weights are not compared with the pushed ones"


def is_only_streamed(transport: str) -> bool:
    """Whether it reads the trainer's tensors while engines load them, so that it sends no copy."""
    return transport in ROUTES and not ROUTES[transport].is_copy


def _named(wanted: Transport, ranks: Sequence[RankPlace], engine: EnginePlace) -> Chosen:
    # What is named is not refused for an estimate.
    ranks = [replace(rank, why_no_room="") for rank in ranks]
    found = ROUTES[wanted].reach(ranks, replace(engine, is_reached=True))
    if isinstance(found, str):
        raise _refusal(wanted, engine, found)
    return found


def _refusal(wanted: Transport, engine: EnginePlace, why: str) -> ConfigError:
    is_clause = why.startswith("it ")
    text = f"engine {engine.engine_id}{f' {why[3:]}' if is_clause else f': {why}'}"
    return ConfigError(
        f"weights.transport = {wanted}: {text}; leave weights.transport out to give each "
        "engine the best route that reaches it, or use distributed, or disk with a shared folder",
        setting="weights.transport",
        value=wanted.value,
    )


def _best(rows: Sequence[RouteRow], ranks: Sequence[RankPlace], engine: EnginePlace) -> Chosen:
    reasons: list[str] = []
    for row in rows:
        found = row.reach(ranks, engine)
        if not isinstance(found, str):
            return replace(found, why="; ".join(reasons)) if row is rows[-1] else found
        reasons.append(found)
    raise AssertionError("the last route reaches every engine")


def check_reach(wanted: Transport, nodes: Collection[str], engines: Sequence[EnginePlace]) -> None:
    """Refuse an offload whose push would not reach an engine, as far as that is known before.

    Args:
        nodes: of the ranks that push.

    Raises:
        ConfigError: the transport reaches engines on these nodes only.
    """
    ranks = [RankPlace(node) for node in nodes]
    for engine in engines:
        if wanted in NEAR_ONLY and (why := why_far(ranks, engine)):
            raise _refusal(wanted, engine, why)


def by_value_note(wanted: Transport, chosen: Mapping[str, Chosen], num_bytes: int) -> str:
    """A warning about engines that get the weights by value though that was not named; or empty.

    Args:
        num_bytes: of the model; 0 if unknown.

    Raises:
        ConfigError: they are more than ``MOST_BYTES_BY_VALUE`` bytes.
    """
    slow = {
        name: choice for name, choice in chosen.items() if choice.transport is Transport.BY_VALUE
    }
    if wanted is Transport.BY_VALUE or not slow:
        return ""
    first, why = next((name, choice.why) for name, choice in slow.items())
    others = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
    total = num_bytes * len(slow)
    text = f"engine {first}{others}: the weights go by value, {total} bytes, because {why}"
    if total > MOST_BYTES_BY_VALUE:
        raise ConfigError(
            f"{text}; that is over {MOST_BYTES_BY_VALUE} bytes, so name it: weights.transport = "
            "by_value; or let a rank of the trainer run on the engine's host",
            setting="weights.transport",
            value=wanted.value,
        )
    return text


def check_window(weights: WeightsConfig, *, is_copy: bool) -> None:
    """Refuse an offload whose push would be refused at its end.

    Args:
        is_copy: the window copies the tensors while it is open, and sends them at its end.

    Raises:
        ConfigError: the transport cannot send a copy, or the server takes no weights.
    """
    streams = is_only_streamed(weights.transport)
    for name, why in of_window(weights, is_copy=is_copy, is_only_streamed=streams):
        raise ConfigError(why, setting=f"weights.{name}", value=getattr(weights, name).value)


def why_loads_cost(kinds: Collection[str], checkpoint: Mapping[str, Any]) -> str:
    """Why each load from a path costs these engines more than its tensors.

    SGLang restores and packs all modules at each such load, and once in a push by value.

    Args:
        kinds: of the server's engines.
        checkpoint: its ``config.json``.
    """
    if not any(kind_of(kind).packs_at_each_load for kind in kinds):
        return ""
    if quantisation_of(checkpoint):
        return "at each load from a path, SGLang packs all quantised weights again"
    if has_experts(checkpoint):
        return "at each load from a path, SGLang may pack the weights of all experts again"
    return ""


def loads_at_once(wanted: Transport, why_cost: str, *, streams: bool) -> bool:
    """Whether all buckets in shared memory are loaded in one call, so that none is streamed.

    Args:
        why_cost: why each load costs more than its tensors.
        streams: the settings ask for buckets that are loaded while the next one is built.
    """
    return bool(why_cost) and (wanted is Transport.AUTO or not streams)


def stream_note(wanted: Transport, why_cost: str, *, streams: bool) -> str:
    """A warning about a push that is streamed by path although each load costs; else empty."""
    if wanted is not Transport.SHARED_MEMORY or not streams or not why_cost:
        return ""
    return (
        f"weights.stream with weights.transport = shared_memory: {why_cost}, so once for each "
        "bucket; leave weights.stream out, or set weights.transport to auto or by_value"
    )
