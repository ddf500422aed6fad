"""The English of docstrings, pages and names: a grammar, and one word for each command.

A docstring names a thing or says what a call does, before it relates it to others; ``one`` stands
for no thing; and what a function returns without a result is part of its sentence.  Spelling is
codespell's.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUM_MOST_IMPORTED = 60
HEADLESS = r"of|those|that|as|by|with"
BEGINS_HEADLESS = re.compile(rf"({HEADLESS})\b", re.IGNORECASE)
ARGUMENT_HEADLESS = re.compile(rf"^ +\w[\w, ]*: ({HEADLESS})\b", re.MULTILINE)
LITANY = re.compile(r"; (empty|None) (if|for|where|while|without|before|after|until)\b")
PAGE_HEADLESS = re.compile(
    r"(?:^|[.|] )((?:Of|Those|That which|What of) [a-z].{0,40})", re.MULTILINE
)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, also of attributes and constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str() as text)):
                    yield statement.lineno, text.strip()


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name


def mistakes_in(code: str, *, is_most_imported: bool = False) -> Iterator[tuple[int, str]]:
    tree = ast.parse(code)
    for line, text in docstrings(tree):
        if BEGINS_HEADLESS.match(text):
            yield line, f"begins with a relation, not with a thing: {text[:50]!r}"
        if match := LITANY.search(" ".join(text.split())):
            yield line, f"{match[0]!r}: write ', or {match[1]} {match[2]}', or leave it out"
        if is_most_imported and (argument := ARGUMENT_HEADLESS.search(text)):
            yield line, f"an argument begins with a relation: {argument[0].strip()!r}"
    for line, name in bound_names(tree):
        if name == "one":
            yield line, "'one' is no name of a thing"


def modules() -> dict[str, Path]:
    paths = (path for folder in ("rollout", "engines") for path in (ROOT / folder).rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
    }


def most_imported(paths: dict[str, Path]) -> set[str]:
    counts: Counter[str] = Counter()
    for name, path in paths.items():
        imported: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {each if each in paths else node.module for each in full}
        counts.update(imported & paths.keys() - {name})
    return {name for name, _ in counts.most_common(NUM_MOST_IMPORTED)}


def test_the_docstrings_and_names_of_the_code() -> None:
    paths = modules()
    first = most_imported(paths)
    assert len(first) == NUM_MOST_IMPORTED
    mistakes = [
        f"{path.relative_to(ROOT)}:{line}: {why}"
        for name, path in paths.items()
        for line, why in mistakes_in(path.read_text(), is_most_imported=name in first)
    ]
    assert mistakes == []


def test_the_sentences_of_the_pages() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
    pages += [page for page in (ROOT / "docs").rglob("*.md") if page.name != "changelog.md"]
    mistakes = [
        f"{page.relative_to(ROOT)}: {sentence}"
        for page in pages
        for sentence in PAGE_HEADLESS.findall(page.read_text())
    ]
    assert mistakes == []


@pytest.mark.parametrize(
    "code",
    [
        '"""Of the ranks of the trainer."""',
        'SIZE = 1\n"""Those of all buckets."""',
        'def find():\n    """The engine; None if there is none."""',
        'def find():\n    """The engine, by its id; empty\n    where it is not known."""',
        "names = [one for one in names]",
        "def show(one): ...",
        "key = lambda one: one.name",
    ],
)
def test_each_mistake_is_found(code: str) -> None:
    assert len(list(mistakes_in(code))) == 1


def test_an_argument_without_a_noun_is_found_in_modules_that_many_import() -> None:
    code = 'def find(key):\n    """Find it.\n\n    Args:\n        key: of the engine.\n    """'
    assert list(mistakes_in(code)) == []
    assert len(list(mistakes_in(code, is_most_imported=True))) == 1


SUFFIXES = {".py", ".md", ".js", ".css", ".html", ".yml", ".yaml", ".ipynb"}
# What other systems call the commands of ``rollout.rules.lifecycle.Command``, as names of code.
OTHER_NAMES = (
    *("pause", "pause_engines", "flush", "release", "release_memory", "release_weights"),
    *("release_kv", "give_memory", "take_memory", "resume", "resume_weights", "resume_kv"),
    *("resume_memory", "resume_generation", "onload", "onload_memory", "wake_up", "sleep"),
    *("continue", "serve_weights"),
)
# They have the names of other systems beside ours.
OF_OTHERS = (
    *("changelog.md", "names.md", "skyrl.md", "trl.md", "verl.md"),
    *("vllm.md", "weight_transfer.py"),
)


def other_names_in(text: str) -> list[str]:
    """Names of code in backticks, and methods that are called on a handle or its phases."""
    name = "|".join(OTHER_NAMES)
    return [
        match[0]
        for pattern in (rf"(`+)(?:{name})(?:\(\))?\1(?!`)", rf"\b(policy|phases)\.(?:{name})\(")
        for match in re.finditer(pattern, text)
    ]


def test_no_text_calls_a_command_by_another_name() -> None:
    folders = (ROOT / "docs", ROOT / "examples", ROOT / "rollout", ROOT / "engines/fake")
    paths = {path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES}
    paths |= {ROOT / name for name in ("CONTRIBUTING.md", "README.md", "SECURITY.md")}
    read = [path for path in paths if path.name not in OF_OTHERS]
    found = {path: other_names_in(path.read_text()) for path in read}
    assert {path: names for path, names in found.items() if names} == {}


def test_another_name_of_a_command_would_be_found() -> None:
    text = "`resume_kv`, ``pause``, policy.phases.release(), `flush_cache`, policy.serve()"
    assert other_names_in(text) == ["`resume_kv`", "``pause``", "phases.release("]


def test_to_push_is_one_thing_wherever_it_is_called() -> None:
    """By a server's handle, by each rank, and in an offload window, whose end it waits for."""
    for file, kind in (
        ("server_handle.py", "ServerHandle"),
        ("deployment_handle.py", "DeploymentHandle"),
        ("pusher.py", "Pusher"),
        ("offload_window.py", "OffloadWindow"),
    ):
        code = ast.parse((ROOT / "rollout/runtime/handle" / file).read_text())
        (methods,) = [
            node.body for node in code.body if isinstance(node, ast.ClassDef) and node.name == kind
        ]
        (push,) = [
            node for node in methods if isinstance(node, ast.FunctionDef) and node.name == "push"
        ]
        first = (ast.get_docstring(push) or "").partition("\n\n")[0].lower()
        assert "these weights, verified and serving" in first, kind
