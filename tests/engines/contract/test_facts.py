"""Tables beside the suite: sources and tests are there, and so is each behaviour of the fakes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.engines.contract import behaviours
from tests.engines.contract.behaviours import README, REFUSALS, ROUTES, rows_of_readme
from tests.engines.contract.differences import DIFFERENCES
from tests.engines.contract.parameters import PARAMETERS
from tests.support.cpu_engines import installed
from tests.support.vllm_stub.conversation import TALK
from tests.support.vllm_stub.stub import StubVllm

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
REAL = {"sglang", "vllm", "embedded"}
SUITES = sorted(HERE.glob("test_contract*.py"))
_SAID = {what: (row.source, *row.others) for what, row in DIFFERENCES.items()}
SOURCES = [
    (kind, what, text)
    for what, texts in (_SAID | {name: row.sources for name, row in PARAMETERS.items()}).items()
    for text in texts
    for kind in ("sglang", "vllm")
    if text.startswith(f"{kind}/")
]


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def function_of(file: Path, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    for node in tree_of(file).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    return None


def assigned_in(file: Path) -> Iterator[tuple[str, str]]:
    """Names of a module and their values."""
    for node in tree_of(file).body:
        if isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0]), ast.unparse(node.value)


def marks_of(file: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The real kinds that it runs over, by its marks and those of its file and its fixtures."""
    named = [ast.unparse(mark) for mark in function.decorator_list]
    named += [text for name, text in assigned_in(file) if name == "pytestmark"]
    arguments = {argument.arg for argument in function.args.args}
    by_kind = [text for text in named if "parametrize('kind'" in text]
    if "bench" in arguments and not by_kind:
        fixture = function_of(file, "kind")
        by_kind = [ast.unparse(one) for one in fixture.decorator_list] if fixture else ["KINDS"]
    text = " ".join(by_kind or named)
    for name, value in assigned_in(file):  # such as a list of kinds
        text += value if re.search(rf"\b{name}\b", text) else ""
    conftest = file.parent / "conftest.py"
    if {"kind", "policy"} & arguments and not by_kind and "params=" in conftest.read_text():
        text += conftest.read_text()
    kinds = {kind for kind in REAL if f"mark.{kind}" in text}
    kinds |= {"sglang", "embedded"} if re.search(r"\bKINDS\b", text) else set()
    kinds |= {"vllm"} if re.search(r"\bVLLM\b", text) else set()
    left_out = " ".join(one for one in named if one.startswith(("not_for(", "NOT_VLLM")))
    return kinds - {
        kind for kind in REAL if repr(kind) in left_out or f"NOT_{kind.upper()}" in left_out
    }


def found(test: str) -> tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The test of a name of the contract, or of an id."""
    file, _, name = test.rpartition("::")
    for one in [ROOT / file] if file else SUITES:
        if one.is_file() and (function := function_of(one, name)):
            return one, function
    raise AssertionError(f"there is no test {test}")


def kinds_of(test: str) -> set[str]:
    return marks_of(*found(test))


def test_each_behaviour_of_the_fake_has_a_test_over_real_engines() -> None:
    assert ROUTES.keys() == behaviours.routes()
    assert REFUSALS.keys() == set(behaviours.refusals())
    for row in rows_of_readme():
        assert [first for first in README if row.startswith(first)], row
    for what, tests in (ROUTES | REFUSALS | README).items():
        shown = set[str]().union(*map(kinds_of, tests))
        assert shown & {"sglang", "vllm"}, f"{what}: over no real engine"


def test_a_row_of_a_behaviour_that_is_gone_is_found() -> None:
    rows = rows_of_readme()
    assert not [first for first in README if not any(one.startswith(first) for one in rows)]


def test_each_call_of_the_vllm_stub_was_recorded_of_vllm() -> None:
    """``test_recorded.py`` has the same conversation with vLLM, ``test_stub.py`` with the stub."""
    asked = {path.partition("?")[0] for step in TALK for path in paths_in(step)}
    names = {name for name in dir(StubVllm) if name.startswith("on_")}
    spoken = {"on" + path.removesuffix(".json").replace("/", "_") for path in asked}
    assert names <= spoken
    methods = {step["body"]["method"] for step in TALK if "method" in (step.get("body") or {})}
    assert {name for name in dir(StubVllm) if name.startswith("rollout_")} <= methods


def paths_in(step: dict[str, str]) -> Iterator[str]:
    yield from (step[how] for how in ("get", "post", "begin") if how in step)


@pytest.mark.parametrize("what", DIFFERENCES)
def test_the_library_is_tested_over_the_real_engines_of_each_difference(what: str) -> None:
    row = DIFFERENCES[what]
    assert {"sglang"} | row.instead.keys() & {"vllm"} <= kinds_of(row.library), row.library


@pytest.mark.parametrize("what", DIFFERENCES)
def test_each_difference_is_shown_by_the_contract(what: str) -> None:
    assert any(f'"{what}"' in file.read_text() for file in SUITES)


@pytest.mark.parametrize(
    ("kind", "what", "source"),
    [
        pytest.param(*one, marks=[getattr(pytest.mark, one[0])], id=f"{one[0]}-{place}")
        for place, one in enumerate(SOURCES)
    ],
)
def test_a_source_is_in_the_installed_engine(kind: str, what: str, source: str) -> None:
    file, _, text = source.partition(": ")
    assert text in (installed(kind, kind).parent / file).read_text(), what


def test_what_a_real_engine_passes_over_has_a_source() -> None:
    for name, row in PARAMETERS.items():
        real = row.passed_over.keys() & {"sglang", "vllm"}
        assert real == {source.partition("/")[0] for source in row.sources}, name
