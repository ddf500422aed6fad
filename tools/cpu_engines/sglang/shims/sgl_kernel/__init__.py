"""In the place of SGLang's kernel library, which is a CUDA build.

SGLang imports names from it and, on a CPU without AMX, calls one.  Every other name is a function
that says so when called.  No ``torch.ops.sgl_kernel`` operator is registered: that is how SGLang
learns that there is no AMX and takes torch's own operators.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    rows: Any, table: Any, starts: Any, ends: Any, slots: Any, row_length: int
) -> None:
    """Write each request's new cache slots into its row: ``table[row, start:end]``."""
    lengths = (ends - starts).tolist()
    for row, start, part in zip(rows.tolist(), starts.tolist(), slots.split(lengths), strict=True):
        table[row, start : start + part.numel()] = part


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on the CPU")

    return missing
