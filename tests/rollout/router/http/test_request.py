"""What is changed in a message on its way: headers and the stamp."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.router.http.head_cache import RequestHead
from rollout.router.http.headers import to_client, to_engine
from rollout.router.http.request import (
    MAX_PARSED_BYTES,
    Request,
    find_field,
    inject_fields,
    is_json_object,
    new_rid,
)
from rollout.router.http.routes import is_generation, route_of


def test_hop_by_hop_headers_and_those_named_by_connection_stay_here():
    kept = to_engine(
        [
            (b"host", b"router"),
            (b"connection", b"keep-alive, X-Mine"),
            (b"keep-alive", b"timeout=5"),
            (b"x-mine", b"1"),
            (b"te", b"trailers"),
            (b"transfer-encoding", b"chunked"),
            (b"content-length", b"3"),
            (b"expect", b"100-continue"),
            (b"authorization", b"Bearer x"),
            (b"x-twice", b"1"),
            (b"x-twice", b"2"),
        ]
    )
    assert kept == [(b"authorization", b"Bearer x"), (b"x-twice", b"1"), (b"x-twice", b"2")]


def test_a_reply_keeps_its_encoding_and_length_and_names_the_engine():
    headers = to_client(
        [
            (b"content-encoding", b"gzip"),
            (b"content-length", b"9"),
            (b"connection", b"close"),
            (b"x-engine-id", b"forged"),
        ],
        "decode-0",
        7,
    )
    assert headers == [
        (b"content-encoding", b"gzip"),
        (b"content-length", b"9"),
        (b"x-engine-id", b"decode-0"),
        (b"x-weight-version", b"7"),
    ]


@pytest.mark.parametrize("body", [b"{}", b"{ \n}", b' {"text": "x"}', b'{"a": {"rid": 1}}'])
def test_an_injected_body_is_the_same_object_with_two_more_fields(body):
    stamped = json.loads(inject_fields(body, rid="r", extra_key="v3"))
    assert stamped == {"rid": "r", "extra_key": "v3", **json.loads(body)}


@given(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3))
def test_injecting_fields_keeps_what_the_client_wrote(members):
    stamped = json.loads(inject_fields(json.dumps(members).encode(), rid="r"))
    assert stamped == {"rid": "r", **members}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"text": "x"}', (False, None)),
        (b'{"rid": "p-1"}', (True, "p-1")),
        (b'{"rid": ["p-1"]}', (True, ["p-1"])),
        (b'{"inner": {"rid": 1}}', (False, None)),
        (b'{"text": "the \\"rid\\" of it"}', (False, None)),
        (b'{"rid": broken', (True, None)),
        (b'{"a": "' + b"x" * MAX_PARSED_BYTES + b'", "rid": 1}', (True, None)),
        (b'{"rid":' + b"[" * 100_000, (True, None)),
    ],
)
def test_a_key_is_found_without_parsing_bodies_that_cannot_have_it(body, found):
    assert find_field(body, "rid") == found


@pytest.mark.parametrize("body", [b"", b"[1]", b'"x"', b"\xff{", b"text"])
def test_a_body_that_is_not_a_json_object_is_unchanged(body):
    assert not is_json_object(body)
    assert inject_fields(body, rid="r") == body


def test_no_rid_that_is_handed_out_can_be_the_prefix_of_another():
    rids = {new_rid() for _ in range(100)}
    assert len(rids) == 100
    assert {len(rid) for rid in rids} == {32}


def test_a_second_attempt_keeps_the_rid_and_takes_the_new_weight_version():
    head = RequestHead(b"POST", route_of(b"/generate"), [])
    request = Request(head, b"{}", rid="r", adds_rid=True, adds_extra_key=True)
    assert json.loads(request.body_for(3)) == {"rid": "r", "extra_key": "v3"}
    assert json.loads(request.body_for(4)) == {"rid": "r", "extra_key": "v4"}
    assert json.loads(request.body_for(None)) == {"rid": "r"}


@pytest.mark.parametrize(
    ("path", "is_passed"),
    [
        ("/generate", True),
        ("/v1/chat/completions", True),
        ("/v1/models", False),
        ("/v1/models/policy", False),
        ("/v1/load_lora_adapter", False),
        ("/v1/completions/", False),
        ("/release_memory_occupation", False),
        ("/update_weights_from_tensor", False),
        ("/generate/more", False),
        ("/metrics", False),
    ],
)
def test_only_generation_paths_go_through_the_gate(path, is_passed):
    assert is_generation(path) is is_passed
