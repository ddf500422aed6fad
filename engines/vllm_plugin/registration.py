"""The entry point ``vllm.general_plugins``: vLLM calls it in each of its processes."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

_DISTRIBUTIONS = ("ray-rollout", "ray-rollout-vllm")
BACKEND = "rollout_shm"
"""The name to use in ``--weight-transfer-config``."""


def register() -> None:
    """Add the weight transfer backend to those of vLLM, if it is not there yet.

    Raises:
        RuntimeError: both distributions with this plugin are installed, in two versions.
    """
    check_versions()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "engines.vllm_plugin.shm_transfer", "ShmTransfer"
        )
    except ValueError:  # vLLM calls its plugins more than once in some processes
        return


def check_versions() -> None:
    """Check that the files of this plugin are of one version.

    The wheel of the plugin alone has files of the main wheel: where both are installed, the later
    one has replaced those of the other.

    Raises:
        RuntimeError: they are of two versions.
    """
    found = {}
    for name in _DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if len(set(found.values())) > 1:
        both = " and ".join(f"{name} {number}" for name, number in found.items())
        raise RuntimeError(
            f"{both} are installed beside vLLM, and have the same files; uninstall both, and "
            "install the one whose version the trainer has"
        )
