"""How the contract of a request is read, of headers and body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.protocol.logprob_kind import LogprobKind, LogprobRule
from rollout.router.continuation import contracts
from rollout.router.continuation.contracts import (
    NOT_GIVEN,
    Versions,
    read_contract,
    versions_of,
    why_no_kind,
)
from rollout.router.continuation.core import Reported
from rollout.router.http.routes import (
    COMPLETION_PATHS,
    GENERATION_PATHS,
    TOKENIZER_PATHS,
    WHOLE_JSON_PATHS,
)
from rollout.router.proxy.reader_choice import Wanted, read_body
from rollout.rules.contract import FIELDS, NO_CONTRACT, Contract

MOST = 1 << 20
MIN, EXACT, LAG, KIND = FIELDS


def read(texts: Any = (), path: str = "/generate", **body: Any) -> contracts.ReadContract:
    return read_contract(path, texts, json.dumps(body).encode(), MOST)


@pytest.mark.parametrize(
    ("texts", "body", "expected"),
    [
        ((), {}, NO_CONTRACT),
        ((), {"stays_with_version": 1}, NO_CONTRACT),
        (((MIN, "8"),), {}, Contract(8)),
        ((), {MIN: 8}, Contract(8)),
        (((MIN, "8"),), {MIN: 8}, Contract(8)),
        (((MIN, "8"), (MIN, "08")), {}, Contract(8)),
        (((EXACT, "9"),), {MIN: 8, LAG: 0}, Contract(8, 9, 0)),
        ((), {MIN: None}, NO_CONTRACT),
        (((KIND, "full"),), {}, Contract(logprob_kind=LogprobKind.FULL)),
        ((), {KIND: "cut"}, Contract(logprob_kind=LogprobKind.CUT)),
        ((), {"sampling_params": {EXACT: 3}}, NO_CONTRACT),
        ((), {"text": f'"{EXACT}": 3'}, NO_CONTRACT),
        ((), {"text": EXACT}, NO_CONTRACT),
        ((), {"text": "a ] b [ c", EXACT: 3, "stop": "]"}, Contract(weight_version=3)),
        ((), {"input_ids": [1] * 9000, EXACT: 3}, Contract(weight_version=3)),
        ((), {EXACT: 3, "input_ids": [1] * 9000}, Contract(weight_version=3)),
        ((), {"text": "[" + "1" * 9000, EXACT: 3, "stop": "]"}, Contract(weight_version=3)),
    ],
)
def test_fields_are_headers_or_members(
    texts: Any, body: dict[str, Any], expected: Contract
) -> None:
    found = read(texts, **body)
    assert (found.contract, found.problem) == (expected, "")
    if any(name in body for name in FIELDS):
        assert found.body is not None
        assert json.loads(found.body) == {k: v for k, v in body.items() if k not in FIELDS}
    else:
        assert found.body is None


@pytest.mark.parametrize(
    ("texts", "body", "words"),
    [
        (((MIN, "x"),), {}, f"{MIN} is 'x'"),
        (((MIN, "-1"),), {}, f"{MIN} is '-1'"),
        (((MIN, "1.0"),), {}, f"{MIN} is '1.0'"),
        (((MIN, "\N{SUPERSCRIPT TWO}"),), {}, f"{MIN} is"),
        (((MIN, ""),), {}, f"{MIN} is ''"),
        (((MIN, "9" * 16),), {}, f"{MIN} is"),
        (((EXACT, "7"), (EXACT, "8")), {}, f"{EXACT} is 7 and 8 in two headers x-weight-version"),
        (((EXACT, "7"),), {EXACT: 8}, f"{EXACT} is 7 in the header x-weight-version and 8"),
        (((EXACT, "1"),), {EXACT: True}, f"{EXACT} is 1 in the header"),
        ((), {EXACT: "8"}, f"{EXACT} is '8'"),
        ((), {LAG: -1}, f"{LAG} is -1"),
        ((), {LAG: True}, f"{LAG} is True"),
        ((), {MIN: 1.0}, f"{MIN} is 1.0"),
        ((), {MIN: [1]}, f"{MIN} is [1]"),
        ((), {MIN: 8, EXACT: 7}, f"{EXACT} is 7, and {MIN} 8 excludes it"),
        (((MIN, "8"),), {EXACT: 7}, f"{EXACT} is 7, and {MIN} 8 excludes it"),
        (((KIND, "best"),), {}, f"{KIND} is 'best', and takes one of full"),
        ((), {KIND: 1}, f"{KIND} is 1"),
    ],
)
def test_what_is_no_contract_is_refused_and_the_field_named(
    texts: Any, body: dict[str, Any], words: str
) -> None:
    assert words in read(texts, **body).problem


def test_a_member_in_a_body_that_is_not_read_is_refused() -> None:
    for body in (b'{"weight_version": 3', b'[{"weight_version": 3}]'):
        found = read_contract("/generate", (), body, MOST)
        assert found.problem.startswith("weight_version is in a body that the router does not read")
        assert "x-weight-version" in found.problem
    long = json.dumps({"text": "a" * 100, EXACT: 3}).encode()
    assert "over 64 bytes" in read_contract("/generate", (), long, 64).problem


def test_a_body_in_another_encoding_has_its_members() -> None:
    body = json.dumps({"a": 1, EXACT: 3}).encode("utf-16")
    found = read_body(Wanted("/generate", max_bytes=MOST), body, texts=((LAG, "1"),))
    assert found.contract == Contract(weight_version=3, max_version_lag=1)
    assert found.fields.body == b'{"a":1}'


@pytest.mark.parametrize("path", sorted(GENERATION_PATHS))
def test_each_path_keeps_a_contract_or_refuses_it(path: str) -> None:
    version, kind = read(((MIN, "1"),), path, a=1), read(((KIND, "full"),), path, a=1)
    assert (version.problem == "") == (path in COMPLETION_PATHS | WHOLE_JSON_PATHS)
    assert version.problem == "" or MIN in version.problem
    assert (kind.problem == "") == (path in COMPLETION_PATHS)
    assert kind.problem == "" or KIND in kind.problem
    streamed = read(((MIN, "1"),), path, stream=True)
    assert (streamed.problem == "") == (path in COMPLETION_PATHS)
    assert not TOKENIZER_PATHS & WHOLE_JSON_PATHS


def test_a_body_without_a_contract_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(body: bytes) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(contracts, "read_object", parse)
    assert read(text="weight versions", sampling_params={}) is NOT_GIVEN
    assert read(text='"weight_version": 3 and more') is NOT_GIVEN
    assert read(((MIN, "3"),), text="a").contract == Contract(3)


@pytest.mark.parametrize(
    ("reported", "admitted", "served", "is_open", "expected"),
    [
        (Reported(("7", "8")), 7, 7, False, (7, 8)),
        (Reported(("8",), "8"), 7, 9, True, (8, 8)),
        (Reported(last="8"), 7, 9, True, (7, 8)),
        (Reported(last="6"), 7, 7, True, (6, 6)),
        (Reported(), 7, 8, True, (7, 8)),
        (Reported(), 7, 7, False, (7, None)),
        (Reported(), None, 7, True, (None, 7)),
        (Reported(("main",), "main"), 7, 7, True, (None, None)),
    ],
)
def test_which_versions_tokens_can_have(
    reported: Reported, admitted: int | None, served: int, is_open: bool, expected: Any
) -> None:
    assert versions_of(reported, admitted, served, is_open=is_open) == expected


def test_versions_of_two_engines_are_joined() -> None:
    assert Versions(7, 8).joined(None) == (7, 8)
    assert Versions(8, 8).joined(Versions(6, 7)) == (6, 8)
    assert Versions(8, None).joined(Versions(6, 7)) == (6, None)


def test_a_kind_that_no_engine_gives_is_refused_with_what_works() -> None:
    rule = LogprobRule(has_cuts=True)
    why = why_no_kind(LogprobKind.FULL, {"main-0": (LogprobKind.CUT, rule), "main-1": (None, rule)})
    assert why.startswith(
        "logprob_kind is full, and the log-probs of this request would be cut or "
    )
    assert "on main-0, main-1" in why
    assert "top_p" in why
    assert "send logprob_kind cut" in why
    assert "router.max_read_bytes" in why
