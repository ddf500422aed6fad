"""Long bodies are read in another process, and what comes back is as if they were read here."""

import asyncio
import json
import pickle

import pytest

from engines.kinds import KINDS
from rollout.router.continuation.dialects.table import ROUTES
from rollout.router.continuation.named_weights import NOT_NAMED
from rollout.router.http.head_cache import RequestHead
from rollout.router.http.reading_process import ReadingFailed
from rollout.router.http.request import Request
from rollout.router.http.routes import route_of
from rollout.router.proxy import exchange, reader_choice
from rollout.router.proxy.reader_choice import Wanted, read_body, read_long_body
from tests.rollout.router.raw import connect, post
from tests.rollout.router.stub_engine import reply

SAMPLING = {"max_new_tokens": 4, "stop": ["x"]}
CHAT = {"messages": [{"role": "user", "content": "a" * 99}], "max_tokens": 4}
BODIES = [
    ("/generate", {"input_ids": [1, 2, 3], "sampling_params": SAMPLING}),
    ("/generate", {"input_ids": [1, 2], "rid": "mine", "extra_key": "k", "stream": True}),
    ("/generate", {"text": "a" * 99, "sampling_params": SAMPLING, "cache_salt": "é"}),
    ("/generate", {"input_ids": [[1], [2]]}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "a" * 99, "stream": True, "extra_key": ["a"]}),
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "tools": [{}], "rid": 5}),
    ("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}, "request_id": "r"}),
    ("/v1/responses", {"input": "a", "cache_salt": "k"}),
]


def wanted(path, dialect, **fields):
    is_translated = path == "/generate" and dialect == "vllm"
    more = {"is_generating": path in ROUTES, "is_kept": True, "is_translated": is_translated}
    return Wanted(path, frozenset({dialect}), **more, max_bytes=1 << 20, **fields)


def written(read, path, body, dialect, tokens=()):
    """The body for an engine, after it, and what a lost engine had sent."""
    request = Request(RequestHead(b"POST", route_of(path.encode()), []), body, read.fields)
    if read.reply is not None:
        read.reply.route = ROUTES[path]
        request.body = read.reply.body(7, dialect)
        if tokens:
            read.reply.base.ids, read.reply.base.num = list(tokens), len(tokens)
            request.body = read.reply.body(7, dialect)
    request.name_for_engine()
    whole = json.loads(b"".join(request.body_for("run:v7", kind=KINDS[dialect])))
    if read.fields.takes_rid:  # which is random
        assert whole.pop(KINDS[dialect].body_names[0]) == request.sent_as
    return whole


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("tokens", [(), (7, 8)])
def test_a_body_is_read_as_it_is_here(monkeypatch, path, body, dialect, tokens):
    if path in ROUTES and dialect not in ROUTES[path].engines:
        pytest.skip("such engines do not have the route")
    monkeypatch.setattr(reader_choice, "_LONG", 1)
    data, what = json.dumps(body).encode(), wanted(path, dialect)
    here = read_body(what, data)
    there = pickle.loads(pickle.dumps(read_long_body(what, data, True)))
    assert (here.why_not, here.named) == (there.why_not, there.named)
    assert (here.reply is None) == (there.reply is None)
    if here.reply is not None and tokens and here.reply.prompt is None:
        tokens = ()
    if not here.why_not:
        expected = written(here, path, data, dialect, tokens)
        assert written(there, path, data, dialect, tokens) == expected


def test_a_name_of_weights_is_read_there_too():
    what = wanted("/generate", "sglang", names_weights=True)
    data = b'{"input_ids": [1], "lora_path": null}'
    there = pickle.loads(pickle.dumps(read_long_body(what, data, True)))
    assert there.named == read_body(what, data).named != NOT_NAMED


@pytest.fixture
def all_are_long(monkeypatch):
    monkeypatch.setattr(exchange, "MOST_BYTES_ON_LOOP", 0)


@pytest.mark.usefixtures("all_are_long")
async def test_a_long_request_reaches_its_engine_with_our_fields(make_bench):
    bench = await make_bench(reply())
    answer = await bench.ask(json={"input_ids": [1, 2], "extra_key": "mine"})
    assert answer.status == 200
    (seen,) = bench.engines[0].seen
    assert seen.json["extra_key"] == "run:v7:mine"
    assert len(seen.json["rid"]) == 32
    assert bench.host._proxy.reading._process is not None


@pytest.mark.usefixtures("all_are_long")
async def test_a_client_that_leaves_while_its_request_is_read_reaches_no_engine(make_bench):
    bench = await make_bench(reply())
    begun, over = asyncio.Event(), asyncio.Event()

    async def call(function, *arguments, client: str = ""):
        begun.set()
        await over.wait()
        return function(*arguments)

    bench.host._proxy.reading.call = call
    owner = bench.host._thread._loop
    _, writer = await connect(bench, post(b'{"input_ids": [1]}'))
    while not begun.is_set():
        await bench.host.stats()
    writer.transport.abort()
    while bench.host._proxy.live:
        await bench.host.stats()
    owner.call_soon_threadsafe(over.set)
    await bench.host.stats()
    assert bench.engines[0].seen == []


@pytest.mark.usefixtures("all_are_long")
async def test_a_request_that_could_not_be_read_is_a_503(make_bench):
    bench = await make_bench(reply())

    async def call(function, *arguments, client: str = ""):
        raise ReadingFailed("it was not read")

    bench.host._proxy.reading.call = call
    answer = await bench.ask()
    assert (answer.status, answer.json["error"]["message"]) == (503, "it was not read")
