"""Prompts from lists and from Hugging Face ``datasets``, which read JSONL, Parquet and more.

Always true: one epoch gives every row once, in an order that depends only on seed and epoch.  A
restored source continues at the next prompt, and rejects data of another length or seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from operator import index
from typing import Any, Protocol

from pydantic import SkipValidation, TypeAdapter

from rollout.core.arguments import STRICT, Count, Whole, checked, checked_as
from rollout.core.errors import ConfigError
from rollout.driver.data.prompt import Prompt, checked_name
from rollout.driver.user_code import callback, result_now, wrong_result

Encode = Callable[[Any], Sequence[int]]
_ID_KEYS = ("prompt_ids", "input_ids")
_COUNT = TypeAdapter(Count, config=STRICT)
# So many rows, at equal distances, give a data set its name.
_NUM_IN_NAME = 64


class PromptRows(Protocol):
    """Rows by number: a list of mappings, or an opened ``datasets.Dataset``."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class FixedPrompts:
    """A list of prompts, each given once."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._num_taken = 0

    def take(self) -> Prompt | None:
        if self._num_taken >= len(self._prompts):
            return None
        self._num_taken += 1
        return self._prompts[self._num_taken - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"num_taken": self._num_taken, "num_rows": len(self._prompts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check_same("rows", state["num_rows"], len(self._prompts))
        self._num_taken = state["num_taken"]


class PromptData:
    """Prompts of a data set, epoch by epoch.

    Args:
        rows: mappings by number: a list, or a ``datasets.Dataset``, such as
            ``datasets.load_dataset("json", data_files="prompts.jsonl", split="train")``.
        encode: turns the value of ``prompt_key`` (a text, a list of messages) into token ids; not
            needed if rows have ``prompt_ids`` or ``input_ids``.
        seed: of the order, which changes each epoch; None keeps the order of the rows.
        num_epochs: epochs until it ends, or None for no end.
        max_prompt_tokens: longer prompts raise, or are skipped with ``skip_too_long``.
        name: under which a driver's journal knows it; None: a digest of the rows.

    Attributes:
        num_skipped: prompts that were skipped because of their length.

    Raises:
        TypeError, ValueError: there are no rows, or a setting is wrong.
    """

    @checked
    def __init__(
        self,
        rows: SkipValidation[PromptRows],
        *,
        encode: Encode | None = None,
        prompt_key: str = "prompt",
        seed: Whole | None = 0,
        num_epochs: Count | None = None,
        max_prompt_tokens: Count | None = None,
        skip_too_long: bool = False,
        name: str | None = None,
    ) -> None:
        if len(rows) == 0:
            raise ValueError("the data set has no rows")
        self.num_skipped = 0
        self._rows = rows
        self._encode = encode
        self._key = prompt_key
        self._seed = seed
        self._num_epochs = num_epochs
        self._max_tokens = max_prompt_tokens
        self._skip_too_long = skip_too_long
        self._name = None if name is None else checked_name(name)
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def take(self) -> Prompt | None:
        """The next prompt, or None after the last epoch.

        Raises:
            ConfigError: a row is unusable.  The error names it; the source stays before it.
            RolloutError: the rows or ``encode`` raised something, which is the cause.
        """
        num_skipped = 0
        while True:
            if self._position >= len(self._rows):
                if num_skipped >= len(self._rows):
                    raise ConfigError(
                        f"every prompt is longer than {self._max_tokens} tokens",
                        setting="max_prompt_tokens",
                        value=self._max_tokens,
                    )
                self._epoch += 1
                self._position = 0
                self._order = self._order_of(self._epoch)
            if self._num_epochs is not None and self._epoch >= self._num_epochs:
                return None
            prompt = self._prompt(self._order[self._position])
            self._position += 1
            if prompt is not None:
                return prompt
            num_skipped += 1
            self.num_skipped += 1

    @property
    def name(self) -> str:
        """The name under which a driver's journal knows the data set, the same in each launch.

        Raises:
            ConfigError: it was given none, and rows have values that cannot be compared.
        """
        if self._name is None:
            self._name = _name_of(self._rows)
        return self._name

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt, from 0."""
        return self._epoch + (self._position >= len(self._rows))

    def state_dict(self) -> dict[str, Any]:
        """Where the source is, as JSON for ``load_state_dict``."""
        return {
            "epoch": self._epoch,
            "place": self._position,
            "seed": self._seed,
            "num_rows": len(self._rows),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``.

        Args:
            state: what ``state_dict`` returned.

        Raises:
            TypeError, ValueError: it was written with other data, or is no such state.
        """
        if missing := sorted(self.state_dict().keys() - state.keys()):
            raise ValueError(f"this is no state of a PromptData: it has no {', '.join(missing)}")
        _check_same("rows", state["num_rows"], len(self._rows))
        _check_same("seed", state["seed"], self._seed)
        self._epoch = checked_as(_COUNT, state["epoch"], "state", "epoch")
        self._position = checked_as(_COUNT, state["place"], "state", "place")
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> Sequence[int]:
        if self._seed is None:
            return range(len(self._rows))
        order = list(range(len(self._rows)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    def _prompt(self, number: int) -> Prompt | None:
        what = f"row {number} of the data set"
        with callback(what):
            row = result_now(what, self._rows.__getitem__, number)
        if not isinstance(row, Mapping):
            raise ConfigError(f"row {number} is {type(row).__name__}, not a mapping")
        key = next((key for key in _ID_KEYS if key in row), self._key)
        if key not in row:
            raise ConfigError(
                f"row {number} has no {self._key!r}, {' or '.join(map(repr, _ID_KEYS))}; "
                f"it has {', '.join(map(str, row)) or 'nothing'}",
                setting="prompt_key",
                value=self._key,
            )
        ids = self._ids(number, key, row[key])
        if not ids:
            raise ConfigError(f"the prompt of row {number} has no tokens")
        if self._max_tokens is not None and len(ids) > self._max_tokens:
            if self._skip_too_long:
                return None
            raise ConfigError(
                f"the prompt of row {number} has {len(ids)} tokens, at most {self._max_tokens} "
                "fit; skip_too_long=True skips such rows",
                setting="max_prompt_tokens",
                value=self._max_tokens,
            )
        return Prompt(ids, {name: value for name, value in row.items() if name not in _ID_KEYS})

    def _ids(self, number: int, key: str, value: Any) -> tuple[int, ...]:
        if key in _ID_KEYS:
            ids = _token_ids(value)
            if ids is None:
                raise ConfigError(f"{key} of row {number} are not token ids: {value!r:.80}")
            return ids
        if self._encode is None:
            raise ConfigError(
                f"row {number} has {key!r} and no token ids: "
                "set encode, for example to a tokenizer's encode",
                setting="encode",
            )
        what = f"encode of row {number}"
        with callback(what):
            encoded = result_now(what, self._encode, value)
        ids = _token_ids(encoded)
        if ids is None:
            raise wrong_result(what, self._encode, encoded, "token ids")
        return ids


def _token_ids(value: Any) -> tuple[int, ...] | None:
    """None if these are none."""
    if isinstance(value, Mapping):
        return None
    try:
        return tuple(map(index, value))
    except TypeError:
        return None


def _name_of(rows: PromptRows) -> str:
    num = len(rows)
    some = sorted({at * (num - 1) // _NUM_IN_NAME for at in range(_NUM_IN_NAME + 1)})
    text = repr((num, [_plain(rows[number], number) for number in some]))
    return f"rows-{blake2b(text.encode(errors='surrogatepass'), digest_size=8).hexdigest()}"


def _plain(value: Any, row: int) -> Any:
    """The value as what has the same ``repr`` in each process."""
    if isinstance(value, Mapping):
        return [(str(key), _plain(part, row)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(part, row) for part in value]
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if hasattr(value, "tolist"):  # of numpy or torch
        return value.tolist()
    raise ConfigError(
        f"row {row} has a value of type {type(value).__name__}, of which no name can be made: give "
        "the data set one, PromptData(name=...)",
        setting="name",
    )


def _check_same(what: str, saved: Any, current: Any) -> None:
    if saved != current:
        raise ValueError(f"the state was written with {what} {saved}, not {current}")
