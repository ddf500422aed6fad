"""GPU memory that another process can open, whatever torch's allocator is set to.

With ``expandable_segments`` torch exports a file descriptor, which the engine must take from this
process with ``pidfd_getfd``.  That needs the rights of a debugger, which containers refuse, and an
engine ends of it.  Torch uses no expandable segment for what is allocated while they are off.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NAME = "expandable_segments"
# The settings are of the process: two pushes must not take each other's for the trainer's.
_lock = threading.Lock()


def why_not_exportable() -> str:
    """Why memory that this process allocates cannot be opened in another; empty if it can."""
    try:
        with exportable_memory():
            return ""
    except Exception as error:  # of torch's interfaces for this, none is public
        return (
            "torch's allocator uses expandable_segments, and they cannot be switched off for what "
            f"is pushed ({error})"
        )


@contextmanager
def exportable_memory() -> Iterator[None]:
    """What is allocated inside is in no expandable segment; the settings are as before afterwards.

    Raises:
        Exception: torch's own; the settings cannot be read or changed.
    """
    with _lock:
        before = _settings()
        fields = [field.strip() for field in before.split(",")]
        if not any(map(_is_expandable, fields)):
            yield
            return
        # All fields: torch resets those that the text does not have.
        kept = [field for field in fields if field and not field.startswith(_NAME)]
        _set(",".join([*kept, f"{_NAME}:False"]))
        try:
            yield
        finally:
            _set(before)


def _is_expandable(field: str) -> bool:
    name, _, value = field.partition(":")
    return name.strip() == _NAME and value.strip().lower() in ("true", "1")


def _settings() -> str:
    """Those in effect, which a trainer may have changed since its environment was read."""
    internals: Any = torch._C
    if hasattr(internals, "_accelerator_getAllocatorSettings"):
        return str(internals._accelerator_getAllocatorSettings())
    found: Any = torch.cuda.memory._snapshot()
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = found["allocator_settings"]
    return next((str(settings[name]) for name in names if settings.get(name)), "")


def _set(settings: str) -> None:
    internals: Any = torch._C
    if hasattr(internals, "_accelerator_setAllocatorSettings"):
        internals._accelerator_setAllocatorSettings(settings)
        return
    of_cuda: Any = torch.cuda.memory
    of_cuda._set_allocator_settings(settings)
