"""Mooncake's TransferEngine, if it is installed (https://github.com/kvcache-ai/Mooncake).

Always true: it is imported only if the settings name it; if it cannot be used, the log names what
is missing, and units are sent over TCP streams.
"""

from __future__ import annotations

import logging
from typing import Any

from rollout.core.errors import WeightsUnavailable
from rollout.weights.store.transfer.rdma import RdmaTransfer

logger = logging.getLogger(__name__)

# Peers connect by address, without a metadata server.
_NO_METADATA_SERVER = "P2PHANDSHAKE"
_PACKAGE = "mooncake-transfer-engine-non-cuda"
_LIBRARIES = "libibverbs1 libnuma1 libcurl4"


def open_transfer(transfer: str, host: str) -> RdmaTransfer | None:
    """The transfer that ``weights.store.transfer`` names, or None for TCP, or if it is
    unavailable."""
    if transfer != "mooncake":
        return None
    try:
        rdma = open_mooncake(host)
    except WeightsUnavailable as error:
        logger.error("store: weights.store.transfer is mooncake, but tcp is used: %s", error)
        return None
    logger.info("store: Mooncake's TransferEngine listens at %s", rdma.session)
    return rdma


def open_mooncake(host: str) -> RdmaTransfer:
    """Start the transfer engine in this process.

    It uses RDMA where it finds such devices, else TCP; ``MC_FORCE_TCP=1`` makes it use TCP.

    Raises:
        WeightsUnavailable: names what to install, or the error.
    """
    engine = _engine_class()()
    # This build detects protocol and devices itself and ignores both arguments.
    status = engine.initialize(host, _NO_METADATA_SERVER, "tcp", "")
    if status:
        raise WeightsUnavailable(
            f"Mooncake's TransferEngine does not start at {host} (status {status}); "
            "the reason is in the agent's stderr"
        )
    return RdmaTransfer(engine, host)


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
