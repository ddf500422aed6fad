"""Readers of what engines and clients send: JSON of replies, streams, bodies, chats, tool calls."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from engines.http.call import EngineCall
from engines.http.connections import HttpReply
from engines.http.sglang_json import (
    read_generate,
    read_loads,
    read_model_info,
    read_server_info,
    read_weights_manifest,
    read_weights_report,
    sse_payloads,
)
from engines.kinds import kind_of
from engines.plain_json import WRONG_FORM, read_json
from engines.protocol.errors import EngineRejected
from engines.vllm import server_report, vllm_json
from rollout.agents import router_link
from rollout.agents.failures import ChatFailure
from rollout.agents.model.answer_reader import AnswerReader
from rollout.agents.model.call_forms import FORMS, THINK
from rollout.agents.model.reply_text import marks_of
from rollout.agents.plan import read_in
from rollout.agents.wire.messages import BadChat
from rollout.driver.client import http_client
from rollout.driver.client.generation_client import GenerationError
from rollout.router.continuation.dialects.table import ROUTES
from rollout.router.continuation.named_weights import read_named
from rollout.router.engine_queries import read_order
from rollout.router.http.head_cache import ReplyHead, RequestHead
from rollout.router.http.request import Request, prompt_of
from rollout.router.http.routes import route_of
from rollout.router.proxy.engine_errors import first_error, read_error, status_of, why_lost
from rollout.router.proxy.figures import StepMetrics
from rollout.router.proxy.prefill_decode import Prompt, _read_prompt
from rollout.router.proxy.reader_choice import Wanted, read_body, read_long_body
from rollout.router.proxy.token_reader import OPEN, Finish, TokenReader, Write
from tools.fuzz.reader import Reader, Refused, Violation, numbered, times, whole

_GENERATED = {
    "text": "ab",
    "output_ids": [1, 2],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 2},
        "output_token_logprobs": [[-0.5, 1, None], [-0.25, 2, None]],
        "input_token_logprobs": [[None, 7, None], [-1.0, 8, None]],
        "output_top_logprobs": [[[-0.5, 1, None]], None],
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "weight_version": "7",
        "weight_versions": [{"version": "7", "start": 0, "end": 2}],
        "routed_experts": "AAAA",
        "output_token_sampling_mask": [[1], None],
    },
}
_VLLM = {
    "request_id": "generate-tokens-r",
    "choices": [
        {
            "index": 0,
            "token_ids": [1, 2],
            "text": "ab",
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
            "finish_reason": "stop",
            "stop_reason": None,
            "weight_versions": [{"version": "7", "start": 0, "end": 2}],
        }
    ],
    "usage": {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    "prompt_logprobs": [None, {"8": {"logprob": -1.0}}],
}
_COMPLETION = {
    "id": "cmpl-r",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "text": "ab",
            "token_ids": [1, 2],
            "logprobs": {
                "token_logprobs": [-0.5, -0.25],
                "tokens": ["a", "b"],
                "top_logprobs": [None, None],
                "text_offset": [0, 1],
            },
            "finish_reason": "stop",
            "matched_stop": None,
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    "metadata": {"weight_version": "7"},
}
_CHAT = {
    "id": "chatcmpl-r",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": "ab", "reasoning_content": "c"},
            "token_ids": [1, 2],
            "logprobs": {
                "content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]
            },
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ],
    "prompt_token_ids": [7, 8],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    "metadata": {"weight_version": "7"},
}
_SERVER_INFO = {
    "version": "0.5.23",
    "tp_size": 2,
    "pp_size": 1,
    "device": "cuda",
    "random_seed": 5,
    "startup_time": {"a": 1.5},
    "internal_states": [{"memory_usage": {"weight": 1.5, "kvcache": 2}, "world_size": 2}],
    "released_tags": ["weights"],
    "weights_update_groups": [],
}
_VLLM_INFO = {
    "vllm_config": {
        "model_config": {"model": "m", "enable_sleep_mode": True},
        "parallel_config": {"tensor_parallel_size": 1},
        "weight_transfer_config": {"backend": "rollout_shm"},
        "instance_id": "x",
    }
}
_WORKERS = {
    "results": [
        {
            "checksums": {"w": "aa"},
            "num_bytes": 5,
            "resident_bytes": {"weights": 5},
            "released": ["kv_cache"],
            "groups": ["g"],
            "encodings": ["delta"],
            "opens_handles": True,
            "error": "",
        }
    ]
}
_LOADS = {
    "loads": [
        {
            "num_running_reqs": 1,
            "num_waiting_reqs": 0,
            "gen_throughput": 1.5,
            "num_output_tokens": 5,
            "token_usage": 0.5,
        }
    ]
}
_MANIFEST = [{"name": "w", "dtype": "float32", "shape": [2, 3], "is_tied": False}]


def _vllm_reply(event: Any) -> Any:
    reader = vllm_json.ReplyReader([7, 8], prompt_from=0, version="7")
    reader.add(event)
    return reader.reply()


def _state_of_plugin(answer: Any) -> Any:
    info = server_report.read_server_info("0.32", _VLLM_INFO)
    return server_report.info_with_state(info)(answer)


_CHECKED = {
    "ranks": [{"checksums": {"w": "aa"}, "parallelism_info": [{"pp_size": 1, "pp_rank": 0}]}]
}
_ANSWERS: Mapping[str, tuple[Callable[[Any], Any], Any]] = {
    "generate": (read_generate, _GENERATED),
    "model_info": (read_model_info, {"model_path": "m", "weight_version": "7"}),
    "server_info": (read_server_info, _SERVER_INFO),
    "loads": (read_loads, _LOADS),
    "weights_report": (read_weights_report, _CHECKED),
    "weights_manifest": (read_weights_manifest, _MANIFEST),
    "vllm_reply": (_vllm_reply, _VLLM),
    "vllm_checksums": (vllm_json.read_checksums, {"checksums": {"r0:w": "aa"}}),
    "vllm_fingerprints": (vllm_json.read_fingerprints, _WORKERS),
    "vllm_errors": (vllm_json.read_errors, _WORKERS),
    "vllm_manifest": (vllm_json.read_manifest, {"results": [_MANIFEST]}),
    "vllm_info": (lambda answer: server_report.read_server_info("0.32", answer), _VLLM_INFO),
    "vllm_state": (_state_of_plugin, _WORKERS),
}
"""Each reader of an engine's answer, and an answer that it reads."""


