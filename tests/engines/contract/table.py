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
from tests.engines.contract import test_contract as suite

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/engines.md"
COLUMNS = {
    "sglang": "SGLang",
    "vllm": "vLLM",
    "embedded": "embedded",
    "fake": "fake",
    "fake-http": "fake over HTTP",
}
_LEAVES_OUT = {"NOT_VLLM": {"vllm"}}
_NOT_PASSED = {"failure", "error", "skipped"}
_ALIKE = {"fake": {"fake", "fake-http"}}
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


_OLD_STATE_HEAD = (
    "## What engines keep of old weights\n\n"
    "A flush or a pause clears what an engine computed with its weights, at each push. What that "
    "does not reach:\nafter each push the [sentinel](../concepts.md#how-weights-are-verified) "
    "asks. Attached SGLang engines have SGLang's.\n\n"
    "| | at 0, so that no embeddings are kept* | refused | refused* | a store of prefixes, which "
    "names keep apart |\n|---|---|---|---|---|\n"
)
_OLD_STATE_END = "\n\\* if a push may change what computes embeddings of images and sounds."


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
            outside = {"fake", "fake-http"}  # KINDS[2:] and VLLM
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
        return {ast.unparse(one).strip("'") for one in mark.args}
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
    return head + "\n" + "\n".join([*lines, "", old_state()]) + "\n"


def old_state() -> str:
    """What each kind keeps of old weights, and what is done about it."""
    rows = []
    for name in ("embedded", "sglang", "vllm", "fake"):
        row = KINDS[name].old_state
        cells = (
            (row.embeddings_variable,),
            row.refused,
            row.refused_for_embeddings,
            row.named_stores,
        )
        texts = (", ".join(f"`{one}`" for one in cell if one) or "none" for cell in cells)
        rows.append(f"| {KINDS[name].title} | {' | '.join(texts)} |")
    return _OLD_STATE_HEAD + "\n".join(rows) + "\n" + _OLD_STATE_END


def _pin(name: str) -> str:
    pins = (ROOT / f"tools/cpu_engines/{name}/pins.txt").read_text()
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
                has_passed = not _NOT_PASSED & {child.tag for child in case}
                found[key] = found.get(key, True) and has_passed
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
