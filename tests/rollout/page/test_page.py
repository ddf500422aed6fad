"""The page of a deployment over fake engines: what it tells, to whom, and while it is stuck."""

import json
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollout.handle import DeploymentHandle
from rollout.local import launch_local
from rollout.page.tallies import METRICS
from rollout.run_folder import CONTROL_FILE
from rollout.timeline.analysis import steps
from rollout.timeline.span import Kind, read_lines
from tests.support.paged import page_of, step, until
from tests.support.served_fakes import engines_of, launched


def samples(page: httpx.Client, query: str = "") -> dict[str, list]:
    told = page.get(f"/metrics{query}").raise_for_status()
    assert told.headers["content-type"].startswith("text/plain")
    return {one.name: one.samples for one in text_string_to_metric_families(told.text)}


def test_the_state_has_every_engine_the_gate_and_where_the_server_is(page: httpx.Client) -> None:
    now = page.get("/api/state?fresh=1").json()
    assert now["is_answering"]
    assert {one["engine_id"] for one in now["engines"]} == {"shared-0", "shared-1", "apart-0"}
    assert now["phase"] == "serving"
    assert now["gate"]["state"] == "open"
    assert now["can_steer"] is False


def test_a_step_is_told_with_every_engine_in_it_and_every_call(
    page: httpx.Client, deployment: DeploymentHandle
) -> None:
    before = len(page.get("/api/state?fresh=1").json()["steps"])
    report = step(deployment["policy"], 1)
    now = page.get("/api/state?fresh=1").json()
    (told,) = now["steps"][before:]
    assert told["weight_version"] == report.weight_version == now["weight_version"] == 1
    assert told["lost_s"] > 0
    assert set(told["phase_s"]) == set(report.phase_s)
    whole = page.get(f"/api/steps/{told['number']}").json()
    kinds = {one["kind"] for one in whole["spans"]}
    assert {Kind.PHASE, Kind.GROUP, Kind.ENGINE, Kind.CALL} <= kinds
    released = [
        one for one in whole["spans"] if one["kind"] == "engine" and one["name"] == "release"
    ]
    assert {one["engine_id"] for one in released} == {"shared-0", "shared-1"}
    pushed = [one for one in whole["spans"] if one["name"] == "update_weights_from_tensor"]
    assert all(one["num_bytes"] > 0 for one in pushed)
    assert page.get("/api/steps/4711").status_code == 404


def test_spans_come_since_a_cursor(page: httpx.Client, deployment: DeploymentHandle) -> None:
    first = page.get("/api/spans?fresh=1").json()
    assert (
        page.get("/api/spans", params={"since": first["cursor"], "fresh": True}).json()["spans"]
        == []
    )
    deployment["policy"].pause_generation().result(30)
    deployment["policy"].continue_generation().result(30)
    new = page.get("/api/spans", params={"since": first["cursor"], "fresh": True}).json()["spans"]
    assert {"pause", "continue"} <= {one["name"] for one in new if one["kind"] == "phase"}


def test_everything_is_in_the_files_of_the_run_too(
    page: httpx.Client, deployment: DeploymentHandle, folder: Path
) -> None:
    version = deployment["policy"].status().result(30).weight_version + 1
    step(deployment["policy"], version)

    def written() -> bool:
        files = folder.glob("*.spans.jsonl")
        spans = [one for file in files for one in read_lines(file.read_text().splitlines())]
        return any(one.weight_version == version for one in steps(spans))

    until(written, f"weight version {version} in the files")


def test_what_a_driver_tells_of_a_step_is_shown_and_kept(
    page: httpx.Client, deployment: DeploymentHandle, folder: Path
) -> None:
    told = {"step": 7, "metrics": {"rollout/reward/mean": 0.5}, "lengths": {"64": 3}}
    httpx.post(f"{deployment['policy'].url}/figures", json=told).raise_for_status()
    now = page.get("/api/state?fresh=1").json()
    assert now["figures"][-1]["metrics"] == told["metrics"]
    kept = [json.loads(line) for line in (folder / "figures.jsonl").read_text().splitlines()]
    assert kept[-1]["step"] == 7
    figures = samples(page)["rollout_driver_figure"]
    assert [(one.labels["figure"], one.value) for one in figures] == [("rollout/reward/mean", 0.5)]


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"step": "seven"},
        {"step": 1, "metrics": {"reward": "high"}},
        {"step": 1, "metrics": {"x" * 300: 1}},
        {"step": 1, "metrics": [1]},
    ],
)
def test_figures_that_are_none_are_refused(deployment: DeploymentHandle, wrong: object) -> None:
    answer = httpx.post(f"{deployment['policy'].url}/figures", json=wrong)
    assert answer.status_code == 400


def test_metrics_of_server_router_and_engines_are_one_page(
    page: httpx.Client, deployment: DeploymentHandle
) -> None:
    version = deployment["policy"].status().result(30).weight_version + 1
    step(deployment["policy"], version)
    told = samples(page)
    assert {one.labels["state"]: one.value for one in told["rollout_gate"]} == {"open": 1.0}
    (held,) = told["rollout_weight_version"]
    assert (held.value, held.labels) == (float(version), {"server": "policy"})
    assert len(told["rollout_engine_weight_version"]) == 3
    counts = {
        one.labels["command"]: one.value
        for one in told["rollout_phase_seconds"]
        if one.name.endswith("_count")
    }
    assert counts["release"] >= 1
    assert any(one.value > 0 for one in told["rollout_freed_bytes"])
    assert told["router_held"][0].labels == {"server": "policy"}
    ours = {name for name in told if name.startswith("rollout_")}
    assert ours <= set(METRICS)


