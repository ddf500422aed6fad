"""Names and values of a trainer's tensors, as the caller gave them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rollout.core.errors import WeightMismatch


def named_pairs(named: Any) -> Iterator[tuple[str, Any]]:
    """The pairs of a mapping, or of an iterable of pairs.

    Raises:
        WeightMismatch: it is neither.
    """
    if isinstance(named, (str, bytes)) or not isinstance(named, Iterable):
        raise WeightMismatch(
            f"a push takes tensors by name, such as model.state_dict(), not {_shown(named)}"
        )
    for index, pair in enumerate(named.items() if isinstance(named, Mapping) else named):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise WeightMismatch(
                f"a push takes pairs (name, tensor); item {index} is {_shown(pair)}"
            )
        name, value = pair
        if not isinstance(name, str):
            raise WeightMismatch(f"the name of a tensor is a str; item {index} has {_shown(name)}")
        yield name, value


def _shown(value: Any) -> str:
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) < 60 else text[:57] + '...'}"
