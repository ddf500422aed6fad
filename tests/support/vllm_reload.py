"""Run by the Python of CPU vLLM: the plugin's transfer and vLLM's own layerwise reload get handles.

CUDA is a double, whose memory this program overwrites as soon as a bucket is answered, as a trainer
does.  Reads pushes from stdin, and prints what became of each; both are JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from engines.vllm_plugin.shm_transfer import ShmTransfer, ShmUpdate
from tests.support.cuda_double import HANDLE, CudaDouble

_OLD = 0.5
_JOINED = {"q_proj": slice(0, 4), "k_proj": slice(4, 6), "v_proj": slice(6, 8)}
_CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(world_size=1, pipeline_parallel_size=1),
    quant_config=None,
    model_config=SimpleNamespace(dtype=torch.float32, hf_config=SimpleNamespace()),
)


class Joined(torch.nn.Linear):
    """Three layers of a checkpoint, which vLLM completes before it copies them."""

    def __init__(self) -> None:
        super().__init__(4, 8, bias=False)
        self.output_sizes = [4, 2, 2]
        self.weight.weight_loader = self.weight_loader

    def weight_loader(self, param: Any, loaded_weight: torch.Tensor, part: str) -> None:
        param.data[_JOINED[part]].copy_(loaded_weight)


class Model(torch.nn.Module):
    """Loads as models of vLLM do.

    Attributes:
        breaks_at: name of a tensor whose load fails.
    """

    packed_modules_mapping = {"qkv_proj": list(_JOINED)}  # noqa: RUF012
    breaks_at = ""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.Module()
        self.attention.qkv_proj = Joined()
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, _OLD)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self.breaks_at:
                raise RuntimeError(f"{name} breaks")
            parameter = self.attention.qkv_proj.weight
            parameter.weight_loader(parameter, tensor, name.split(".")[1])


class Memory:
    """What the transfer has opened."""

    def __init__(self) -> None:
        self.opened: list[bytearray] = []
        self.open_at_waits: list[bool] = []

    def rebuild(self, *arguments: Any) -> torch.Tensor:
        self.opened.append(bytearray(arguments[HANDLE]))
        return torch.frombuffer(self.opened[-1], dtype=torch.uint8)

    def is_open(self) -> bool:
        """Whether a tensor refers to the last one."""
        return sys.getrefcount(self.opened[-1]) > _UNUSED

    def wait(self, device: torch.device) -> None:
        self.open_at_waits.append(self.is_open())

    def overwrite(self) -> None:
        self.opened[-1][:] = b"\x7f" * len(self.opened[-1])


_UNUSED = (lambda held: sys.getrefcount(held[-1]))([bytearray()])


def report(pushed: Any) -> dict[str, Any]:
    memory = Memory()
    reductions.rebuild_cuda_tensor = memory.rebuild
    torch.cuda.synchronize = memory.wait  # type: ignore[assignment]
    model = Model()
    record_metadata_for_reloading(model)
    device = torch.device("cuda", pushed["index"])
    transfer = ShmTransfer(SimpleNamespace(), _CONFIG, device, model)
    model.breaks_at = pushed["breaks_at"]
    error: Exception | None = None
    are_open = []
    transfer.start_weight_update()
    try:
        for bucket in pushed["buckets"]:
            try:
                transfer.receive_weights(ShmUpdate(**bucket))
            finally:
                if memory.opened:
                    are_open.append(memory.is_open())
                    memory.overwrite()
        transfer.finish_weight_update()
    except Exception as raised:
        error = raised
    if error is not None:  # it still exists
        are_open[-1:] = [memory.is_open()] if memory.opened else []
    return {
        "error": str(error or ""),
        "weight": model.attention.qkv_proj.weight.tolist(),
        "open_after": are_open,
        "open_at_waits": memory.open_at_waits,
    }


def main() -> None:
    given = json.load(sys.stdin)
    CudaDouble(given["uuids"]).install(setattr)
    print(json.dumps({name: report(pushed) for name, pushed in given["pushes"].items()}))


if __name__ == "__main__":
    main()
