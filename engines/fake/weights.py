"""The weights of a fake engine: names, shapes and digests instead of numbers.

Always true: a tensor in ``lost`` holds garbage until it is written again.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.protocol import TensorInfo

DEFAULT_TENSORS = (
    TensorInfo("model.embed_tokens.weight", "float32", (16, 8)),
    TensorInfo("model.layers.0.mlp.weight", "float32", (8, 8)),
    TensorInfo("lm_head.weight", "float32", (16, 8)),
)


class Fatal(Exception):
    """What would have ended SGLang's scheduler."""


@dataclass(frozen=True, slots=True)
class FakeTensor:
    """A tensor of a push without torch: a shape, and a value to tell one from another."""

    shape: tuple[int, ...]
    value: float = 0.0


def pack_tensors(tensors: Mapping[str, Any]) -> bytes:
    """A payload of ``update_weights_from_tensor`` before base64: a pickle of (name, tensor)."""
    return pickle.dumps(list(tensors.items()))


def unpack_tensors(payload: str) -> list[tuple[str, Any]]:
    """What ``pack_tensors``, or a trainer with torch, has packed.

    Raises:
        Fatal: it cannot be read.
    """
    try:
        return [(str(name), tensor) for name, tensor in pickle.loads(base64.b64decode(payload))]
    except Exception as error:  # unpickling can raise anything
        raise Fatal(f"unreadable payload: {error}") from None


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
        self.digests = {name: digest_of((path, name)) for name in self.tensors}
        self.lost.clear()

    def lose(self) -> None:
        """Contents after an unbacked resume: different each time, and different on each engine."""
        self.num_losses += 1
        self.lost.update(self.tensors)
        garbage = (id(self), self.num_losses)
        self.digests = {name: digest_of((garbage, name)) for name in self.tensors}

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
            self.digests[name] = digest_of(tensor)
            self.lost.discard(name)

    def checksum(self) -> str:
        """One digest of everything."""
        return digest_of(sorted(self.digests.items()))


def digest_of(value: Any) -> str:
    """Equal for equal values; a real tensor counts by its numbers."""
    content = value.tolist() if hasattr(value, "tolist") else value
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]
