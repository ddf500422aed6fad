"""Operators of SGLang's kernels that models look up at import, declared without a kernel.

Without them the module of a model cannot be imported, nor what imports it: the image processor of
all Qwen-VL models imports that of Qwen3.5.  What would call one fails by name.
"""

from __future__ import annotations

_NAMES = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)


def declare() -> None:
    """Declare them, unless there is a build of the kernels that has them."""
    import torch

    for name in _NAMES:
        if not hasattr(torch.ops.sgl_kernel, name):
            torch.library.define(f"sgl_kernel::{name}", "(Tensor one) -> Tensor")
