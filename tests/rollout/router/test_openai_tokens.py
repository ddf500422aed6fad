"""Exact accounting of OpenAI requests over random deaths, without sockets."""

import json
from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.router.openai_tokens import read_openai
from rollout.router.recorded_chat import read_recorded_chat

PIECES = [b"a", b"\xe2\x82", b"\xac", b"ST", b"OP", b" ", b"S", b"T", b"O", b"P"]
PROMPT = [101, 102, 103]
HEAD = {"id": "r", "created": 1, "model": "m"}


@dataclass
class Engine:
    """Its token at a place depends on the place alone; it holds back half characters."""

    tokens: list[int]
    is_chat: bool
    interval: int = 1

    def start(self, raw) -> int:
        if not self.is_chat:
            ids = raw["prompt"]
            if isinstance(ids, str):
                return 0
            assert ids == PROMPT + self.tokens[: len(ids) - len(PROMPT)]
            return len(ids) - len(PROMPT)
        if not raw.get("continue_final_message"):
            return 0
        begun = raw["messages"][-1]["content"].encode()
        sums = accumulate((PIECES[one] for one in self.tokens), initial=b"")
        return next(num for num, text in enumerate(sums) if text == begun)

    def events(self, body: bytes):
        raw = json.loads(body)
        assert raw["stream"] is True
        assert raw["stream_options"]["continuous_usage_stats"] is True
        start, budget = self.start(raw), raw["max_tokens"]
        assert budget > 0
        if self.is_chat:
            yield self.chunk({"delta": {"role": "assistant", "content": ""}})
        out: list[int] = []
        sent_text, sent = "", 0
        while True:
            out.append(self.tokens[start + len(out)])
            shown = text = b"".join(PIECES[one] for one in out).decode(errors="replace")
            reason, matched = None, None
            assert raw.get("no_stop_trim") or not raw.get("stop")
            if stop := next((one for one in raw.get("stop") or [] if one in text), None):
                reason, matched = "stop", stop
            elif len(out) >= budget:
                reason = "length"
            elif text.endswith("\ufffd"):
                shown = sent_text
            if reason is None and len(out) % self.interval:
                continue
            yield from self.told(shown[len(sent_text) :], out, sent, start, reason, matched)
            if reason is not None:
                break
            if shown[len(sent_text) :] or not self.is_chat:
                sent = len(out)
            sent_text = shown
        yield {**self.chunk(None), "usage": self.usage(len(out), start)}

    def told(self, delta, out, sent, start, reason, matched):
        usage = {"usage": self.usage(len(out), start)}
        places = range(start + sent, start + len(out))
        end = {"finish_reason": reason, "matched_stop": matched}
        if not self.is_chat:
            logprobs = {
                "tokens": [str(n) for n in places],
                "token_logprobs": [-n for n in places],
                "text_offset": [-1 for _ in places],
                "top_logprobs": [],  # as SGLang has it where none are asked for
            }
            ids = {"token_ids": out[sent:]} | ({} if sent else {"prompt_token_ids": PROMPT})
            yield self.chunk({"text": delta, "logprobs": logprobs, **ids, **end}) | usage
            return
        if delta:
            logprobs = {"content": [{"token": str(n), "logprob": -n} for n in places]}
            yield self.chunk({"delta": {"content": delta}, "logprobs": logprobs}) | usage
        if reason:
            yield self.chunk({"delta": {}, **end})

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


def run(body, engines, deaths=()):
    """The transcript at its end, and the chunks its client was told."""
    is_chat = engines[0].is_chat
    transcript = read_openai(json.dumps(body).encode(), is_chat=is_chat)
    assert transcript is not None
    told = []
    for version, engine in enumerate(engines):
        death = deaths[version] if version < len(deaths) else None
        for count, event in enumerate(engine.events(transcript.body(version))):
            if count == death:
                break
            transcript.absorb(event)
            if transcript.is_streamed and transcript.is_safe and not transcript.is_over:
                told += transcript.news()
        if transcript.is_over:
            return transcript, told + transcript.news()
        transcript.lose_engine()
    raise AssertionError("never finished")