def test_a_stuck_phase_is_seen_while_it_is_stuck(
    page: httpx.Client, deployment: DeploymentHandle
) -> None:
    policy, now = deployment["policy"], {}
    with engines_of(policy) as engines:
        engines["shared-1"].hold("pause_generation")
        pending = policy.pause_generation()
        engines["shared-1"].wait_entered("pause_generation")
        doing: dict = {}

        def is_alone() -> bool:
            now.update(page.get("/api/state?fresh=1").json())
            doing.update({one["engine_id"]: one["doing"] for one in now["engines"]})
            return bool(doing["shared-1"] and not doing["shared-0"])

        until(is_alone, "shared-1 is the only one that still pauses")
        engines["shared-1"].open("pause_generation")
        pending.result(30)
        policy.continue_generation().result(30)
    assert doing["shared-1"]["name"] == "pause"
    assert doing["shared-0"] is None
    assert now["lock_owner"] == "pause_generation"
    assert [one["name"] for one in now["running"] if one["kind"] == "call"] == ["pause_generation"]


def test_changes_come_as_they_happen(page: httpx.Client, deployment: DeploymentHandle) -> None:
    with page.stream("GET", "/api/changes") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        seen = []
        for line in stream.iter_lines():
            if line.startswith("event: "):
                seen.append(line.removeprefix("event: "))
            if line == "event: spans" and seen == ["hello", "state", "spans"]:
                deployment["policy"].pause_generation().result(30)
            if line.startswith("data: ") and seen[-1] == "change" and '"phase":"paused"' in line:
                break
    deployment["policy"].continue_generation().result(30)
    assert seen[:3] == ["hello", "state", "spans"]


def test_the_end_of_an_engines_log_can_be_read(page: httpx.Client) -> None:
    assert "tail" in page.get("/api/engines/shared-0/log").json()
    assert page.get("/api/engines/nobody/log").status_code == 404


def test_nobody_steers_a_page_without_a_control_key(page: httpx.Client) -> None:
    for path in ("/api/stop", "/api/fence/shared-0"):
        answer = page.post(path, headers={"authorization": "Bearer guess"})
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "read_only"


def test_a_browser_is_told_to_load_nothing_from_elsewhere(page: httpx.Client) -> None:
    answer = page.get("/")
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_request_for_another_host_is_refused(page: httpx.Client) -> None:
    assert page.get("/api/state", headers={"host": "evil.example"}).status_code == 401


def test_a_header_without_end_is_refused(page: httpx.Client) -> None:
    try:
        status = page.get("/", headers={"x-long": "x" * (64 << 10)}).status_code
    except httpx.TransportError:
        return  # cut off before it had said all of it
    assert status == 400


def test_with_keys_one_looks_and_the_other_steers(tmp_path: Path) -> None:
    page_keys = {"key": "look-key", "control_key": "steer-key"}
    with launched(launch_local, tmp_path, run_id="keyed", page=page_keys) as handle:
        with page_of(handle.config) as page:
            assert page.get("/api/state?fresh=1").status_code == 401
            assert page.get("/metrics").status_code == 401
            assert "key" in page.get("/").text
            assert page.get("/health").status_code == 200
            assert page.post("/key", data={"key": "guess"}).status_code == 401
            assert page.post("/key", data={"key": "look-key"}).status_code == 303
            assert page.get("/api/state").status_code == 200  # by the cookie it was given
            page.cookies.clear()
            look = {"authorization": "Bearer look-key"}
            steer = {"authorization": "Bearer steer-key"}
            now = page.get("/api/state?fresh=1", headers=look).json()
            assert now["can_steer"] is True
            assert "steer-key" not in json.dumps(now)
            assert page.post("/api/fence/shared-0", headers=look).status_code == 403
            assert page.post("/api/fence/shared-0", headers=steer).status_code == 200
            events = page.get("/api/state?fresh=1", headers=look).json()["events"]
            (fenced,) = [one for one in events if one["name"] == "fenced"]
            assert (fenced["engine_id"], fenced["said"][:14]) == ("shared-0", "fenced by hand")
        assert "look-key" not in repr(handle.config)
        control = tmp_path / "keyed" / "policy" / CONTROL_FILE
        assert "look-key" not in control.read_text()
    assert not control.exists()


def test_the_page_can_end_the_server(tmp_path: Path) -> None:
    with launched(launch_local, tmp_path, page={"control_key": "steer"}) as handle:
        url = handle["policy"].url
        with page_of(handle.config) as page:
            steer = {"authorization": "Bearer steer"}
            assert page.post("/api/stop", headers=steer).status_code == 202
        control = tmp_path / "run" / "policy" / CONTROL_FILE
        until(lambda: not control.exists(), "the page has ended")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")
