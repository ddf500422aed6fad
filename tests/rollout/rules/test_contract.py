"""What fulfils a contract of a request, by the versions that are served and those of its tokens."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rollout.rules.contract import NO_CONTRACT, Contract, Fit, contract_of

NOW, LATER, NEVER = Fit


@pytest.mark.parametrize(
    ("contract", "by_served"),
    [
        ({}, {None: NOW, 0: NOW, 9: NOW}),
        ({"min_weight_version": 5}, {None: LATER, 4: LATER, 5: NOW, 9: NOW}),
        ({"weight_version": 5}, {None: LATER, 4: LATER, 5: NOW, 6: NEVER}),
        ({"max_version_lag": 0}, {None: LATER, 0: NOW, 6: NOW}),
        ({"min_weight_version": 3, "weight_version": 5}, {3: LATER, 5: NOW, 6: NEVER}),
        ({"logprob_kind": "full"}, {None: NOW, 3: NOW}),
    ],
    ids=repr,
)
def test_what_is_served_fits_a_contract_now_later_or_never(
    contract: dict[str, Any], by_served: dict[int | None, Fit]
) -> None:
    found = contract_of(contract)
    assert {served: found.fit(served) for served in by_served} == by_served


@pytest.mark.parametrize(
    ("contract", "oldest", "newest", "served", "why"),
    [
        (NO_CONTRACT, None, None, None, ""),
        (Contract(weight_version=5), 5, 5, 9, ""),
        (Contract(weight_version=5), 5, 6, 6, "weight version 6, and weight_version is 5"),
        (Contract(weight_version=5), 4, 5, 5, "weight version 4, and weight_version is 5"),
        (Contract(weight_version=5), None, None, 5, "not known"),
        (Contract(min_weight_version=5), 5, 8, 9, ""),
        (Contract(min_weight_version=5), 4, 8, 9, "version 4, and min_weight_version is 5"),
        (Contract(max_version_lag=2), 3, 5, 5, ""),
        (Contract(max_version_lag=2), 3, 5, 6, "version 3, version 6 is served, .* is 2"),
    ],
    ids=repr,
)
def test_tokens_fulfil_a_contract_or_it_is_named(
    contract: Contract, oldest: int | None, newest: int | None, served: int | None, why: str
) -> None:
    found = contract.why_broken(oldest, newest, served)
    assert re.search(why, found) if why else found == ""


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"min_weight_version": -1}, "min_weight_version is -1"),
        ({"weight_version": True}, "weight_version is True"),
        ({"max_version_lag": 1.5}, r"max_version_lag is 1\.5"),
        ({"weight_version": "5"}, "weight_version is '5'"),
        ({"weight_version": 1 << 53}, "weight_version is 9007199254740992"),
        ({"logprob_kind": "best"}, "logprob_kind is 'best', and takes one of full"),
        ({"weight_version": 3, "min_weight_version": 4}, "min_weight_version 4 excludes it"),
    ],
    ids=repr,
)
def test_what_is_no_contract_is_refused_by_the_name_of_its_field(
    values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        contract_of(values)


def test_a_contract_goes_into_headers() -> None:
    contract = contract_of({"weight_version": 3, "logprob_kind": "full", "affinity": "a"})
    assert contract.to_headers() == {"x-weight-version": "3", "x-logprob-kind": "full"}
    assert not contract_of({"logprob_kind": "full", "weight_version": None}).has_versions
