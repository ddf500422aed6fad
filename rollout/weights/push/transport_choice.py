"""Chooses the transport of a push."""

from __future__ import annotations

from rollout.config import Transport
from rollout.core.errors import ConfigError


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
    if wanted in (Transport.SHARED_MEMORY, Transport.CUDA_IPC) and remote_engines:
        raise ConfigError(
            f"weights.transport = {wanted}: engine {remote_engines[0]} runs on another host than "
            "the trainer; use distributed, or disk with a shared folder",
            setting="weights.transport",
            value=wanted.value,
        )
    if wanted is not Transport.AUTO:
        return wanted
    return Transport.TENSOR if remote_engines or why_no_room else Transport.SHARED_MEMORY
