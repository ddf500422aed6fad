"""Bodies and events in parts: what is not parsed is what a JSON parser would find there."""

import json
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.http.reply_check import NotFinite
from rollout.router.continuation import fast_path
from rollout.router.continuation.fast_path import (
    GrowingLists,
    GrownList,
    is_unfinished,
    loads_reply,
    read_fields,
    split_body,
    split_event,
)
from rollout.router.http.fast_json import loads
from tests.rollout.router.continuation.replies import generate

IDS = st.lists(st.integers(0, 2**40), min_size=1, max_size=5)
PIECES = [*'ab"\\,:[]{}\u00e9\n', '","output_ids":[', '"error"']
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
NAMES = st.sampled_from(["input_ids", "rid", "text", "stream", 'a"input_ids', "x"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS | IDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(NAMES, VALUES, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_the_parts_of_a_body_are_what_a_parser_finds(raw, indent, is_ascii):
    body = json.dumps(raw, indent=indent, ensure_ascii=is_ascii).encode()
    parts = split_body(body)
    fields = None if parts is None else read_fields(parts.fields)
    if fields is None:
        return
    assert parts.prompt.values == raw["input_ids"]
    assert len(parts.prompt) == len(raw["input_ids"])
    again = json.loads(parts.with_rid(parts.prompt.in_body(json_of(fields), [7])))
    assert again == {**raw, "input_ids": [*raw["input_ids"], 7]}


def json_of(fields):
    return json.dumps(fields, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "body",
    [
        b'{"input_ids": [[1], [2]]}',
        b'{"input_ids": []}',
        b'{"input_ids": [1], "input_ids": [2, 3]}',
        b'{"x": {"input_ids": [1]}}',
        b'{"x": "\\"input_ids\\": [1]"}',
        b'{"x\\"input_ids": [1]}',
        b'{"input_ids": [1',
        b'{"input_ids" [1]}',
        b'{"x": {"rid": "a"}, "input_ids": [1]}',
        b'{"rid": "a", "input_ids": [1], "rid": 5}',
    ],
)
def test_a_body_of_another_form_has_no_parts(body):
    parts = split_body(body)
    assert parts is None or read_fields(parts.fields) is None


def test_ids_that_are_not_json_go_to_the_engine_as_they_are():
    reply = generate(b'{"input_ids": [1 2,,]}', 32)
    assert b"[1 2,,]" in reply.body()
    assert "input_ids" in reply.why_not_taken(["vllm"])


def test_requests_that_differ_in_ids_and_rid_share_nothing():
    bodies = [{"input_ids": [n, n + 1], "rid": f"r-{n}", "stream": False} for n in range(3)]
    bodies[0]["return_logprob"] = True
    replies = [generate(json.dumps(body).encode(), 32) for body in bodies]
    replies[0].absorb(event_of([5], finish=None, output_token_logprobs=[[-1.0, 5, None]]))
    replies[0].lose_engine()
    sent = [json.loads(reply.body()) for reply in replies]
    assert [one["rid"] for one in sent] == ["r-0", "r-1", "r-2"]
    assert [one["input_ids"] for one in sent] == [[0, 1, 5], [1, 2], [2, 3]]
    assert [one.get("return_logprob") for one in sent] == [True, None, None]


# -- events ------------------------------------------------------------------------------------


def event_of(ids, *, finish, text="x", **meta):
    meta |= {"completion_tokens": len(ids), "finish_reason": finish, "weight_version": "3"}
    return {"text": text, "output_ids": ids, "meta_info": meta}


def length(num):
    return {"type": "length", "length": num}


@given(TEXTS, st.lists(st.integers(0, 9), max_size=4), VALUES, st.booleans(), st.booleans())
def test_an_event_in_parts_is_the_event_that_a_parser_finds(text, ids, other, is_ascii, is_dense):
    event = event_of(ids, finish=None, text=text, other=other)
    separators = (",", ":") if is_dense else None
    data = json.dumps(event, ensure_ascii=is_ascii, separators=separators).encode()
    before, after = b'data: "error" "finish_reason": null', b'\n{"text": "", "error": 1}'
    place = (before + data + after, len(before), len(before + data))
    parts = split_event(*place)
    in_doubt = '"error"' in json.dumps(other) or "\\" in json.dumps(other, ensure_ascii=is_ascii)
    assert is_unfinished(*place) or in_doubt
    assert parts is not None
    assert (parts.num_ids, parts.meta) == (len(ids), event["meta_info"])
    event["meta_info"]["more"] = [1]
    assert json.loads(b"".join(parts.with_meta({"more": [1]}))) == event


@pytest.mark.parametrize(
    "text", ['"' * 1000, 'a\\\\"', "\\", '", "output_ids', '\\", "output_ids": [1]']
)
def test_the_end_of_a_text_is_found_behind_its_quotes(text):
    data = json.dumps(event_of([1], finish=None, text=text)).encode()
    parts = split_event(data)
    assert parts is None or parts.num_ids == 1
    assert (parts is not None) is is_unfinished(data) is (text != '", "output_ids')
    assert not is_unfinished(data, 0, data.index(b"meta_info"))


OF_EVENT = [
    b'"text":"x"',
    b'"output_ids":[1]',
    b'"finish_reason":null',
    b'"finish_reason":{"type":"stop"}',
    b'"finish\\u005freason":{"type":"stop"}',
    b'"meta_info":{"completion_tokens":1,%s}',
    b'"meta\\u005finfo":{"completion_tokens":1,%s}',
    b'"error":{"message":"x"}',
    b'"\\u0065rror":{"message":"x"}',
]


@given(st.lists(st.sampled_from(OF_EVENT), max_size=3), st.data())
def test_an_event_with_equal_or_escaped_keys_is_what_a_parser_finds(more, data):
    members = data.draw(st.permutations([*OF_EVENT[:2], OF_EVENT[5], *more]))
    members = [OF_EVENT[0], *members] if data.draw(st.booleans()) else members

    def filled(member):
        if b"%s" not in member:
            return member
        return member % b",".join(data.draw(st.lists(st.sampled_from(OF_EVENT[2:5]), min_size=1)))

    event = b"{%s}" % b",".join(map(filled, members))
    parsed = json.loads(event)
    if is_unfinished(event):
        assert "error" not in parsed
        assert parsed["meta_info"].get("finish_reason") is None
    if (parts := split_event(event)) is not None:
        assert "error" not in parsed
        assert parts.meta == parsed["meta_info"]
        again = json.loads(b"".join(parts.with_meta({"more": 1})))
        assert again["meta_info"] == {**parsed["meta_info"], "more": 1}


ENTRIES = st.lists(
    st.tuples(st.floats(-9, 0) | st.none(), st.integers(0, 99), st.none() | TEXTS), max_size=3
)
EVENTS = st.tuples(
    st.sampled_from(["grow", "grow", "grow", "again", "other"]),
    st.lists(st.integers(0, 2**40), max_size=3),
    ENTRIES,
    TEXTS,
    st.dictionaries(st.sampled_from(["output_ids", "output_token_logprobs", "x"]), VALUES),
)
EDITS = st.none() | st.tuples(st.floats(0, 1), st.sampled_from([b"", b",", b"]", b"[", b"1", b'"']))


def parsed_or_error(parse, event):
    try:
        return parse(event)
    except ValueError:
        return ValueError


@given(st.lists(EVENTS, max_size=6), EDITS)
def test_of_lists_that_grow_is_read_what_a_parser_reads(steps, edit):
    lists, ids, entries = GrowingLists(), [], []
    for number, (step, more_ids, more_entries, text, others) in enumerate(steps):
        if step == "other":
            ids, entries = [], []
        if step != "again":
            ids, entries = ids + more_ids, entries + more_entries
        meta = {**others, "output_token_logprobs": entries, "finish_reason": None}
        event = json_of({"text": text, "output_ids": ids, "meta_info": meta, **others})
        if edit is not None and number == len(steps) - 1:
            at = int(edit[0] * len(event))
            event = event[:at] + edit[1] + event[at + 1 :]
        assert parsed_or_error(lists.loads, event) == parsed_or_error(loads, event)


LISTS = st.lists(st.lists(st.floats(-9, 0) | TEXTS | VALUES, max_size=3), max_size=12)


@given(LISTS, st.integers(0, 12), st.integers(1, 40))
def test_a_list_that_stays_text_is_the_list(entries, begin, size):
    data = json_of(entries)[1:-1]
    new = entries[min(begin, len(entries)) :]
    grown = GrownList(data, len(entries), new)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_path, "_PIECE", size)
        assert list(grown) == entries
    assert (len(grown), grown) == (len(entries), entries)
    assert [0].__add__(entries) == operator.add([0], grown)
    assert entries.__add__([0]) == operator.add(grown, [0])
    assert grown[:begin] == entries[:begin]
    for at in range(len(entries) + 2):
        assert list(grown.since(at)) == entries[at:]


@pytest.mark.parametrize(
    "entry", [(-0.5, 7, None), (-1e-7, 7, None), (None, 7, None), (-0.5, 7, "],["), (-0.5, 7, "a")]
)
def test_a_long_reply_is_read_as_a_parser_reads_it(monkeypatch, entry):
    event, sizes = long_event(5000, finish=length(5000), entry=entry), []
    expected = entries_of(5000, entry)
    real = fast_path.orjson.loads
    monkeypatch.setattr(
        fast_path.orjson, "loads", lambda data: sizes.append(len(data)) or real(data)
    )
    payload = loads_reply(event)
    entries = list(map(tuple, payload["meta_info"]["output_token_logprobs"]))
    is_plain = entry[0] is not None and entry[2] is None
    assert (max(sizes) < len(event) * 0.8) == is_plain
    assert entries == expected
    assert payload == json.loads(event)


def test_a_long_reply_that_names_its_logprobs_twice_is_read_as_a_parser_reads_it():
    event = long_event(1000, finish=length(1000))
    twice = event.replace(b'"meta_info":{', b'"meta_info":{"x":{"output_token_logprobs":[[-9]]},')
    assert twice != event
    assert loads_reply(twice) == json.loads(twice)


def entries_of(num, entry):
    """Such an entry for each token, which names it where this one is a number."""
    if not isinstance(entry[1], int):
        return [entry] * num
    return [(entry[0], token, *entry[2:]) for token in range(num)]


def long_event(num, *, finish=None, entry=(-0.5, 7, None), **more):
    event = event_of(list(range(num)), finish=finish, text="x" * num)
    event["meta_info"] |= {"output_token_logprobs": entries_of(num, entry), **more}
    return json_of(event)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_of_a_long_event_only_what_is_new_is_parsed(monkeypatch, is_streamed):
    body = {"input_ids": [1], "stream": is_streamed, "sampling_params": {"max_new_tokens": 4096}}
    reply, sizes = generate(json.dumps(body).encode(), 32), []
    real = fast_path.orjson.loads
    monkeypatch.setattr(
        fast_path.orjson, "loads", lambda data: sizes.append(len(data)) or real(data)
    )
    last = long_event(3232, finish=length(3232))
    for event in [*(long_event(num) for num in range(32, 3232, 32)), last]:
        sizes.clear()
        assert reply.take(event) is None
        # A whole reply is checked once, with its last event.
        assert sum(sizes) < (1 << 14 if is_streamed or event is not last else len(last))
    got = json.loads(b"".join(reply.written()))
    assert got["meta_info"]["output_token_logprobs"] == [[-0.5, one, None] for one in range(3232)]
    assert got["output_ids"] == list(range(3232))


@pytest.mark.parametrize(
    "entry", [(-1, 7, None), (-1e-7, 7, "x]],["), (-0.25, 7, None, 1), (-0.5, "[,,null],", None)]
)
def test_a_long_reply_is_what_a_parser_finds_whatever_its_logprobs(entry):
    event = long_event(1000, finish={"type": "stop", "matched": 1}, entry=entry)
    expected = json.loads(event)
    parts = split_event(event)
    assert parts is not None
    assert (parts.logprobs is None) is (entry != (-1, 7, None))
    again = json.loads(b"".join(parts.with_meta({"more": 1})))
    assert again["meta_info"] == {**expected["meta_info"], "more": 1}
    rest = {**expected["meta_info"]}
    if parts.logprobs is not None:
        del rest["output_token_logprobs"]
    assert parts.meta == rest


def test_a_long_reply_without_a_number_is_not_passed_on():
    nan = long_event(1000, finish=length(1000), entry=(None, 7, None))
    with pytest.raises(NotFinite):
        generate(b'{"input_ids": [1], "sampling_params": {"max_new_tokens": 1000}}', 32).take(nan)
    few = long_event(1000, finish=length(1000), output_token_logprobs=[[-0.5, 7, None]] * 999)
    with pytest.raises(ValueError, match="999 output_token_logprobs for 1000"):
        generate(b'{"input_ids": [1], "sampling_params": {"max_new_tokens": 1000}}', 32).take(few)


def replies(events, *, body=b'{"input_ids": [1]}', num=None):
    """The reply after these events, taken as bytes and absorbed."""
    taken, absorbed = generate(body, 32), generate(body, 32)
    for event in events:
        assert taken.take(json.dumps(event).encode()) is None
        absorbed.absorb(event)
    return json.loads(b"".join(taken.written())), absorbed.payload()


@pytest.mark.parametrize("num_events", [1, 2, 3, 9])
def test_the_last_event_is_the_reply_whatever_came_before(num_events):
    events = [event_of(list(range(n)), finish=None, text="x" * n) for n in range(1, num_events)]
    last = event_of(list(range(num_events)), finish=length(num_events), prompt_tokens=1)
    got, expected = replies([*events, last])
    assert got == expected
    assert got["meta_info"]["weight_versions"] == [{"version": "3", "start": 0, "end": num_events}]


@pytest.mark.parametrize(
    "last",
    [
        event_of(
            [1, 1], finish={"type": "stop", "matched": 2}, output_token_logprobs=[[-1, 1, None]] * 2
        ),
        event_of([1, 2], finish=length(9)),
        event_of([], finish={"type": "stop", "matched": None}),
        {"output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}, "weight_version": 1}},
        event_of([1], finish={"type": "stop"}, num_failovers=4),
        event_of([1], finish={"type": "stop"}) | {"index": 0},
    ],
)
def test_a_reply_that_is_passed_on_is_the_one_that_would_be_written(last):
    got, expected = replies([last])
    assert got == expected


@pytest.mark.parametrize(
    "last",
    [
        event_of([1], finish=length(1), output_token_logprobs=[]),
        event_of(list(range(200)), finish={"type": "stop"}),
        event_of([1], finish={"type": 5}),
    ],
)
def test_a_last_event_that_is_inconsistent_is_not_passed_on(last):
    reply = generate(b'{"input_ids": [1]}', 32)
    with pytest.raises(ValueError, match=r"0 output_token_logprobs|200 output|not a text"):
        reply.take(json.dumps(last).encode())


def test_events_with_new_tokens_only_are_all_read():
    events = [event_of([n], finish=None, text="x") for n in range(1, 8)]
    for num, event in enumerate(events, 1):
        event["meta_info"]["completion_tokens"] = num
    events[-1]["meta_info"]["finish_reason"] = length(7)
    got, expected = replies(events)
    assert got == expected
    assert got["output_ids"] == [1, 2, 3, 4, 5, 6, 7]


def test_new_tokens_only_after_events_with_all_tokens_are_refused():
    reply = generate(b'{"input_ids": [1]}', 32)
    for num in range(1, 9):
        reply.take(json.dumps(event_of(list(range(num)), finish=None, text="x" * num)).encode())
    late = event_of([8], finish=None)
    late["meta_info"] |= {"completion_tokens": 9, "finish_reason": length(9)}
    with pytest.raises(ValueError, match="1 ids for 9 tokens"):
        reply.take(json.dumps(late).encode())


@pytest.mark.parametrize("num_events", [1, 2, 5, 9])
def test_a_lost_engine_leaves_the_tokens_of_its_last_event(num_events):
    reply = generate(b'{"input_ids": [1, 2]}', 32)
    for num in range(1, num_events + 1):
        event = event_of(list(range(num)), finish=None, text="x" * num)
        assert reply.take(json.dumps(event).encode()) is None
    assert reply.has_tokens_of_engine
    reply.lose_engine()
    assert json.loads(reply.body())["input_ids"] == [1, 2, *range(num_events)]
    assert (reply.num_kept, reply.num_recomputed) == (num_events, 0)


def test_an_event_after_a_gap_is_not_safe_by_itself():
    """Its text may have grown in an event that was not kept."""
    reply = generate(b'{"input_ids": [1], "sampling_params": {"stop": ["ab"]}}', 32)
    texts = ["x", "xy", *["xyz"] * 9]  # the last tokens are within a character
    for num, text in enumerate(texts, 1):
        event = event_of(list(range(num)), finish=None, text=text)
        reply.take(json.dumps(event).encode())
    reply.lose_engine()
    assert json.loads(reply.body())["input_ids"] == [1, 0, 1]


def test_an_unreadable_event_of_a_lost_engine_is_not_kept():
    reply = generate(b'{"input_ids": [1]}', 32)
    for num in range(1, 4):
        event = json.dumps(event_of(list(range(num)), finish=None, text="x" * num)).encode()
        reply.take(event if num < 3 else event[:-1])
    reply.lose_engine()
    assert json.loads(reply.body())["input_ids"] == [1, 0, 1]
