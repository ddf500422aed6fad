"""The page of a deployment over fake engines: its data, its keys, and a stuck phase."""

import json
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from rollout.agents.model.alignment import Drift
from rollout.agents.worker.metrics import METRICS as AGENTS_METRICS
from rollout.cli.lib.server_view import render_server
from rollout.config.run_dir import JOURNAL_FILE
from rollout.control.server.journal import read
from rollout.control.server.server import RolloutServer
from rollout.core.samples import Sample, SampleGroup
from rollout.driver.logprobs.gap_figures import GapSums
from rollout.driver.stream.shown_samples import shown_samples
from rollout.observability import step_reports
from rollout.observability.page.prometheus import METRICS
from rollout.observability.timeline.analysis import steps
from rollout.observability.timeline.span import Kind
from rollout.observability.timeline.span_file import read_lines
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.rollout.observability.timeline.spans import rank_push
from tests.support.paged import page_of, step, until
from tests.support.served_fakes import engines_of, launched


def samples(page: httpx.Client, of: str = "") -> dict[str, list]:
    response = page.get(f"/metrics{of}").raise_for_status()
    assert response.headers["content-type"].startswith("text/plain")
    return {family.name: family.samples for family in text_string_to_metric_families(response.text)}


def test_the_state_has_every_engine_the_gate_and_where_the_server_is(page: httpx.Client) -> None:
    now = page.get("/api/state?fresh=1").json()
    assert now["is_answering"]
    assert {engine["engine_id"] for engine in now["engines"]} == {"shared-0", "shared-1", "apart-0"}
    assert now["phase"] == "serving"
    assert now["gate"]["state"] == "open"
    assert now["can_steer"] is False
    assert [url.rpartition(":")[0] for url in now["agents_urls"]] == ["http://127.0.0.1"]


def test_a_step_has_all_its_engines_and_calls(
    page: httpx.Client, deployment: DeploymentHandle
) -> None:
    before = len(page.get("/api/state?fresh=1").json()["steps"])
    report = step(deployment["policy"], 1)
    now = page.get("/api/state?fresh=1").json()
    (done,) = now["steps"][before:]
    assert done["weight_version"] == report.weight_version == now["weight_version"] == 1
    assert done["lost_s"] > 0
    assert set(done["phase_s"]) == set(report.phase_s)
    whole = page.get(f"/api/steps/{done['number']}").json()
    kinds = {span["kind"] for span in whole["spans"]}
    assert {Kind.PHASE, Kind.GROUP, Kind.ENGINE, Kind.CALL} <= kinds
    released = [
        span
        for span in whole["spans"]
        if span["kind"] == "engine" and span["name"] == "release_memory_occupation"
    ]
    assert {span["engine_id"] for span in released} == {"shared-0", "shared-1"}
    pushed = [span for span in whole["spans"] if span["name"] == "update_weights_from_tensor"]
    assert all(span["num_bytes"] > 0 for span in pushed)
    assert page.get("/api/steps/4711").status_code == 404


def test_spans_come_since_a_cursor(page: httpx.Client, deployment: DeploymentHandle) -> None:
    first = page.get("/api/spans?fresh=1").json()
    assert (
        page.get("/api/spans", params={"since": first["cursor"], "fresh": True}).json()["spans"]
        == []
    )
    deployment["policy"].phases.pause_generation().result(30)
    deployment["policy"].phases.continue_generation().result(30)
    new = page.get("/api/spans", params={"since": first["cursor"], "fresh": True}).json()["spans"]
    assert {"pause_generation", "continue_generation"} <= {
        span["name"] for span in new if span["kind"] == "phase"
    }


def test_everything_is_in_the_files_of_the_run_too(
    page: httpx.Client, deployment: DeploymentHandle, folder: Path
) -> None:
    version = deployment["policy"].status().result(30).weight_version + 1
    step(deployment["policy"], version)

    def written() -> bool:
        files = folder.glob("*.spans.jsonl")
        spans = [span for file in files for span in read_lines(file.read_text().splitlines())]
        return any(step.weight_version == version for step in steps(spans))

    until(written, f"weight version {version} in the files")


def test_the_figures_that_a_driver_reports_are_shown_and_kept(
    page: httpx.Client, deployment: DeploymentHandle, folder: Path
) -> None:
    reported = {"step": 7, "metrics": {"rollout/reward/mean": 0.5}, "lengths": {"64": 3}}
    httpx.post(f"{deployment['policy'].url}/figures", json=reported).raise_for_status()
    now = page.get("/api/state?fresh=1").json()
    assert now["figures"][-1]["metrics"] == reported["metrics"]
    kept = [json.loads(line) for line in (folder / "figures.jsonl").read_text().splitlines()]
    assert kept[-1]["step"] == 7
    figures = samples(page)["rollout_driver_figure"]
    assert [(sample.labels["figure"], sample.value) for sample in figures] == [
        ("rollout/reward/mean", 0.5)
    ]


