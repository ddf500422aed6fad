"""The tables of docs/how-to/mismatch.md, from the figures that tests of real engines left.

    pytest tests/end_to_end/real/test_logprobs.py -m "sglang or vllm or embedded" \\
        --junitxml=results.xml
    python -m tests.engines.protocol.logprob_table results.xml ...

A test leaves figures only if each of its cells is right; what these results lack stays as it was.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.support.logprob_cells import MODES, SINGLES

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/how-to/mismatch.md"
FIGURES = Path(__file__).with_name("logprob_figures.json")
BEGIN = "<!-- python -m tests.engines.protocol.logprob_table writes this -->"
END = "<!-- to here -->"
Figures = Mapping[str, Sequence[Any]]
"""For ``logprobs KIND MODE`` its cells, and for ``prompts KIND MODE`` those of prompts."""
_TITLES = {
    "embedded default": "embedded",
    "embedded original": "embedded, original",
    "sglang default": "SGLang {sglang}",
    "sglang original": "SGLang, original",
    "vllm processed": "vLLM {vllm}, processed",
    "vllm raw": "vLLM, raw",
}
_PROMPT_NAMES = ("at temperature 1", "at the request's")


def read_figures() -> Figures:
    """Those that are kept."""
    found: Figures = json.loads(FIGURES.read_text())
    return found


def found_in(files: Iterable[Path]) -> dict[str, Sequence[Any]]:
    """The figures in these results."""
    found: dict[str, Sequence[Any]] = {}
    for file in files:
        for one in ElementTree.parse(file).iter("property"):
            name, value = one.get("name", ""), one.get("value", "")
            if name.startswith(("logprobs ", "prompts ")):
                found[name] = json.loads(value)
    return found


def written(figures: Figures) -> str:
    """As JSON, one cell a line."""
    lists = (
        f"{json.dumps(name)}: [\n"
        + ",\n".join(json.dumps(_short(row)) for row in figures[name])
        + "\n]"
        for name in sorted(figures)
    )
    return "{\n" + ",\n".join(lists) + "\n}\n"


def _short(row: Any) -> Any:
    if isinstance(row, float):
        return float(f"{row:.1e}")
    if isinstance(row, dict):
        return {name: value if name == "sampling" else _short(value) for name, value in row.items()}
    return [_short(value) for value in row] if isinstance(row, list) else row


def text_of(sampling: Mapping[str, Any]) -> str:
    """The parameters of a cell, as the table has them."""
    shown = (
        f"{name} {json.dumps(value) if name == 'logit_bias' else value}"
        for name, value in sampling.items()
    )
    return ", ".join(shown).replace('"', "") or "none"


def tables(figures: Figures) -> str:
    """Each parameter alone, all cells by kind, and log-probs of prompts."""
    modes = [f"{kind} {mode}" for kind, of_kind in MODES.items() for mode in of_kind]
    pins = {name: _pin(name) for name in ("sglang", "vllm")}
    titles = [_TITLES[mode].format(**pins) for mode in modes]
    head = f"| | {' | '.join(titles)} |\n|---|{'---|' * len(modes)}\n"
    of_modes = [figures[f"logprobs {mode}"] for mode in modes]
    num = len(SINGLES)
    singles = "".join(
        f"| {text_of(cells[0]['sampling'])} | {' | '.join(map(_cell, cells))} |\n"
        for cells in zip(*(cells[:num] for cells in of_modes), strict=True)
    )
    kinds = ("full", "raw", "cut", "penalised", "refused")
    of_all = "".join(
        f"| `{kind}` | {' | '.join(_summary(cells, kind) for cells in of_modes)} |\n"
        for kind in kinds
    )
    of_prompts = "".join(
        f"| {name} | "
        + " | ".join(_largest(figures.get(f"prompts {mode}") or [], at) for mode in modes)
        + " |\n"
        for at, name in enumerate(_PROMPT_NAMES)
    )
    total = len(of_modes[0])
    return (
        "The kind of each parameter alone; behind it the largest distance of a token from what "
        "transformers computes for that kind,\nand, where it is not `full`, the average distance "
        f"from `full`, in nats:\n\n{head}{singles}\n"
        f"All {total} cells, which are these and each pair of two parameters: how many are of a "
        f"kind, and the largest distance from it:\n\n{head}{of_all}\n"
        "Log-probs of a prompt, with temperatures, cuts, penalties and biases in the request: the "
        f"largest distance from log-softmax:\n\n{head}{of_prompts}"
    )


def _largest(rows: Sequence[Sequence[float]], at: int) -> str:
    return f"{max(row[at] for row in rows):.0e}" if rows else "not measured"


def _cell(cell: Mapping[str, Any]) -> str:
    kind = cell["kind"]
    if kind == "refused":
        return "refused"
    far = "" if kind == "full" else f" / {cell['full']:.2g}"
    return f"`{kind}` {_figure(cell['own'])}{far}"


def _figure(own: float | None) -> str:
    return "?" if own is None else f"{own:.0e}"


def _summary(cells: Sequence[Mapping[str, Any]], kind: str) -> str:
    of_kind = [cell for cell in cells if cell["kind"] == kind]
    if not of_kind:
        return "none"
    known = [cell["own"] for cell in of_kind if cell.get("own") is not None]
    return f"{len(of_kind)}, {max(known):.0e}" if known else f"{len(of_kind)}"


def page(text: str, figures: Figures) -> str:
    """The page with these tables in the place of its own."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables(figures)}\n{END}{after}"


def _pin(name: str) -> str:
    pins = (ROOT / f"tools/cpu_engines/{name}/pins.txt").read_text()
    found = re.search(rf"^{name}(?:-cpu)?==(\S+)", pins, re.MULTILINE)
    assert found
    return found[1]


if __name__ == "__main__":
    kept = read_figures() if FIGURES.exists() else {}
    FIGURES.write_text(written({**kept, **found_in(map(Path, sys.argv[1:]))}))
    PAGE.write_text(page(PAGE.read_text(), read_figures()))
