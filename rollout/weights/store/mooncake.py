"""Mooncake's TransferEngine, if it is installed (https://github.com/kvcache-ai/Mooncake).

Always true: nothing of it is imported before it is asked for; where it cannot be used, the log
says what is missing and units travel over the streams.
"""

from __future__ import annotations

import logging
from typing import Any

from rollout.errors import WeightsUnavailable
from rollout.weights.store.moving import Mover

logger = logging.getLogger(__name__)

# Each end finds the other by its address; there is no third process that keeps a list.
_NO_METADATA_SERVER = "P2PHANDSHAKE"
_PACKAGE = "mooncake-transfer-engine-non-cuda"
_LIBRARIES = "libibverbs1 libnuma1 libcurl4"


def mover_of(transfer: str, host: str) -> Mover | None:
    """The node's end of the transfers that ``weights.store.transfer`` names, if they are not the
    streams and can be had."""
    if transfer != "mooncake":
        return None
    try:
        mover = open_mooncake(host)
    except WeightsUnavailable as error:
        logger.error("store: weights.store.transfer is mooncake, but tcp is used: %s", error)
        return None
    logger.info("store: Mooncake's TransferEngine listens at %s", mover.session)
    return mover


def open_mooncake(host: str) -> Mover:
    """This process's end.

    It uses RDMA where it finds such devices, else TCP; ``MC_FORCE_TCP=1`` makes it use TCP.

    Raises:
        WeightsUnavailable: with what has to be installed, or what it said.
    """
    engine = _engine_class()()
    # The third and the fourth, protocol and devices, it finds out by itself in this build.
    status = engine.initialize(host, _NO_METADATA_SERVER, "tcp", "")
    if status:
        raise WeightsUnavailable(
            f"Mooncake's TransferEngine does not start at {host} (status {status}); "
            "it writes why to the agent's stderr"
        )
    return Mover(engine, host)


def _engine_class() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError as error:
        raise WeightsUnavailable(
            f"no Python module {error.name}: on every node pip install {_PACKAGE}, "
            "or mooncake-transfer-engine, the build with CUDA"
        ) from None
    except ImportError as error:
        raise WeightsUnavailable(
            f"Mooncake's library does not load: {error}; on Debian and Ubuntu: "
            f"apt-get install {_LIBRARIES}"
        ) from None
    return TransferEngine
