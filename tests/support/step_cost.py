"""The least seconds of a step on GPUs, as ``docs/step-cost.md`` shows them: bytes / bandwidth.

``python -m tests.support.step_cost`` prints the table of the page.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.kinds import kind_of
from tests.support.recipes import GPUS_OF_HOST, parts

MODEL = "Qwen3-8B"
GB = 10**9
HBM, NVLINK, PCIE, NETWORK = 3350 * GB, 450 * GB, 64 * GB, 50 * GB
"""Bytes/s of an H100 SXM by NVIDIA's data sheet (NVLink and PCIe 5 in one direction), and of a
network with 400 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Work:
    """One part of a step.

    Attributes:
        formula: of the bytes that one GPU moves, W for those of the weights.
        medium: over which they go.
    """

    name: str
    formula: str
    num_bytes: float
    medium: str
    bandwidth: float

    @property
    def seconds(self) -> float:
        return self.num_bytes / self.bandwidth


def works() -> list[Work]:
    """The parts of a step of ``MODEL`` on one host, an engine on each GPU."""
    weights = 2 * parts(MODEL).num_elements
    others = (GPUS_OF_HOST - 1) / GPUS_OF_HOST
    graphs = kind_of("sglang").graph_copy_bytes
    return [
        Work("release, resume: CUDA graphs of SGLang", "2 x 800 MiB", 2 * graphs, "PCIe", PCIE),
        Work("push: gather the shards of FSDP2", "7/8 W", others * weights, "NVLink", NVLINK),
        Work("push by `cuda_ipc`: flatten, load", "4 W", 4 * weights, "GPU memory", HBM),
        Work("push by `shared_memory`: to the host, from it", "2 W", 2 * weights, "PCIe", PCIE),
        Work("push by `distributed` to another host", "W", weights, "network", NETWORK),
        Work("verify: read all weights once", "W", weights, "GPU memory", HBM),
    ]


def table() -> str:
    """The table of the page."""
    rows = [
        "| part | bytes of a GPU | over | GB | GB/s | seconds |",
        "|---|---|---|---:|---:|---:|",
    ]
    rows += [
        f"| {work.name} | {work.formula} | {work.medium} | {work.num_bytes / GB:.1f} | "
        f"{work.bandwidth / GB:.0f} | {work.seconds:.3f} |"
        for work in works()
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