def joined(chunks, is_chat):
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(
        (one["delta"].get("content") or "") if is_chat else one["text"] for one in choices
    )
    return text, [one["finish_reason"] for one in choices if one["finish_reason"]]


def well_formed(tokens):
    """The same with whole characters only: a chat goes on from its text, not from its bytes."""
    return [one for token in tokens for one in {1: (1, 2), 2: (0,)}.get(token, (token,))]


TOKENS = st.lists(st.integers(0, len(PIECES) - 1), min_size=60, max_size=60)
DEATHS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=6)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
@settings(max_examples=150, deadline=None)
@given(TOKENS, st.integers(1, 50), st.sampled_from([[], ["STOP"], ["STOP", "a a"]]), DEATHS)
def test_deaths_change_nothing_of_an_answer_but_its_versions(
    is_chat, is_streamed, tokens, budget, stops, deaths
):
    body = request(is_chat, budget, stops, stream=is_streamed, return_token_ids=not is_chat)
    tokens = well_formed(tokens) if is_chat else tokens
    whole, _ = run(body, [Engine(tokens, is_chat)])
    for stop in stops:
        assert stop not in json.dumps(
            whole.payload()["choices"][0]["message" if is_chat else "text"]
        )
    engines = [Engine(tokens, is_chat, interval) for _, interval in deaths]
    pieced, told = run(body, [*engines, Engine(tokens, is_chat)], [one for one, _ in deaths])
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
        assert joined(told, is_chat) == (text, [choice["finish_reason"]])


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.integers(1, 40), DEATHS)
def test_log_probs_are_as_many_as_the_tokens_of_a_completion(tokens, budget, deaths):
    body = request(False, budget, [], logprobs=0, return_token_ids=True)
    engines = [Engine(tokens, False, interval) for _, interval in deaths]
    transcript, _ = run(body, [*engines, Engine(tokens, False)], [one for one, _ in deaths])
    choice = transcript.payload()["choices"][0]
    assert choice["token_ids"] == tokens[: len(choice["token_ids"])]
    assert choice["logprobs"]["token_logprobs"] == [-n for n in range(len(choice["token_ids"]))]


def test_a_stream_with_log_probs_goes_on_from_the_tokens_it_was_told():
    body = request(False, 10, [], logprobs=0, stream=True, prompt=PROMPT)
    transcript, told = run(body, [Engine([0] * 60, False), Engine([0] * 60, False)], [4])
    assert transcript.can_continue
    assert (transcript.num_kept, transcript.num_recomputed) == (4, 0)
    assert joined(told, False) == ("a" * 10, ["length"])


def test_a_token_without_its_log_prob_is_not_gone_on_from():
    transcript = read_openai(
        json.dumps(request(False, 9, [], logprobs=0, prompt=PROMPT)).encode(), is_chat=False
    )
    assert transcript is not None
    transcript.absorb(
        Engine.chunk({"text": "a", "token_ids": [0], "logprobs": {"token_logprobs": []}})
    )
    transcript.lose_engine()
    assert not transcript.can_continue


def test_a_chat_goes_on_from_its_text_with_what_is_left_of_its_budget():
    transcript, _ = run(
        request(True, 10, []), [Engine([0] * 60, True), Engine([0] * 60, True)], [4]
    )
    assert (transcript.num_kept, transcript.num_recomputed, transcript.num_seams) == (3, 0, 1)
    answer = transcript.payload()
    assert answer["choices"][0]["message"]["content"] == "a" * 10
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}
    assert answer["metadata"]["weight_versions"] == [
        {"version": "0", "start": 0, "end": 3},
        {"version": "1", "start": 3, "end": 10},
    ]


def test_an_engine_that_does_not_count_as_it_goes_has_its_tokens_made_again():
    transcript = read_openai(json.dumps(request(True, 9, [])).encode(), is_chat=True)
    assert transcript is not None
    transcript.body(1)
    transcript.absorb(Engine.chunk({"delta": {"content": "hello"}}))
    transcript.lose_engine()
    assert "continue_final_message" not in json.loads(transcript.body(2))


