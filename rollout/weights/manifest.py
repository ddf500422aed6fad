"""What a push contains, checked against what the engine holds before anything is sent.

SGLang dies of a wrong shape and silently ignores a wrong name, so both are found here.  A
checkpoint's own manifest is read from its safetensors headers, which needs no tensor library
(format: https://huggingface.co/docs/safetensors/index#format).
"""

from __future__ import annotations

import difflib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollout.errors import WeightMismatch

_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its checkpoint name, dtype in torch's words (``bfloat16``), and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of a checkpoint or of a push, by name.

    Attributes:
        fingerprints: of their contents, by name; empty where none were taken.
    """

    tensors: Mapping[str, TensorSpec]
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> Manifest:
        """A manifest of these tensors.

        Raises:
            WeightMismatch: a name occurs twice.
        """
        tensors: dict[str, TensorSpec] = {}
        for spec in specs:
            if spec.name in tensors:
                raise WeightMismatch(f"tensor {spec.name!r} is pushed twice", tensor=spec.name)
            tensors[spec.name] = spec
        return cls(tensors)


def check_push(pushed: Manifest, expected: Manifest, *, must_be_complete: bool) -> None:
    """Refuse a push that the engines could not take or would take wrongly.

    Element types may differ within a kind (the engine converts float32 to its own bfloat16),
    but not between kinds.

    Raises:
        WeightMismatch: an unknown name (with the nearest known), a wrong shape, a wrong kind of
            dtype, or, where it must be complete, a missing tensor.
    """
    for name, spec in pushed.tensors.items():
        known = expected.tensors.get(name)
        if known is None:
            near = difflib.get_close_matches(name, expected.tensors, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise WeightMismatch(f"the model has no tensor {name!r}{hint}", tensor=name)
        if spec.shape != known.shape:
            raise WeightMismatch(
                f"tensor {name!r} has shape {list(spec.shape)}, the model's is {list(known.shape)}",
                tensor=name,
            )
        if _kind(spec.dtype) != _kind(known.dtype):
            raise WeightMismatch(
                f"tensor {name!r} is {spec.dtype}, the model's is {known.dtype}", tensor=name
            )
    missing = [name for name in expected.tensors if name not in pushed.tensors]
    if missing and must_be_complete:
        raise WeightMismatch(
            f"the push lacks {len(missing)} of {len(expected.tensors)} tensors, first "
            f"{missing[0]!r}; a full push must bring all (set weights.update to 'partial' if "
            "that is what is meant)",
            tensor=missing[0],
        )


def _kind(dtype: str) -> str:
    return "float" if "float" in dtype else dtype


SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def read_checkpoint_manifest(model_path: str | Path) -> Manifest | None:
    """The manifest of a checkpoint directory; None if it holds no safetensors file.

    Raises:
        WeightMismatch: a file is not in safetensors format.
    """
    files = sorted(Path(model_path).glob("*.safetensors"))
    if not files:
        return None
    return Manifest.of(spec for file in files for spec in _read_header(file))


def _read_header(file: Path) -> list[TensorSpec]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(stream.read(length))
        return [
            TensorSpec(
                name, SAFETENSORS_DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"])
            )
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightMismatch(f"{file} is not a safetensors file: {error}") from None
