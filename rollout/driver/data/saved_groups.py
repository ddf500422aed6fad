"""Groups of a run in files, one file for each step: kept by one run, trained on again by another.

A file has the rows of ``sample_rows``: JSON lines, or Parquet, which the extra ``data`` reads.  In
a folder a file is named by its step, ``000012.jsonl``.  A path that is one file has the groups of
every step: a trainer sees the same batch again and again.

Always true: what is read equals what was written; a file under its own name is whole.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.plain_json import WRONG_FORM, read_json
from engines.process.own_files import new_file
from rollout.core.errors import ConfigError, RolloutError
from rollout.core.optional_deps import optional_import
from rollout.core.samples import SampleGroup
from rollout.driver.data.sample_rows import groups_of, sample_rows

RECORD = "ROLLOUT_RECORD"
"""Environment variable: a folder in which each driver keeps the groups of its steps."""
REPLAY = "ROLLOUT_REPLAY"
"""Environment variable: a file or folder whose groups each driver returns, without engines."""


@dataclass(frozen=True, slots=True)
class SavedGroups:
    """Groups that were saved.

    Attributes:
        path: of one file, or of a folder with a file for each step.
    """

    path: Path

    @classmethod
    def of_environment(cls, variable: str) -> SavedGroups | None:
        """Saved groups that an environment variable names, or None if it is not set."""
        path = os.environ.get(variable)
        return cls(Path(path)) if path else None

    def make_folder(self) -> None:
        """Make the folder, if it is not there.

        Raises:
            OSError: it cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)

    def files(self) -> dict[int, Path]:
        """The files of the folder by step, in order.

        Raises:
            ConfigError: it has none.
        """
        named = (file for file in self.path.iterdir() if file.suffix in _READERS)
        by_step = {int(file.stem): file for file in sorted(named) if file.stem.isdecimal()}
        if not by_step:
            kinds = " or ".join(f"STEP{suffix}" for suffix in _READERS)
            raise ConfigError(f"folder {self.path} has no saved groups, which are named {kinds}")
        return dict(sorted(by_step.items()))

    def read(self, step: int) -> list[SampleGroup]:
        """The groups of a step.

        Raises:
            ConfigError: there is no such path, or the file has no rows of samples.
            RolloutError: this step was not saved.
        """
        if not self.path.is_dir():
            return read_groups(self.path)
        files = self.files()
        if step not in files:
            steps = ", ".join(map(str, files)) if len(files) < 9 else f"{min(files)}..{max(files)}"
            raise RolloutError(f"step {step} is not saved in {self.path}, which has {steps}")
        return read_groups(files[step])

    def write(self, step: int, groups: Sequence[SampleGroup]) -> Path:
        """Keep the groups of a step in the folder, which is made; returns their file."""
        return write_groups(self.path / f"{step:06}.jsonl", groups, step)


def write_groups(file: Path, groups: Sequence[SampleGroup], step: int = 0) -> Path:
    """Write groups as JSON lines; returns ``file``, which was replaced if it was there.

    Raises:
        ConfigError: metadata of a sample has a value that cannot be saved.
        OSError: the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # Another driver may write the same file.
    part = file.with_name(f"{file.name}.{secrets.token_hex(8)}.part")
    try:
        with os.fdopen(new_file(str(part), mode=0o666), "w") as stream:
            stream.writelines(f"{json.dumps(row)}\n" for row in sample_rows(groups, step))
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return file


def read_groups(file: Path) -> list[SampleGroup]:
    """The groups in a file.

    Raises:
        ConfigError: there is no such file, of a known kind, with rows of samples.
    """
    rows = read_rows(file)
    try:
        groups = groups_of(rows)
    except WRONG_FORM as error:
        raise ConfigError(f"{file} has no saved groups: {error}") from None
    if not groups:
        raise ConfigError(f"{file} has no groups")
    return groups


def read_rows(file: Path) -> list[Mapping[str, Any]]:
    """The rows of a file of JSON lines or Parquet.

    Raises:
        ConfigError: there is no such file, or it is of no such kind.
    """
    if file.suffix not in _READERS:
        raise ConfigError(f"{file}: the name of a file of rows ends in {' or '.join(_READERS)}")
    try:
        return list(_READERS[file.suffix](file))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {file}") from None
    except ValueError as error:
        raise ConfigError(f"{file} has no rows: {error}") from None


def _json_lines(file: Path) -> Iterable[Mapping[str, Any]]:
    with file.open() as stream:
        yield from map(read_json, stream)


def _parquet(file: Path) -> Iterable[Mapping[str, Any]]:
    with optional_import("data", f"{file} needs datasets"):
        from datasets import Dataset  # type: ignore[import-untyped]
    rows: Iterable[Mapping[str, Any]] = Dataset.from_parquet(str(file))
    return rows


_READERS: dict[str, Callable[[Path], Iterable[Mapping[str, Any]]]] = {
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}