_OTHERS: tuple[Any, ...] = (
    None,
    [],
    {},
    "x",
    "",
    1.5,
    -1,
    10**30,
    10**400,
    math.nan,
    math.inf,
    True,
)


def _changed(value: Any) -> Iterator[Any]:
    """The value with each of its parts replaced by other ones."""
    yield value
    if isinstance(value, dict):
        for name, part in value.items():
            yield {other: one for other, one in value.items() if other != name}
            for changed in _changed(part):
                yield {**value, name: changed}
    elif isinstance(value, list):
        for place, part in enumerate(value):
            for changed in _changed(part):
                yield [*value[:place], changed, *value[place + 1 :]]
    yield from _OTHERS


_DEEP = b"[" * 5000, b'{"a":' * 250 + b"1" + b"}" * 250, b"[" * 250 + b"]" * 250


def _numbered(rows: Sequence[Any]) -> Iterator[bytes]:
    """Inputs whose first byte is the row: each answer, and each of its changes."""
    for number, right in enumerate(rows):
        for value in _changed(right):
            yield bytes([number]) + json.dumps(value).encode()
        for deep in _DEEP:
            yield bytes([number]) + deep


def _answer(data: bytes) -> Any:
    """An engine's answer to a call."""
    rows = list(_ANSWERS.values())
    read, _ = rows[data[0] % len(rows)] if data else rows[0]
    return EngineCall("engine", "operation", 1.0).read(HttpReply(200, data[1:]), read)


def _answers() -> Iterator[bytes]:
    return _numbered([right for _, right in _ANSWERS.values()])


def _kind_loads(data: bytes) -> Any:
    """What an engine reports of its load, as the page and drivers read it."""
    kind = kind_of(("sglang", "vllm")[data[0] % 2 if data else 0])
    return kind.read_loads(data[1:])


