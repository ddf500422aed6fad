"""The page of engines and features, from the contract suite and the results of its runs.

    pytest tests/engines/contract -k "test_contract.py or test_contract_requests.py" \\
        -m "not chaos" --junitxml=results.xml
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
from tests.engines.contract.differences import DIFFERENCES
from tests.engines.contract.parameters import PARAMETERS

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/reference/engines.md"
COLUMNS = {
    "sglang": "SGLang",
    "vllm": "vLLM",
    "embedded": "embedded",
    "fake": "fake",
    "fake-http": "fake over HTTP",
}
_LEAVES_OUT = {"NOT_VLLM": {"vllm"}, "NO_PORT": {"fake"}}
_NOT_PASSED = {"failure", "error", "skipped"}
_ALIKE = {"fake": {"fake", "fake-http"}}
_SUITES = [
    Path(__file__).with_name(name) for name in ("test_contract.py", "test_contract_requests.py")
]
_HEAD = (
    "# Engines and features\n\n"
    "What `tests/engines/contract` shows about each kind of engine. *yes*: the test "
    "passed. *otherwise*: the kind\ndoes something else on purpose, and the test shows it. *no*: "
    "the test is not for this kind.\n`python -m tests.engines.contract.table` writes this "
    "page from results in which each *yes* and *otherwise* passed.\n\n"
    "Versions: SGLang {sglang}, vLLM {vllm}, both on a CPU. Our vLLM client also accepts the "
    "other versions from 0.27 to 0.33; they were not run.\n"
)


_DIFFERENCES_HEAD = (
    "## Where the kinds differ\n\n"
    "What SGLang does, what another kind does instead, and the engine's source file that shows it. "
    "The last column names the\nlibrary's test over the real engines that differ.\n\n"
    "| SGLang | in its place | source | the library over it |\n|---|---|---|---|\n"
)
_PARAMETERS_HEAD = (
    "## Sampling parameters\n\n"
    "*effect*: the tokens or the text show it. *refused*: 400, or an error of our client. "
    "*passed over*: accepted, without effect.\n`n` is a parameter of `policy.generate`, which "
    "sends each completion as a separate request.\n\n"
    "| | SGLang | vLLM | embedded | fake | |\n|---|---|---|---|---|---|\n"
)
_OLD_STATE_HEAD = (
    "## What engines keep of old weights\n\n"
    "At each push, a flush or a pause clears the state that an engine computed with its weights. "
    "This table lists what they do not reach.\n"
    "The [sentinel](../concepts.md#how-weights-are-verified) checks it after each push. Attached "
    "SGLang engines have SGLang's row.\n\n"
    "| | at 0, so that no embeddings are kept* | refused | refused* | a store of prefixes, which "
    "names keep apart |\n|---|---|---|---|---|\n"
)
_OLD_STATE_END = (
    "\n\\* if a push may change the tensors that compute embeddings of images and sounds."
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
    for file in _SUITES:
        text = file.read_text()
        lines = text.split("\n")
        for node in ast.parse(text).body:
            if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield _row(node, lines, ast.get_source_segment(text, node) or "")


def _row(node: ast.AsyncFunctionDef, lines: list[str], body: str) -> Row:
    cells = dict.fromkeys(COLUMNS, "yes")
    notes = []
    for what in (what for what in DIFFERENCES if f'"{what}"' in body):
        for kind, instead in DIFFERENCES[what].instead.items():
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
    parts = [*lines, "", differences(), "", parameters(), "", old_state()]
    return head + "\n" + "\n".join(parts) + "\n"


def differences() -> str:
    """What SGLang does and others do not, where that stands, and what the library is tested on."""
    rows = (
        f"| {what} | {'; '.join(f'{COLUMNS[kind]}: {text}' for kind, text in row.instead.items())} "
        f"| {', '.join(f'`{_file_of(one)}`' for one in (row.source, *row.others))} "
        f"| `{row.library.partition('::')[2].removeprefix('test_')}` |"
        for what, row in DIFFERENCES.items()
    )
    return _DIFFERENCES_HEAD + "\n".join(rows)


def _file_of(source: str) -> str:
    return source.partition(": ")[0]


def parameters() -> str:
    """What becomes of each sampling parameter."""
    kinds = ("sglang", "vllm", "embedded", "fake")
    rows = []
    for name, parameter in PARAMETERS.items():
        cells = " | ".join(parameter.expected(kind) for kind in kinds)
        why = "; ".join(
            f"{COLUMNS[kind]}: {parameter.passed_over[kind]}"
            for kind in kinds
            if kind in parameter.passed_over
        )
        rows.append(f"| `{name}` | {cells} | {why} |")
    return _PARAMETERS_HEAD + "\n".join(rows)


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
