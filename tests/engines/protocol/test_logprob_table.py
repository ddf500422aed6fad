"""The tables of docs/how-to/mismatch.md are those of the recorded figures, and these the rule's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.kinds import kind_of
from engines.protocol.logprob_kind import LogprobRule
from tests.engines.protocol import logprob_table as table
from tests.support.logprob_cells import CELLS, COUNTING, MODES

ORIGINAL = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
_SETTINGS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "embedded default": ({}, {}),
    "embedded original": ({"returns_original_logprob": True}, {}),
    "sglang default": ({}, {}),
    "sglang original": ({}, ORIGINAL),
    "vllm processed": ({"logprobs_mode": "processed_logprobs"}, {}),
    "vllm raw": ({"logprobs_mode": "raw_logprobs"}, {}),
}
OF_MODES = [(kind, mode) for kind, modes in MODES.items() for mode in modes]


def rule_of(name: str) -> LogprobRule:
    raw, env = _SETTINGS[name]
    of_vllm = {"generation_config": "vllm", "override_generation_config": {}}
    kind = kind_of(name.partition(" ")[0])
    return kind.logprob_rule({**of_vllm, **raw}, env, lambda folder: {})


@pytest.mark.parametrize(("kind", "mode"), OF_MODES)
def test_the_rule_gives_the_kind_of_each_cell_that_was_measured(kind: str, mode: str) -> None:
    cells = table.read_figures()[f"logprobs {kind} {mode}"]
    assert [cell["sampling"] for cell in cells] == CELLS
    rule, steps = rule_of(f"{kind} {mode}"), MODES[kind][mode]
    for cell in cells:
        if cell["kind"] == "refused":
            assert kind == "embedded", cell
            continue
        assert rule.kind_of(cell["sampling"]) == cell["kind"], cell
        is_known = not (steps.counts_late and cell["sampling"].keys() & set(COUNTING))
        assert (cell["own"] is not None) is is_known
        assert (cell["own"] or 0.0) < 1e-4
        assert cell["full"] < 1e-4 if cell["kind"] == "full" else cell["full"] > 1e-4


@pytest.mark.parametrize(("kind", "mode"), OF_MODES)
def test_log_probs_computed_again_would_be_at_temperature_1(kind: str, mode: str) -> None:
    rows = table.read_figures()[f"prompts {kind} {mode}"]
    assert max(at_1 for at_1, _ in rows) < 1e-4
    assert max(at_own for _, at_own in rows) > 0.1


def test_the_page_has_the_tables_of_the_figures() -> None:
    text = table.PAGE.read_text()
    assert text == table.page(text, table.read_figures()), (
        "docs/how-to/mismatch.md is stale: run tests/end_to_end/real/test_logprobs.py with "
        "--junitxml=FILE, then `python -m tests.engines.protocol.logprob_table FILE ...`"
    )


def test_results_without_a_mode_leave_its_figures(tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    cells = "[{&quot;sampling&quot;: {}}]"
    results.write_text(
        "<testsuites><testsuite><properties>"
        f'<property name="logprobs vllm raw" value="{cells}"/>'
        '<property name="other" value="1"/></properties></testsuite></testsuites>'
    )
    assert table.found_in([results]) == {"logprobs vllm raw": [{"sampling": {}}]}
    assert table.found_in([]) == {}