def _loads() -> Iterator[bytes]:
    for value in _changed(_LOADS):
        yield b"\0" + json.dumps(value).encode()
    for number in ("1.0", "1e5", "...", "1e999", "e", "+1", "1" * 400):
        for name in ("num_requests_running", "kv_cache_usage_perc", "generation_tokens_total"):
            yield f'\1vllm:{name}{{a="b"}} {number}\n'.encode()
    yield b"\0" + _DEEP[0]


# -- streams ------------------------------------------------------------------------------------


async def _parts(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def _all(made: AsyncGenerator[Any, None]) -> list[Any]:
    """What a generator gives that waits for nothing."""

    async def collect() -> list[Any]:
        return [one async for one in made]

    try:
        collect().send(None)
    except StopIteration as end:
        found: list[Any] = end.value
        return found
    raise Violation("it waits")


def _sse(parts: Sequence[bytes]) -> list[bytes]:
    found = _all(sse_payloads(_parts(parts)))
    if not found:
        raise Refused
    return found


def _events(*payloads: Any, done: bool = True) -> bytes:
    lines = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in payloads)
    return lines + (b"data: [DONE]\n\n" if done else b"")


def _streams() -> Iterator[bytes]:
    yield _events(_GENERATED)
    yield b": comment\n\ndata:" + "\u2028".encode() + b"\r\ndata: x"
    yield b"nothing"
    yield b"\n" * 3000


class _Response:
    """The reply to a driver."""

    headers: Mapping[str, str] = {"x-engine-id": "e", "x-logprob-kind": "sampled"}

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.content = self
        self._parts = parts

    def iter_any(self) -> AsyncIterator[bytes]:
        return _parts(self._parts)


def _driver_stream(parts: Sequence[bytes]) -> list[Any]:
    """A reply to the driver's client, which is streamed."""
    return [repr(one) for one in _all(http_client._read_stream(_Response(parts)))]  # type: ignore[arg-type]


def _driver_streams() -> Iterator[bytes]:
    unfinished = {**_GENERATED, "meta_info": {**_GENERATED["meta_info"], "finish_reason": None}}  # type: ignore[dict-item]
    yield _events(unfinished, _GENERATED)
    for value in _changed(_GENERATED):
        yield _events(value)
    yield from (b"data: " + deep + b"\n\n" for deep in _DEEP)
    yield _events({"error": {"message": "no"}})


def _worker_stream(parts: Sequence[bytes]) -> list[Any]:
    """A reply of the router to a worker of agents, which is streamed."""
    return [repr(one) for one in _all(router_link._streamed(_Response(parts), {}))][-1:]  # type: ignore[arg-type]


def _refusal(data: bytes) -> str:
    """A refusal of the router, or an error of an engine: of these nothing raises."""
    error = http_client._error_of_status((503, 400, 500)[data[0] % 3 if data else 0], data[1:], "x")
    payload = read_error(data[1:])
    found = (why_lost(payload, outlives_its_core=True), status_of(payload), first_error(data[1:]))
    if "a newer one" not in str(error):
        raise Refused
    return f"{found}{error}"


def _refusals() -> Iterator[bytes]:
    right = {
        "error": {"needs_push": 5, "reason": "r", "code": 500, "type": "not_finite", "message": "m"}
    }
    for value in _changed(right):
        yield b"\0" + json.dumps(value).encode()
        yield b'\0data: {"error"' + json.dumps(value).encode()
    yield b"\0" + _DEEP[0]


# -- replies read as tokens ---------------------------------------------------------------------

