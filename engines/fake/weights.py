"""The weights of a fake engine: names, shapes and digests instead of numbers.

Always true: a tensor in ``lost`` holds garbage until it is written again.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from engines.fingerprint import host_fingerprint
from engines.protocol import TensorInfo

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
DEFAULT_TENSORS = (
    TensorInfo("model.embed_tokens.weight", "float32", (16, 8)),
    TensorInfo("model.layers.0.mlp.weight", "float32", (8, 8)),
    TensorInfo("lm_head.weight", "float32", (16, 8)),
)


class Fatal(Exception):
    """What would have ended SGLang's scheduler."""


@dataclass(frozen=True, slots=True)
class FakeTensor:
    """A tensor of a push without torch: a shape, and a value to tell one from another.

    Attributes:
        fingerprint: of the bytes it stands for, if there are any.
    """

    shape: tuple[int, ...]
    value: float = 0.0
    fingerprint: str = ""


def fingerprint_of(tensor: Any) -> str:
    """What an engine that holds it will say of it, and so what its trainer takes of it."""
    known: str = getattr(tensor, "fingerprint", "")
    return known or f"fake:{digest_of(tensor)}"


def pack_tensors(tensors: Mapping[str, Any]) -> bytes:
    """A payload of ``update_weights_from_tensor`` before base64: a pickle of (name, tensor)."""
    return pickle.dumps(list(tensors.items()))


def unpack_tensors(payload: str) -> list[tuple[str, Any]]:
    """What ``pack_tensors``, or a trainer with torch, has packed.

    Raises:
        Fatal: it cannot be read.
    """
    try:
        loaded = _Reader(io.BytesIO(base64.b64decode(payload))).load()
        if isinstance(loaded, dict) and "flattened_tensor" in loaded:
            loaded = _split(loaded)
        return [(str(name), tensor) for name, tensor in loaded]
    except Exception as error:  # unpickling can raise anything
        raise Fatal(f"unreadable payload: {error}") from None


class _Place:
    """What SGLang's ``FlattenedTensorMetadata`` says, without SGLang."""

    name: str
    shape: Sequence[int]
    dtype: Any
    start_idx: int
    end_idx: int


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Place if name == "FlattenedTensorMetadata" else super().find_class(module, name)


def _split(bucket: Mapping[str, Any]) -> Iterator[tuple[str, FakeTensor]]:
    """The tensors of a flattened bucket; their bytes stand for their numbers."""
    flat = bucket["flattened_tensor"]
    for one in bucket["metadata"]:
        content = bytes(flat[one.start_idx : one.end_idx].tolist())
        dtype = str(one.dtype).removeprefix("torch.")
        yield one.name, _tensor_of(one.name, dtype, tuple(one.shape), content)


def _tensor_of(name: str, dtype: str, shape: tuple[int, ...], content: bytes) -> FakeTensor:
    fingerprint = host_fingerprint(name, dtype, shape, content)
    return FakeTensor(shape, xxh3_64_intdigest(content), fingerprint)


@dataclass(slots=True)
class FakeWeights:
    """What the engine holds.

    Attributes:
        digests: tensor name -> digest of its contents.
        lost: names whose contents are garbage.
    """

    tensors: Mapping[str, TensorInfo]
    digests: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    num_losses: int = 0

    @classmethod
    def initial(cls, tensors: Sequence[TensorInfo]) -> FakeWeights:
        """The weights of the checkpoint."""
        weights = cls({tensor.name: tensor for tensor in tensors})
        weights.load_checkpoint("checkpoint")
        return weights

    def load_checkpoint(self, path: str) -> None:
        self.digests = {name: fingerprint_of((path, name)) for name in self.tensors}
        self.lost.clear()

    def load_path(self, path: str) -> None:
        """What ``update_weights_from_disk`` does: the tensors in the files there, or, where there
        are none, a checkpoint that is told from others by its path.

        Raises:
            Fatal: a tensor has another shape than the model's.
        """
        files = sorted(Path(path).glob("*.safetensors"))
        if not files:
            self.load_checkpoint(path)
        for file in files:
            self.write(_tensors_in(file))

    def lose(self) -> None:
        """Contents after an unbacked resume: different each time, and different on each engine."""
        self.num_losses += 1
        self.lost.update(self.tensors)
        garbage = (id(self), self.num_losses)
        self.digests = {name: fingerprint_of((garbage, name)) for name in self.tensors}

    def garble(self) -> None:
        """The first tensor by name holds something else, the same on each engine."""
        name = min(self.tensors)
        self.digests[name] = fingerprint_of(("garbled", name))

    def write(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Take new contents.  Unknown names are passed over in silence, as SGLang does.

        Raises:
            Fatal: a tensor has another shape than the model's.
        """
        for name, tensor in pairs:
            known = self.tensors.get(name)
            if known is None:
                continue
            shape = tuple(getattr(tensor, "shape", known.shape))
            if shape != known.shape:
                raise Fatal(f"{name} has shape {shape}, not {known.shape}")
            self.digests[name] = fingerprint_of(tensor)
            self.lost.discard(name)

    def logprobs(self, prompt: Sequence[int], adapter: str) -> tuple[float, ...]:
        """Log-probabilities of the tokens after the first: a function of all weights, of the
        adapter's contents and of the tokens up to each."""
        state = f"{self.checksum()} {adapter}"
        found = []
        for token in prompt:
            state = digest_of((state, token))
            found.append(-12.0 * (int(state[:8], 16) / 2**32) - 0.01)
        return tuple(found[1:])

    def checksum(self) -> str:
        """One digest of everything."""
        return digest_of(sorted(self.digests.items()))


def _tensors_in(file: Path) -> Iterator[tuple[str, FakeTensor]]:
    """Tensors of a safetensors file; their bytes stand for their numbers."""
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    for name, entry in json.loads(content[8 : 8 + size]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
            part = content[8 + size + begin : 8 + size + end]
            yield name, _tensor_of(name, dtype, tuple(entry["shape"]), part)


def digest_of(value: Any) -> str:
    """Equal for equal values; a real tensor counts by its numbers."""
    content = value.tolist() if hasattr(value, "tolist") else value
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]
