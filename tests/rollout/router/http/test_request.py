"""What is changed in a message on its way: headers and the stamp."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.kinds import KINDS
from rollout.router.http.head_cache import RequestHead
from rollout.router.http.headers import to_client, to_engine
from rollout.router.http.request import (
    MAX_PARSED_BYTES,
    UNKNOWN,
    Request,
    find_field,
    inject_members,
    is_json_object,
    new_rid,
)
from rollout.router.http.routes import COMPLETION_PATHS, KEYED_PATHS, is_generation, route_of
from rollout.router.proxy.reader_choice import Wanted, read_body


def _loads(parts):
    return json.loads(b"".join(parts))


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
    both = _loads(inject_members(body, b'"rid":"r"', b'"extra_key":"v3"'))
    assert both == {"rid": "r", "extra_key": "v3", **json.loads(body)}
    assert [*both] == ["rid", *json.loads(body), "extra_key"]
    assert _loads(inject_members(body, b"", b'"a":1')) == {**json.loads(body), "a": 1}
    assert _loads(inject_members(body, b'"rid":"r"', b"")) == {"rid": "r", **json.loads(body)}


@given(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3))
def test_injecting_fields_keeps_what_the_client_wrote(members):
    stamped = _loads(inject_members(json.dumps(members).encode(), b'"rid":"r"', b""))
    assert stamped == {"rid": "r", **members}


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"text": "x"}', (False, None)),
        (b'{"rid": "p-1"}', (True, "p-1")),
        (b'{"rid": ["p-1"]}', (True, ["p-1"])),
        (b'{"inner": {"rid": 1}}', (False, None)),
        (b'{"text": "the \\"rid\\" of it"}', (False, None)),
        (b'{"rid": null}', (True, None)),
        (b'{"rid": broken', (True, UNKNOWN)),
        (b'{"a": "' + b"x" * MAX_PARSED_BYTES + b'", "rid": 1}', (True, UNKNOWN)),
        (b'{"rid":' + b"[" * 100_000, (True, UNKNOWN)),
    ],
)
def test_a_key_is_found_without_parsing_bodies_that_cannot_have_it(body, found):
    assert find_field(body, "rid") == found


@pytest.mark.parametrize("body", [b"", b"[1]", b'"x"', b"\xff{", b"text"])
def test_a_body_that_is_not_a_json_object_is_unchanged(body):
    assert not is_json_object(body)
    assert b"".join(inject_members(body, b'"rid":"r"', b"")) == body


def test_no_rid_that_is_handed_out_can_be_the_prefix_of_another():
    rids = {new_rid() for _ in range(100)}
    assert len(rids) == 100
    assert {len(rid) for rid in rids} == {32}


def sends(body, *, path="/generate", kind="sglang", num=3):
    """The ids of a request at the engines that it is sent to, one after the other."""
    request, ids = request_of(body, path), []
    for version in range(num):
        request.name_for_engine()
        whole = _loads(request.body_for(f"run:v{version}", kind=KINDS[kind]))
        id_name, key_name = KINDS[kind].body_names
        assert whole[key_name] == f"run:v{version}"
        ids.append(whole.get(id_name))
    return request, ids


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("path", sorted(COMPLETION_PATHS))
@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"rid": "r-1"}',
        b'{"rid": null, "a": 1}',
        b'{"request_id": "r-1"}',
        b'{"r\\u0069d": "r-1", "r\\u0065quest_id": "r-1"}',
        b'{"rid": "%s"}' % (b"0" * 32),
    ],
)
def test_each_send_has_an_id_of_its_own_and_the_new_weight_version(body, path, kind):
    _, ids = sends(body, path=path, kind=kind)
    assert len({*ids}) == 3
    assert {len(sent) for sent in ids} == {32}


def test_the_client_keeps_its_own_id_and_gets_that_of_the_first_send_without_one():
    assert sends(b'{"rid": "r-1"}')[0].rid == "r-1"
    request, ids = sends(b"{}")
    assert request.rid == ids[0]


def test_each_prompt_of_a_list_has_an_id_of_its_own():
    request, ids = sends(b'{"input_ids": [[1], [2]], "rid": ["a", "a1"]}')
    assert request.fields.rids == ("a", "a1")
    assert len({*itertools.chain(*ids)}) == 6
    assert [len(sent) for sent in ids] == [2, 2, 2]


def test_an_id_that_is_no_text_is_left_for_the_engine_to_refuse():
    assert sends(b'{"rid": 5}')[1] == [5, 5, 5]


def request_of(body, path="/generate"):
    fields = read_body(Wanted(path), body).fields
    whole = body if fields.body is None else fields.body
    head = RequestHead(b"POST", route_of(path.encode()), [])
    return Request(head, whole, fields, names=fields.names)


def sent(body, *, path="/generate", kind="sglang"):
    """The key of a body for an engine."""
    request = request_of(body, path)
    whole = _loads(request.body_for("run:v3", kind=KINDS[kind]))
    return whole[KINDS[kind].body_names[1]]


@pytest.mark.parametrize(
    ("own", "key"),
    [
        ("mine", "run:v3:mine"),
        ("", "run:v3"),
        (None, "run:v3"),
        ([], "run:v3"),
        (["a", "b"], ["run:v3:a", "run:v3:b"]),
        (["a", None], ["run:v3:a", "run:v3:null"]),
        (7, "run:v3:7"),
        ({"a": "\ud800"}, 'run:v3:{"a": "\\ud800"}'),
        ('quoted " \\', 'run:v3:quoted " \\'),
        ("run:v2", "run:v3:run:v2"),
    ],
)
@pytest.mark.parametrize(
    "form", ['{"extra_key":%s}', '{"a":1,"extra_key":%s}', '{"extra_key":%s,"a":1}']
)
def test_a_clients_own_key_goes_inside_ours(form, own, key):
    assert sent((form % json.dumps(own)).encode()) == key


@pytest.mark.parametrize(
    "body",
    [
        b'{"extra\\u005fkey": "mine"}',
        b'{"extra_key": "mine", "extra\\u005fkey": "mine"}',
        b'{"extra_key": "a", "x": {"extra_key": "b"}, "extra_key": "c"}',
        '{"extra_key": "mine"}'.encode("utf-16-le"),
        '{"extra_key": "mine"}'.encode("utf-16"),
        '{"extra_key": "mine"}'.encode("utf-32-be"),
        '{"extra_key": "mine"}'.encode("utf-8-sig"),
        b' {"extra_key": "mine"} \r\n',
        b'{"x": "' + b"x" * MAX_PARSED_BYTES + b'", "extra_key": "mine", "y": 1}',
    ],
)
@pytest.mark.parametrize("path", sorted(KEYED_PATHS))
def test_no_spelling_of_a_key_leaves_our_namespace(path, body):
    is_vllm = path == "/inference/v1/generate"
    body = body.replace(b"extra", b"cache").replace(b"key", b"salt") if is_vllm else body
    assert sent(body, path=path, kind="vllm" if is_vllm else "sglang").startswith("run:v3")


def test_a_key_that_was_not_read_shares_with_no_other_request():
    body = b'{"x": "' + b"x" * MAX_PARSED_BYTES + b'", "extra_key": "mine", "y": 1}'
    assert sent(body) != sent(body)


@given(st.dictionaries(st.sampled_from(["extra_key", "rid", "a"]), st.text() | st.none()))
def test_other_keys_never_share_a_name(members):
    own = members.get("extra_key")
    key = sent(json.dumps(members).encode())
    assert key == "run:v3" if not own else key.startswith("run:v3:")
    assert len(key) <= 128


@pytest.mark.parametrize("own", ["a" * 120, "a" * 119 + "b", "ä" * 500])
def test_a_long_key_is_shortened_to_what_vllm_takes(own):
    key = sent(json.dumps({"cache_salt": own}).encode(), path="/v1/completions", kind="vllm")
    assert len(key) <= 128
    assert not set(key) & set("@/\\\0")
    assert key != sent(json.dumps({"cache_salt": own[:-1]}).encode(), kind="vllm")


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"a": 1', b'"}', b"text}", b"\xff\xfe{"])
def test_what_no_engine_reads_as_an_object_is_passed_on(body):
    assert b"".join(request_of(body).body_for("run:v3")) == body


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
