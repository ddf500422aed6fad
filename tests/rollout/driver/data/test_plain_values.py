"""Values of users as JSON: what is read equals what was written, or it is refused by its place."""

import json
import math
from datetime import UTC, timedelta, timezone
from enum import IntEnum, StrEnum
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.driver.data.plain_values import NotPlainError, as_it_is, from_plain, to_plain

KEYS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | (st.sampled_from(["$python", "value", "\ud800"]))
)
LEAVES = (
    KEYS
    | st.floats()
    | st.binary()
    | st.integers(-(1 << 200), 1 << 200)
    | st.datetimes(
        timezones=st.sampled_from([None, UTC, timezone(timedelta(hours=-3, minutes=-30))])
    ).map(lambda of: of.replace(fold=0))
    | st.dates()
    | st.times().map(lambda of: of.replace(fold=0))
    | st.uuids()
)
VALUES = st.recursive(
    LEAVES,
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(KEYS | st.tuples(KEYS), parts, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_what_is_read_is_what_was_written(value: Any) -> None:
    """``repr`` also has the types, NaN and the sign of zero."""
    plain = to_plain(value, "metadata")
    assert repr(from_plain(orjson.loads(orjson.dumps(plain)))) == repr(value)
    assert repr(from_plain(json.loads(json.dumps(plain)))) == repr(value)


@pytest.mark.parametrize(
    "value", [None, True, 3, "\u00e9", 0.5, [1, {"a": [None]}], {"value": 1, "b": {}}]
)
def test_what_is_json_stands_for_itself(value: Any) -> None:
    assert to_plain(value, "metadata") == value


class Number(IntEnum):
    ONE = 1


class Word(StrEnum):
    A = "a"


@pytest.mark.parametrize(("value", "plain"), [(Number.ONE, 1), (Word.A, "a")])
def test_kinds_of_pythons_own_types_are_their_values(value: Any, plain: Any) -> None:
    assert type(from_plain(to_plain(value, "metadata"))) is type(plain)
    assert from_plain(to_plain(value, "metadata")) == plain


@pytest.mark.parametrize("value", [object(), {1, 2}, math, 1j, Exception("no")])
def test_any_other_value_is_refused_with_its_place_or_stays(value: Any) -> None:
    kind = type(value).__name__
    with pytest.raises(NotPlainError, match=rf"metadata\['a'\]\[1\] is a {kind}, which is not"):
        to_plain({"a": [0, value]}, "metadata")
    assert from_plain(to_plain({"a": (value,)}, "metadata", as_it_is))["a"][0] is value


@pytest.mark.parametrize(
    "value", [{"$python": "int"}, {"$python": "eval", "value": "1"}, {"$python": "int", "value": 1}]
)
def test_what_was_not_saved_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="is no value that was saved"):
        from_plain(value)
