"""The names of members that are searched in a body: one pass, and none is overlooked."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol.logprob_kind import LogprobRule
from rollout.router.continuation.body_names import SEARCHED, names_in, outline_of
from rollout.rules.contract import FIELDS

NAMES = sorted(name.decode() for name in SEARCHED)
IDS = [1] * 2000
JSONS = st.recursive(
    st.none() | st.integers() | st.text() | st.sampled_from(['"rid":', "[", "]", *NAMES]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=12,
)


def found(body: bytes) -> frozenset[bytes]:
    return names_in(outline_of(body))


def names_within(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(value, *map(names_within, value.values()))
    return set().union(*map(names_within, value)) if isinstance(value, list) else set()


@given(st.dictionaries(st.sampled_from((*NAMES, "a", "[", "]")), JSONS, max_size=5))
def test_no_member_is_overlooked(body: dict[str, Any]) -> None:
    wanted = {name.encode() for name in names_within(body)} & SEARCHED
    nested = {"input_ids": [IDS, [], IDS]}
    for each in ({**body, "ids": IDS}, {"ids": IDS, **body}, {**nested, **body}, body):
        for indent in (None, 1):
            assert wanted <= found(json.dumps(each, indent=indent).encode())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_ids", [0, 1, 300])
@pytest.mark.parametrize("is_first", [True, False])
def test_each_name_is_found_beside_token_ids_and_only_it(
    name: str, num_ids: int, is_first: bool
) -> None:
    ids, own = {"input_ids": [7] * num_ids}, {name: 1}
    body = {**own, **ids} if is_first else {**ids, **own}
    assert found(json.dumps(body).encode()) == {name.encode()}
    assert found(json.dumps({"text": f'a "{name}" b', **ids}).encode()) == set()
    assert found(b'{"a": [' + b"7," * num_ids + f'"{name}": 1'.encode()) == {name.encode()}


def test_what_contracts_and_every_rule_of_log_probs_need_is_searched() -> None:
    assert {name.encode() for name in FIELDS} <= SEARCHED
    for has in itertools.product((True, False), repeat=3):
        for defaults in ((), (("top_p", 0.5),)):
            rule = LogprobRule(*has, defaults)
            assert {name.encode() for name in rule.names} <= SEARCHED
