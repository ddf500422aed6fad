"""Exact accounting of OpenAI requests over random deaths, without sockets."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.router.continuation.replies import chat, completion

PIECES = [b"a", b"\xe2\x82", b"\xac", b"ST", b"OP", b" ", b"S", b"T", b"O", b"P"]
PROMPT = [101, 102, 103]
HEAD = {"id": "r", "created": 1, "model": "m"}


@dataclass
class Engine:
    """Its token at a place depends on the place alone; it holds back half characters.

    Chats are vLLM's, with the ids of each token.
    """

    tokens: list[int]
    is_chat: bool
    interval: int = 1

    def start(self, raw) -> int:
        ids = (raw.get("kv_transfer_params") or raw).get(
            "prompt_token_ids" if self.is_chat else "prompt"
        )
        if not isinstance(ids, list):
            return 0
        assert ids == PROMPT + self.tokens[: len(ids) - len(PROMPT)]
        return len(ids) - len(PROMPT)

    def events(self, body: bytes):
        raw = json.loads(body)
        assert raw["stream"] is True
        assert raw["stream_options"]["continuous_usage_stats"] is True
        start, budget = self.start(raw), raw["max_tokens"]
        assert budget > 0
        if self.is_chat:
            prompt = {"prompt_token_ids": PROMPT + self.tokens[:start]}
            yield self.chunk({"delta": {"role": "assistant", "content": ""}}) | prompt
        out: list[int] = []
        sent_text, sent = "", 0
        while True:
            out.append(self.tokens[start + len(out)])
            shown = text = b"".join(PIECES[entry] for entry in out).decode(errors="replace")
            reason, matched = None, None
            trim = "include_stop_str_in_output" if self.is_chat else "no_stop_trim"
            assert raw.get(trim) or not raw.get("stop")
            if stop := next((entry for entry in raw.get("stop") or [] if entry in text), None):
                reason, matched = "stop", stop
            elif len(out) >= budget:
                reason = "length"
            elif text.endswith("\ufffd"):
                shown = sent_text
            if reason is None and len(out) % self.interval:
                continue
            yield from self.reported(shown[len(sent_text) :], out, sent, start, reason, matched)
            if reason is not None:
                break
            sent, sent_text = len(out), shown
        yield {**self.chunk(None), "usage": self.usage(len(out), start)}

    def reported(self, delta, out, sent, start, reason, matched):
        usage = {"usage": self.usage(len(out), start)}
        places = range(start + sent, start + len(out))
        end = {"finish_reason": reason, "matched_stop": matched}
        if not self.is_chat:
            logprobs = {
                "tokens": [str(n) for n in places],
                "token_logprobs": [-n for n in places],
                "text_offset": [-1 for _ in places],
                "top_logprobs": [],  # as SGLang sends it where none are requested
            }
            ids = {"token_ids": out[sent:]} | ({} if sent else {"prompt_token_ids": PROMPT})
            yield self.chunk({"text": delta, "logprobs": logprobs, **ids, **end}) | usage
            return
        logprobs = {"content": [{"token": str(n), "logprob": -n} for n in places]}
        choice = {"delta": {"content": delta}, "logprobs": logprobs, "token_ids": out[sent:]}
        yield self.chunk(choice | end) | usage

    def usage(self, num: int, start: int):
        prompt = len(PROMPT) + start
        return {"prompt_tokens": prompt, "completion_tokens": num, "total_tokens": prompt + num}

    @staticmethod
    def chunk(choice):
        choices = [] if choice is None else [{"index": 0, **choice}]
        return {**HEAD, "object": "x", "choices": choices}


def request(is_chat, budget, stops, **more):
    prompt = {"messages": [{"role": "user", "content": "q"}]} if is_chat else {"prompt": "q"}
    return {**prompt, "max_tokens": budget, "stop": stops, **more}


def read_it(body, is_chat=True):
    """A completion on SGLang, or a chat on vLLM."""
    data = json.dumps(body).encode()
    reply = chat(data, "vllm") if is_chat else completion(data)
    assert reply is not None
    reply.body(None, "vllm" if is_chat else "sglang")
    return reply


def sent_to(reply, version, is_chat=True):
    return reply.body(version, "vllm" if is_chat else "sglang")


def run(body, engines, deaths=()):
    """The finished reply, and the chunks sent to the client."""
    is_chat = engines[0].is_chat
    reply = read_it(body, is_chat)
    reported = []
    for version, engine in enumerate(engines):
        death = deaths[version] if version < len(deaths) else None
        for count, event in enumerate(engine.events(sent_to(reply, version, is_chat))):
            if count == death:
                break
            reply.absorb(event)
            if reply.is_streamed and reply.is_safe and not reply.is_finished:
                reported += reply.new_payloads()
        if reply.is_finished:
            return reply, reported + reply.new_payloads()
        reply.lose_engine()
    raise AssertionError("never finished")


def joined(chunks, is_chat):
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(
        (entry["delta"].get("content") or "") if is_chat else entry["text"] for entry in choices
    )
    return text, [entry["finish_reason"] for entry in choices if entry["finish_reason"]]


TOKENS = st.lists(st.integers(0, len(PIECES) - 1), min_size=60, max_size=60)
DEATHS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=6)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
@given(TOKENS, st.integers(1, 50), st.sampled_from([[], ["STOP"], ["STOP", "a a"]]), DEATHS)
def test_lost_engines_change_only_the_versions_of_a_response(
    is_chat, is_streamed, tokens, budget, stops, deaths
):
    body = request(is_chat, budget, stops, stream=is_streamed, return_token_ids=not is_chat)
    whole, _ = run(body, [Engine(tokens, is_chat)])
    for stop in stops:
        assert stop not in json.dumps(
            whole.payload()["choices"][0]["message" if is_chat else "text"]
        )
    engines = [Engine(tokens, is_chat, interval) for _, interval in deaths]
    pieced, reported = run(
        body, [*engines, Engine(tokens, is_chat)], [entry for entry, _ in deaths]
    )
    expected, got = whole.payload(), pieced.payload()
    assert got["choices"] == expected["choices"]
    assert got["usage"] == expected["usage"]
    end = 0
    for span in got["metadata"]["weight_versions"]:
        assert span["start"] == end < span["end"]
        end = span["end"]
    choice = expected["choices"][0]
    text = choice["message"]["content"] if is_chat else choice["text"]
    if is_streamed:
        assert joined(reported, is_chat) == (text, [choice["finish_reason"]])


@given(TOKENS, st.integers(1, 40), DEATHS)
def test_log_probs_are_as_many_as_the_tokens_of_a_completion(tokens, budget, deaths):
    body = request(False, budget, [], logprobs=0, return_token_ids=True)
    engines = [Engine(tokens, False, interval) for _, interval in deaths]
    reply, _ = run(body, [*engines, Engine(tokens, False)], [entry for entry, _ in deaths])
    choice = reply.payload()["choices"][0]
    assert choice["token_ids"] == tokens[: len(choice["token_ids"])]
    assert choice["logprobs"]["token_logprobs"] == [-n for n in range(len(choice["token_ids"]))]


def test_a_stream_with_log_probs_continues_from_the_reported_tokens():
    body = request(False, 10, [], logprobs=0, stream=True, prompt=PROMPT)
    reply, reported = run(body, [Engine([0] * 60, False), Engine([0] * 60, False)], [4])
    assert (reply.num_kept, reply.num_recomputed) == (4, 0)
    assert joined(reported, False) == ("a" * 10, ["length"])


@pytest.mark.parametrize("cut", [None, 1, 2, 3])
def test_a_stream_of_a_chat_has_the_log_probs_of_tokens_without_text(cut):
    body = request(True, 9, [], stream=True, logprobs=True)
    reply = read_it(body)
    texts, end = ["a", "", "b", ""], {"finish_reason": "stop", "stop_reason": None}
    events = [
        Engine.chunk(
            {
                "delta": {"content": text},
                "token_ids": [num],
                "logprobs": {"content": [{"logprob": -num, "token": text}]},
            }
        )
        for num, text in enumerate(texts)
    ]
    events[0]["prompt_token_ids"] = PROMPT
    events[-1]["choices"][0] |= end
    chunks, at = [], 0
    while not reply.is_finished:
        start = at
        while at < len(events) and at != cut:
            usage = {"prompt_tokens": 3, "completion_tokens": at + 1 - start}
            reply.absorb(events[at] | {"usage": usage})
            at += 1
            if reply.is_safe:
                chunks += reply.new_payloads()
        if at == cut:
            reply.lose_engine()
            at, cut = reply.base.num, None
            events[at]["prompt_token_ids"] = [*PROMPT, *range(at)]
    sent = [
        entry["logprob"]
        for chunk in chunks
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {}).get("content", [])
    ]
    assert sent == [0, -1, -2, -3]
    assert joined(chunks, True) == ("ab", ["stop"])
    (choice,) = reply.payload()["choices"]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == sent


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_versions_of_a_chat_cover_its_end_which_has_no_text(is_streamed):
    reply = chat(json.dumps(request(True, 9, [], stream=is_streamed)).encode())
    reply.body(7)
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    reply.absorb(Engine.chunk({"delta": {"content": "a"}}) | {"usage": usage})
    reply.absorb(Engine.chunk({"delta": {}, "finish_reason": "stop"}))
    reply.absorb(Engine.chunk(None) | {"usage": usage | {"completion_tokens": 2}})
    last = reply.new_payloads()[-1] if is_streamed else reply.payload()
    assert last["metadata"]["weight_versions"] == [{"version": "7", "start": 0, "end": 2}]
    assert reply.payload()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"token_logprobs": [-1.0], "top_logprobs": []}, "logprobs_missing"),
        ({"token_logprobs": [-1.0], "top_logprobs": [{}]}, ""),
    ],
)
def test_a_token_without_its_log_probs_is_not_continued_from(columns, why):
    reply = completion(json.dumps(request(False, 9, [], logprobs=0, prompt=PROMPT)).encode())
    assert reply is not None
    whole = {"token_logprobs": [-1.0], "top_logprobs": [{}]}
    for logprobs in (whole, columns):
        reply.absorb(Engine.chunk({"text": "a", "token_ids": [0], "logprobs": logprobs}))
    assert reply.lose_engine() == why


@pytest.mark.parametrize(("dialect", "num_kept"), [("sglang", 0), ("vllm", 1)])
def test_without_the_tokenizer_sglang_may_show_a_chinese_character_too_early(dialect, num_kept):
    reply = completion(json.dumps(request(False, 9, [], prompt=PROMPT)).encode())
    assert reply is not None
    reply.body(1, dialect)
    reply.absorb(Engine.chunk({"text": "中", "token_ids": [0]}))
    reply.lose_engine()
    assert reply.num_kept == num_kept


def test_a_chat_continues_from_its_ids_with_the_remaining_budget():
    reply, _ = run(request(True, 10, []), [Engine([0] * 60, True), Engine([0] * 60, True)], [4])
    assert (reply.num_kept, reply.num_recomputed, reply.num_failovers) == (3, 0, 1)
    response = reply.payload()
    assert response["choices"][0]["message"]["content"] == "a" * 10
    assert response["usage"] == {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}
    assert response["metadata"]["weight_versions"] == [
        {"version": "0", "start": 0, "end": 3},
        {"version": "1", "start": 3, "end": 10},
    ]


@pytest.mark.parametrize("is_chat", [False, True])
def test_at_a_seam_both_limits_and_the_minimum_count_the_tokens_before_it(is_chat):
    both = {"max_completion_tokens": 10} if is_chat else {}
    body = request(is_chat, 10, [], min_tokens=7, **both)
    reply = read_it(body, is_chat)
    for num, event in enumerate(Engine([0] * 60, is_chat).events(sent_to(reply, 1, is_chat))):
        if num == 4:
            break
        reply.absorb(event)
    reply.lose_engine()
    kept = reply.num_kept
    raw = json.loads(sent_to(reply, 2, is_chat))
    assert kept == (3 if is_chat else 4)
    assert (raw["max_tokens"], raw["min_tokens"]) == (10 - kept, 7 - kept)
    assert raw.get("max_completion_tokens") == (10 - kept if is_chat else None)


def test_a_chat_that_continues_its_last_message_continues_it_at_a_seam():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is "}]
    body = {"messages": messages, "continue_final_message": True}
    reply = read_it(body)
    begin_chat(reply, "7")
    assert reply.lose_engine() == ""
    raw = json.loads(sent_to(reply, 2))
    assert raw["messages"] == messages
    assert raw["kv_transfer_params"] == {"prompt_token_ids": [*PROMPT, 5]}


def test_reasoning_behind_a_seam_is_refused():
    reply = read_it(request(True, 9, []))
    begin_chat(reply, "a")
    assert reply.lose_engine() == ""
    with pytest.raises(ValueError, match="reasoning comes after"):
        reply.absorb(Engine.chunk({"delta": {"reasoning_content": "b"}}))


def begin_chat(reply, text):
    """The first two chunks of a chat on vLLM."""
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    reply.absorb(Engine.chunk({"delta": {"content": ""}}) | {"prompt_token_ids": PROMPT})
    reply.absorb(Engine.chunk({"delta": {"content": text}, "token_ids": [5]}) | usage)


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_a_chat_whose_engine_gives_no_ids_starts_over_while_its_client_has_nothing(dialect):
    body = json.dumps(request(True, 9, [], stream=True)).encode()
    reply = chat(body, dialect)
    assert reply is not None
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    for has_shown in (False, True):
        reply.body(1, dialect)
        reply.absorb(Engine.chunk({"delta": {"role": "assistant", "content": ""}}))
        if reply.is_safe:
            assert "hello" not in json.dumps(reply.new_payloads())
        reply.absorb(Engine.chunk({"delta": {"content": "hello"}}) | usage)
        if has_shown:
            assert "hello" in json.dumps(reply.new_payloads())
        why = reply.lose_engine()
        assert why == {"sglang": "chat_without_ids", "vllm": "prompt_unknown"}[dialect]
        assert reply.has_shown is has_shown
        again = json.loads(reply.body(2, dialect))
        assert again["messages"] == [{"role": "user", "content": "q"}]
        assert again["max_tokens"] == 9
        assert "kv_transfer_params" not in again
    assert (reply.num_kept, reply.num_recomputed) == (0, 2)


def test_a_chat_of_vllm_continues_on_sglang_from_its_ids():
    reply = read_it(request(True, 9, []))
    begin_chat(reply, "a")
    assert reply.lose_engine() == ""
    raw = json.loads(reply.body(2, "sglang"))
    assert (raw["input_ids"], raw["max_tokens"]) == ([*PROMPT, 5], 8)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images"),
        ({"include_reasoning": False}, "reasoning"),
    ],
)
def test_a_chat_that_vllm_renders_again_or_hides_a_part_of_starts_over(more, why):
    reply = read_it(request(True, 9, [], **more))
    begin_chat(reply, "a")
    assert reply.lose_engine() == why
    assert "kv_transfer_params" not in json.loads(sent_to(reply, 2))


def test_reasoning_cannot_be_continued():
    reply = read_it(request(True, 9, []))
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    reply.absorb(Engine.chunk({"delta": {"reasoning_content": "well"}}) | usage)
    assert reply.payload()["choices"][0]["message"]["reasoning_content"] == "well"
    assert reply.lose_engine() == "reasoning"


def test_more_tokens_than_requested_are_an_error():
    reply = completion(json.dumps(request(False, 2, [])).encode())
    assert reply is not None
    with pytest.raises(ValueError, match="3 output tokens where at most 2"):
        reply.absorb(Engine.chunk({"text": "abc", "token_ids": [1, 2, 3]}))


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"regex": "a+"},
        {"return_token_ids": True},
        {"messages": []},
        {"messages": "hi"},
    ],
)
def test_a_chat_that_cannot_be_continued_has_no_reply(more):
    body = {**request(True, 5, []), **more}
    assert chat(json.dumps(body).encode()) is None


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [], None, 7])
def test_only_a_single_prompt_can_be_continued(prompt):
    assert completion(json.dumps({"prompt": prompt}).encode()) is None
