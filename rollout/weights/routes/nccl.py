"""Whether a broadcast goes by NCCL, and whether that works from this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from engines.protocol.spec import NCCL_CUMEM
from rollout.config import ServerConfig, Transport, WeightUpdate
from rollout.core.errors import ConfigError

logger = logging.getLogger(__name__)


def backend_of(config: ServerConfig, *, is_on_cuda: bool) -> str:
    """The backend of a server's broadcasts; ``auto`` is NCCL where it works.

    Args:
        is_on_cuda: whether the tensors are on a GPU.

    Raises:
        ConfigError: NCCL is named, or chosen, and would fail.
    """
    wanted, why_no_nccl = config.weights.backend, config.why_no_nccl
    if wanted == "auto" and not is_on_cuda:
        return "gloo"
    if wanted == "auto" and why_no_nccl:
        logger.warning(
            "weights.transport = distributed sends by gloo, through host memory: %s; "
            "cuda_ipc or shared_memory is faster",
            why_no_nccl,
        )
        return "gloo"
    if wanted == "gloo":
        return wanted
    why = f"weights.backend = nccl: {why_no_nccl}" if why_no_nccl else ""
    if why := why or why_cumem_differs(os.environ.get(NCCL_CUMEM), config.nccl_cumem):
        raise ConfigError(why, setting="weights.backend", value=wanted)
    return "nccl"


def check_nccl(config: ServerConfig, is_far: Callable[[], bool]) -> None:
    """Refuse a trainer with a GPU whose broadcasts would fail, before it has trained.

    Args:
        is_far: whether an engine is on another host, so that ``auto`` may broadcast to it, which is
            a warning: a rank of the trainer may be there.

    Raises:
        ConfigError: see ``backend_of``.
    """
    weights = config.weights
    if weights.update is WeightUpdate.FROZEN or not (why := why_nccl_fails(config)):
        return
    import torch

    if not torch.cuda.is_available():
        return
    if weights.transport is Transport.DISTRIBUTED:
        backend_of(config, is_on_cuda=True)
    elif weights.transport is Transport.AUTO and is_far():
        logger.warning("a push to engines on another host would fail: %s", why)


def why_nccl_fails(config: ServerConfig) -> str:
    """Why a broadcast by NCCL from this process would fail, where it is chosen."""
    if config.weights.backend == "gloo" or config.why_no_nccl:
        return ""
    return why_cumem_differs(os.environ.get(NCCL_CUMEM), config.nccl_cumem)


def nccl_of_torch() -> str:
    """The version of NCCL in this Python's torch, or why there is none."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"none: torch cannot be imported: {error}"
    built = f"torch {torch.__version__}"
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return f"none: {built} is built without it; broadcasts go by gloo, through host memory"
    version = ".".join(map(str, torch.cuda.nccl.version()[:3]))
    return f"{version}, in {built}"


def why_cumem_differs(own: str | None, engines: Mapping[str, str | None]) -> str:
    """Why a broadcast by NCCL would fail between this process and the engines.

    NCCL reads the variable once, and all ranks of a group must have the same value.  SGLang sets
    it; NCCL's own default is another one.

    Args:
        own: the value in this process, or None if it is not set.
        engines: group -> the value of its engines, or None if only their hosts know it.
    """
    for group, value in engines.items():
        if own is None or value not in (None, own):
            return (
                f"{NCCL_CUMEM} is {own or 'not set'} in the trainer, and the engines of group "
                f"{group} have {value or 'the value of their hosts; SGLang mostly takes 0'}: set "
                f"{NCCL_CUMEM}={value or 0} in the environment of the trainer before its process "
                "starts, or engine.env of the group to the trainer's value"
            )
    return ""