_SAMPLED = {"max_new_tokens": 4, "stop": ["zz"]}
_OPENAI = {"max_tokens": 4, "stop": ["zz"], "stream": True, "return_token_ids": True}
_MESSAGES = [{"role": "user", "content": "a"}]
_REPLIES: Sequence[tuple[str, str, Any, Any]] = (
    ("/generate", "sglang", {"input_ids": [7, 8], "sampling_params": _SAMPLED}, _GENERATED),
    (
        "/generate",
        "sglang",
        {"input_ids": [7, 8], "sampling_params": _SAMPLED, "stream": True, "return_logprob": True},
        _GENERATED,
    ),
    (
        "/generate",
        "sglang",
        {"text": "x", "sampling_params": _SAMPLED, "return_routed_experts": True},
        _GENERATED,
    ),
    (
        "/generate",
        "sglang",
        {"input_ids": [7, 8], "sampling_params": _SAMPLED, "return_sampling_mask": True},
        _GENERATED,
    ),
    ("/generate", "vllm", {"input_ids": [7, 8], "return_logprob": True}, _VLLM),
    (
        "/inference/v1/generate",
        "vllm",
        {"token_ids": [7, 8], "sampling_params": {"max_tokens": 4, "logprobs": 0}},
        _VLLM,
    ),
    ("/v1/completions", "sglang", {"prompt": [7, 8], "logprobs": 0, **_OPENAI}, _COMPLETION),
    ("/v1/completions", "vllm", {"prompt": "x", "max_tokens": 4}, _COMPLETION),
    ("/v1/chat/completions", "sglang", {"messages": _MESSAGES, "max_tokens": 4}, _CHAT),
    ("/v1/chat/completions", "sglang", {"messages": _MESSAGES, "logprobs": True}, _CHAT),
    ("/v1/chat/completions", "vllm", {"messages": _MESSAGES, "logprobs": True, **_OPENAI}, _CHAT),
)
"""Route, dialect of the engine, the client's body, and an event of the engine."""


def _reply(parts: Sequence[bytes]) -> Any:
    """An engine's reply, which the router reads as tokens."""
    row, parts = numbered(parts, len(_REPLIES))
    path, dialect, body, _ = _REPLIES[row]
    made = ROUTES[path].reply(json.dumps(body).encode(), 1, frozenset({dialect}))
    assert made is not None
    reader = TokenReader(made)
    reader.body(7, dialect)
    content = b"application/json" if made.wants_whole_reply else b"text/event-stream"
    reader.begin(ReplyHead(200, [(b"content-type", content)]))
    action = None
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        action = reader.take(part, OPEN if is_last else None)
        if is_last or action is None:
            continue
        if not isinstance(action, Write):
            break
    if not made.is_finished:
        made.lose_engine()
        reader.body(8, dialect)
    reader.abort()
    if not isinstance(action, Finish):
        raise Refused(str(action))
    # A client of a stream gets events that depend on how they came.
    return b"".join(map(bytes, action.body)) if not made.is_streamed else "streamed"


def _replies() -> Iterator[bytes]:
    for number, (path, _, _, right) in enumerate(_REPLIES):
        first = bytes([number])
        yield first + json.dumps(right).encode()
        for value in _changed(right):
            yield first + _events(value)
        if path == "/generate":
            half = {**right, "output_ids": [1], "text": "a"} if "text" in right else right
            yield first + _events(half, right)
        for deep in _DEEP:
            yield first + b"data: " + deep + b"\n\n"
        yield first + _events(right, {"error": {"message": "m", "code": 500}})
        yield (
            first
            + b'data: {"text": "'
            + b"a" * 9000
            + b'", "output_ids": [1], "meta_info": {}}\n\n'
        )


def _prefill(data: bytes) -> Any:
    found = _read_prompt(data)
    if not isinstance(found, Prompt):
        raise Refused
    return found


def _prefills() -> Iterator[bytes]:
    yield json.dumps(_GENERATED).encode()
    for value in _changed(_GENERATED):
        yield _events(value)
    yield from _DEEP


# -- bodies of clients --------------------------------------------------------------------------

_BODIES: Sequence[tuple[str, frozenset[str], Any]] = tuple(
    (path, frozenset({dialect}), {**body, "rid": "r", "extra_key": "k", "lora_path": None})
    for path, dialect, body, _ in _REPLIES
)


