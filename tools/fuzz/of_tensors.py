"""Readers of what pushes carry: pickled tensors, encoded tensors, safetensors files, handles."""

from __future__ import annotations

import base64
import json
import os
import pickle
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from engines.tensors.fingerprint import host_fingerprint_of, start_with
from engines.tensors.payload.weight_payload import HANDLES, MOST_SHARED, load_payload, tensors_in
from engines.tensors.safetensors_header import SafetensorsError, make_header, read_header
from rollout.core.errors import WeightsUnavailable
from tools.fuzz.reader import MOST_BYTES, Reader, Refused, Violation, times, whole

# The bytes of tensors beside what Python has: tracemalloc does not see torch's.
_MOST_TENSOR_BYTES = (MOST_SHARED + 2) * MOST_BYTES


def _tensors() -> list[tuple[str, Any]]:
    import torch

    return [
        ("w", torch.arange(12, dtype=torch.float32).reshape(3, 4)),
        ("b", torch.ones(5, dtype=torch.bfloat16)),
        ("flag", torch.tensor(True)),
    ]


def _payloads() -> Iterator[bytes]:
    import torch

    from rollout.weights.tensors import payload

    named = _tensors()
    bucket = bytes(payload.flattened_bucket(named))
    yield bucket
    yield bytes(payload.adapter_payload(named))
    yield pickle.dumps([(name, one) for name, one in named], 3)
    shared = torch.ones(6)
    yield pickle.dumps([("a", shared), ("b", shared[2:4]), ("t", shared.reshape(2, 3).T)], 4)
    yield pickle.dumps({name: one.float().numpy() for name, one in named}, 5)
    yield pickle.dumps(_Calls(os.system, "true"))
    yield pickle.dumps([("w", 5)])
    yield b"\x80\x04" + b"]" * 99
    yield handle_bucket()
    # One entry of a bucket, and one tensor, again and again: a reference takes two bytes.
    flat = torch.zeros(20_000, dtype=torch.uint8)
    place = payload.FlattenedTensorMetadata("w", flat.shape, flat.dtype, 0, 20_000, 20_000)
    again = {"flattened_tensor": flat, "metadata": [place] * 1000}
    yield payload._named_as_sglang_does(pickle.dumps(again, 3))
    yield pickle.dumps([("w", flat)] * 1000, 3)


def handle_bucket() -> bytes:
    """A payload of a CUDA IPC handle, as torch writes it on a GPU."""
    import torch
    from torch.multiprocessing import reductions

    from rollout.weights.tensors.payload import FlattenedTensorMetadata, _named_as_sglang_does

    place = FlattenedTensorMetadata("w", torch.Size((4,)), torch.float32, 0, 16, 16)
    handle = _Calls(
        reductions.rebuild_cuda_tensor,
        torch.Tensor,
        torch.Size((16,)),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        "GPU-0",
        b"m" * 64,
        16,
        0,
        False,
        b"c" * 64,
        0,
        b"e" * 64,
        True,
    )
    made = pickle.dumps({"flattened_tensor": handle, "metadata": [place]}, 3)
    return _named_as_sglang_does(made)


