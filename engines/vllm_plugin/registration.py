"""The entry point ``vllm.general_plugins``: vLLM calls it in each of its processes."""

from __future__ import annotations

BACKEND = "rollout_shm"
"""The name to use in ``--weight-transfer-config``."""


def register() -> None:
    """Add the weight transfer backend to those of vLLM, if it is not there yet."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "engines.vllm_plugin.shm_transfer", "ShmTransfer"
        )
    except ValueError:  # vLLM calls its plugins more than once in some processes
        return