def _body(data: bytes) -> Any:
    """A client's body: what the router reads of it, and what an engine would get."""
    path, dialects, _ = _BODIES[data[0] % len(_BODIES)] if data else _BODIES[0]
    body, (dialect,) = data[1:], dialects
    wanted = Wanted(
        path,
        dialects,
        is_generating=True,
        is_translated=path == "/generate" and dialect == "vllm",
        is_kept=True,
        names_weights=True,
        max_bytes=1 << 20,
    )
    read = read_body(wanted, body)
    read_long_body(wanted, body, True)
    prompt_of(body)
    read_named(path, body, 1 << 20)
    head = RequestHead(b"POST", route_of(path.encode()), [])
    request = Request(head, body, read.fields)
    if read.reply is not None:
        read.reply.route = ROUTES[path]
        request.body = read.reply.body(7, dialect)
    request.name_for_engine()
    b"".join(request.body_for("run:v7", {"a": 1}, kind_of(dialect)))
    if read.reply is None:
        raise Refused
    return True


def _bodies() -> Iterator[bytes]:
    yield from _numbered([body for _, _, body in _BODIES])
    text = json.dumps(_BODIES[0][2])
    for encoding in ("utf-16", "utf-32", "utf-8-sig", "utf-16-le"):
        yield b"\0" + text.encode(encoding)
    yield b"\0" + b'{"input_ids":[' + b"9" * 5000 + b"]}"
    yield b'\0{"rid":"\\ud800","input_ids":[1]}'


def _abort(data: bytes) -> Any:
    if (found := read_order(data)) is None:
        raise Refused
    return found


def _aborts() -> Iterator[bytes]:
    for value in _changed({"rid": ["a"], "rid_prefix": "p", "abort_all": False}):
        yield json.dumps(value).encode()
    yield from _DEEP


def _figures(data: bytes) -> Any:
    """What a driver reports of a step, as the router's route reads it."""
    kept = StepMetrics()
    kept.put(read_json(data), len(data))
    json.dumps(kept.last(), allow_nan=False)
    return len(kept.last())


def _reports() -> Iterator[bytes]:
    sample = {
        "prompt": "p",
        "reply": "r",
        "reward": 1.0,
        "tokens": 5,
        "engines": ["e"],
        "versions": [7],
        "status": "",
    }
    right = {
        "step": 1,
        "metrics": {"a": 1.5},
        "lengths": {"8": 1},
        "logprob_gaps": {"e": {"0.1": 5}},
        "samples": [sample],
    }
    for value in _changed(right):
        yield json.dumps(value).encode()
    yield from _DEEP


# -- chats --------------------------------------------------------------------------------------


def _chat(data: bytes) -> Any:
    """A chat of a session, as far as it needs no tokenizer."""
    chat, history = read_in(data)
    return len(history.exact), chat.begun


def _chats() -> Iterator[bytes]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    right = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "<think>b</think> c", "tool_calls": [call]},
            {"role": "tool", "content": "d", "tool_call_id": "c"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
        "stream_options": {"include_usage": True},
        "stream": True,
        "max_tokens": 5,
        "stop": ["x"],
        "n": 1,
    }
    for value in _changed(right):
        yield json.dumps(value).encode()
    call["function"] = {"name": "f", "arguments": "[" * 5000}
    yield json.dumps(right).encode()
    call["function"] = {"name": "f", "arguments": '{"a": "\\ud800"}'}
    yield json.dumps(right).encode()
    call["function"] = {"name": "f", "arguments": "9" * 5000}
    yield json.dumps(right).encode()
    yield from _DEEP


@cache
def _answer_readers() -> list[AnswerReader]:
    """Of a model with a token for each character."""

    def decode(ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    return [
        AnswerReader(
            form, THINK, marks_of((*form.all_marks, *THINK), lambda word: None, {}), decode
        )
        for form in FORMS
    ]


_SCHEMA = {"properties": {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "object"}]}}}
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}]


