"""The page of engines and features is that of the contract suite as it is."""

from __future__ import annotations

from pathlib import Path

from tests.engines.contract import table


def test_the_page_is_not_stale() -> None:
    assert table.PAGE.read_text() == table.page(), (
        "docs/reference/engines.md is stale: run the contract suite with --junitxml=FILE for all "
        "kinds, then `python -m tests.engines.contract.table FILE ...`"
    )


def test_a_kind_that_failed_or_was_not_run_is_not_on_the_page(tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    cases = [
        f'<testcase name="{row.name}[{kind}]"><properties/>{"<failure/>" * (kind == "embedded")}'
        "</testcase>"
        for row in table.rows()
        for kind in table.COLUMNS
        if kind != "vllm"
    ]
    results.write_text(f"<testsuite>{''.join(cases)}</testsuite>")
    unshown = table.missing(table.outcomes([results]))
    assert {name.rsplit(" ", 1)[1] for name in unshown} == {"embedded", "vllm"}


def test_the_reason_of_a_difference_and_of_a_gap_is_on_the_page() -> None:
    found = {row.name: row for row in table.rows()}
    prefix = found["test_an_abort_by_id_ends_every_id_that_begins_with_it"]
    assert prefix.cells["vllm"] == "otherwise"
    assert "vLLM: ends exactly that id" in prefix.notes
    same = found["test_an_id_in_use_is_refused"]
    assert same.cells["vllm"] == "no"
    assert same.cells["sglang"] == "yes"
    assert "vLLM gives each request an id of its own" in same.notes[0]
