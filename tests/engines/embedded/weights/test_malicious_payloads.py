"""Payloads made to harm: each is refused in words, and never ends the process that reads it.

They are read in a child, so that one that ends it fails its test and not the run.
"""

from __future__ import annotations

import base64
import os
import pickle
import random
import resource
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.engines.embedded.engine_client import Asker

pytestmark = pytest.mark.embedded

MAX_GROWTH_BYTES = 300 << 20


class Call:
    """What a payload calls, and with what it fills the result."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.parts


def raw(*parts: bytes) -> bytes:
    """A pickle of these opcodes."""
    return b"".join((b"\x80\x04", *parts, b"."))


def named(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def bucket(**entry: Any) -> bytes:
    """A flattened bucket of 16 bytes, with one entry that has these fields."""
    import torch
    from rollout.weights.tensors import payload

    tensor = torch.ones(4)
    made = payload.flattened_bucket([("a", tensor)])
    place = payload.FlattenedTensorMetadata("a", tensor.shape, tensor.dtype, 0, 16, 16)
    wrong = payload.FlattenedTensorMetadata(**(vars(place) | entry))
    parts = [
        payload._named_as_sglang_does(pickle.dumps([what], 3))[2:-1] for what in (place, wrong)
    ]
    assert parts[0] in made
    return made.replace(*parts)


def objects() -> Iterator[tuple[str, Any]]:
    import numpy
    import torch

    if numpy.lib.NumpyVersion(numpy.__version__) < "2.0.0":
        from numpy.core.multiarray import _reconstruct
        from numpy.core.numeric import _frombuffer
    else:
        from numpy._core.multiarray import _reconstruct
        from numpy._core.numeric import _frombuffer

    pointers, float32 = b"A" * 32, numpy.dtype("f4")
    yield "the finding", Call(torch.Size, Call(numpy.ndarray, (4,), "O", pointers))
    yield "an array by its class", Call(numpy.ndarray, (4,), "f4", pointers)
    for kind in ("O", "O8", "V8", "U4", "M8", "f4,O", "c16", ">f4"):
        yield f"an array of {kind}", Call(_frombuffer, pointers, numpy.dtype(kind), (4,), "C")
        state = (1, (4,), numpy.dtype(kind), False, pointers)
        yield f"a filled {kind}", Call(_reconstruct, numpy.ndarray, (0,), b"b", state=state)
    for shape in ((1 << 40,), (-8,), (2, -4), (8, 1 << 63), (8.0,), (7,), "8"):
        yield f"an array of {shape}", Call(_frombuffer, pointers, float32, shape, "C")
    state = (1, (4,), float32, False, [1, 2])
    yield "a filled list", Call(_reconstruct, numpy.ndarray, (0,), b"b", state=state)
    yield "an empty array", Call(_reconstruct, numpy.ndarray, (1 << 40,), b"b")
    yield "a size of text", Call(torch.Size, "text")
    yield "a size of sizes", Call(torch.Size, (torch.Size((1,)),))
    yield "a parameter of text", Call(torch._utils._rebuild_parameter, "text", False, OrderedDict())


def tensors() -> Iterator[tuple[str, Any]]:
    import torch

    rebuild, storage = torch._utils._rebuild_tensor_v2, torch.ones(4).untyped_storage()
    typed = torch.ones(4)._typed_storage()
    for first, shape, strides in (
        (0, (1 << 40,), (1,)),
        (0, (1 << 40,), (0,)),
        (0, (5,), (1,)),
        (1, (4,), (1,)),
        (0, (4,), (-1,)),
        (3, (4,), (-1,)),
        (0, (2, 2), (2, 2)),
        (1 << 62, (1,), (1,)),
        (-1, (1,), (1,)),
        (0, (-4,), (1,)),
        (0, (4,), (1, 1)),
        (0, (4.0,), (1,)),
        (0, (True,), (1,)),
        (0, (1,) * 65, (1,) * 65),
        (0, (1 << 64,), (1 << 64,)),
        (0, 4, 1),
        ("0", (4,), (1,)),
    ):
        what = f"{shape} by {strides} from {first}"
        yield what, Call(rebuild, typed, first, shape, strides, False, OrderedDict())
    for no_storage in ("text", None, 4, (typed,), torch.ones(4), rebuild):
        call = Call(rebuild, no_storage, 0, (4,), (1,), False, OrderedDict())
        yield f"a tensor in {type(no_storage).__name__}", call
    load = torch.storage._load_from_bytes
    whole = storage.__reduce__()[1][0]
    yield "a storage of text", Call(load, "text")
    yield "a storage alone", typed
    for end in (0, 5, 40, len(whole) - 17, len(whole) - 3):
        stored = Call(load, whole[:end])
        yield (
            f"a storage cut at {end}",
            Call(rebuild, stored, 0, (4,), (1,), False, OrderedDict()),
        )
    within = pickle.dumps(Call(os.system, "true"))
    yield "a call within a storage", Call(load, within)
    yield "a sparse tensor", torch.eye(2).to_sparse()
    yield "a handle", Call(torch.multiprocessing.reductions.rebuild_cuda_tensor, *range(15))


def opcodes() -> Iterator[tuple[str, bytes]]:
    most = (1 << 31) - 1
    size, rebuild = named("torch", "Size"), named("torch._utils", "_rebuild_tensor_v2")
    entry = named("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
    yield "a deep key", raw(b"}", b")", b"\x85" * 300_000, b"Ns")
    yield "a deep tuple", raw(b")", b"\x85" * 300_000)
    yield "a deep list", raw(b"]" * 300_000, b"a" * 299_999)
    yield "a deep size", raw(size, b")", b"\x85" * 300_000, b"R")
    yield "a place of the memo", raw(b"Nr", most.to_bytes(4, "little"))
    yield "a place that is empty", raw(b"j", most.to_bytes(4, "little"))
    for code, width in ((b"B", 4), (b"X", 4), (b"\x8e", 8), (b"\x96", 8), (b"\x8d", 8)):
        length = (1 << (8 * width - 2)).to_bytes(width, "little")
        yield f"{length!r} bytes by {code!r}", raw(code, length, b"abc")
    yield "a frame without an end", raw(b"\x95", (1 << 62).to_bytes(8, "little"))
    yield "a number of 2 GiB", raw(b"\x8b", most.to_bytes(4, "little"), b"1")
    yield (
        "sizes copied over and over",
        raw(b"(", b"K\x01" * 100_000, b"t\x94", (size + b"h\x00\x85R") * 10_000, b"t"),
    )
    yield "a list of itself", raw(b"]\x94h\x00a")
    yield "a dict of itself", raw(b"}\x94X\x01\x00\x00\x00ah\x00s")
    yield "a function that is changed", raw(rebuild, b"N}X\x0c\x00\x00\x00__defaults__)s\x86b")
    yield "a class that is changed", raw(entry, b"N}X\x04\x00\x00\x00nameK\x01s\x86b")
    yield "an object of a function", raw(rebuild, b")\x81")
    yield "a call of text", raw(b"X\x04\x00\x00\x00text)R")
    yield "a call without a tuple", raw(size, b"]R")
    yield "a name that is none", raw(b"K\x01K\x02\x93")
    yield "text that is none", raw(b"X\x02\x00\x00\x00\xff\xfe")
    yield "a name without an end", raw(b"c" + b"a" * 1000)
    yield "a persistent id", raw(b"NQ")
    yield "an extension", raw(b"\x82\x01")
    yield "a set", raw(b"\x8f(K\x01\x90")
    for short in (b"", b"R", b"b", b"a", b"e", b"u", b"s", b"t", b"\x87", b"\x93", b"q\x00", b"("):
        yield f"nothing before {short!r}", raw(short)
        yield f"one number before {short!r}", raw(b"K\x01", short)
    yield "no bytes", b""
    yield "no end", b"\x80\x04N"


def buckets() -> Iterator[tuple[str, bytes]]:
    nested: Any = 1
    for _ in range(100):
        nested = [nested]
    for wrong in (
        {"end_idx": 20},
        {"start_idx": -16, "end_idx": 0},
        {"start_idx": 16, "end_idx": 0},
        {"start_idx": 1, "end_idx": 17},
        {"start_idx": 0.0},
        {"end_idx": 12},
        {"shape": (1 << 40,)},
        {"shape": (-4,)},
        {"shape": nested},
        {"shape": (nested,)},
        {"shape": "four"},
        {"dtype": "object"},
        {"dtype": ("float32",)},
        {"dtype": nested},
        {"name": nested},
        {"name": 5},
    ):
        yield f"a bucket with {next(iter(wrong))} {str(wrong)[:40]}", bucket(**wrong)
    yield "a bucket of text", pickle.dumps({"flattened_tensor": "text", "metadata": []})
    yield "a bucket without entries", pickle.dumps({"flattened_tensor": "text"})
    yield "a bucket that is a list", pickle.dumps([1])


def outcomes(cases: list[tuple[str, bytes]], load_format: str | None) -> dict[str, str]:
    """What became of each payload in a child, which has a minute."""
    import torch

    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the others are not in the child
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        for name, payload in cases:
            os.write(write_fd, f"{name}\0{outcome(payload, load_format)}\0".encode())
        os._exit(0)
    os.close(write_fd)
    with open(read_fd) as stream:
        said = stream.read().split("\0")[:-1]
    status = os.waitpid(child, 0)[1]
    found = dict(zip(said[::2], said[1::2], strict=True))
    if status:
        found[cases[len(found)][0]] = f"ended by status {os.waitstatus_to_exitcode(status)}"
    return found


def outcome(payload: bytes, load_format: str | None) -> str:
    from engines.embedded.core.errors import Invalid
    from engines.embedded.weights.payload_tensors import read_payload

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for _, tensor in read_payload(base64.b64encode(payload).decode(), load_format):
            tensor.clone()
        said = "read"
    except Invalid as refusal:
        said = "refused" if len(str(refusal)) < 1000 else "refused with too many words"
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"[:200]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return f"took {grown} bytes" if grown > MAX_GROWTH_BYTES else said


def pickled(cases: Iterator[tuple[str, Any]]) -> list[tuple[str, bytes]]:
    return [(what, pickle.dumps([("a", value)])) for what, value in cases]


TABLES: dict[str, Callable[[], list[tuple[str, bytes]]]] = {
    "objects": lambda: pickled(objects()),
    "tensors": lambda: pickled(tensors()),
    "opcodes": lambda: list(opcodes()),
    "buckets": lambda: list(buckets()),
}


@pytest.mark.parametrize("table", TABLES)
def test_a_payload_that_is_made_to_harm_is_refused(table: str) -> None:
    cases = TABLES[table]()
    assert len(dict(cases)) == len(cases)
    load_format = "flattened_bucket" if table == "buckets" else None
    found = outcomes(cases, load_format)
    assert {what: said for what, said in found.items() if said != "refused"} == {}
    assert found.keys() == dict(cases).keys()


def test_a_tensor_under_many_names_is_copied_once() -> None:
    import torch

    value = torch.zeros(1 << 18)
    payload = pickle.dumps([(str(number), value) for number in range(1000)])
    assert outcomes([("many names", payload)], None) == {"many names": "read"}


def test_a_payload_of_too_many_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from engines.tensors.payload import pickled_values

    monkeypatch.setattr(pickled_values, "MAX_STEPS", 1000)
    cases = [("few", raw(b"]" * 998)), ("many", raw(b"]" * 1000))]
    pickled_values.read_pickle(memoryview(cases[0][1]), lambda module, name: None)
    with pytest.raises(ValueError, match="at most 1000 steps"):
        pickled_values.read_pickle(memoryview(cases[1][1]), lambda module, name: None)


def valid_payloads() -> list[tuple[bytes, str | None]]:
    import numpy
    import torch
    from rollout.weights.tensors.payload import adapter_payload, flattened_bucket

    pairs = [("wide", torch.randn(3, 4)), ("odd", torch.ones(5, dtype=torch.bool))]
    arrays = {"a": numpy.ones((2, 3), numpy.float32), "b": torch.ones(4, 4).t()}
    return [
        (flattened_bucket(pairs), "flattened_bucket"),
        (adapter_payload(pairs), None),
        *((pickle.dumps(arrays, protocol), None) for protocol in (3, 4, 5)),
    ]


def mutated(payload: bytes, others: random.Random) -> bytes:
    """The payload with one to three changes: bytes set, taken out, doubled, or cut."""
    content = bytearray(payload)
    for _ in range(others.randint(1, 3)):
        at = others.randrange(len(content))
        length = min(others.choice((1, 1, 1, 2, 8, 30)), len(content) - at)
        change = others.randrange(5)
        if change < 2:
            content[at : at + length] = others.randbytes(length)
        elif change == 2:
            del content[at : at + length]
        elif change == 3:
            content[at:at] = content[at : at + length]
        else:
            content[at] = others.choice(b"(.)]}NQRabceghjqrstu\x81\x85\x86\x87\x93\x94")
        content = content or bytearray(b"N")
    return bytes(content)


@pytest.mark.parametrize("index", range(5))
def test_a_payload_with_random_changes_is_read_or_refused(index: int) -> None:
    payload, load_format = valid_payloads()[index]
    others = random.Random(index)
    cases = [(f"change {number}", mutated(payload, others)) for number in range(600)]
    found = outcomes([("unchanged", payload), *cases], load_format)
    assert found.pop("unchanged") == "read"
    assert {what: said for what, said in found.items() if said not in ("read", "refused")} == {}
    assert len(found) == len(cases)
    assert list(found.values()).count("refused") > 100


async def test_the_engine_refuses_such_a_payload_and_lives_on(engine: Asker) -> None:
    payload = base64.b64encode(pickled(objects())[0][1]).decode()
    path = "/load_lora_adapter_from_tensors"
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    body = {"lora_name": "a", "config_dict": config, "serialized_named_tensors": [payload]}
    refused = "payload is not base64 of a pickle of tensors"
    assert refused in await engine.refused(400, path, **body)
    await engine.post("/begin_weight_update")
    update = {"serialized_named_tensors": [payload], "load_format": "direct"}
    assert refused in await engine.refused(400, "/update_weights_from_tensor", **update)
    await engine.post("/end_weight_update")
    assert (await engine.generate(max_new_tokens=2))["meta_info"]["completion_tokens"] == 2
