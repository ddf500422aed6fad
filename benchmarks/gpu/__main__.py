"""A GPU: limits of the machine, the memory saver, and pushes of models in real shapes.

``python -m benchmarks.gpu --families qwen3-0.6b`` measures the limits, and then this model; each
family by itself ends in less than 8 minutes.  ``--smoke`` runs on a logical GPU where there is no
other, with tiny models.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import limits, saver, sync
from benchmarks.gpu.shapes import SHAPES, checkpoint_bytes
from benchmarks.report import Arguments, Rows, machine, parse_arguments, publish
from tests.support.gpu.machine import Gpu, the_gpu

FAMILIES = ("saver", *SHAPES)
GOALS = {
    "saver": "resume of a backup: at least 20 GiB/s; bounded by pcie_in, and by the driver's "
    "calls that make memory",
    "qwen3-0.6b": "sync median below 0.15 s; bounded by requests per bucket and kernels per "
    "tensor, not by bytes",
    "qwen3-8b": "sync median below 1.5 s; bounded by gpu_copy (about 8 times the bytes: flatten, "
    "apply, and two fingerprints), and by requests per bucket",
    "qwen3-30b-a3b": "none; bounded by kernels per tensor: each expert has three",
}
# Tokens of the KV cache: 7.5 GiB of the first, 9 of the second, and little beside the largest.
NUM_TOKENS = {"qwen3-0.6b": 65_536, "qwen3-8b": 65_536, "qwen3-30b-a3b": 8192}
SPARE_BYTES = 8 << 30


def main() -> None:
    arguments = parse_arguments(__doc__ or "", FAMILIES)
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
    rows = Rows("gpu")
    rows["repeats"] = repeats
    rows["limits"] = limits.measure(gpu, repeats)
    for family in arguments.families:
        rows[family] = {"goal": GOALS[family], **_measure(family, gpu, folder, repeats, is_tiny)}
    return rows


def _measure(family: str, gpu: Gpu, folder: Path, repeats: int, is_tiny: bool) -> dict[str, Any]:
    if family == "saver":
        return saver.measure(gpu, repeats, sizes_gib=(1,) if is_tiny else (4, 16))
    needed = 0 if is_tiny else 2 * checkpoint_bytes(family) + SPARE_BYTES
    if gpu.free_bytes() < needed:
        return {"not_measured": f"{needed} bytes are needed, and {gpu.free_bytes()} are free"}
    num_tokens = 1024 if is_tiny else NUM_TOKENS[family]
    return sync.measure(
        family, gpu, folder, repeats=repeats, num_tokens=num_tokens, is_tiny=is_tiny
    )


if __name__ == "__main__":
    main()
