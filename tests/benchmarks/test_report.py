"""Rows of a benchmark: printed when they are measured, and part of the result."""

import json

import pytest

from benchmarks.report import Rows


def test_a_row_is_printed_as_a_line_of_json_when_it_is_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = Rows("push.dense")
    rows["copied"] = {"gib_per_s": 2.5}
    assert json.loads(capsys.readouterr().err) == {"push.dense.copied": {"gib_per_s": 2.5}}
    rows["streamed"] = {"gib_per_s": 3.0}
    assert json.loads(capsys.readouterr().err) == {"push.dense.streamed": {"gib_per_s": 3.0}}
    assert json.loads(json.dumps(rows)) == {
        "copied": {"gib_per_s": 2.5},
        "streamed": {"gib_per_s": 3.0},
    }
