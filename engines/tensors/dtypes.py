"""Element types of tensors: torch's names, safetensors' words, bytes of one element."""

from __future__ import annotations

# Torch's name -> safetensors' word and bytes of one element.  Older releases of safetensors cannot
# read complex numbers, so they have no word here and are not written.
_TYPES = {
    "complex128": ("", 16),
    "complex64": ("", 8),
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
DTYPES = tuple(_TYPES)
BROADCAST_TYPES = frozenset(
    {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8"}
)
"""Sent by a broadcast as they are; other types as bytes.  gloo (torch 2.13, tried) refuses float8,
int16, uint16, uint32 and uint64; torch's list for NCCL (NCCLUtils.hpp) lacks the last four."""
SAFETENSORS_WORDS = {name: word for name, (word, _) in _TYPES.items() if word}
NAMES_OF_WORDS = {word: name for name, word in SAFETENSORS_WORDS.items()}


def element_bytes(dtype: str) -> int:
    """Bytes of one element, by torch's name of the type: ``bfloat16``, ``float8_e4m3fn``.

    Raises:
        ValueError: the name is not known.
    """
    if dtype not in _TYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    return _TYPES[dtype][1]
