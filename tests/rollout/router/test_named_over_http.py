"""What clients name over HTTP: what the router keeps of it, answers to it and logs of it.

Each row of ``NAMED`` gets values as long as the transport allows, and many.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from .conftest import Bench, MakeBench, router_config
from .raw import response_to
from .stub_engine import Connection, Seen, reply

HEAD, BODY = 60_000, 1 << 20
MIB = 1 << 20
LONGEST_ERROR, LONGEST_LINE = 2048, 1024
HOSTILE = "\r\nERROR forged \x1b[31m"


@dataclass
class Named:
    """Something that a client names.

    Attributes:
        what: it is.
        request: with a value in its place.
        longest: value in characters.
        most_bytes: that the router may keep of 3 to 8 MB of such values, or of 1 500 of 1.5 kB.
    """

    what: str
    request: Callable[[str], bytes]
    longest: int = BODY
    most_bytes: int = 2 * MIB


def in_head(value: str) -> str:
    """Without what no head can have."""
    return value.replace("\r", "%0D").replace("\n", "%0A").replace("\x1b", "%1B").replace(" ", "+")


def message(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """A request; an underscore in a header's name stands for a hyphen."""
    named = {"host": "localhost", "content-type": "application/json"} | headers
    lines = [f"{method} {path} HTTP/1.1", f"content-length: {len(body)}", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in named.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def at_path(form: str, method: str = "POST", **more: Any) -> Callable[[str], bytes]:
    body = json.dumps(more["json"]).encode() if more else b""
    return lambda value: message(method, form.format(in_head(value)), body)


def in_header(name: str, path: str = "/generate") -> Callable[[str], bytes]:
    return lambda value: message("POST", path, b'{"input_ids": [1]}', **{name: in_head(value)})


def in_body(path: str, make: Callable[[str], Any]) -> Callable[[str], bytes]:
    return lambda value: message("POST", path, json.dumps(make(value)).encode())


def field(name: str, path: str = "/generate", **more: Any) -> Callable[[str], bytes]:
    return in_body(path, lambda value: {"input_ids": [1], **more, name: value})


CHAT = {"messages": [{"role": "user", "content": "a"}]}
NAMED = [
    Named("path", at_path("/{}"), HEAD),
    Named("session, which the router has not", at_path("/sessions/{}", "GET"), HEAD),
    Named("query", at_path("/generate?{}", json={"input_ids": [1]}), HEAD),
    Named("affinity", in_header("x_affinity"), HEAD, 3 * MIB),
    Named("engine in a header", in_header("x_engine_id"), HEAD),
    Named("any header", in_header("x_anything"), HEAD),
    Named("origin", in_header("origin"), HEAD),
    Named("host", in_header("host"), HEAD, 6 * MIB),
    Named("content type", in_header("content_type"), HEAD),
    Named("affinity in a body", field("affinity"), BODY, 3 * MIB),
    Named("rid", field("rid")),
    Named("rids", in_body("/generate", lambda value: {"input_ids": [[1]], "rid": [value]})),
    Named("extra_key", field("extra_key")),
    Named("lora_path", field("lora_path")),
    Named("stop", field("sampling_params", stop=1)),
    Named("model", in_body("/v1/completions", lambda value: {"prompt": "a", "model": value})),
    Named("cache_salt", in_body("/v1/completions", lambda v: {"prompt": "a", "cache_salt": v})),
    Named("rid to abort", in_body("/abort_request", lambda value: {"rid": value})),
    Named("beginning of rids", in_body("/abort_request", lambda v: {"rid_prefix": v})),
    Named("figure", in_body("/figures", lambda v: {"step": 1, "metrics": {v: 1}})),
    Named("figure's value", in_body("/figures", lambda v: {"step": 1, "metrics": {"a": v}})),
    Named("step of figures", in_body("/figures", lambda v: {"step": v})),
    Named("engine of figures", in_body("/figures", lambda v: {"step": 1, "logprob_gaps": {v: {}}})),
    Named(
        "sample of figures", in_body("/figures", lambda v: {"step": 1, "samples": [{"prompt": v}]})
    ),
    Named("adapter to pin", in_body("/pins", lambda v: {"lora_path": v})),
]
BY_WHAT = pytest.mark.parametrize("row", NAMED, ids=lambda row: row.what)
Script = Callable[[Connection, Seen], Any]


async def _bench(make_bench: MakeBench, script: Script | None = None) -> Bench:
    bench = await make_bench(script or reply(), config=router_config(policy="affinity"))
    adapters = {"policy": "policy@1"}
    await bench.host.set_gate("open", weight_version=7, base_version=7, adapters=adapters)
    return bench


async def send(bench: Bench, row: Named, value: str) -> None:
    """Send a request.  An error is short, with no characters that a terminal or a log obeys."""
    try:
        whole = await response_to(bench, row.request(value))
    except ConnectionResetError:  # refused, and closed before all of the body was sent
        return
    for engine in bench.engines:
        engine.seen.clear()
    head, _, body = whole.partition(b"\r\n\r\n")
    if int(head.split()[1]) >= 400:
        assert len(whole) < LONGEST_ERROR, whole[:300]
        assert all(byte >= 32 for byte in body), body[:300]


@BY_WHAT
@pytest.mark.parametrize("num", [pytest.param(1_500, marks=pytest.mark.slow), 60])
async def test_nothing_is_kept_of_what_clients_name(
    row: Named, num: int, make_bench: MakeBench
) -> None:
    bench = await _bench(make_bench)
    length = row.longest if num == 60 else 1500
    if row.longest == BODY and num == 60:
        num = 8  # of 1 MiB
    await send(bench, row, "first")
    tracemalloc.start()
    try:
        before = _traced()
        for number in range(num):
            await send(bench, row, f"{number:06d}".ljust(length, "v"))
        grown = _traced() - before
    finally:
        tracemalloc.stop()
    assert grown < row.most_bytes, f"{grown / MIB:.1f} MiB"


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@BY_WHAT
async def test_lines_of_the_log_are_short_and_are_the_routers_own(
    row: Named,
    make_bench: MakeBench,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of requests that are answered, whose engine fails, and that the router itself fails."""
    caplog.set_level(logging.DEBUG)

    async def break_off(connection: Connection, seen: Seen) -> None:
        raise ConnectionResetError

    bench = await _bench(make_bench, break_off)
    values = (HOSTILE, HOSTILE + "v" * (row.longest - 100))
    for epoch, value in enumerate(values, 2):
        await bench.host.set_members(epoch, [bench.member(0)])
        await send(bench, row, value)
    await bench.host.set_members(4, [bench.member(0)])

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a fault of the router")

    for value in values:
        await bench.host.set_gate("holding")
        with monkeypatch.context() as patch:
            patch.setattr(type(bench.host._gate), "_admit_or_refuse", fail)
            sending = asyncio.ensure_future(send(bench, row, value))
            while not sending.done() and not (await bench.host.stats())["gate"]["num_held"]:
                pass
            await bench.host.set_gate("open")
            await sending
            await send(bench, row, value)
    for record in caplog.records:
        line = record.getMessage() + json.dumps(getattr(record, "rid", ""))
        assert line.isprintable(), line[:300]
        assert len(line) < LONGEST_LINE, line[:300]
    lines = " ".join(record.getMessage() for record in caplog.records)
    is_generation = row.request("").startswith((b"POST /generate", b"POST /v1/completions"))
    is_sent = is_generation and row.what not in ("origin", "host")  # refused at once
    assert ("failed POST" in lines) == is_sent
    assert ("could not be admitted" in lines) == is_sent