def _tool_calls(parts: Sequence[bytes]) -> Any:
    """What a model wrote: its calls, and what of it was certain while it came."""
    data = b"".join(parts)
    readers = _answer_readers()
    reader = readers[data[0] % len(readers)] if data else readers[0]
    ids = list(map(ord, data[1:].decode("utf-8", "replace")))
    options: Any = {"tools": _TOOLS, "stops": ["]]"], "new_id": lambda: "abcdefghijk"}
    whole, reading = reader.reading(**options), reader.reading(**options)
    whole.feed(ids)
    answer = whole.end()
    step = max(1, len(ids) // max(1, len(parts)))
    pieces = [reading.feed(ids[at : at + step]) for at in range(0, len(ids), step)]
    for name in ("content", "reasoning"):
        shown = "".join(getattr(piece, name) for piece in pieces)
        if not getattr(answer, name).startswith(shown):
            raise Violation(f"certain: {shown!r:.200}, and then {answer!r:.200}")
    if reading.end() != answer:
        raise Violation(f"in pieces it is another answer than {answer!r:.200}")
    if not answer.calls:
        raise Refused
    return answer


def _written_calls() -> Iterator[bytes]:
    yield b"\0<|channel|>analysis<|message|>a<|end|><|start|>assistant to=functions.f<|message|>{}"
    yield b'\1[TOOL_CALLS]f[ARGS]{"a": 1}'
    yield b'\1[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'
    section = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    section += '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
    yield b"\2" + section.encode()
    for row, middle in ((3, "function\u003c|sep|>f\n```json\n{}\n```"), (4, "f{}")):
        yield bytes([row]) + "".join((*FORMS[row].blocks, middle, *FORMS[row].marks)).encode()
    yield b"\5<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"
    yield b"\6<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
    yield b'\7a<tool_call>\n{"name": "f", "arguments": {"a": [1, "<tool_call>"]}}\n</tool_call>b'
    yield b'\10<|python_tag|>{"name": "f", "parameters": {"a": 1}}'
    yield b'\10{"name": "f", "parameters": {"a": 1}}'
    for number, form in enumerate(FORMS):
        for begin in (*form.blocks, "<think>"):
            yield bytes([number]) + begin.encode() * 2000
            yield bytes([number]) + (begin + "[" * 600).encode()
            yield bytes([number]) + (begin + '{"a":"' * 99).encode() * 20
            yield bytes([number]) + (begin + " " * 30000).encode()


def _embedded_body(data: bytes) -> Any:
    """A body for the embedded engine: the object, and how its tokens are drawn."""
    from engines.embedded.core.errors import Invalid
    from engines.embedded.generation import sampling_params
    from engines.embedded.server.request_runner import object_in

    raw = object_in(data)
    if "sampling_params" not in raw:
        raise Invalid("it has none")
    return sampling_params.parse(raw["sampling_params"])


def _embedded_bodies() -> Iterator[bytes]:
    sampling = {
        "max_new_tokens": 5,
        "temperature": 0.5,
        "top_k": -1,
        "stop": ["a"],
        "stop_token_ids": [1],
        "sampling_seed": 7,
        "min_p": 0.0,
    }
    for value in _changed({"sampling_params": sampling}):
        yield json.dumps(value).encode()
    yield from _DEEP


def readers() -> Sequence[Reader]:
    """The readers of this module."""
    from engines.embedded.core.errors import Invalid

    failed, refusals = (GenerationError,), (Invalid,)
    return (
        Reader("engine_answer", whole(_answer), (EngineRejected,), _answers),
        Reader("engine_loads", whole(_kind_loads), WRONG_FORM, _loads),
        Reader("sse", _sse, (), _streams, is_split=True),
        Reader("driver_stream", _driver_stream, failed, _driver_streams, is_split=True),
        # Of events that arrive together it reads the last one, so cuts make a difference.
        Reader("worker_stream", _worker_stream, (ChatFailure,), _driver_streams),
        Reader("refusal", whole(_refusal), (), _refusals),
        Reader("token_reply", _reply, (), _replies, is_split=True),
        Reader("prefill_reply", whole(_prefill), (), _prefills),
        Reader("client_body", whole(_body), (), _bodies, times(256)),
        Reader("abort_order", whole(_abort), (), _aborts),
        Reader("step_figures", whole(_figures), (ValueError,), _reports),
        Reader("session_chat", whole(_chat), (BadChat,), _chats, times(256)),
        Reader(
            "embedded_body", whole(_embedded_body), refusals, _embedded_bodies, needs=("torch",)
        ),
        Reader("tool_calls", _tool_calls, (), _written_calls, is_split=True, needs=("renderers",)),
    )
