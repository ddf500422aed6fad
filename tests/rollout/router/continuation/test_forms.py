"""Bodies that another engine could read differently: the router reads none of them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.router.continuation.forms import read_object
from tests.rollout.router.continuation.replies import generate
from tests.rollout.router.continuation.replies import read as reply_to
from tests.rollout.router.odd_bodies import (
    ODD,
    PLAIN,
    odd_bodies,
    sampling,
)


def read(path, body):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    if path == "/generate":
        return generate(body, 32)
    return reply_to(path, body)


@pytest.mark.parametrize(
    ("path", "fields"), [(path, fields) for path, odd in ODD.items() for fields in odd], ids=repr
)
def test_a_body_that_an_engine_may_read_differently_has_no_reply(path, fields):
    assert read(path, PLAIN[path]) is not None
    assert read(path, {**PLAIN[path], **fields}) is None


@pytest.mark.parametrize(
    ("path", "fields", "budget"),
    [
        ("/generate", {}, 128),
        ("/generate", {"sampling_params": None}, 128),
        ("/generate", sampling(max_new_tokens=None), None),
        ("/generate", sampling(max_new_tokens=40, min_new_tokens=None, stop=None), 40),
        ("/v1/completions", {}, 16),
        ("/v1/completions", {"max_tokens": 40, "max_completion_tokens": None, "stop": "a"}, 40),
        ("/v1/chat/completions", {}, None),
        ("/v1/chat/completions", {"max_tokens": None, "max_completion_tokens": None}, None),
        ("/v1/chat/completions", {"max_completion_tokens": 40}, 40),
        ("/v1/chat/completions", {"max_tokens": 40, "max_completion_tokens": 40}, 40),
        ("/v1/chat/completions", {"max_tokens": 40, "stop": ["a", "b"], "stream": 1}, 40),
    ],
)
def test_the_budget_is_the_one_that_sglang_reads(path, fields, budget):
    assert read(path, {**PLAIN[path], **fields}).budget == budget


@pytest.mark.parametrize("path", PLAIN)
@pytest.mark.parametrize(
    "value",
    [
        b"[" * 982 + b"]" * 982,
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b"NaN",
        b'"\\ud800"',
        b"9" * 4000,
        b"1e400",
        b"-1" + b"0" * 400 + b".0",
    ],
    ids=["lists", "objects", "nan", "surrogate", "digits", "exponent", "long"],
)
def test_a_body_that_could_not_be_written_again_is_not_read(path, value):
    body = json.dumps(PLAIN[path]).encode()[:-1] + b', "x": ' + value + b"}"
    assert read(path, body) is None


def test_only_the_end_of_the_text_is_compared_with_stop_strings():
    reply = read("/v1/completions", {"prompt": [1], "max_tokens": 9, "stop": ["abc", "d"]})
    for part in ("x" * 1000, "y" * 10):
        reply.absorb({"choices": [{"text": part, "token_ids": [1]}]})
    ends = []
    end_of_text = reply._end_of_text
    reply._end_of_text = lambda num: ends.append(num) or end_of_text(num)
    reply.absorb({"choices": [{"text": "z" * 4, "token_ids": [1]}]})
    assert ends == [3 + 4, 3]
    assert end_of_text(6) == "yyzzzz"


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(0, 30),
    st.integers(1, 4),
)
def test_text_is_safe_if_no_stop_string_is_in_it_or_begins_at_its_end(text, stops, cut, step):
    body = {"prompt": [1], "max_tokens": 1000, "stop": stops}
    reply = read("/v1/completions", body)

    def is_safe(so_far):
        begins = any(so_far.endswith(s[:n]) for s in stops for n in range(1, len(s)))
        return not begins and not any(stop in so_far for stop in stops)

    parts = [text[at : at + step] for at in range(0, len(text), step)]
    so_far = ""
    for part in parts:
        if len(so_far) >= cut and reply.now.num:  # its engine is lost once
            reply.lose_engine()
            so_far, cut = reply.base.text, 1 << 20
        so_far += part
        reply.absorb({"choices": [{"text": part, "token_ids": [1]}]})
        assert reply.is_safe == is_safe(so_far)


@given(odd_bodies())
def test_a_body_that_is_read_can_be_continued_whatever_it_contains(drawn):
    path, body = drawn
    reply = read(path, body)
    if reply is None:
        return
    json.loads(reply.body(1))
    if path == "/generate":
        meta = {"completion_tokens": 2, "weight_version": "1", "prompt_tokens": 1}
        good = {"text": "ab", "output_ids": [1, 2], "meta_info": meta}
    else:
        choice = {"text": "ab", "token_ids": [1, 2], "delta": {"content": "ab"}}
        good = {"choices": [choice], "usage": {"completion_tokens": 2}}
    if reply.budget is None or reply.budget >= 2:
        reply.absorb(good)
        reply.lose_engine()
        json.loads(reply.body(2))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**18, 10**19])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
)


@given(st.dictionaries(st.text("ab"), VALUES, max_size=4))
def test_a_body_is_read_exactly_or_not_at_all(raw):
    for value in (raw, raw | {"c": [[]] * 200}):  # with few lists, and with many
        raw_again = read_object(json.dumps(value).encode())
        assert raw_again is None or repr(raw_again) == repr(value)
        if not any(abs(number) >= 2**63 for number in integers_of(value)):
            assert raw_again is not None


def integers_of(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for one in value for number in integers_of(one)]
    return [value] if type(value) is int else []


@pytest.mark.parametrize("number", [2**63, 10**19, 2**64 - 1])
def test_an_integer_of_64_bits_is_not_rounded(number):
    raw = read_object(json.dumps({"seed": number}).encode())
    assert raw == {"seed": number}
    assert type(raw["seed"]) is int


def test_a_body_deeper_than_can_be_written_again_is_not_read():
    assert read_object(b'{"a":' + b"[" * 100 + b"]" * 100 + b"}")
    assert read_object(b'{"a":' + b"[" * 300 + b"]" * 300 + b"}") is None


@pytest.mark.parametrize("one", [b"[],", b'{"a":1},'])
def test_a_body_with_too_many_parts_is_not_read(one):
    assert read_object(b'{"a": [%s1]}' % (one * 200_000)) is not None
    assert read_object(b'{"a": [%s1]}' % (one * 600_000)) is None


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b'"\\ud800"', b"01"])
def test_a_body_that_parsers_take_for_different_values_is_not_read(value):
    assert read_object(b'{"a": ' + value + b"}") is None
