"""The commands against a running deployment, as somebody types them."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from rollout.cli import app
from rollout.errors import ConfigError
from rollout.handle import DeploymentHandle
from rollout.local import launch_local
from rollout.run_folder import RunFolder
from tests.support.paged import step, until
from tests.support.served_fakes import config, engines_of, launched


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    with launched(launch_local, tmp_path_factory.mktemp("run")) as handle:
        step(handle["policy"], 1)
        yield handle


@pytest.fixture
def run(deployment: DeploymentHandle) -> str:
    return str(RunFolder.of(deployment.config).path)


def looked(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "200", "NO_COLOR": "1"})


def alone_and_stuck(examined: list[dict[str, Any]]) -> bool:
    first = examined[0]["findings"][0]
    return examined[0]["verdict"] == "stuck" and len(first["engine_ids"]) == 1


def typed(*words: str, status: int = 0) -> str:
    result = looked(*words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


def told(*words: str, status: int = 0) -> Any:
    return json.loads(typed(*words, "--json", status=status))


def recorded(what: str, *words: str) -> bool:
    """Whether it tells of a step yet: what is recorded is written a moment later."""
    result = looked(*words, "--json")
    return result.exit_code == 0 and bool(json.loads(result.output)[what])


def test_status_shows_every_engine(run: str) -> None:
    output = typed("status", run)
    for word in ("policy", "serving", "shared-0", "shared-1", "apart-0", "gate open"):
        assert word in output
    assert "fingerprints of 3 engines in " in output
    assert "bytes unknown" in output  # fakes hold none, and say nothing of them
    (step,) = told("status", run)["policy"]["steps"][-1:]
    assert step["checking"]["num_engines"] == 3
    assert step["checking"]["s_per_gib"] is None
    assert told("status", run)["policy"]["weight_version"] == 1


def test_top_looks_as_often_as_it_is_told(run: str) -> None:
    assert typed("top", run, "--num", "2", "--every", "0.2").count("last step: lost") >= 1


def test_doctor_says_that_nothing_is_wrong(run: str) -> None:
    assert "nothing is wrong" in typed("doctor", run)


def test_doctor_explains_a_phase_that_hangs_while_it_hangs(
    run: str, deployment: DeploymentHandle
) -> None:
    now = ("--patience", "0")
    policy = deployment["policy"]
    with engines_of(policy) as engines:
        engines["shared-1"].hold("pause_generation")
        pending = policy.pause_generation()
        engines["shared-1"].wait_entered("pause_generation")
        until(
            lambda: alone_and_stuck(json.loads(looked("doctor", run, *now, "--json").output)),
            "only shared-1 is late, and longer than usual",
        )
        output = typed("doctor", run, *now, status=3)
        engines["shared-1"].open("pause_generation")
        pending.result(30)
        policy.continue_generation().result(30)
    assert "STUCK" in output
    assert "s for engine shared-1, since" in output.splitlines()[1]
    assert "HTTP call pause_generation without an answer" in output
    assert "end of its log" in output
    assert "Do: " in output


def in_release(status: str) -> bool:
    running = json.loads(status)["policy"]["running"] if status.startswith("{") else []
    return any(one["name"] == "release" and one["elapsed_s"] > 0.5 for one in running)


def test_a_newcomer_finds_the_stuck_engine_with_what_the_documentation_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[3] / "docs/how-to/watch.md"
    (config,) = re.findall(r"```yaml\n(run_id: stuck\n.*?)```", page.read_text(), re.DOTALL)
    (shell,) = re.findall(r"```sh\n(mkdir .*?)```", page.read_text(), re.DOTALL)
    first, *commands = [line.partition("#")[0].strip() for line in shell.splitlines()]
    assert commands == ["rollout bench stuck.yaml", "rollout doctor"]
    (tmp_path / "stuck.yaml").write_text(config)
    subprocess.run(first, shell=True, cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    root = {**os.environ, "PYTHONPATH": str(page.parents[2])}
    bench = [sys.executable, "-m", "rollout", "bench", "stuck.yaml", "--seconds", "0.2"]
    now = ("doctor", "--patience", "0.5")
    with subprocess.Popen(bench, env=root, stderr=subprocess.DEVNULL) as running:
        try:
            until(lambda: in_release(looked("status", "--json").output), "its first offload hangs")
            output = typed(*now, status=3).splitlines()
        finally:
            running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
    assert "STUCK" in output[0]
    assert "release has waited" in output[1]
    assert "for engines ill-0, ill-1, since" in output[1]
    assert "HTTP call release_memory_occupation without an answer for" in output[2]
    assert "in release, the engine gives its memory back" in "".join(output)
    assert "1. wait: in 1" in next(line for line in output if "Do:" in line)


def test_a_server_is_found_by_folder_by_page_and_by_the_place_one_stands_in(
    run: str, deployment: DeploymentHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = json.loads((Path(run) / "policy" / "control.json").read_text())["url"]
    for how in (run, f"{run}/policy", url):
        assert list(told("status", how)) == ["policy"]
    stand = Path(run).parent.parent
    (stand / "runs").symlink_to(Path(run).parent)
    monkeypatch.chdir(stand)
    assert list(told("status")) == ["policy"]
    assert list(told("status", "run")) == ["policy"]


def test_a_run_that_has_ended_is_called_that(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no running server found: no control\.json"):
        typed("status", str(tmp_path))
    left = {"server": "policy", "url": "http://127.0.0.1:1", "pid": 2**22 - 1, "began_s": 0}
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "control.json").write_text(json.dumps(left))
    with pytest.raises(ConfigError, match="is gone"):
        typed("doctor", str(tmp_path))


def test_a_trace_opens_elsewhere_and_says_where_the_time_went(run: str, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    until(lambda: recorded("steps", "trace", run, "-o", str(out)), "the step is in the files")
    assert {"ph", "name", "pid"} <= set(json.loads(out.read_text())["traceEvents"][0])
    output = typed("trace", run, "-o", str(out))
    assert "lost at the boundary" in output
    assert "slowest engine" in output


def test_a_report_is_one_file_that_loads_nothing(run: str, tmp_path: Path) -> None:
    figures = Path(run) / "policy" / "figures.jsonl"
    metrics = {"rollout/reward/mean": 0.5, "rollout/version_lag/1": 3.0, "eval/sums": 0.25}
    one = {"at_s": 1.0, "step": 1, "metrics": metrics, "lengths": {"64": 3}}
    figures.write_text(json.dumps(one) + "\n{cut")
    out = tmp_path / "report.html"
    until(lambda: recorded("num_steps", "report", run, "-o", str(out)), "the step is there")
    page = out.read_text()
    for word in ("Reward", "Version lag", "≤ 64", "release", "lost", "Evaluations"):
        assert word in page
    assert "http" not in page.replace("http://127.0.0.1", "")
    figures.unlink()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing was recorded there"):
        typed("trace", str(tmp_path))
    with pytest.raises(ConfigError, match="no such run folder"):
        typed("report", str(tmp_path / "nowhere"))


def test_a_plan_names_all_that_would_be_refused_and_what_mends_it(tmp_path: Path) -> None:
    loaded = config(tmp_path)
    backup = {"weights_cpu_backup": False}
    groups = {"a": {"engine": backup}, "b": {"engine": backup}, "c": {"num_engines": 2}}
    values = loaded.model_dump(mode="json", exclude_defaults=True)
    values["servers"]["policy"] |= {"groups": groups, "weights": {"update": "lora"}}
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    plan = told("plan", str(file), status=2)
    assert [one.split(".engine")[0] for one in plan["refusals"]] == [
        "servers.policy.groups.a",
        "servers.policy.groups.b",
    ]
    assert "weights_cpu_backup to true" in plan["refusals"][0]
    assert plan["groups"][2]["weights_from"] == "CPU backup, then the push"
    assert "refused" in typed("plan", str(file), status=2)
    with pytest.raises(ConfigError, match="weights_cpu_backup"):
        typed("validate", str(file))


def test_a_plan_without_refusals_ends_well(tmp_path: Path) -> None:
    loaded = config(tmp_path)
    file = tmp_path / "rollout.json"
    file.write_text(loaded.model_dump_json(exclude_defaults=True))
    output = typed("plan", str(file))
    assert "the push (all tensors)" in output
    assert "any free" in output
    assert told("validate", str(file))["is_valid"] is True


def test_serve_runs_until_it_is_stopped_by_name(
    tmp_path: Path, deployment: DeploymentHandle
) -> None:
    """Over attached engines, which are there already and stay there."""
    status = deployment["policy"].status().result(30)
    urls = [e.endpoint.url for group in status.groups for e in group.engines][:1]
    groups = {"main": {"needs_offload": False, "engine": {"kind": "attached", "urls": urls}}}
    loaded = config(tmp_path, groups, run_id="served")
    values = loaded.model_dump(mode="json", exclude_defaults=True)
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    with subprocess.Popen(
        [sys.executable, "-m", "rollout", "serve", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as served:
        control = tmp_path / "served" / "policy" / "control.json"
        until(lambda: control.exists() or served.poll() is not None, "it serves")
        assert served.poll() is None, served.communicate()[0]
        until(
            lambda: told("status", str(tmp_path / "served"))["policy"].get("phase") == "serving",
            "its engines are there",
        )
        assert "stopped" in typed("stop", str(tmp_path / "served"), "--yes")
        assert served.wait(30) == 0
    assert not control.exists()


def test_every_command_that_answers_can_answer_in_json() -> None:
    commands = dict(typer.main.get_command(app).commands)
    of_sglang = commands.pop("sglang-cpu").commands
    # What becomes SGLang itself answers nothing.
    assert of_sglang.pop("serve")
    for name, command in (commands | of_sglang).items():
        assert any("--json" in option.opts for option in command.params), name


def test_the_interpreter_of_sglang_can_be_asked_for_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = looked("sglang-cpu", "path", "--json")
    assert result.exit_code == 1
    assert "rollout sglang-cpu install" in result.output
