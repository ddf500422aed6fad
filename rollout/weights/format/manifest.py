"""Manifests: names, dtypes and shapes of a checkpoint's or a push's tensors.

A push is checked against the checkpoint before anything is sent: SGLang crashes on a wrong shape
and silently ignores a wrong name.  A checkpoint's manifest is read from its safetensors headers,
which needs no tensor library.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

from engines.tensors.dtypes import element_bytes
from engines.tensors.safetensors_header import SafetensorsError, read_header, word_of
from rollout.config import Casts, WeightsConfig, WeightUpdate
from rollout.core.errors import WeightMismatch

FP8 = "float8_e4m3fn"
SCALE_SUFFIX = "_scale_inv"
"""The scales of a quantised ``x.weight`` are ``x.weight_scale_inv``."""
_MOST_NAMES = 3
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""How the names of the two tensors end that a model may tie."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor: its name in the checkpoint, dtype in torch's names (``bfloat16``), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element.

        Raises:
            WeightMismatch: safetensors does not support the dtype.
        """
        try:
            word_of(self.name, self.dtype)
        except ValueError as error:
            raise WeightMismatch(str(error), tensor=self.name) from None
        return element_bytes(self.dtype)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.element_bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of a checkpoint or of a push, by name.

    Attributes:
        fingerprints: fingerprint by name of the tensor, or empty if none were computed.
    """

    tensors: Mapping[str, TensorSpec]
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, specs: Iterable[TensorSpec], fingerprints: Mapping[str, str] | None = None
    ) -> Manifest:
        """A manifest of these tensors.

        Raises:
            WeightMismatch: a name occurs twice.
        """
        tensors: dict[str, TensorSpec] = {}
        for spec in specs:
            if spec.name in tensors:
                raise WeightMismatch(f"tensor {spec.name!r} is pushed twice", tensor=spec.name)
            tensors[spec.name] = spec
        return cls(tensors, fingerprints or {})


def check_contents(
    pushed: Manifest, expected: Manifest | None, settings: WeightsConfig, contents: WeightUpdate
) -> None:
    """``check_push`` of this part of a server's model; an adapter has a check of its own.

    Args:
        expected: None if the checkpoint has no list of its tensors: then nothing is checked.
    """
    if expected is not None and contents in (WeightUpdate.FULL, WeightUpdate.PARTIAL):
        check_push(
            pushed,
            expected,
            must_be_complete=contents is WeightUpdate.FULL,
            casts=settings.casts,
            not_pushed=settings.not_pushed,
        )


def check_push(
    pushed: Manifest,
    expected: Manifest,
    *,
    must_be_complete: bool,
    casts: Casts = Casts.ANY,
    not_pushed: Sequence[str] = (),
) -> None:
    """Raise if engines could not load a push, or would load it wrongly.

    Args:
        casts: the float types that the engine may convert to its own.
        not_pushed: patterns of tensors that a push does not contain.

    Raises:
        WeightMismatch: an unknown name (the error suggests the nearest one), a wrong shape, a wrong
            dtype, a tensor of ``not_pushed``, or a missing tensor where the push must be complete.
    """
    for name, spec in pushed.tensors.items():
        if pattern := first_match(name, not_pushed):
            raise WeightMismatch(
                f"tensor {name!r} is pushed, and weights.not_pushed says it is not, with "
                f"{pattern!r}; leave it out of the push, or change weights.not_pushed",
                tensor=name,
            )
        known = expected.tensors.get(name)
        if known is None:
            hint = _hint_for(spec, expected)
            raise WeightMismatch(f"the model has no tensor {name!r}{hint}", tensor=name)
        if spec.shape != known.shape:
            raise WeightMismatch(
                f"tensor {name!r} has shape {list(spec.shape)}, the model's is {list(known.shape)}",
                tensor=name,
            )
        if spec.dtype != known.dtype and (
            why := _why_not_quantised(known, expected) or _why_no_cast(spec, known, casts)
        ):
            raise WeightMismatch(
                f"tensor {name!r} is {spec.dtype}, the model's is {known.dtype}{why}", tensor=name
            )
    if must_be_complete:
        _check_complete(pushed, expected, not_pushed)


def _hint_for(unknown: TensorSpec, expected: Manifest) -> str:
    """What a tensor that the model does not have was meant to be, or empty if that is unknown."""
    if unknown.name.endswith(HEAD):
        for name, known in expected.tensors.items():
            if name.endswith(EMBEDDING) and known.shape == unknown.shape:
                return (
                    f": its checkpoint ties the head to {name!r}, which the push of that sets too; "
                    f"leave {unknown.name!r} out, or give the same tensor under both names (for a "
                    "head of its own, serve a checkpoint with tie_word_embeddings false)"
                )
    near = difflib.get_close_matches(unknown.name, expected.tensors, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _check_complete(pushed: Manifest, expected: Manifest, not_pushed: Sequence[str]) -> None:
    missing = [
        name
        for name in expected.tensors
        if name not in pushed.tensors and not first_match(name, not_pushed)
    ]
    if missing:
        raise WeightMismatch(
            f"the push lacks {len(missing)} of {len(expected.tensors)} tensors, first "
            f"{missing[0]!r}; a full push must contain all, except for those of "
            "weights.not_pushed (for a partial push, set weights.update to 'partial')",
            tensor=missing[0],
        )


def first_match(name: str, patterns: Sequence[str]) -> str:
    """The first shell pattern that matches a name, or empty if none does."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), "")