def test_a_thought_cannot_be_gone_on_with():
    transcript = read_openai(json.dumps(request(True, 9, [])).encode(), is_chat=True)
    assert transcript is not None
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    transcript.absorb(Engine.chunk({"delta": {"reasoning_content": "well"}}) | usage)
    assert transcript.payload()["choices"][0]["message"]["reasoning_content"] == "well"
    assert not transcript.can_continue


def test_more_tokens_than_were_asked_for_are_an_error():
    transcript = read_openai(json.dumps(request(False, 2, [])).encode(), is_chat=False)
    assert transcript is not None
    with pytest.raises(ValueError, match="3 tokens, 2 asked for"):
        transcript.absorb(Engine.chunk({"text": "abc", "token_ids": [1, 2, 3]}))


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
def test_a_chat_that_cannot_go_on_from_its_middle_is_left_alone(more):
    body = {**request(True, 5, []), **more}
    assert read_openai(json.dumps(body).encode(), is_chat=True) is None


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [], None, 7])
def test_only_one_prompt_can_go_on(prompt):
    assert read_openai(json.dumps({"prompt": prompt}).encode(), is_chat=False) is None


def test_the_turn_of_a_recorded_completion_is_whole():
    body = request(False, 4, [])
    transcript = read_openai(json.dumps(body).encode(), is_chat=False)
    assert transcript is not None
    assert transcript.record() == ""
    for event in Engine([0, 3, 0, 0], False).events(transcript.body(5)):
        transcript.absorb(event)
    assert transcript.turn() == {
        "input_ids": PROMPT,
        "output_ids": [0, 3, 0, 0],
        "output_logprobs": [0, -1, -2, -3],
        "weight_versions": [{"version": "5", "start": 0, "end": 4}],
        "finish_reason": {"type": "length", "matched": None},
    }
    assert transcript.payload()["choices"][0]["logprobs"] is None, "nobody asked for them"


ANSWER = {
    **HEAD,
    "object": "chat.completion",
    "usage": {"completion_tokens": 2},
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab", "tool_calls": [{"id": "t"}]},
            "logprobs": {"content": []},
            "finish_reason": "tool_calls",
            "matched_stop": None,
            "prompt_token_ids": PROMPT,
            "response_token_ids": [5, 6],
            "meta_info": {"output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]]},
        }
    ],
}


def test_a_recorded_chat_is_asked_for_whole_and_told_as_its_client_wants():
    raw = {"messages": [], "stream": True, "stream_options": {"include_usage": True}, "tools": [1]}
    chat = read_recorded_chat(json.dumps(raw).encode())
    assert chat is not None
    asked = json.loads(chat.body(5))
    assert (asked["stream"], asked["logprobs"], asked["tools"]) == (False, True, [1])
    assert "stream_options" not in asked
    chat.absorb(ANSWER)
    assert chat.turn() == {
        "input_ids": PROMPT,
        "output_ids": [5, 6],
        "output_logprobs": [-1.0, -2.0],
        "weight_versions": [{"version": "5", "start": 0, "end": 2}],
        "finish_reason": {"type": "tool_calls", "matched": None},
    }
    (choice,) = chat.payload()["choices"]
    assert choice.keys() == {"index", "message", "logprobs", "finish_reason", "matched_stop"}
    begun, ended, usage = chat.news()
    assert begun["choices"][0]["delta"]["tool_calls"] == [{"id": "t", "index": 0}]
    assert ended["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["usage"] == {"completion_tokens": 2}


def test_a_chat_whose_engine_told_too_little_is_not_recorded():
    chat = read_recorded_chat(b'{"messages": []}')
    assert chat is not None
    (choice,) = ANSWER["choices"]
    chat.absorb({**ANSWER, "choices": [{**choice, "meta_info": None}]})
    with pytest.raises(ValueError, match="0 log-probs for 2 tokens"):
        chat.turn()


def test_a_recorded_chat_that_loses_its_engine_starts_from_nothing():
    chat = read_recorded_chat(b'{"messages": []}')
    assert chat is not None
    chat.absorb(ANSWER)
    chat.lose_engine()
    assert (chat.is_over, chat.num_recomputed, chat.num_seams) == (False, 2, 1)
    assert read_recorded_chat(b'{"n": 2}') is None
