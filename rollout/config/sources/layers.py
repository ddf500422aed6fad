"""The files and overrides that a configuration is read from, in order: later ones win.

Always true: a mistake names what gave its value: the last file that has the setting, with its line,
or the override.  The value of an override of a secret is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from rollout.config.mistakes import HIDDEN, is_secret
from rollout.config.sources.parsers import line_of, read_lines, read_values
from rollout.core.errors import ConfigError, Mistake


@dataclass(frozen=True)
class _File:
    path: Path
    values: Any

    @classmethod
    def read(cls, path: Path) -> _File:
        return cls(path, read_values(path))

    def gives(self, setting: str) -> bool:
        return not _rest_of(self.values, setting)

    def locate(self, mistake: Mistake) -> Mistake:
        line = line_of(self._lines, mistake.setting)
        return replace(mistake, source=str(self.path), line=line)

    @cached_property
    def _lines(self) -> yaml.Node | None:
        return read_lines(self.path)


@dataclass(frozen=True, slots=True)
class _Override:
    text: str
    shown: str
    setting: str
    values: Any

    @classmethod
    def read(cls, text: str) -> _Override:
        key, _, value = text.partition("=")
        setting = re.sub(r"\[([^]]*)\]", r".\1", key)
        if not key.strip() or text == key:
            raise ConfigError(f"the override {text!r} is not written key.path=value")
        values: Any = value
        for part in reversed(setting.split(".")):
            values = {part: values}
        shown = f"{key}={HIDDEN}" if is_secret(setting, value) else text
        return cls(text, shown, setting, values)

    def gives(self, setting: str) -> bool:
        return f"{setting}.".startswith(f"{self.setting}.")

    def locate(self, mistake: Mistake) -> Mistake:
        return replace(mistake, source=f"the override {self.shown}", line=None)


@dataclass(frozen=True, slots=True)
class Sources:
    """All that a configuration is read from."""

    files: tuple[_File, ...]
    overrides: tuple[_Override, ...] = ()

    @classmethod
    def read(cls, paths: Sequence[Path], overrides: Sequence[str] = ()) -> Sources:
        """Read files and overrides.

        Raises:
            ConfigError: a file is missing or cannot be parsed, or an override is not written
                ``key.path=value``.
        """
        return cls(tuple(map(_File.read, paths)), tuple(map(_Override.read, overrides)))

    def merged(self) -> Any:
        """The values of all: sections are merged, a list or a value is replaced.

        Raises:
            ConfigError: a file is no section, or an override does not fit the files.
        """
        first, *others = self.files
        if not others and not self.overrides:
            return first.values
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        config: Any = OmegaConf.create({}, flags={"allow_objects": True})
        for file in self.files:
            if not isinstance(file.values, Mapping):
                raise ConfigError(f"config {file.path} has no settings; it must be a mapping")
            try:
                layer = OmegaConf.create(dict(file.values), flags={"allow_objects": True})
                config = OmegaConf.unsafe_merge(config, layer)
            except OmegaConfBaseException as error:
                raise ConfigError(f"cannot merge config {file.path}: {_reason(error)}") from None
            except RecursionError:  # by an anchor of YAML
                why = "a part of the values is in itself"
                raise ConfigError(f"cannot merge config {file.path}: {why}") from None
        for override in self.overrides:
            try:
                config.merge_with_dotlist([override.text])
            except (OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
                raise ConfigError(f"the override {override.shown}: {_reason(error)}") from None
        return OmegaConf.to_container(config)

    def located(self, mistakes: Iterable[Mistake]) -> list[Mistake]:
        """The mistakes, each with what gave its value."""
        return [self._origin(mistake.setting).locate(mistake) for mistake in mistakes]

    def folder_of(self, setting: str) -> Path:
        """The folder that a relative path is relative to: of its file, or else this process's."""
        origin = self._origin(setting)
        return origin.path.parent if isinstance(origin, _File) else Path()

    def _origin(self, setting: str) -> _File | _Override:
        """What gives a setting, or else most of the sections around it."""
        origins: list[_File | _Override] = [*self.files, *self.overrides]
        for origin in reversed(origins):
            if origin.gives(setting):
                return origin
        return min(origins, key=lambda origin: len(_rest_of(origin.values, setting)))


def _rest_of(values: Any, setting: str) -> str:
    """The end of a setting's path, below the deepest section of it that is in the values."""
    while setting and isinstance(values, Mapping):
        keys = [key for key in values if f"{setting}.".startswith(f"{key}.")]
        if not keys:
            break
        key = max(keys, key=lambda key: len(str(key)))
        values, setting = values[key], setting[len(str(key)) + 1 :]
    return setting


def _reason(error: Exception) -> str:
    setting = str(getattr(error, "full_key", None) or "")
    if is_secret(setting, None):
        return f"the value of {setting} cannot be read"
    reason = str(error).partition("\n")[0]
    return f"{setting}: {reason}" if setting else reason
