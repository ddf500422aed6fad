"""Chooses the transport of a push, and how it is used."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rollout.config import EngineKind, Transport, WeightsConfig, WeightUpdate
from rollout.core.errors import ConfigError
from rollout.weights.format.checkpoint_config import has_experts, quantisation_of

ONLY_STREAM = (Transport.DISTRIBUTED, Transport.CUDA_IPC)
"""They read the trainer's tensors while engines load them, so they cannot send a copy later."""
NEAR_ONLY = (Transport.SHARED_MEMORY, Transport.CUDA_IPC)
"""They reach engines on the trainer's host alone."""
NCCL_CUMEM = "NCCL_CUMEM_ENABLE"


def choose_transport(wanted: Transport, remote_engines: list[str], why_no_room: str) -> Transport:
    """Replaces ``auto`` by a transport; checks one that is named.

    ``auto``: shared memory where every engine runs on the trainer's host and the host has room,
    else by value, which works anywhere.

    Args:
        remote_engines: ids of engines that do not run on this host.
        why_no_room: why a copy of the weights does not fit into shared memory; empty if it does.

    Raises:
        ConfigError: the named transport cannot reach an engine.
    """
    if wanted in NEAR_ONLY and remote_engines:
        raise ConfigError(
            f"weights.transport = {wanted}: engine {remote_engines[0]} runs on another host than "
            "the trainer; use distributed, or disk with a shared folder",
            setting="weights.transport",
            value=wanted.value,
        )
    if wanted is not Transport.AUTO:
        return wanted
    return Transport.TENSOR if remote_engines or why_no_room else Transport.SHARED_MEMORY


def check_window(weights: WeightsConfig, *, is_copy: bool) -> None:
    """Refuse an offload whose push would be refused at its end.

    Args:
        is_copy: the window copies the tensors while it is open, and sends them at its end.

    Raises:
        ConfigError: the transport cannot send a copy, or the server takes no weights.
    """
    if weights.update is WeightUpdate.FROZEN and not is_copy:
        raise ConfigError(
            "offloaded(weights): weights.update is frozen, so the server never takes new weights; "
            "leave the function out",
            setting="weights.update",
            value=weights.update.value,
        )
    takes_tensors = weights.update in (WeightUpdate.FULL, WeightUpdate.PARTIAL)
    if is_copy and takes_tensors and weights.transport in ONLY_STREAM:
        raise ConfigError(
            f"weights.transport = {weights.transport}: it reads the tensors while engines load "
            "them, so window.push cannot copy them; use offloaded(weights=function), or "
            "give_memory() and then serve_weights(tensors) or pusher.push(tensors)",
            setting="weights.transport",
            value=weights.transport.value,
        )


def why_loads_cost(kinds: Collection[EngineKind], checkpoint: Mapping[str, Any]) -> str:
    """Why each load from a path costs these engines more than its tensors; empty if it does not.

    SGLang restores and packs all modules at each such load, and once in a push by tensor.

    Args:
        kinds: of the server's engines.
        checkpoint: its ``config.json``.
    """
    if not {EngineKind.SGLANG, EngineKind.ATTACHED} & set(kinds):
        return ""
    if quantisation_of(checkpoint):
        return "at each load from a path, SGLang packs all quantised weights again"
    if has_experts(checkpoint):
        return "at each load from a path, SGLang may pack the weights of all experts again"
    return ""


def loads_at_once(wanted: Transport, chosen: Transport, why_cost: str, *, streams: bool) -> bool:
    """Whether all buckets of a push are loaded in one call, so that it is not streamed.

    Args:
        why_cost: why each load costs more than its tensors; empty if it does not.
        streams: the settings ask for buckets that are loaded while the next one is built.
    """
    is_free = wanted is Transport.AUTO or not streams
    return chosen is Transport.SHARED_MEMORY and bool(why_cost) and is_free


def stream_note(wanted: Transport, why_cost: str, *, streams: bool) -> str:
    """A warning about a push that is streamed by path although each load costs; else empty."""
    if wanted is not Transport.SHARED_MEMORY or not streams or not why_cost:
        return ""
    return (
        f"weights.stream with weights.transport = shared_memory: {why_cost}, so once for each "
        "bucket; leave weights.stream out, or set weights.transport to auto or tensor"
    )


def choose_backend(wanted: str, why_no_nccl: str, *, is_on_cuda: bool) -> str:
    """The backend of a broadcast: ``auto`` is NCCL for tensors on a GPU that NCCL can send."""
    if wanted != "auto":
        return wanted
    return "nccl" if is_on_cuda and not why_no_nccl else "gloo"


def why_cumem_differs(own: str | None, engines: Mapping[str, str | None]) -> str:
    """Why a broadcast by NCCL would fail between this process and the engines; empty if not.

    NCCL reads the variable once, and all ranks of a group must have the same value.  SGLang sets
    it; NCCL's own default is another one.

    Args:
        own: the value in this process; None if it is not set.
        engines: group -> the value of its engines; None if only their owner knows it.
    """
    for group, value in engines.items():
        if own is None or value not in (None, own):
            return (
                f"{NCCL_CUMEM} is {own or 'not set'} in the trainer, and the engines of group "
                f"{group} have {value or 'the value of their owner; SGLang takes 0'}: set "
                f"{NCCL_CUMEM}={value or 0} in the environment of the trainer before its process "
                "starts, or engine.env of the group to the trainer's value"
            )
    return ""
