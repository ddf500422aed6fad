"""Prompts out of lists, JSONL, Parquet and Hugging Face datasets.

Always true: one epoch gives every row once, in an order that only the seed and the epoch decide;
a source that was written down goes on at the very next prompt, and refuses to do so over data
of another length or seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollout.driver.prompts import Prompt
from rollout.errors import ConfigError
from rollout.extras import extra

Encode = Callable[[Any], Sequence[int]]
_ID_KEYS = ("prompt_ids", "input_ids")


class Rows(Protocol):
    """Rows by number; a list of mappings, an opened ``datasets.Dataset``."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Fixed:
    """Prompts that are there already, each once."""

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
        _same("rows", state["num_rows"], len(self._prompts))
        self._num_taken = state["num_taken"]


class PromptData:
    """Prompts of a data set, epoch after epoch.

    Args:
        rows: mappings by number; what ``jsonl`` and ``parquet`` open, a list, a ``datasets``
            object.
        encode: token ids of what stands under ``prompt_key`` (a text, a list of messages); not
            needed where rows have ``prompt_ids`` or ``input_ids``.
        seed: of the order, which is another one each epoch; None keeps that of the rows.
        num_epochs: until it ends; None goes on for ever.
        max_prompt_tokens: longer prompts raise, or are left out with ``skip_too_long``.

    Attributes:
        num_skipped: prompts that were left out for their length.

    Raises:
        ConfigError: there are no rows.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        encode: Encode | None = None,
        prompt_key: str = "prompt",
        seed: int | None = 0,
        num_epochs: int | None = None,
        max_prompt_tokens: int | None = None,
        skip_too_long: bool = False,
    ) -> None:
        if len(rows) == 0:
            raise ConfigError("the data set has no rows", setting="rows")
        self.num_skipped = 0
        self._rows = rows
        self._encode = encode
        self._key = prompt_key
        self._seed = seed
        self._num_epochs = num_epochs
        self._most = max_prompt_tokens
        self._skips = skip_too_long
        self._epoch = 0
        self._place = 0
        self._order = self._order_of(0)

    def take(self) -> Prompt | None:
        """The next prompt; None after the last epoch.

        Raises:
            ConfigError: a row is unusable; it is named, and the source stays before it.
        """
        num_skipped = 0
        while True:
            if self._place >= len(self._rows):
                if num_skipped >= len(self._rows):
                    raise ConfigError(
                        f"every prompt is longer than {self._most} tokens",
                        setting="max_prompt_tokens",
                        value=self._most,
                    )
                self._epoch += 1
                self._place = 0
                self._order = self._order_of(self._epoch)
            if self._num_epochs is not None and self._epoch >= self._num_epochs:
                return None
            prompt = self._prompt(self._order[self._place])
            self._place += 1
            if prompt is not None:
                return prompt
            num_skipped += 1
            self.num_skipped += 1

    @property
    def epoch(self) -> int:
        """The epoch that the next prompt is of, from 0."""
        return self._epoch + (self._place >= len(self._rows))

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "place": self._place,
            "seed": self._seed,
            "num_rows": len(self._rows),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was written.

        Raises:
            ConfigError: it was written over other data.
        """
        _same("rows", state["num_rows"], len(self._rows))
        _same("seed", state["seed"], self._seed)
        self._epoch, self._place = state["epoch"], state["place"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> Sequence[int]:
        if self._seed is None:
            return range(len(self._rows))
        order = list(range(len(self._rows)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    def _prompt(self, number: int) -> Prompt | None:
        row = self._rows[number]
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
        if self._most is not None and len(ids) > self._most:
            if self._skips:
                return None
            raise ConfigError(
                f"the prompt of row {number} has {len(ids)} tokens, at most {self._most} fit; "
                "skip_too_long=True leaves such rows out",
                setting="max_prompt_tokens",
                value=self._most,
            )
        return Prompt(ids, {name: value for name, value in row.items() if name not in _ID_KEYS})

    def _ids(self, number: int, key: str, value: Any) -> tuple[int, ...]:
        if key not in _ID_KEYS:
            if self._encode is None:
                raise ConfigError(
                    f"row {number} has {key!r} and no token ids: give encode=, a tokenizer's, say",
                    setting="encode",
                )
            value = self._encode(value)
        try:
            return tuple(int(one) for one in value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key} of row {number} are not token ids: {error}") from None


class JsonLines:
    """Rows of a JSONL file, found by their offsets: the file is not kept in memory.

    Raises:
        ConfigError: there is no such file, or a line is no JSON object; the line is named.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._offsets: list[int] = []
        offset = 0
        try:
            with self._path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        self._check(line, number)
                        self._offsets.append(offset)
                    offset += len(line)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", value=str(path)) from None

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int, /) -> Any:
        with self._path.open("rb") as lines:
            lines.seek(self._offsets[index])
            return json.loads(lines.readline())

    def _check(self, line: bytes, number: int) -> None:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{self._path}, line {number}: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{self._path}, line {number}: not a JSON object")


def jsonl(path: Path | str, **settings: Any) -> PromptData:
    """Prompts of a JSONL file, one object a line; settings are those of ``PromptData``.

    Raises:
        ConfigError: the file cannot be read, or a line is no JSON object; the line is named.
    """
    return PromptData(JsonLines(path), **settings)


def parquet(path: Path | str, **settings: Any) -> PromptData:
    """Prompts of a Parquet file; settings are those of ``PromptData``.

    Raises:
        ConfigError: the file cannot be read, or pyarrow is missing.
    """
    with extra("data", "Parquet needs pyarrow, which is not installed"):
        import pyarrow
        from pyarrow import parquet as reader
    try:
        table = reader.read_table(path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise ConfigError(f"cannot read {path}: {error}", value=str(path)) from None
    return PromptData(_Table(table), **settings)


class _Table:
    """A table stays in Arrow's memory; only the row that is asked for becomes Python."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int, /) -> Any:
        return self._table.slice(index, 1).to_pylist()[0]


def _same(what: str, then: Any, now: Any) -> None:
    if then != now:
        raise ConfigError(f"the state was written over {what} {then}, not {now}", setting=what)
