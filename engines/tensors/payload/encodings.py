"""Tensors of a push that are not sent as they are, each under a name that says how it is encoded.

Always true: one is checked whole when it is read, and against the tensor that it is for, before
that tensor is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from engines.tensors import delta
from engines.tensors.torch_fingerprint import dtype_name


class Encoded(Protocol):
    """A tensor that was read; ``str`` names it in messages.

    Attributes:
        name, dtype, shape: of the whole tensor.
        base: the weight version that it begins from.
    """

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def base(self) -> str: ...
    def apply(self, tensor: torch.Tensor) -> None:
        """Make this tensor, which has the bits of the base, what the trainer has."""
        ...


_READERS: Mapping[str, Callable[[str, torch.Tensor], Encoded]] = {delta.SUFFIX: delta.read_delta}
"""How names end -> what reads the content."""

ENCODINGS = tuple(suffix.removeprefix("#") for suffix in _READERS)
"""The names of the encodings, as in ``weights.encoding``."""


def is_encoded(name: str) -> bool:
    """Whether a pushed tensor of this name is encoded; else it is whole."""
    return name.endswith(tuple(_READERS))


def decoded(name: str, content: torch.Tensor) -> Encoded:
    """One that was pushed under ``name``.

    Raises:
        ValueError: it is damaged, or of another tensor.
    """
    (read,) = (reader for suffix, reader in _READERS.items() if name.endswith(suffix))
    return read(name, content)


def why_not_for(encoded: Encoded, tensor: torch.Tensor, version: str) -> str:
    """Why it does not begin from this tensor of a model of ``version``."""
    dtype = dtype_name(tensor.dtype)
    if (encoded.base, encoded.dtype, list(encoded.shape)) == (version, dtype, list(tensor.shape)):
        return ""
    return f"{encoded} is not for weight version {version} in {dtype}"
