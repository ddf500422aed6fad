"""Arguments that users pass: pydantic checks their kinds and bounds, which are their annotations.

Always true: an error is a TypeError or a ValueError, as of Python's own functions; it names the
argument, its value and what fits.  Whole numbers of numpy and torch are numbers; texts and booleans
are none.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar, cast, dataclass_transform

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    validate_call,
)
from pydantic.dataclasses import dataclass

from engines.protocol.plain_text import value_text

_WORDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "True or False",
    "a valid string": "a text",
    "a valid tuple": "a tuple or list",
    "a valid dictionary": "a mapping",
    "callable": "a function",
}
# Of vLLM, OpenAI, transformers and concurrent.futures.
_OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "num_return_sequences": "n",
    "prompt_token_ids": "ids",
    "token_ids": "ids",
    "timeout": "timeout_s",
}
_SECRETS = ("key", "control_key")
# Those errors of pydantic that are about the type of a value; also all whose names end so.
_OF_TYPE = ("is_instance_of", "is_subclass_of", "int_from_float")
_ENDS_OF_TYPE = ("_type", "_parsing")

P = ParamSpec("P")
T = TypeVar("T")

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)


def _index_of(value: Any) -> Any:
    is_foreign = not isinstance(value, int) and hasattr(value, "__index__")
    return value.__index__() if is_foreign else value


Whole = Annotated[int, BeforeValidator(_index_of)]
Count = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(ge=1)]
AboveZero = Annotated[float, Field(gt=0)]
Seconds = AboveZero
RankTimeout = Annotated[float, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[tuple[TokenId, ...], Field(strict=False)]


@dataclass_transform(frozen_default=True)
def options(kind: type[T]) -> type[T]:
    """A frozen dataclass that checks its values when it is made."""
    made: Any = dataclass(frozen=True, slots=True, config=STRICT)(kind)
    init, signature = made.__init__, inspect.signature(made)

    @wraps(init)
    def checked_init(self: T, *args: Any, **kwargs: Any) -> None:
        with _naming_mistakes(signature, args, kwargs):
            init(self, *args, **kwargs)

    made.__init__ = checked_init
    return cast(type[T], made)


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """A function, method or coroutine that checks its arguments when it is called."""
    call: Callable[..., Any] = validate_call(config=STRICT)(function)
    signature = inspect.signature(function)

    @wraps(function)
    def checked_call(*args: P.args, **kwargs: P.kwargs) -> Any:
        with _naming_mistakes(signature, args, kwargs):
            return call(*args, **kwargs)

    @wraps(function)
    async def checked_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
        with _naming_mistakes(signature, args, kwargs):
            return await call(*args, **kwargs)

    return checked_coroutine if inspect.iscoroutinefunction(function) else checked_call  # type: ignore[return-value]


@contextmanager
def _naming_mistakes(
    signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        for name in kwargs.keys() - signature.parameters.keys():
            raise TypeError(_unknown(name, list(signature.parameters))) from None
        # A wrong number of arguments is Python's own TypeError.
        names = list(signature.bind(*args, **kwargs).arguments)
        raise _mistakes(error, names) from None


def _unknown(name: str, known: Sequence[str]) -> str:
    meant = _OTHER_NAMES.get(name, "")
    near = [meant] if meant in known else difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
    return f"got an unexpected keyword argument {name!r}{hint}"


def checked_as(adapter: TypeAdapter[T], value: Any, *name: str) -> T:
    """The value, checked by an adapter.

    Args:
        name: name of the argument, or empty for a TypedDict, whose keys are the arguments.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise _mistakes(error, within=name) from None


def _mistakes(
    error: ValidationError, positional: Sequence[str] = (), within: Sequence[str] = ()
) -> TypeError | ValueError:
    """What pydantic has found, in one error: a TypeError if a value is of a wrong type.

    Args:
        positional: the names of arguments that were given by position.
    """
    mistakes: list[str] = []
    is_of_type = False
    for found in error.errors(include_url=False):
        if isinstance(own := found.get("ctx", {}).get("error"), ValueError):
            return own
        is_of_type |= found["type"] in _OF_TYPE or found["type"].endswith(_ENDS_OF_TYPE)
        place: list[Any] = [*within, *(part for part in found["loc"] if part != "[key]")]
        first, *path = place
        name = str(positional[first] if isinstance(first, int) else first)
        name += "".join(f"[{part!r}]" for part in path)
        accepted = re.sub(r"^\w+ should", "must", found["msg"])
        for theirs, ours in _WORDS.items():
            accepted = accepted.replace(theirs, ours)
        shown = "(hidden)" if name in _SECRETS else value_text(found["input"])
        mistakes.append(f"{name} = {shown}: {accepted}")
    if len(mistakes) > 1:
        mistakes.insert(0, f"{len(mistakes)} arguments are wrong:")
    return (TypeError if is_of_type else ValueError)("\n  ".join(mistakes))


def wrong(name: str, value: Any, accepted: str) -> ValueError:
    """The error for the value of one argument."""
    return ValueError(f"{name} = {value_text(value)}: must be {accepted}")


def wrong_type(name: str, value: Any, accepted: str) -> TypeError:
    """The error for an argument of another type."""
    return TypeError(f"{name} = {value_text(value)}: must be {accepted}")
