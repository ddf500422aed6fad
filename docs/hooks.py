"""What is generated into the pages: ``<!-- generated: NAME -->`` becomes what the code says.

Always true: a mark without a generator, or a generator without a mark in any page, fails the build.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click
import typer
from pydantic import BaseModel

from rollout import lifecycle
from rollout.cli import app
from rollout.config import RolloutConfig
from rollout.page.tallies import METRICS as SERVER_METRICS
from rollout.router.metrics import METRICS as ROUTER_METRICS

ROOT = Path(__file__).parents[1]
_MARK = re.compile(r"<!-- generated: (\w+) -->")
_UNITS = {"_seconds": "seconds", "_bytes": "bytes"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for every page."""
    return _MARK.sub(lambda mark: GENERATORS[mark[1]](), markdown)


def diagram() -> str:
    return f"```mermaid\n{lifecycle.diagram()}\n```"


def transitions() -> str:
    lines = ["| phase | command | leads to | who |", "|---|---|---|---|"]
    lines += [
        f"| {row.phase} | `{row.command}` | {row.target} | {row.only or 'all groups'} |"
        for row in lifecycle.TABLE
    ]
    return "\n".join(lines)


def configuration() -> str:
    """Every setting of every slice, from the classes themselves."""
    told: list[str] = []
    seen: set[type[BaseModel]] = set()
    _describe(RolloutConfig, "", told, seen)
    return "\n\n".join(told)


def _describe(
    model: type[BaseModel], path: str, told: list[str], seen: set[type[BaseModel]]
) -> None:
    if model in seen:
        return
    seen.add(model)
    rows = ["| setting | default | |", "|---|---|---|"]
    nested: list[tuple[type[BaseModel], str]] = []
    for name, field in model.model_fields.items():
        where = f"{path}{name}"
        inner = _slice_in(field.annotation)
        if inner is not None:
            is_map = "dict" in str(field.annotation)
            nested.append((inner, f"{where}.{'<name>.' if is_map else ''}"))
        default = "required" if field.is_required() else _default(field)
        about = (field.description or (inner.__doc__ or "" if inner else "")).strip()
        about = " ".join(about.split()).replace("|", "\\|")
        rows.append(f"| `{where}` | {default} | {about} |")
    told.append(f"## {model.__name__}\n\n{' '.join((model.__doc__ or '').split())}")
    told.append("\n".join(rows))
    for inner, where in nested:
        _describe(inner, where, told, seen)


def _slice_in(annotation: Any) -> type[BaseModel] | None:
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
        if one is not annotation and (found := _slice_in(one)):
            return found
    return None


def _default(field: Any) -> str:
    if field.default_factory is not None:
        return "empty"
    if isinstance(field.default, BaseModel):
        return "its own defaults"
    value = field.default
    return f"`{getattr(value, 'value', value)!r}`" if value is not None else "none"


def commands() -> str:
    """Every command with its options, from the program itself."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    return "\n\n".join(_command(name, one) for name, one in group.commands.items())


def _command(name: str, command: Any) -> str:
    if hasattr(command, "commands"):
        return "\n\n".join(
            _command(f"{name} {inner}", one) for inner, one in command.commands.items()
        )
    words = [f"## rollout {name}", (command.help or "").replace("\n\n", "\n\n").strip()]
    rows = ["| | default | |", "|---|---|---|"]
    rows += [_parameter(one) for one in command.params]
    if command.params:
        words.append("\n".join(rows))
    return "\n\n".join(words)


def _parameter(one: Any) -> str:
    is_option = one.param_type_name == "option"
    spelled = ", ".join(f"`{opt}`" for opt in one.opts) if is_option else f"`{one.name.upper()}`"
    has_default = one.default not in (None, False, "") and not callable(one.default)
    default = f"`{one.default}`" if has_default else ""
    about = (getattr(one, "help", "") or "").replace("|", "\\|")
    return f"| {spelled} | {default} | {about} |"


def metrics() -> str:
    lines = ["| metric | kind | labels | unit | |", "|---|---|---|---|---|"]
    for name, (kind, labels, about) in (SERVER_METRICS | ROUTER_METRICS).items():
        unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
        told = f"{name}_total" if kind == "counter" else name
        named = ", ".join(f"`{label}`" for label in ("server", *labels))
        lines.append(f"| `{told}` | {kind} | {named} | {unit} | {about} |")
    return "\n".join(lines)


def benchmarks() -> str:
    """The figures and how to repeat them; its links go to the repository's own files."""
    text = (ROOT / "benchmarks" / "README.md").read_text()
    text = re.sub(r"^# .*\n", "", text, count=1)
    return re.sub(r"\[([^\]]+)\]\((?!http)[^)]*\)", r"`\1`", text)


GENERATORS: dict[str, Callable[[], str]] = {
    "diagram": diagram,
    "transitions": transitions,
    "configuration": configuration,
    "commands": commands,
    "metrics": metrics,
    "benchmarks": benchmarks,
}