def wrong_patterns(patterns: Sequence[str], names: Collection[str]) -> Iterator[str]:
    """Why patterns do not fit the names of a checkpoint's tensors.

    They are those of ``weights.not_pushed`` or ``weights.frozen``.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = ", ".join(_names_like(pattern, names))
            yield f"{pattern!r} matches no tensor of the checkpoint; names like it: {near}"
    if patterns and all(first_match(name, patterns) for name in names):
        yield "no tensor is left; for weights that never change, set update to frozen"


def _names_like(pattern: str, names: Collection[str]) -> list[str]:
    """Some names that begin most like a pattern."""
    start = pattern.rstrip("*?.")
    num_parts = start.count(".") + 1
    by_start: dict[str, list[str]] = {}
    for name in sorted(names):
        by_start.setdefault(".".join(name.split(".")[:num_parts]), []).append(name)
    nearest = difflib.get_close_matches(start, by_start, n=1, cutoff=0.0)
    return by_start[nearest[0]][:_MOST_NAMES] if nearest else []


def _why_not_quantised(known: TensorSpec, expected: Manifest) -> str:
    """Why a tensor of another dtype cannot be pushed as a quantised one.

    Without its scales, a float8 number means nothing.
    """
    if known.dtype != FP8 or known.name + SCALE_SUFFIX not in expected.tensors:
        return ""
    return (
        f" with scales in {known.name + SCALE_SUFFIX!r}; push with name_map="
        "rollout.fp8_block_quantiser(model_path), which makes both"
    )


def _why_no_cast(pushed: TensorSpec, known: TensorSpec, casts: Casts) -> str:
    """Why a tensor cannot have another dtype than the model's."""
    is_float = "float" in pushed.dtype and "float" in known.dtype
    if not is_float or "float8" in pushed.dtype + known.dtype:
        return "; push that dtype"
    if casts is Casts.ANY:
        return ""
    if casts is Casts.NARROW and pushed.element_bytes > known.element_bytes:
        return ""
    return (
        f", and weights.casts = {casts} does not allow that; push {known.dtype}, or set "
        "weights.casts to any"
    )


def read_checkpoint_manifest(model_path: str | Path) -> Manifest | None:
    """The manifest of a checkpoint directory, or None if it holds no safetensors file.

    Raises:
        WeightMismatch: a file is not in safetensors format.
    """
    files = sorted(Path(model_path).glob("*.safetensors"))
    if not files:
        return None
    try:
        return Manifest.of(TensorSpec(*spec) for file in files for spec in _specs_in(file))
    except SafetensorsError as error:
        raise WeightMismatch(str(error)) from None


def _specs_in(file: Path) -> list[tuple[str, str, tuple[int, ...]]]:
    with file.open("rb") as stream:
        return read_header(file, stream.fileno()).specs()
