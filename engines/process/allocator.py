"""Settings of torch's allocator and of the memory saver in an engine's environment."""

from __future__ import annotations

from collections.abc import Mapping

RETAINED_BACKUP = {"TMS_RETAIN_CPU_BACKUP": "1"}
"""The host copy of released weights keeps its pinned memory, which takes seconds to allocate."""
_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def refuse_expandable_segments(env: Mapping[str, str], what: str) -> None:
    """Refuse them where memory is released: such segments cannot be.

    Args:
        what: names what releases it, in the error.

    Raises:
        ValueError: the environment asks for them.
    """
    for name in _NAMES:
        if "expandable_segments:true" in env.get(name, "").replace(" ", "").lower():
            raise ValueError(
                f"{name}={env[name]}: {what} does not work with expandable segments; "
                "unset it, or set it differently under engine.env"
            )
