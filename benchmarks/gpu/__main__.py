"""A GPU: limits of the machine, the memory saver, and pushes of models in real shapes.

``python -m benchmarks.gpu --families limits qwen3-0.6b`` measures the limits, and then this model;
``--seconds 100`` ends in so many, with fewer repeats.  ``--smoke`` runs on a logical GPU where
there is no other, with tiny models.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import limits, saver, sync
from benchmarks.gpu.repeats import TimeLeft
from benchmarks.gpu.shapes import checkpoint_bytes
from benchmarks.report import Arguments, Rows, machine, parse_arguments, publish
from tests.support.gpu.machine import Gpu, the_gpu
from tests.support.gpu.policy import embedded_engine
from tests.support.gpu.sglang import sglang_engine

SPARE_BYTES = 8 << 30
# A start, a first push and the two repeats that there always are.
LEAST_S = 30.0


@dataclass(frozen=True)
class Model:
    """A family of pushes: a shape, the engine that gets them, and tokens of its KV cache."""

    shape: str
    goal: str
    num_tokens: int = 65_536
    engine: Callable[..., dict[str, Any]] = embedded_engine


MODELS = {
    "qwen3-0.6b": Model(
        "qwen3-0.6b",
        "sync median below 0.15 s; bounded by requests per bucket and kernels per tensor, not by "
        "bytes",
    ),
    "qwen3-8b": Model(
        "qwen3-8b",
        "sync median below 1.5 s, step median below 3 s; bounded by gpu_copy (about 8 times the "
        "bytes: flatten, apply, and two fingerprints), and by requests per bucket",
    ),
    "sglang": Model(
        "qwen3-0.6b",
        "sync median below 0.15 s; bounded by SGLang's loader, which takes tensor by tensor, and "
        "by the requests that verify it",
        engine=sglang_engine,
    ),
    "sglang-8b": Model(
        "qwen3-8b",
        "sync median below 1.5 s, step median below 3 s; bounded by gpu_copy, and by SGLang's "
        "loader, which takes tensor by tensor",
        num_tokens=32_768,
        engine=sglang_engine,
    ),
    "qwen3-30b-a3b": Model(
        "qwen3-30b-a3b",
        "none; bounded by kernels per tensor: each expert has three",
        num_tokens=8192,
    ),
}
SAVER_GOAL = (
    "resume of a backup: at least 20 GiB/s; bounded by pcie_in, and by the driver's calls that "
    "make memory"
)
FAMILIES = ("limits", "saver", *MODELS)


def main() -> None:
    arguments = parse_arguments(__doc__ or "", FAMILIES, has_limit=True)
    is_tiny = arguments.size == "smoke"
    if not torch.cuda.is_available() and not is_tiny:
        sys.exit("benchmarks.gpu: no CUDA device; --smoke runs on a logical one")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with the_gpu(device, folder / "gpus") as gpu:
            result = measure(gpu, folder, arguments, is_tiny=is_tiny)
    result |= {"is_real": int(gpu.is_real), "machine": machine("torch", "transformers")}
    publish(result, as_json=arguments.as_json, title="gpu")


def measure(gpu: Gpu, folder: Path, arguments: Arguments, *, is_tiny: bool) -> Rows:
    repeats = arguments.by_size(smoke=2, quick=3, full=10)
    left = TimeLeft(arguments.seconds)
    rows = Rows("gpu")
    rows["repeats"] = repeats
    for family in arguments.families:
        rows[family] = _measure(family, gpu, folder, repeats, left, is_tiny)
    return rows


def _measure(
    family: str, gpu: Gpu, folder: Path, repeats: int, left: TimeLeft, is_tiny: bool
) -> dict[str, Any]:
    if left.share(1.0) < LEAST_S:
        return {"not_measured": f"{left.share(1.0):.0f} s are left"}
    if family == "limits":
        return limits.measure(gpu, repeats)
    if family == "saver":
        sizes_gib = (1,) if is_tiny else (4, 16)
        return {"goal": SAVER_GOAL, **saver.measure(gpu, repeats, sizes_gib)}
    model = MODELS[family]
    needed = 0 if is_tiny else 2 * checkpoint_bytes(model.shape) + SPARE_BYTES
    if gpu.free_bytes() < needed:
        return {"not_measured": f"{needed} bytes are needed, and {gpu.free_bytes()} are free"}
    num_tokens = 1024 if is_tiny else model.num_tokens
    found = sync.measure(
        family,
        gpu,
        folder,
        shape=model.shape,
        engine=model.engine(gpu, num_tokens=num_tokens),
        repeats=repeats,
        left=left,
        is_tiny=is_tiny,
    )
    return {"goal": model.goal, **found}


if __name__ == "__main__":
    main()
