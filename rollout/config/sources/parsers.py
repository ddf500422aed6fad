"""Reads the values of a configuration file: YAML, JSON or TOML, by its suffix.

Always true: whatever is in the file, the only error is a ``ConfigError`` that names it.  A key that
stands twice is refused: the parsers would silently drop the first one.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rollout.core.errors import ConfigError


def read_values(path: Path) -> Any:
    """The values in a file.

    Raises:
        ConfigError: it is missing, is no text in UTF-8, or cannot be parsed; names the line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    except ValueError as error:  # a NUL in its name
        raise ConfigError(f"cannot read config {str(path)!r}: {error}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"config {path}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8; save "
            "the file as UTF-8 text"
        ) from None
    try:
        return _PARSERS.get(path.suffix.lower(), _parse_yaml)(text)
    except RecursionError:
        raise ConfigError(f"cannot parse config {path}: it is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"cannot parse config {path}{_reason(error)}") from None


def read_lines(path: Path) -> yaml.Node | None:
    """The values of a YAML or JSON file with their lines; None of TOML, which has none."""
    try:
        return yaml.compose(path.read_text("utf-8-sig"), _Loader)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def line_of(node: yaml.Node | None, setting: str) -> int | None:
    """The line of a setting, or of the nearest section around it that is in the file."""
    line = None
    while isinstance(node, yaml.MappingNode):
        entries = ((key, value, f"{key.value}.") for key, value in node.value)
        below = [entry for entry in entries if f"{setting}.".startswith(entry[2])]
        if not below:
            break
        key, node, prefix = max(below, key=lambda entry: len(entry[2]))
        line, setting = key.start_mark.line + 1, setting.removeprefix(prefix)
    return line


def _reason(error: Exception) -> str:
    match error:
        case yaml.MarkedYAMLError(problem=problem, problem_mark=mark) if mark is not None:
            return f", line {mark.line + 1}, column {mark.column + 1}: {problem or error}"
        case json.JSONDecodeError():
            return f", line {error.lineno}, column {error.colno}: {error.msg}"
    return f": {error}"


class _Loader(yaml.SafeLoader):
    """YAML's own types only, and no key twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"key {key.value!r} is given twice", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return node


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_repeats)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {repeated!r} is given twice")
    return values


_PARSERS: dict[str, Callable[[str], Any]] = {".json": _parse_json, ".toml": tomllib.loads}