def test_a_long_file_of_figures_becomes_the_old_one(
    page: httpx.Client,
    deployment: DeploymentHandle,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every client of the router can make it grow."""
    monkeypatch.setattr(step_reports, "_MAX_FILE_BYTES", 300)
    for number in range(12):
        reported = {"step": 100 + number, "metrics": {"rollout/reward/mean": 0.5}}
        httpx.post(f"{deployment['policy'].url}/figures", json=reported).raise_for_status()
        assert page.get("/api/state?fresh=1").json()["figures"][-1]["step"] == 100 + number
    files = [folder / "figures.jsonl", folder / "old_figures.jsonl"]
    lines = [line for file in files[::-1] for line in file.read_text().splitlines()]
    assert json.loads(lines[-1])["step"] == 111
    assert all(0 < file.stat().st_size < 600 for file in files)


def test_the_samples_of_the_last_steps_are_kept_apart_from_their_figures(
    page: httpx.Client, deployment: DeploymentHandle
) -> None:
    shown = shown_samples([SampleGroup(0, [Sample([1], text="four", reward=1.0)])], 4)
    for number in range(30):
        reported = {"step": number, "metrics": {}, "samples": shown}
        httpx.post(f"{deployment['policy'].url}/figures", json=reported).raise_for_status()
        now = page.get("/api/state?fresh=1").json()
    assert [one["step"] for one in now["samples"]] == list(range(10, 30))
    assert now["samples"][-1]["samples"][0]["reply"] == "four"
    assert not any("samples" in report for report in now["figures"])


def test_a_steps_later_reports_add_to_its_figures(
    page: httpx.Client, deployment: DeploymentHandle
) -> None:
    for name, value in (("rollout/reward/mean", 0.5), ("logprob_gap/mean", 0.01)):
        reported = {"step": 8, "metrics": {name: value}}
        httpx.post(f"{deployment['policy'].url}/figures", json=reported).raise_for_status()
    figures = {one.labels["figure"]: one.value for one in samples(page)["rollout_driver_figure"]}
    assert figures == {"rollout/reward/mean": 0.5, "logprob_gap/mean": 0.01}


def test_the_logprob_gaps_of_all_steps_add_up_in_a_histogram(
    page: httpx.Client, deployment: DeploymentHandle
) -> None:
    sums = GapSums()
    sums.add([0.0002, -0.02, 0.5])
    broken = sums.histogram() | {"0.01": 9}
    for step_number in (9, 10):
        gaps = {"shared-0": sums.histogram(), "shared-1": broken, "shared-2": {"sum": 1}}
        reported = {"step": step_number, "logprob_gaps": gaps}
        httpx.post(f"{deployment['policy'].url}/figures", json=reported).raise_for_status()
    exported = [one for one in samples(page)["rollout_logprob_gap_nats"] if one.labels["engine"]]
    assert {one.labels["engine"] for one in exported} == {"shared-0"}
    values = {one.labels.get("le", one.name.rpartition("_")[2]): one.value for one in exported}
    assert (values["0.0001"], values["0.001"], values["0.03"], values["+Inf"]) == (0, 2, 4, 6)
    assert values["sum"] == pytest.approx(2 * 0.5202)


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"step": 1, "logprob_gaps": {"main-0": 3}},
        {"step": 1, "logprob_gaps": {"x" * 300: {}}},
        {"step": 1, "logprob_gaps": []},
        {"step": "seven"},
        {"step": 1, "metrics": {"reward": "high"}},
        {"step": 1, "metrics": {"x" * 300: 1}},
        {"step": 1, "metrics": [1]},
    ],
)
def test_malformed_figures_are_refused(deployment: DeploymentHandle, wrong: object) -> None:
    answer = httpx.post(f"{deployment['policy'].url}/figures", json=wrong)
    assert answer.status_code == 400


def test_the_metrics_of_the_server_are_those_of_the_table(
    page: httpx.Client, deployment: DeploymentHandle
) -> None:
    version = deployment["policy"].status().result(30).weight_version + 1
    step(deployment["policy"], version)
    exported = samples(page)
    assert {sample.labels["state"]: sample.value for sample in exported["rollout_gate"]} == {
        "open": 1.0
    }
    (held,) = exported["rollout_weight_version"]
    assert (held.value, held.labels) == (float(version), {"server": "policy"})
    assert len(exported["rollout_engine_weight_version"]) == 3
    counts = {
        sample.labels["command"]: sample.value
        for sample in exported["rollout_phase_seconds"]
        if sample.name.endswith("_count")
    }
    assert counts["release_memory_occupation"] >= 1
    assert any(sample.value > 0 for sample in exported["rollout_freed_bytes"])
    assert set(exported) <= set(METRICS)


def test_a_push_has_its_bytes_density_and_paused_seconds_on_the_page_and_in_the_metrics(
    page: httpx.Client, deployment: DeploymentHandle
) -> None:
    policy = deployment["policy"]
    version = policy.status().result(30).weight_version + 1
    report = step(policy, version)
    record = RolloutServer.record_push
    spans = rank_push(time.time(), version=version)
    policy._caller.call(record, spans).result(30)
    pushed = page.get("/api/state?fresh=1").json()["pushes"][-1]
    assert pushed["paused_s"] == pytest.approx(report.paused_s)
    assert (pushed["weight_version"], pushed["route"]) == (version, "by_value delta")
    exported = samples(page)
    for name, value in (("rollout_pushed_bytes", 400), ("rollout_push_seconds", 0.5)):
        (sent,) = [one for one in exported[name] if one.labels["route"] == "by_value delta"]
        assert sent.value == pytest.approx(value)
    assert exported["rollout_push_density_ratio"][0].value == pushed["density"] == 0.015625
    assert exported["rollout_paused_seconds"][0].value >= report.paused_s


def test_prometheus_is_told_of_the_server_its_router_and_its_engines(page: httpx.Client) -> None:
    here = f"{page.base_url.host}:{page.base_url.port}"
    targets = page.get("/metrics/targets").raise_for_status().json()
    assert {tuple(one["targets"]) for one in targets} == {(here,)}
    found = {one["labels"].pop("__metrics_path__"): one["labels"] for one in targets}
    assert set(found) == {
        *("/metrics", "/metrics/router", "/metrics/agents/0", "/metrics/engines/apart-0"),
        *("/metrics/engines/shared-0", "/metrics/engines/shared-1"),
    }
    assert found["/metrics/router"] == {"server": "policy", "instance": "policy/router"}
    assert found["/metrics/agents/0"] == {"server": "policy", "instance": "policy/agents/0"}
    assert found["/metrics/engines/apart-0"]["engine"] == "apart-0"
    assert len({labels["instance"] for labels in found.values()}) == len(found)


def test_the_metrics_of_router_and_agents_are_passed_on(page: httpx.Client) -> None:
    assert samples(page, "/router")["router_held"][0].labels == {}
    until(lambda: page.get("/metrics/agents/0").is_success, "the worker of agents has started")
    found = samples(page, "/agents/0")
    assert set(found) == set(AGENTS_METRICS)
    assert {one.labels["drift"] for one in found["agents_session_turns"]} == set(Drift)


@pytest.mark.parametrize(
    ("name", "status"), [("engines/shared-0", 502), ("engines/other", 404), ("other", 404)]
)
def test_a_target_without_metrics_is_down(page: httpx.Client, name: str, status: int) -> None:
    response = page.get(f"/metrics/{name}")  # fake engines have none
    assert (response.status_code, name in response.json()["error"]["message"]) == (status, True)


def test_a_stuck_phase_is_seen_while_it_is_stuck(
    page: httpx.Client, deployment: DeploymentHandle
) -> None:
    policy, now = deployment["policy"], {}
    with engines_of(policy) as engines:
        engines["shared-1"].hold("pause_generation")
        pending = policy.phases.pause_generation()
        engines["shared-1"].wait_entered("pause_generation")
        doing: dict = {}

        def is_alone() -> bool:
            now.update(page.get("/api/state?fresh=1").json())
            doing.update({engine["engine_id"]: engine["doing"] for engine in now["engines"]})
            return bool(doing["shared-1"] and not doing["shared-0"])

        until(is_alone, "shared-1 is the only one that still pauses")
        engines["shared-1"].open("pause_generation")
        pending.result(30)
        policy.phases.continue_generation().result(30)
    assert doing["shared-1"]["name"] == "pause_generation"
    assert doing["shared-0"] is None
    assert now["lock_owner"] == "pause_generation"
    assert [span["name"] for span in now["running"] if span["kind"] == "call"] == [
        "pause_generation"
    ]


def test_changes_come_as_they_happen(page: httpx.Client, deployment: DeploymentHandle) -> None:
    with page.stream("GET", "/api/changes") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        seen = []
        for line in stream.iter_lines():
            if line.startswith("event: "):
                seen.append(line.removeprefix("event: "))
            if line == "event: spans" and seen == ["hello", "state", "spans"]:
                deployment["policy"].phases.pause_generation().result(30)
            if line.startswith("data: ") and seen[-1] == "change" and '"phase":"paused"' in line:
                break
    deployment["policy"].phases.continue_generation().result(30)
    assert seen[:3] == ["hello", "state", "spans"]


def test_the_page_is_sent_what_it_draws_of_the_ranks_of_a_push(
    page: httpx.Client, deployment: DeploymentHandle
) -> None:
    caller = deployment["policy"]._caller
    caller.call(RolloutServer.record_push, rank_push(time.time())).result(30)
    ranks: set[int] = set()
    with page.stream("GET", "/api/changes") as stream:
        event = ""
        for line in stream.iter_lines():
            event = line.removeprefix("event: ") if line.startswith("event: ") else event
            if line.startswith("data: ") and event == "spans":
                spans = json.loads(line.removeprefix("data: "))
                ranks |= {span["rank"] for span in spans if span["kind"] == "rank"}
            if ranks == {0, 1}:
                break


def test_the_end_of_an_engines_log_can_be_read(page: httpx.Client) -> None:
    log = page.get("/api/engines/shared-0/log").json()["tail"].splitlines()
    last = page.get("/api/engines/shared-0/log?lines=1").json()["tail"].splitlines()
    assert len(log) > len(last) == 1
    assert page.get("/api/engines/shared-0/log?lines=-5").json()["tail"].count("\n") == 0
    assert page.get("/api/engines/nobody/log").status_code == 404


def test_without_a_control_key_no_request_controls_the_server(page: httpx.Client) -> None:
    for path in ("/api/stop", "/api/fence/shared-0"):
        answer = page.post(path, headers={"authorization": "Bearer guess"})
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "read_only"


def test_the_headers_forbid_a_browser_to_load_anything_from_other_hosts(page: httpx.Client) -> None:
    answer = page.get("/")
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_request_for_another_host_is_refused(page: httpx.Client) -> None:
    assert page.get("/api/state", headers={"host": "evil.example"}).status_code == 401


def test_an_oversized_header_is_refused(page: httpx.Client) -> None:
    try:
        # Longer than what one read takes, or all of it might come before its length is checked.
        status = page.get("/", headers={"x-long": "x" * (1 << 20)}).status_code
    except httpx.TransportError:
        return  # disconnected before it had sent all of it
    assert status == 400


def test_one_key_grants_the_view_and_the_other_the_control(tmp_path: Path) -> None:
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
            (fenced,) = [event for event in events if event["name"] == "fenced"]
            assert (fenced["engine_id"], fenced["said"][:14]) == ("shared-0", "fenced by hand")
        assert "look-key" not in repr(handle.config)
        journal = tmp_path / "keyed" / "policy" / JOURNAL_FILE
        assert "look-key" not in journal.read_text()
    assert not read(journal).page


def test_the_page_can_stop_the_server(tmp_path: Path) -> None:
    with launched(launch_local, tmp_path, page={"control_key": "steer"}) as handle:
        url = handle["policy"].url
        with page_of(handle.config) as page:
            steer = {"authorization": "Bearer steer"}
            assert page.post("/api/stop", headers=steer).status_code == 202
        journal = tmp_path / "run" / "policy" / JOURNAL_FILE
        until(lambda: not read(journal).page, "the page has ended")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")


def test_the_memory_of_gpus_is_in_state_metrics_and_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    groups = {"shared": {"num_engines": 1, "engine": {"kind": "fake", "gpus": 2}}}
    with launched(launch_local, tmp_path, groups) as deployment:
        deployment["policy"].offload().result(30)
        with page_of(deployment.config) as page:
            now = page.get("/api/state?fresh=1").json()
            metrics = samples(page)
    (engine,) = now["engines"]
    held = {"used_bytes": 0, "total_bytes": 6_000, "busy_percent": None}
    assert engine["gpus"] == [{"uuid": "GPU-4", **held}, {"uuid": "GPU-5", **held}]
    assert engine["resident_bytes"] > 2**20  # of the host, which a release leaves as it is
    labels = {"engine": "shared-0", "gpu": "GPU-4"}
    samples_of_gpu = metrics["rollout_gpu_used_bytes"]
    (used,) = [one for one in samples_of_gpu if labels.items() <= one.labels.items()]
    assert used.value == 0
    assert len(metrics["rollout_gpu_bytes"]) == 2
    assert "rollout_gpu_busy_ratio" not in metrics  # a fake does not measure it
    console = Console(width=200, record=True)
    console.print(render_server(now, "here"))
    assert "0 B of 12 KiB on 2 GPUs" in console.export_text()
    engine["gpus"] = []  # without NVML; what the host holds would say nothing of a GPU
    console.print(render_server(now, "here"))
    assert "not measured" in console.export_text()