class _Calls:
    """What a payload calls, and with what."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._parts = function, arguments

    def __reduce__(self) -> Any:
        return self._parts


def _in_store(data: bytes) -> list[tuple[str, bytes]]:
    """As the store reads a pushed bucket."""
    from rollout.weights.store.push_reader import tensors_of

    found: list[tuple[str, Any]] = list(tensors_of(data))
    _check_size("the store's tensors", sum(content.nbytes for _, content in found))
    return [(name, b"") for name, _ in found]


def _in_plugin(data: bytes) -> Any:
    """As vLLM's client makes the plugin's form of it."""
    from engines.vllm.update_info import update_info

    return update_info([base64.b64encode(data).decode()])


def _in_embedded(data: bytes) -> int:
    """As the embedded engine makes tensors of it, in each of its forms."""
    from engines.embedded.core.errors import Invalid
    from engines.embedded.weights.payload_tensors import read_payload

    text, num = base64.b64encode(data).decode(), 0
    for load_format in (None, "flattened_bucket"):
        try:
            named = read_payload(text, load_format)
        except Invalid:
            continue
        num += 1
        storages = {one.untyped_storage().data_ptr(): one for _, one in named}
        num_bytes = sum(one.untyped_storage().nbytes() for one in storages.values())
        _check_size("the engine's tensors", num_bytes)
        for _, one in named:
            if one.numel():
                one[(-1,) * one.dim()].item()
    if not num:
        raise Invalid("in neither form")
    return num


def _check_size(what: str, num_bytes: int) -> None:
    if num_bytes > _MOST_TENSOR_BYTES:
        raise Violation(f"{what} have {num_bytes} bytes, at most {_MOST_TENSOR_BYTES} are allowed")


# -- encoded tensors ----------------------------------------------------------------------------


def _delta(data: bytes) -> Any:
    """A delta whose fingerprint is right, so that more than that is read of it."""
    import torch

    from engines.tensors.payload.encodings import decoded, why_not_for

    (length,) = struct.unpack("<I", data[:4].ljust(4, b"\0"))
    head, body = data[4 : 4 + length], data[4 + length :]
    hasher = start_with(head)
    hasher.update(memoryview(body))
    fingerprint = host_fingerprint_of(hasher).encode()
    content = bytearray(
        length.to_bytes(_delta_length_bytes(), "little") + head + fingerprint + body
    )
    made = decoded("w#delta", torch.frombuffer(content, dtype=torch.uint8))
    tensor = torch.zeros(8, dtype=torch.float32)
    if not why_not_for(made, tensor, "1"):
        made.apply(tensor)
    return str(made)


def _delta_length_bytes() -> int:
    from engines.tensors import delta

    return delta._LENGTH_BYTES


def _deltas() -> Iterator[bytes]:
    import torch

    from engines.tensors import delta

    positions = torch.tensor([1, 5], dtype=torch.int32)
    values = delta.bits_of(torch.tensor([1.0, 2.0]))
    made = bytes(
        delta.make_delta(delta.Delta("w", "float32", (8,), "1", 2), positions, values).numpy()
    )
    size = int.from_bytes(made[: delta._LENGTH_BYTES], "little")
    head = made[delta._LENGTH_BYTES : delta._LENGTH_BYTES + size]
    body = made[delta._LENGTH_BYTES + size + delta._FINGERPRINT_BYTES :]
    for changed in (head, head.replace(b'"num_changed":2', b'"num_changed":3'), b"{}", b"[]"):
        yield struct.pack("<I", len(changed)) + changed + body
    yield b""


# -- safetensors --------------------------------------------------------------------------------


def _files() -> Iterator[bytes]:
    header, _ = make_header([("a", "float32", (2, 3)), ("b", "bfloat16", ()), ("c", "int8", (0,))])
    yield header + bytes(26)
    yield header + bytes(5)
    for text in (
        b"{}",
        b"[]",
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
        b' "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
        b'{"a": {"dtype": "XX", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"x": 1}}',
    ):
        yield struct.pack("<Q", len(text)) + text + bytes(16)
    yield struct.pack("<Q", 1 << 40)


def _header(data: bytes) -> Any:
    descriptor = os.memfd_create("fuzz")
    try:
        os.write(descriptor, data)
        header = read_header("the file", descriptor)
        return len(header.specs()), header.placed(len(data)), sorted(header.metadata)
    finally:
        os.close(descriptor)


def _pushed_file(data: bytes) -> int:
    """As vLLM's plugin makes tensors of a file in the request."""
    from engines.vllm_plugin.pushed_files import tensors_in

    found = tensors_in(base64.b64encode(data).decode())
    return sum(one.nbytes for one in found.values())


def _pushed_handle(data: bytes) -> Any:
    """A handle and its layout, but for the opening of the memory."""
    from engines.plain_json import read_json
    from engines.vllm_plugin.pushed_handles import read_handle

    info = read_json(data)
    if not isinstance(info, dict) or not isinstance(handles := info.get("handles"), dict):
        raise Refused
    return read_handle("GPU-0", handles.get("GPU-0"), info.get("layout"))


def _handles() -> Iterator[bytes]:
    from engines.vllm.update_info import update_info

    made = update_info([base64.b64encode(handle_bucket()).decode()])
    yield json.dumps(made).encode()
    yield json.dumps({**made, "layout": {"a": 1}}).encode()


def _load(data: bytes) -> int:
    """Values with handles in them, as far as no kind of engine looks at them."""
    loaded = load_payload(data, HANDLES)
    return sum(one.content.nbytes for one in tensors_in(loaded))


_TORCH = ("torch",)


def readers() -> Sequence[Reader]:
    """The readers of this module."""
    from engines.embedded.core.errors import Invalid

    made = times(256)  # an opcode of two bytes makes a dict or an object
    form = (AttributeError, KeyError, TypeError, ValueError)
    return (
        Reader("payload_values", whole(_load), form, _payloads, made, needs=_TORCH),
        Reader(
            "payload_store", whole(_in_store), (WeightsUnavailable,), _payloads, made, needs=_TORCH
        ),
        Reader("payload_vllm", whole(_in_plugin), (ValueError,), _payloads, made, needs=_TORCH),
        Reader("payload_embedded", whole(_in_embedded), (Invalid,), _payloads, made, needs=_TORCH),
        Reader("delta", whole(_delta), (ValueError,), _deltas, needs=_TORCH),
        Reader("safetensors_header", whole(_header), (SafetensorsError,), _files),
        Reader("pushed_file", whole(_pushed_file), (ValueError,), _files, needs=_TORCH),
        Reader("pushed_handle", whole(_pushed_handle), (ValueError,), _handles, needs=_TORCH),
    )
