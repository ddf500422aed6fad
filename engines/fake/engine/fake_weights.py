"""The weights of a fake engine: names, shapes and digests instead of numbers.

Always true: a tensor in ``lost`` holds garbage until it is written again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from engines.protocol import TensorInfo
from engines.tensors.fingerprint import host_fingerprint
from engines.tensors.payload.weight_payload import load_payload, tensors_in
from engines.tensors.safetensors_header import SafetensorsError, make_header, read_header

DEFAULT_TENSORS = (
    TensorInfo("model.embed_tokens.weight", "float32", (16, 8)),
    TensorInfo("model.layers.0.mlp.weight", "float32", (8, 8)),
    TensorInfo("lm_head.weight", "float32", (16, 8)),
)


def write_checkpoint(folder: Path | str, tensors: Sequence[TensorInfo] = DEFAULT_TENSORS) -> Path:
    """Write what a server reads of a model before it starts engines; returns ``folder``.

    The safetensors file has the names, types and shapes of ``tensors``, and holes in place of their
    data, so a push is checked against it as against a real one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "fake"}')
    header, places = make_header((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
    file = folder / "model.safetensors"
    file.write_bytes(header)
    os.truncate(file, max((end for _, end in places.values()), default=len(header)))
    return folder


def checkpoint_tensors(folder: Path | str) -> Sequence[TensorInfo]:
    """The tensors in a checkpoint's files; those of ``write_checkpoint`` where it has no files.

    Raises:
        SafetensorsError: a file is damaged.
    """
    found: dict[str, TensorInfo] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with file.open("rb") as stream:
            header = read_header(file, stream.fileno())
        found |= {spec[0]: TensorInfo(*spec) for spec in header.specs()}
    return list(found.values()) or DEFAULT_TENSORS


def checkpoint_vocabulary(folder: Path | str, default: int) -> int:
    """The number of token ids by a checkpoint's ``config.json``, also in its ``text_config``."""
    try:
        config = json.loads((Path(folder) / "config.json").read_bytes())
    except OSError:
        return default
    return int({**config, **config.get("text_config", {})}.get("vocab_size", default))


SAVED = "fake-weights.json"
"""In a folder that fakes load: digests by tensor name, as JSON."""


class FatalCall(Exception):
    """What would have ended SGLang's scheduler."""


@dataclass(frozen=True, slots=True)
class FakeTensor:
    """A tensor of a push without torch: a shape, and a value that stands for its contents.

    Attributes:
        fingerprint: of the bytes it stands for, if there are any.
    """

    shape: tuple[int, ...]
    value: float = 0.0
    fingerprint: str = ""


_FAKE_TENSOR = {(FakeTensor.__module__, FakeTensor.__name__): FakeTensor}


def fingerprint_of(tensor: Any) -> str:
    """The fingerprint that an engine with this tensor reports, and so its trainer's."""
    known: str = getattr(tensor, "fingerprint", "")
    return known or f"fake:{digest_of(tensor)}"


def pack_tensors(tensors: Mapping[str, Any]) -> bytes:
    """A payload of ``update_weights_from_tensor`` before base64: a pickle of (name, tensor)."""
    return pickle.dumps(list(tensors.items()))


def unpack_tensors(payload: str) -> list[tuple[str, Any]]:
    """What ``pack_tensors``, or a trainer with torch, has packed.

    Raises:
        FatalCall: it cannot be read.
    """
    try:
        loaded = load_payload(base64.b64decode(payload), _FAKE_TENSOR)
        if isinstance(loaded, list) and all(isinstance(value, FakeTensor) for _, value in loaded):
            return loaded
        return [
            (tensor.name, _tensor_of(tensor.name, tensor.dtype, tensor.shape, tensor.content))
            for tensor in tensors_in(loaded)
        ]
    except Exception as error:  # unpickling can raise anything
        raise FatalCall(f"unreadable payload: {error}") from None


def _tensor_of(
    name: str, dtype: str, shape: tuple[int, ...], content: bytes | memoryview
) -> FakeTensor:
    """Its bytes stand for its numbers."""
    fingerprint = host_fingerprint(name, dtype, shape, content)
    return FakeTensor(shape, xxh3_64_intdigest(content), fingerprint)


class FakeWeights:
    """What the engine holds; first the contents of its checkpoint.

    Args:
        model_path: of that checkpoint.

    Attributes:
        digests: tensor name -> digest of its contents.
        lost: names whose contents are garbage.
    """

    def __init__(self, tensors: Sequence[TensorInfo], model_path: str = "") -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.lost: set[str] = set()
        self.num_losses = 0
        self._model_path = model_path
        self.load_checkpoint("checkpoint")

    def load_checkpoint(self, path: str) -> None:
        self.digests = {name: fingerprint_of((path, name)) for name in self.tensors}
        self.lost.clear()

    def load_path(self, path: str) -> None:
        """What ``update_weights_from_disk`` does: the tensors in the files there, or what was saved
        there, or, where there is neither, a checkpoint that differs from others by its path.

        Raises:
            FatalCall: a tensor has another shape than the model's.
        """
        files = sorted(Path(path).glob("*.safetensors"))
        if path == self._model_path:
            self.load_checkpoint("checkpoint")
        elif (saved := Path(path) / SAVED).exists():
            self.digests = json.loads(saved.read_text())
            self.lost.clear()
        elif not files:
            self.load_checkpoint(path)
        else:
            for file in files:
                self.write(tensors_in_file(file))

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
            FatalCall: a tensor has another shape than the model's.
        """
        for name, tensor in pairs:
            known = self.tensors.get(name)
            if known is None:
                continue
            shape = tuple(getattr(tensor, "shape", known.shape))
            if shape != known.shape:
                raise FatalCall(
                    f"tensor {name!r} has shape {list(known.shape)}, and {list(shape)} came"
                )
            self.digests[name] = fingerprint_of(tensor)
            self.lost.discard(name)

    def checksum(self) -> str:
        """One digest of everything."""
        return digest_of(sorted(self.digests.items()))


def tensors_in_file(file: Path) -> Iterator[tuple[str, FakeTensor]]:
    """Tensors of a safetensors file; their bytes stand for their numbers.

    Raises:
        FatalCall: it is not one.
    """
    try:
        with file.open("rb") as stream:
            content, header = stream.read(), read_header(file, stream.fileno())
        if len(content) == header.num_bytes:  # ``write_checkpoint`` writes no data
            for name, dtype, shape in header.specs():
                yield name, _tensor_of(name, dtype, shape, b"")
            return
        for tensor in header.placed(len(content)):
            part = content[tensor.offset : tensor.offset + tensor.num_bytes]
            yield tensor.name, _tensor_of(tensor.name, tensor.dtype, tensor.shape, part)
    except SafetensorsError as error:
        raise FatalCall(str(error)) from None


def logprob_of(state: str) -> float:
    """The log-probability that a digest of all that computed it stands for, in nats."""
    return -12.0 * (int(state[:8], 16) / 2**32) - 0.01


def digest_of(value: Any) -> str:
    """Equal for equal values; a real tensor counts by its numbers."""
    content = value.tolist() if hasattr(value, "tolist") else value
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]
