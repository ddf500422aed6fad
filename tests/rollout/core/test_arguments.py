"""Options and arguments that pydantic checks."""

import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from rollout.core.arguments import Count, Seconds, checked, options


@options
class Choice:
    every: Count = 1
    timeout_s: Seconds | None = None


@checked
def wait(num: Count, *, timeout_s: Seconds = 1.0) -> Any:
    if timeout_s > 100:
        raise ValueError("of the function itself")
    return num


@checked
async def waiting(num: Count) -> int:
    return num


def test_a_whole_number_of_numpy_is_one() -> None:
    assert wait(np.int64(3)) == 3
    assert type(Choice(every=np.int32(3)).every) is int  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda value: Choice(value), lambda value: Choice(every=value)])
def test_an_option_is_named_also_if_it_is_given_by_position(make: Any) -> None:
    with pytest.raises(TypeError, match=r"^every = True: must be a whole number$"):
        make(True)


def test_options_are_values() -> None:
    choice = Choice(2, 3.0)
    assert pickle.loads(pickle.dumps(choice)) == replace(Choice(2), timeout_s=3.0) == choice
    with pytest.raises(FrozenInstanceError):
        choice.every = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="every = -1: must be at least 0"):
        replace(choice, every=-1)


def test_all_mistakes_are_in_one_error() -> None:
    with pytest.raises(
        TypeError, match=r"2 arguments are wrong:\n  num = 'a'.*\n  timeout_s = 0: "
    ):
        wait("a", timeout_s=0)  # type: ignore[arg-type]


async def test_a_coroutine_checks_its_arguments() -> None:
    assert await waiting(1) == 1
    with pytest.raises(TypeError, match=r"num = 1\.5: must be a whole number"):
        await waiting(1.5)  # type: ignore[arg-type]


def test_a_wrong_shape_of_a_call_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nope'"):
        wait(1, nope=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing a required argument: 'num'"):
        wait()  # type: ignore[call-arg]


def test_an_error_of_the_function_itself_stays() -> None:
    with pytest.raises(ValueError, match=r"^of the function itself$"):
        wait(1, timeout_s=101)
