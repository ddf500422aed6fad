"""The page of engines and features, from the contract suite and the results of its runs.

    pytest tests/engines/contract/test_contract.py -m "not chaos" --junitxml=results.xml
    python -m tests.engines.contract.table results.xml

Nothing is written unless each test passed with each kind that it is for.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from engines.kinds import KINDS
from tests.engines.conftest import FAKE_VLLM
from tests.engines.contract import test_contract as suite

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/engines.md"
COLUMNS = {
    "sglang": "SGLang",
    "vllm": "vLLM",
    "embedded": "embedded",
    "fake": "fake",
    "fake-http": "fake over HTTP",
    FAKE_VLLM: "fake vLLM",
}
_LEAVES_OUT = {"NOT_VLLM": {"vllm", FAKE_VLLM}}
_ALIKE = {"vllm": {"vllm", FAKE_VLLM}, "fake": {"fake", "fake-http"}}
_SUITE = Path(suite.__file__)
_HEAD = (
    "# Engines and features\n\n"
    "What `tests/engines/contract/test_contract.py` shows of each kind of engine. *yes*: the test "
    "passed. *otherwise*: the kind\ndoes something else on purpose, and the test shows that. *no*: "
    "not a part of this kind.\n`python -m tests.engines.contract.table` writes this page, from "
    "results in which each *yes* and *otherwise* passed.\n\n"
    "Versions: SGLang {sglang}, vLLM {vllm}, both on a CPU. The client of vLLM also takes the "
    "others of 0.27 to 0.33, which were not run.\n"
)


_CENSUS_HEAD = (
    "## What engines have of old weights\n\n"
    "What an engine computes with its weights and has after a request, and why none of it reaches "
    "a token of new weights.\n*cleared*: a call clears it at each push. *named*: its key has the "
    "run and the weight version. *disabled*: engines\nare launched without it. *refused*: the "
    "option that adds it is refused. *recomputed*: it is derived from the weights\nagain. An entry "
    "about images or sounds counts only if a push may change what computes their embeddings. An "
    "engine of\nanother version, or with an option that may add an entry and is in none, is a "
    "warning, and an error with\n`weights.strict_caches`. After each push the [sentinel]"
    "(../concepts.md#how-weights-are-verified) asks. Attached SGLang\nengines have SGLang's."
)


@dataclass(frozen=True)
class Row:
    """One test.

    Attributes:
        cells: by kind; empty where the test is not for it.
    """

    name: str
    cells: dict[str, str]
    notes: tuple[str, ...]


def rows() -> Iterator[Row]:
    """The tests of the suite, in its order."""
    text = _SUITE.read_text()
    lines = text.split("\n")
    for node in ast.parse(text).body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield _row(node, lines, ast.get_source_segment(text, node) or "")


def _row(node: ast.AsyncFunctionDef, lines: list[str], body: str) -> Row:
    cells = dict.fromkeys(COLUMNS, "yes")
    notes = []
    for what in (what for what in suite.DIFFERENCES if f'"{what}"' in body):
        for kind, instead in suite.DIFFERENCES[what].items():
            cells |= dict.fromkeys(_ALIKE.get(kind, {kind}), "otherwise")
            notes.append(f"{COLUMNS[kind]}: {instead}")
    for mark in node.decorator_list:
        found, line = ast.unparse(mark), lines[mark.lineno - 1]
        if found.startswith("pytest.mark.parametrize('kind'"):
            outside = {"fake", "fake-http", FAKE_VLLM}  # KINDS[2:] and VLLM
        else:
            outside = _left_out(mark)
        cells |= dict.fromkeys(outside, "no")
        if outside and "# " in line:
            names = " and ".join(COLUMNS[kind] for kind in COLUMNS if kind in outside)
            notes.append(f"not {names}: {line.partition('# ')[2]}")
    return Row(node.name, cells, tuple(notes))


def _left_out(mark: ast.expr) -> set[str]:
    if isinstance(mark, ast.Name):
        return _LEAVES_OUT[mark.id]
    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "not_for":
        names = [ast.unparse(one).strip("'") for one in mark.args]
        return {FAKE_VLLM if name == "FAKE_VLLM" else name for name in names}
    return set()


def page() -> str:
    """The text of the page."""
    lines = [
        f"| | {' | '.join(COLUMNS.values())} | |",
        f"|---|{'---|' * len(COLUMNS)}---|",
        *(
            f"| {row.name.removeprefix('test_').replace('_', ' ')} | "
            f"{' | '.join(row.cells[kind] for kind in COLUMNS)} | {'; '.join(row.notes)} |"
            for row in rows()
        ),
    ]
    head = _HEAD.format(sglang=_pin("sglang"), vllm=_pin("vllm"))
    return head + "\n" + "\n".join([*lines, "", *census()]) + "\n"


def census() -> Iterator[str]:
    """What each kind has of its weights after a request, and what is done about it."""
    yield _CENSUS_HEAD
    for kind in KINDS.values():
        if kind.census is KINDS["sglang"].census and kind.name != "sglang":
            continue
        versions = ", ".join(kind.census.versions)
        yield f"\n### {kind.title.removeprefix('the ')} {versions}\n"
        yield "| what | treatment | by | in the engine's source |\n|---|---|---|---|"
        for cache in kind.census.caches:
            cells = (cache.name, cache.treatment.value, cache.by, f"`{cache.source}`")
            yield f"| {' | '.join(cells)} |"


def _pin(name: str) -> str:
    pins = (ROOT / f"engines/cpu/{name}/pins.txt").read_text()
    found = re.search(rf"^{name}(?:-cpu)?==(\S+)", pins, re.MULTILINE)
    assert found
    return found[1]


def outcomes(files: Iterable[Path]) -> dict[tuple[str, str], bool]:
    """Whether all cases of a test passed, by name of the test and kind."""
    found: dict[tuple[str, str], bool] = {}
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            name, _, label = case.get("name", "").rstrip("]").partition("[")
            padded = f"-{label}-"
            kinds = [kind for kind in COLUMNS if f"-{kind}-" in padded and "-gpu-" not in padded]
            if kinds:
                key = (name, max(kinds, key=len))
                found[key] = found.get(key, True) and len(case) == 0
    return found


def missing(results: dict[tuple[str, str], bool]) -> list[str]:
    """What the page says that these results do not show."""
    return [
        f"{row.name} with {kind}"
        for row in rows()
        for kind, cell in row.cells.items()
        if cell != "no" and not results.get((row.name, kind))
    ]


if __name__ == "__main__":
    if unshown := missing(outcomes(map(Path, sys.argv[1:]))):
        sys.exit("not passed in these results:\n" + "\n".join(unshown))
    PAGE.write_text(page())
