"""Opens a pushed payload with SGLang's own code and prints what is in it, as JSON.

``payload_reader SOURCES``: a folder with single files of SGLang; the payload is the standard input.
The whole of SGLang cannot be imported where its libraries are not installed.  With UUIDs in
``ROLLOUT_CUDA_DOUBLE`` there are these GPUs, and they are doubles.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support import cuda_double

FILES = ("utils/common.py", "utils/patch_torch.py", "weight_sync/tensor_bucket.py")
_IMPORTS = """
import io, pickle, pybase64, torch
from multiprocessing.reduction import ForkingPickler
is_npu = is_musa = lambda: False
torch_release = (2, 9)
"""
# Of common.py, whose other imports are many.
_NEEDED = ("MultiprocessingSerializer", "SafeUnpickler", "_safe_load_torch_storage")


def load_sglang(sources: Path) -> None:
    """Put the modules that the payload names into ``sys.modules``."""
    for name in ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.weight_sync"):
        package = ModuleType(name)
        package.__path__ = []
        sys.modules[name] = package
    whole = ast.parse((sources / FILES[0]).read_text())
    whole.body = [node for node in whole.body if getattr(node, "name", "") in _NEEDED]
    _make("sglang.srt.utils.common", _IMPORTS, whole)
    for file in FILES[1:]:
        name = f"sglang.srt.{file.removesuffix('.py').replace('/', '.')}"
        _make(name, "", ast.parse((sources / file).read_text()))


def _make(name: str, head: str, body: ast.Module) -> None:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(head, module.__dict__)
    exec(compile(body, name, "exec"), module.__dict__)


def main(sources: Path) -> None:
    load_sglang(sources)
    from engines.tensors.torch_fingerprint import device_fingerprint

    if uuids := os.environ.get("ROLLOUT_CUDA_DOUBLE"):
        cuda_double.CudaDouble(uuids.split(",")).install(setattr)
    sglang: Any = sys.modules
    sglang["sglang.srt.utils.patch_torch"].monkey_patch_torch_reductions()
    serializer = sglang["sglang.srt.utils.common"].MultiprocessingSerializer
    found = serializer.deserialize(sys.stdin.read())
    bucket = sglang["sglang.srt.weight_sync.tensor_bucket"].FlattenedTensorBucket(**found)
    tensors = dict(bucket.reconstruct_tensors())
    print(
        json.dumps(
            {
                "device": str(bucket.flattened_tensor.device),
                "devices": cuda_double.opened,
                "fingerprints": {
                    name: device_fingerprint(name, one) for name, one in tensors.items()
                },
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
