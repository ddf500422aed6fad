"""Reports of drivers: which of several of one step hold, and the file that a lost process left."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.config.run_dir import FIGURES_FILE
from rollout.observability import step_reports
from rollout.observability.page.run_history import RunHistory
from rollout.observability.recorded import read_figures
from rollout.observability.step_reports import ReportFile, standing
from rollout.router.proxy.figures import StepMetrics


def report(step: int, driver: str, **figures: float) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in figures.items()}
    return {"step": step, "driver": driver, "metrics": named, "at_s": float(step)}


def test_what_a_driver_that_was_started_again_reports_takes_the_place_of_the_first() -> None:
    first = [report(step, "first", reward=step) for step in range(5)]
    again = [report(step, "again", reward=step + 0.5) for step in range(3, 5)]
    assert standing([*first, *again]) == [*first[:3], *again]
    assert standing([*first, *again], 4) == [again[1]]
    # Until it has come so far, the last step shows what there is.
    assert standing([*first, again[0]]) == [*first[:3], first[4], again[0]]


def test_other_figures_of_a_step_stay() -> None:
    judged = report(3, "first", gap=0.1)
    both = [report(3, "first", reward=1.0), judged, report(3, "again", reward=2.0)]
    assert standing(both) == [judged, both[2]]


def test_two_drivers_that_report_by_turns_are_both_there() -> None:
    by_turns = [
        report(step, driver, reward=1.0) for step in range(3) for driver in ("math", "code")
    ]
    later = report(3, "math", reward=1.0)
    assert standing([*by_turns, later]) == [*by_turns, later]


def test_several_reports_of_one_driver_for_a_step_are_all_there() -> None:
    both = [report(1, "one", reward=1.0), report(1, "one", reward=2.0)]
    assert standing(both) == both


def test_the_report_of_a_run_counts_a_repeated_step_once(tmp_path: Path) -> None:
    server = tmp_path / "policy"
    server.mkdir()
    lines = [report(0, "first", reward=0.0), report(0, "again", reward=1.0)]
    other = [line | {"launch": "earlier"} for line in lines[:1]]
    (server / FIGURES_FILE).write_text("".join(json.dumps(one) + "\n" for one in [*other, *lines]))
    assert [one["metrics"]["reward"] for one in read_figures(tmp_path)] == [0.0, 1.0]


def reported(router: StepMetrics, *steps: int) -> list[dict[str, Any]]:
    for step in steps:
        router.put({"step": step, "metrics": {"reward": 1.0}}, 100)
    return router.last()


def test_a_router_in_the_place_of_a_lost_one_is_heard_from_its_first_report_on() -> None:
    history = RunHistory()
    first = StepMetrics()
    for step in range(100):
        history.take_figures(reported(first, step))
    again = StepMetrics()
    new = history.take_figures(reported(again, *range(100, 105)))
    assert [one["step"] for one in new] == [100, 101, 102, 103, 104]
    assert history.take_figures(again.last()) == []
    assert len(history.to_dict()["figures"]) == 105


def test_a_server_in_the_place_of_a_lost_one_takes_no_report_twice(tmp_path: Path) -> None:
    router = StepMetrics()
    file = ReportFile(tmp_path, "launch")
    for one in RunHistory(file.read()).take_figures(reported(router, *range(20))):
        file.append(one)
    file = ReportFile(tmp_path, "launch")
    history = RunHistory(file.read())
    assert [one["step"] for one in history.to_dict()["figures"]] == list(range(20))
    new = history.take_figures(reported(router, 20))
    assert [one["step"] for one in new] == [20]
    # The same folder in another launch has begun with nothing.
    assert ReportFile(tmp_path, "another").read() == []


@pytest.mark.parametrize("left", [1, 30, -2, -1])
def test_a_line_that_was_cut_is_written_again_and_no_other_is_lost(
    tmp_path: Path, left: int
) -> None:
    reports = reported(StepMetrics(), 0, 1, 2)
    file = ReportFile(tmp_path, "launch")
    file.append(reports[0])
    begin = (tmp_path / FIGURES_FILE).stat().st_size
    file.append(reports[1])
    with (tmp_path / FIGURES_FILE).open("rb+") as lines:
        lines.truncate(begin + left if left > 0 else lines.seek(0, 2) + left)
    again = ReportFile(tmp_path, "launch")
    for one in RunHistory(again.read()).take_figures(reports):
        again.append(one)
    assert [one["step"] for one in again.read()] == [0, 1, 2]


def test_what_is_no_report_in_the_file_does_not_stop_the_page(tmp_path: Path) -> None:
    good = reported(StepMetrics(), 0)[0]
    odd: list[Any] = [
        {**good, "lengths": 3},
        {**good, "logprob_gaps": {"main-0": 3}},
        {**good, "logprob_gaps": 3},
        {**good, "samples": {}},
        {**good, "router": 3},
        {**good, "serial": "x"},
        {**good, "metrics": 3},
        *([], 3, None),
    ]
    lines = [json.dumps({**one, "launch": ""} if isinstance(one, dict) else one) for one in odd]
    (tmp_path / FIGURES_FILE).write_text("\n".join(lines) + "\n")
    history = RunHistory(ReportFile(tmp_path, "").read())
    history.to_dict()
    assert [one["step"] for one in history.take_figures([good])] == [0]


def test_reports_that_are_in_the_old_file_are_not_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_reports, "_MAX_FILE_BYTES", 300)
    router = StepMetrics()
    file = ReportFile(tmp_path, "")
    for one in reported(router, *range(4)):
        file.append(one)
    (tmp_path / FIGURES_FILE).replace(tmp_path / step_reports.OLD_FIGURES_FILE)
    assert RunHistory(ReportFile(tmp_path, "").read()).take_figures(router.last()[2:]) == []


@pytest.mark.parametrize("driver", [3, "x" * 65, ["a"], {}])
def test_a_name_of_a_driver_is_a_short_text(driver: Any) -> None:
    with pytest.raises(ValueError, match="string"):
        StepMetrics().put({"step": 1, "metrics": {}, "driver": driver}, 1)
