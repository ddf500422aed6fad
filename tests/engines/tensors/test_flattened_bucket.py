"""Where tensors lie in a flattened bucket."""

from __future__ import annotations

import pytest

from engines.tensors.dtypes import element_bytes
from engines.tensors.flattened_bucket import lay_out, wide_first


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float64", 8),
        ("int64", 8),
        ("float32", 4),
        ("uint32", 4),
        ("bfloat16", 2),
        ("float16", 2),
        ("int16", 2),
        ("float8_e4m3fn", 1),
        ("float8_e8m0fnu", 1),
        ("uint8", 1),
        ("bool", 1),
        ("complex64", 8),
    ],
)
def test_the_bytes_of_an_element(dtype: str, size: int) -> None:
    assert element_bytes(dtype) == size


@pytest.mark.parametrize("dtype", ["float", "bfloat", "32", "int4", "quint8", "torch.float32", ""])
def test_a_dtype_that_is_none_is_named(dtype: str) -> None:
    with pytest.raises(ValueError, match="unknown dtype"):
        element_bytes(dtype)


def test_tensors_follow_one_another_in_the_order_of_their_names() -> None:
    places = lay_out(
        ["b", "a", "none", "one"], ["float32", "bfloat16", "int8", "int8"], [[2, 3], [5], [0], []]
    )
    assert places == [(0, 24), (24, 34), (34, 34), (34, 35)]


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "words"),
    [
        ([], [], [], "cannot be empty"),
        (["a"], ["float32", "int8"], [[1]], "differ in length"),
        (["a"], ["float32"], [[1], [2]], "differ in length"),
        (["a"], ["float32"], [[2, -1]], "'a' has a negative dimension"),
        (["a", "b"], ["bfloat16", "float32"], [[1], [1]], "'b' begins at byte 2"),
        (["a"], ["float"], [[1]], "unknown dtype 'float'"),
    ],
)
def test_what_sglang_would_refuse_is_refused(
    names: list[str], dtypes: list[str], shapes: list[list[int]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        lay_out(names, dtypes, shapes)


def test_wide_elements_first_is_an_order_that_is_taken() -> None:
    dtypes = ["int8", "bfloat16", "float32", "bfloat16", "int64"]
    order = wide_first(dtypes)
    assert order == [4, 2, 1, 3, 0]
    sorted_dtypes = [dtypes[index] for index in order]
    assert len(lay_out(list("abcde"), sorted_dtypes, [[3]] * 5)) == 5
    assert wide_first(["bfloat16"] * 4) == [0, 1, 2, 3]
