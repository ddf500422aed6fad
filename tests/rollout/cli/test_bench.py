"""``rollout bench``: with engines that it starts, with a running target, and its arithmetic."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollout.cli.bench.load import LoadGenerator, LoadPlan, RequestResult, figures
from rollout.cli.bench.measure import boundary, step_of
from rollout.cli.main import app
from rollout.config.run_dir import RunFolder
from rollout.core.errors import ConfigError, RolloutError
from rollout.observability.timeline.analysis import steps
from rollout.observability.timeline.span import Outcome
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.rollout.observability.timeline.spans import engine, offload_step
from tests.support.builders import write_checkpoint
from tests.support.paged import page_of, step
from tests.support.served_fakes import launched

QUICK = ("--clients", "4", "--seconds", "0.3", "--max-new-tokens", "4")


def bench(*words: str) -> Any:
    result = CliRunner().invoke(app, ["bench", *QUICK, *words, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    with launched(launch_local, tmp_path_factory.mktemp("run")) as handle:
        yield handle


# -- what it measures -----------------------------------------------------------------------------


def test_a_configuration_is_started_loaded_cycled_and_ended(tmp_path: Path) -> None:
    """With keys, and with groups that offload and groups that do not."""
    groups = {
        "shared": {"num_engines": 2, "engine": {"kind": "fake", "options": {"token-s": 0.001}}},
        "apart": {"needs_offload": False, "engine": {"kind": "fake"}},
    }
    server = {"model_path": write_checkpoint(tmp_path), "groups": groups}
    server["router"] = {"client_key": "tell", "control_key": "steer"}
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps({"log_dir": str(tmp_path), "servers": {"policy": server}}))
    measured = bench(str(file), "--cycles", "2")
    assert measured["load"]["num_done"] > 0
    assert measured["load"]["tokens_per_s"] > measured["load"]["requests_per_s"] > 0
    assert measured["load_in_cycles"]["num_failed"] == 0
    at_boundary = measured["boundary"]
    assert at_boundary["num_cycles"] == 2
    assert list(at_boundary["phases"])[:3] == ["pause", "flush", "release"]
    assert at_boundary["phases"]["update_weights"]["slowest_engine"] != ""
    assert 0 < at_boundary["lost_median_s"] <= at_boundary["lost_longest_s"]
    assert "tell" not in json.dumps(measured)
    assert Path(measured["run"]).parent == tmp_path


def test_without_a_target_two_fakes_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", *QUICK, "--cycles", "1"])
    assert result.exit_code == 0, result.output
    for word in ("requests/s", "latency p99", "update_weights", "lost per step", "rollout trace"):
        assert word in result.stdout


def test_a_running_target_is_loaded_and_its_steps_are_reported(
    deployment: DeploymentHandle,
) -> None:
    policy, run = deployment["policy"], str(RunFolder.of(deployment.config).path)
    assert "boundary" not in bench(run)
    with page_of(deployment.config) as page:
        for target in (policy.url, str(page.base_url)):
            assert bench(target)["load"]["num_done"] > 0
        before = page.get("/api/state").json()
        step(policy, 1)
        measured = page.get("/api/state", params={"fresh": 1}).json()
    new = [step for step in measured["steps"] if step not in before["steps"]]
    assert boundary([step_of(new_step) for new_step in new])["num_cycles"] == 1


def test_a_running_target_is_not_offloaded(deployment: DeploymentHandle) -> None:
    with pytest.raises(ConfigError, match="may be part of a training run"):
        bench(deployment["policy"].url, "--cycles", "1")


def test_a_missing_target_is_named(deployment: DeploymentHandle) -> None:
    with pytest.raises(ConfigError, match="no such server; policy"):
        bench(str(RunFolder.of(deployment.config).path), "--server", "judge")
    with pytest.raises(ConfigError, match="no running server found"):
        bench("nowhere")
    with pytest.raises(ConfigError, match="must be 'fake' or 'embedded'"):
        bench("--engine", "vllm")
    with pytest.raises(RolloutError, match="no completion came: ClientConnectorError"):
        bench("http://127.0.0.1:1")


# -- the clients ----------------------------------------------------------------------------------


def test_the_clients_end_with_their_owner(deployment: DeploymentHandle) -> None:
    plan = LoadPlan(deployment["policy"].url, 3, 4, 2, 10.0)
    with LoadGenerator(plan) as clients:
        clients.wait_for(9, 20.0)
        assert len({request.num_tokens for request in clients.ended()}) == 1
    assert clients._process.returncode == 0
    with pytest.raises(RolloutError, match="0 of 1 requests ended: the clients have ended"):
        clients.wait_for(1, 1.0)


def test_only_requests_that_ended_in_the_window_count() -> None:
    ended = [
        RequestResult(0.0, 0.9, 100),
        RequestResult(0.5, 1.5, 10),
        RequestResult(1.0, 2.0, 10),
        RequestResult(1.5, 1.9, 4, was_aborted=True),
        RequestResult(1.5, 1.6, failure="refused"),
        RequestResult(2.5, 3.0, 100),
    ]
    measured = figures(ended, 1.0, 3.0)
    assert (measured["num_done"], measured["num_aborted"], measured["num_failed"]) == (2, 1, 1)
    assert (measured["requests_per_s"], measured["tokens_per_s"]) == (1.0, 12.0)
    assert (measured["latency_p50_s"], measured["latency_p99_s"]) == (1.0, 1.0)
    assert measured["errors"] == ["refused"]


@pytest.mark.parametrize(("num", "p99_s"), [(1, 0.0), (100, 98.0), (101, 99.0), (200, 197.0)])
def test_99_of_100_are_no_later_than_the_p99(num: int, p99_s: float) -> None:
    ended = [RequestResult(0.0, float(took)) for took in range(num)]
    assert figures(ended, 0.0, 1000.0)["latency_p99_s"] == p99_s


def test_nothing_ended_is_no_latency() -> None:
    assert figures([], 0.0, 1.0)["latency_p50_s"] is None


def test_errors_before_the_window_are_reported_too() -> None:
    measured = figures([RequestResult(0.0, 0.9, failure="refused")], 1.0, 3.0)
    assert (measured["num_failed"], measured["errors"]) == (0, ["refused"])


# -- the boundary ---------------------------------------------------------------------------------


def test_the_slowest_engine_is_the_one_that_was_waited_for_longest() -> None:
    late = engine("pause", "main-1", 200.0, 9.0)
    twice = [span for at_s in (100.0, 200.0, 300.0) for span in offload_step(at_s)]
    pause = boundary(steps([*twice, late]))["phases"]["pause"]
    assert (pause["slowest_engine"], pause["slowest_in"]) == ("main-1", 1)


def test_the_boundary_is_the_median_and_the_worst_of_the_steps() -> None:
    spans = [*offload_step(100.0), *offload_step(200.0)]
    spans.append(engine("flush", "main-1", 200.3, 0.1, outcome=Outcome.FAILED, said="it hangs"))
    measured = boundary(steps(spans))
    assert measured["lost_median_s"] == pytest.approx(3.0)
    assert measured["phases"]["update_weights"]["median_s"] == pytest.approx(1.0)
    assert measured["failures"] == ["engine main-1: flush: it hangs"]


def test_no_step_is_reported_as_none() -> None:
    assert boundary([]) == {
        "num_cycles": 0,
        "lost_median_s": None,
        "lost_longest_s": None,
        "phases": {},
        "failures": [],
    }
