"""Servers and runs side by side: what a page knows of the others, and what it compares."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.fake.http_fake import HttpFakeLauncher
from rollout.config import RolloutConfig
from rollout.config.run_dir import FIGURES_FILE, JOURNAL_FILE, RunFolder
from rollout.control.server import runs as runs_module
from rollout.control.server.journal import ServerJournal
from rollout.control.server.runs import known_runs
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.browser import open_page, shot
from tests.support.builders import write_checkpoint
from tests.support.paged import page_of, step, until
from tests.support.served_fakes import launched

ONE = {"main": {"num_engines": 1, "engine": {"kind": "embedded"}}}


def report(server: Any, number: int, reward: float) -> None:
    figures = {"step": number, "metrics": {"rollout/reward/mean": reward}}
    httpx.post(f"{server.url}/figures", json=figures, trust_env=False).raise_for_status()


def two_servers(folder: Path, run_id: str) -> DeploymentHandle:
    servers = {
        name: {"model_path": write_checkpoint(folder / name), "groups": ONE}
        for name in ("policy", "critic")
    }
    values = {"log_dir": str(folder), "run_id": run_id, "servers": servers}
    return launch_local(RolloutConfig.from_dict(values), launcher=HttpFakeLauncher())


@pytest.fixture(scope="module")
def three_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    """A run of two servers, beside one that runs and one that has ended."""
    folder = tmp_path_factory.mktemp("runs")
    with launched(launch_local, folder, ONE, run_id="ended") as handle:
        for number, reward in ((1, 0.1), (2, 0.2), (3, 0.3)):
            report(handle["policy"], number, reward)
    with launched(launch_local, folder, ONE, run_id="beside") as beside:
        report(beside["policy"], 4, 0.4)
        own = two_servers(folder, "own")
        try:
            step(own["policy"], 1)
            for number, reward in ((1, 0.5), (2, 0.75)):
                report(own["policy"], number, reward)
            yield own
        finally:
            own.stop()


@pytest.fixture
def page(three_runs: DeploymentHandle) -> Iterator[httpx.Client]:
    with page_of(three_runs.config) as client:
        yield client


def servers_of(page: httpx.Client) -> dict[tuple[str, str], dict[str, Any]]:
    runs = page.get("/api/runs").raise_for_status().json()["runs"]
    return {(run["run_id"], one["server"]): one for run in runs for one in run["servers"]}


def test_servers_of_this_run_come_first_and_those_that_run_have_a_summary(
    page: httpx.Client,
) -> None:
    def complete() -> bool:
        found = servers_of(page)
        is_seen = {name: one["summary"] and one["summary"]["step"] for name, one in found.items()}
        steps = {("own", "critic"): None, ("own", "policy"): 2}
        others = {("beside", "policy"): 4, ("ended", "policy"): None}
        critic = found["own", "critic"]["summary"]
        return is_seen == steps | others and bool(critic and critic["num_serving"])

    until(complete, "the steps of the runs")
    found = servers_of(page)
    assert list(found)[:2] == [("own", "critic"), ("own", "policy")]
    assert [name for name, one in found.items() if one["is_here"]] == [("own", "policy")]
    assert found["own", "critic"]["summary"]["num_serving"] == 1
    assert found["beside", "policy"]["summary"]["reward"] == 0.4
    assert found["ended", "policy"]["trouble"] == "stopped, or on another host"


def test_figures_that_came_just_before_the_end_are_recorded(page: httpx.Client) -> None:
    found = page.get("/api/runs/ended/curves").json()
    assert found["curves"]["rollout/reward/mean"] == [[1, 0.1], [2, 0.2], [3, 0.3]]


@pytest.mark.parametrize("name", ["nobody", "..", "%2e%2e%2fown", "own%2fpolicy"])
def test_only_the_names_of_runs_can_be_read(page: httpx.Client, name: str) -> None:
    assert page.get(f"/api/runs/{name}/curves").status_code == 404


def test_a_key_is_sent_only_to_the_servers_of_the_same_run(tmp_path: Path) -> None:
    keys = {"key": "look"}
    look = {"authorization": "Bearer look"}
    with (
        launched(launch_local, tmp_path, ONE, run_id="first", page=keys),
        launched(launch_local, tmp_path, ONE, run_id="second", page=keys) as handle,
        page_of(handle.config) as page,
    ):
        assert page.get("/api/runs").status_code == 401
        page.headers.update(look)
        found = servers_of(page)
        assert found["second", "policy"]["summary"]["server"] == "policy"
        assert found["first", "policy"]["trouble"].endswith("its page needs its key")


def test_a_killed_server_and_folders_that_are_no_runs_are_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_module, "_MAX_RUNS", 3)
    for number in range(5):
        run = RunFolder(tmp_path / f"run-{number}", f"run-{number}")
        run.of_server("policy").mkdir(parents=True)
        (run.path / "launch.json").write_text("{}")
        os.utime(run.path / "launch.json", (number, number))
        (run.of_server("policy") / FIGURES_FILE).touch()
    left = tmp_path / "run-0" / "policy" / JOURNAL_FILE
    journal = ServerJournal.of(left, "run-0", "policy", "local")
    journal.keep(page="http://127.0.0.1:1")
    asyncio.run(journal.write())
    assert known_runs(tmp_path, "run-0")[0].servers[0].journal is not None
    values = json.loads(left.read_text())
    values["process"]["started"] -= 1
    left.write_text(json.dumps(values))
    (tmp_path / "run-4" / "policy" / JOURNAL_FILE).write_text('{"server": 3, "page": []}')
    (tmp_path / "run-3" / "policy" / JOURNAL_FILE).write_text("[]")
    (tmp_path / "no-run").mkdir()
    found = known_runs(tmp_path, "run-0")
    # Its own first, then the latest launched; the pid is that of another process now.
    assert [run.run_id for run in found] == ["run-0", "run-4", "run-3"]
    assert [run.servers[0].journal for run in found] == [None, None, None]


def test_the_page_lists_servers_and_runs_and_links_to_those_that_run(
    browser: Any, three_runs: DeploymentHandle, page: httpx.Client
) -> None:
    with open_page(browser, str(page.base_url)) as shown:
        shown.wait_for_selector("#run-rows tr:has-text('ended')")
        rows = shown.locator("#run-rows tr")
        assert rows.count() == 4
        assert "(this page)" in rows.nth(1).inner_text()
        critic = rows.nth(0).locator("a")
        assert critic.inner_text() == "critic"
        with page_of(three_runs.config, "critic") as other:
            assert str(other.base_url).startswith(str(critic.get_attribute("href")))
        assert not shown.locator("#run-rows tr:has-text('ended') a").count()


def test_two_runs_are_compared_step_by_step(browser: Any, page: httpx.Client) -> None:
    recorded = "/api/runs/own/curves?server=policy"
    until(lambda: page.get(recorded).json()["curves"].get("rollout/reward/mean"), "own figures")
    with open_page(browser, str(page.base_url)) as shown:
        shown.wait_for_selector("#compare option[value=ended]", state="attached")
        shown.select_option("#compare", "ended")
        chart = shown.locator("#comparison figure:has-text('Reward')")
        chart.wait_for()
        assert chart.locator("polyline").count() == 2
        words = chart.inner_text()
        assert "own 0.750" in words
        assert "ended 0.300" in words
        # Under the pointer, both runs have the value of the same step.
        box = chart.locator("svg").bounding_box()
        shown.mouse.move(box["x"] + 0.55 * box["width"], box["y"] + 40)
        assert "own 0.750 at 2" in chart.inner_text()
        assert "ended 0.200 at 2" in chart.inner_text()
        shot(shown, "comparison")
        shown.select_option("#compare", "")
        shown.wait_for_selector("#comparison", state="hidden")


def test_a_comparison_fits_a_narrow_window(browser: Any, page: httpx.Client) -> None:
    with open_page(browser, str(page.base_url), width=360) as shown:
        shown.wait_for_selector("#compare option[value=ended]", state="attached")
        shown.select_option("#compare", "ended")
        shown.wait_for_selector("#comparison polyline")
        assert shown.evaluate("() => document.documentElement.scrollWidth") <= 360
        # Nor is its text narrower than elsewhere.
        stretch = "svg => { const matrix = svg.getScreenCTM(); return matrix.a; }"
        assert shown.eval_on_selector("#comparison svg", stretch) == pytest.approx(1)


def test_a_run_that_recorded_nothing_is_explained(browser: Any, page: httpx.Client) -> None:
    with open_page(browser, str(page.base_url)) as shown:
        shown.wait_for_selector("#compare option[value=ended]", state="attached")
        nothing = {"run_id": "ended", "server": "policy", "curves": {}}
        shown.route("**/runs/*/curves*", lambda route: route.fulfill(json=nothing))
        shown.select_option("#compare", "ended")
        shown.wait_for_selector("#compare-note:has-text('Neither run has recorded a figure')")
