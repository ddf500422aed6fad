"""The commands against a running deployment, as a user types them."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.kinds import KINDS
from engines.process.tcp_ports import reserve_port
from engines.protocol import Endpoint
from rollout.cli.main import app
from rollout.config import WeightsConfig
from rollout.config.run_dir import RunFolder
from rollout.control.server.journal import ServerJournal, read
from rollout.core.errors import ConfigError
from rollout.core.samples import Sample, SampleGroup
from rollout.driver.stream.shown_samples import shown_samples
from rollout.runtime import preflight
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from rollout.runtime.preflight import push_sizes
from rollout.weights.push.push_memory import push_memory
from rollout.weights.routes.nccl import nccl_of_torch
from tests.rollout.observability.timeline.spans import offload_step, rank_push
from tests.support.builders import with_kinds, write_checkpoint
from tests.support.paged import step, until
from tests.support.pages import code_of
from tests.support.processes import program
from tests.support.served_fakes import config, engines_of, launched


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    agents = {"agents": {"workers": 1}}
    with launched(launch_local, tmp_path_factory.mktemp("run"), server=agents) as handle:
        step(handle["policy"], 1)
        yield handle


@pytest.fixture
def run(deployment: DeploymentHandle) -> str:
    return str(RunFolder.of(deployment.config).path)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "200", "NO_COLOR": "1"})


def alone_and_stuck(examined: list[dict[str, Any]]) -> bool:
    first = examined[0]["findings"][0]
    return examined[0]["verdict"] == "stuck" and len(first["engine_ids"]) == 1


def run_command(*words: str, status: int = 0) -> str:
    result = invoke(*words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


def json_of(*words: str, status: int = 0) -> Any:
    return json.loads(run_command(*words, "--json", status=status))


def recorded(what: str, *words: str) -> bool:
    """Whether the files have a step yet: spans are written a moment after they end."""
    result = invoke(*words, "--json")
    return result.exit_code == 0 and bool(json.loads(result.output)[what])


def test_status_shows_every_engine(run: str) -> None:
    output = run_command("status", run)
    for word in ("policy", "serving", "shared-0", "shared-1", "apart-0", "gate open"):
        assert word in output
    assert json_of("status", run)["policy"]["weight_version"] == 1


def test_top_updates_as_often_as_requested(run: str) -> None:
    assert run_command("top", run, "--num", "2", "--every", "0.2").count("last step: lost") >= 1


def test_doctor_reports_that_nothing_is_wrong(run: str) -> None:
    assert "nothing is wrong" in run_command("doctor", run)


def test_doctor_names_the_nccl_of_this_python(run: str) -> None:
    (report,) = json_of("doctor", run)
    (line,) = [one for one in run_command("doctor", run).splitlines() if one.startswith("NCCL")]
    assert line == f"NCCL  {report['nccl']}"
    assert report["nccl"] == nccl_of_torch()


def test_doctor_explains_a_phase_that_hangs_while_it_hangs(
    run: str, deployment: DeploymentHandle
) -> None:
    now = ("--patience", "0")
    policy = deployment["policy"]
    with engines_of(policy) as engines:
        engines["shared-1"].hold("pause_generation")
        pending = policy.phases.pause_generation()
        engines["shared-1"].wait_entered("pause_generation")
        until(
            lambda: alone_and_stuck(json.loads(invoke("doctor", run, *now, "--json").output)),
            "only shared-1 is late, and longer than usual",
        )
        output = run_command("doctor", run, *now, status=3)
        engines["shared-1"].open("pause_generation")
        pending.result(30)
        policy.phases.continue_generation().result(30)
    assert "STUCK" in output
    assert "s for engine shared-1, since" in output.splitlines()[1]
    assert "HTTP call pause_generation without a reply" in output
    assert "end of its log" in output
    assert "Do: " in output


def in_release(status: str) -> bool:
    running = json.loads(status)["policy"]["running"] if status.startswith("{") else []
    return any(
        span["name"] == "release_memory_occupation" and span["elapsed_s"] > 0.5 for span in running
    )


@pytest.mark.slow
def test_a_newcomer_finds_the_stuck_engine_with_what_the_documentation_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[3] / "docs/how-to/watch.md"
    (config,) = re.findall(r"```yaml\n(run_id: stuck\n.*?)```", page.read_text(), re.DOTALL)
    (shell,) = re.findall(r"```sh\n(mkdir .*?)```", page.read_text(), re.DOTALL)
    first, *commands = [line.partition("#")[0].strip() for line in shell.splitlines()]
    assert commands == ["python stuck.py", "rollout doctor"]
    (tmp_path / "stuck.py").write_text(code_of("how-to/watch.md"))
    (tmp_path / "stuck.yaml").write_text(config)
    subprocess.run(first, shell=True, cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    root = {**os.environ, "PYTHONPATH": str(page.parents[2])}
    now = ("doctor", "--patience", "0.5")
    stuck = [sys.executable, "stuck.py"]
    with subprocess.Popen(stuck, env=root, stderr=subprocess.DEVNULL) as running:
        try:
            # A whole program and its engines start: seconds, on a busy machine half a minute.
            until(
                lambda: in_release(invoke("status", "--json").output),
                "its first offload hangs",
                60,
            )
            output = run_command(*now, status=3).splitlines()
        finally:
            running.send_signal(signal.SIGINT)
        assert running.wait(30) == -signal.SIGINT
    assert "STUCK" in output[0]
    assert "release_memory_occupation has waited" in output[1]
    assert "for engines faulty-0, faulty-1, since" in output[1]
    assert "HTTP call release_memory_occupation without a reply for" in output[2]
    assert "in release_memory_occupation, the engine releases its memory" in "".join(output)
    assert "1. wait: in 1" in next(line for line in output if "Do:" in line)


def test_a_server_is_found_by_folder_by_page_and_by_the_working_directory(
    run: str, deployment: DeploymentHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = read(Path(run) / "policy" / "journal.json").page
    for how in (run, f"{run}/policy", url):
        assert list(json_of("status", how)) == ["policy"]
    stand = Path(run).parent.parent
    (stand / "runs").symlink_to(Path(run).parent)
    monkeypatch.chdir(stand)
    assert list(json_of("status")) == ["policy"]
    assert list(json_of("status", "run")) == ["policy"]


def test_a_run_that_has_ended_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no running server found: there is no journal\.json"):
        run_command("status", str(tmp_path))
    file = tmp_path / "policy" / "journal.json"
    journal = ServerJournal.of(file, "exp", "policy", "local")
    asyncio.run(journal.write())
    with pytest.raises(ConfigError, match=r"the server has not started yet"):
        run_command("doctor", str(tmp_path))
    left = json.loads(file.read_text())
    left["process"]["started"] -= 1
    file.write_text(json.dumps(left))
    with pytest.raises(ConfigError, match="is gone"):
        run_command("doctor", str(tmp_path))
    asyncio.run(journal.end())
    with pytest.raises(ConfigError, match=r"no journal\.json below"):
        run_command("doctor", str(tmp_path))
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"journal\.json cannot be read"):
        run_command("doctor", str(tmp_path))


def test_a_trace_is_a_file_and_a_summary(run: str, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    until(lambda: recorded("steps", "trace", run, "-o", str(out)), "the step is in the files")
    assert {"ph", "name", "pid"} <= set(json.loads(out.read_text())["traceEvents"][0])
    output = run_command("trace", run, "-o", str(out))
    assert "lost at the boundary" in output
    assert "slowest engine" in output
    assert "stage of pushes" not in output


def test_a_trace_shows_the_rank_that_was_slow(tmp_path: Path) -> None:
    lines = [json.dumps(span.to_dict()) for span in [*offload_step(), *rank_push()]]
    (tmp_path / "policy.spans.jsonl").write_text("\n".join(lines))
    output = run_command("trace", str(tmp_path))
    rows = [re.findall(r"[\w.]+", line) for line in output.split("stage of pushes")[1].splitlines()]
    assert next(row[:5] for row in rows if row and row[0] in "01") == [
        *("0", "copy", "by_value", "delta", "0.40")
    ]
    found = json.loads(run_command("trace", str(tmp_path), "--json"))["push_stages"]
    assert [(one["rank"], one["stage"]) for one in found][:2] == [(0, "copy"), (1, "gather")]


def test_a_trace_and_a_report_have_what_each_push_sent_changed_and_paused(tmp_path: Path) -> None:
    lines = [json.dumps(span.to_dict()) for span in [*offload_step(), *rank_push()]]
    (tmp_path / "policy.spans.jsonl").write_text("\n".join(lines))
    (pushed,) = json.loads(run_command("trace", str(tmp_path), "--json"))["pushes"]
    assert pushed["paused_s"] == pytest.approx(1.5)
    assert (pushed["route"], pushed["density"], pushed["num_bytes"]) == (
        *("by_value delta", 0.015625, 400),
    )
    cells = ["policy", "7", "by_value delta", "400 B", "1.562%", "0.50", "1.50"]
    output = run_command("trace", str(tmp_path)).split("route of the push")[1]
    assert all(cell in output for cell in cells), output
    run_command("report", str(tmp_path))
    assert "".join(f"<td>{cell}" for cell in cells) in (tmp_path / "report.html").read_text()


def test_a_report_is_one_file_that_loads_nothing(run: str, tmp_path: Path) -> None:
    figures = Path(run) / "policy" / "figures.jsonl"
    metrics = {"rollout/reward/mean": 0.5, "rollout/version_lag/1": 3.0, "eval/sums": 0.25}
    launch = RunFolder(Path(run), "run").last_launch()
    figure = {"at_s": 1.0, "step": 1, "metrics": metrics, "lengths": {"64": 3}, "launch": launch}
    sample = Sample([1], text="<b>4</b>", reward=0.25, metadata={"question": "2+2?"})
    figure["samples"] = shown_samples([SampleGroup(0, [sample])], 4)
    figures.write_text(json.dumps(figure) + "\n{cut")
    out = tmp_path / "report.html"
    until(lambda: recorded("num_steps", "report", run, "-o", str(out)), "the step is there")
    page = out.read_text()
    for word in (
        "Reward",
        "Version lag",
        "≤ 64",
        "release_memory_occupation",
        "lost",
        "Evaluations",
    ):
        assert word in page
    assert "<td>2+2?<td>&lt;b&gt;4&lt;/b&gt;<td>0.25<td>0" in page
    assert "default-src 'none'" in page  # a browser loads nothing
    assert "No data was recorded: Tokens per second" in page
    figures.unlink()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no spans were recorded there"):
        run_command("trace", str(tmp_path))


def test_a_run_that_is_not_there_is_named_beside_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("trace", "report"):
        with pytest.raises(ConfigError, match=r"no run nope; there is no \./runs"):
            run_command(command, "nope")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for command in ("trace", "report", "status"):
        with pytest.raises(ConfigError, match="runs here: runs/mine"):
            run_command(command, "nope")
    with pytest.raises(ConfigError, match="no spans were recorded there"):
        run_command("trace", "mine")


def test_a_plan_names_each_refusal_and_the_setting_to_change(tmp_path: Path) -> None:
    loaded = config(tmp_path)
    backup = {"weights_cpu_backup": False}
    groups = with_kinds({"a": {"engine": backup}, "b": {"engine": backup}, "c": {"num_engines": 2}})
    values = loaded.model_dump(mode="json", exclude_defaults=True)
    values["servers"]["policy"] |= {"groups": groups, "weights": {"update": "lora"}}
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    plan = json_of("plan", str(file), status=2)
    assert [refusal.split(".engine")[0] for refusal in plan["refusals"]] == [
        "servers.policy.groups.a",
        "servers.policy.groups.b",
    ]
    assert "weights_cpu_backup to true" in plan["refusals"][0]
    assert plan["groups"][2]["weights_from"] == "CPU backup, then the push"
    assert "refused" in run_command("plan", str(file), status=2)
    assert run_command("validate", str(file), status=2).count("set weights_cpu_backup to true") == 2


def test_plan_has_the_addresses_of_agents_and_what_they_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = {"workers": 2, "port": 8100}
    values = config(tmp_path, server={"agents": agents}).model_dump(mode="json")
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    monkeypatch.setattr(preflight, "_OF_AGENTS", ("json", "no_such_package"))
    plan = json_of("plan", str(file))
    assert plan["servers"][0]["agents"] == ["127.0.0.1:8100", "127.0.0.1:8101"]
    (note,) = [one for one in plan["notes"] if "no_such_package" in one]
    assert note.startswith("servers.policy.agents: no_such_package is not installed here")
    assert "pip install" in note
    assert "agents 127.0.0.1:8100, 127.0.0.1:8101, page" in run_command("plan", str(file))
    values["servers"]["policy"]["agents"] = {"workers": 0}
    file.write_text(json.dumps(values))
    assert not [one for one in json_of("plan", str(file))["notes"] if "no_such_package" in one]


def test_an_option_that_the_server_does_not_have_is_a_note_of_plan_and_validate(
    tmp_path: Path,
) -> None:
    values = config(tmp_path).model_dump(mode="json", exclude_defaults=True)
    options = {"mem-fraction-statik": 0.5, "tp": 1, "context_length": 64}
    engine = {"kind": "sglang", "python": sys.executable, "options": options}
    values["servers"]["policy"]["groups"] = {"main": {"engine": engine}}
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    (note,) = json_of("validate", str(file))["notes"]
    assert note.endswith("no option 'mem-fraction-statik'; did you mean 'mem-fraction-static'?")
    assert note in json_of("plan", str(file))["notes"]
    assert f"note: {note}" in run_command("validate", str(file))
    values["servers"]["policy"]["groups"]["main"]["engine"] = {
        "kind": "fake",
        "options": {"falt": ""},
    }
    file.write_text(json.dumps(values))
    assert "fake engine has no options falt; it has drain_s, fault" in run_command(
        "validate", str(file), status=2
    )


@pytest.mark.parametrize(
    ("backup", "store", "weights_from"),
    [
        (None, False, "the push (all tensors)"),
        (None, True, "the push (all tensors), or the store"),
        (True, True, "CPU backup, then the push"),
    ],
)
def test_a_plan_shows_before_a_release_what_brings_the_weights_back(
    tmp_path: Path, backup: bool | None, store: bool, weights_from: str
) -> None:
    values = config(tmp_path).model_dump(mode="json", exclude_defaults=True)
    values["servers"]["policy"] |= {
        "model_path": str(write_checkpoint(tmp_path / "model")),
        "groups": {"main": {"engine": {"kind": "embedded", "weights_cpu_backup": backup}}},
        "weights": {"store": store or None},
    }
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    (group,) = json_of("plan", str(file))["groups"]
    assert group["weights_from"] == weights_from


def test_a_plan_counts_the_backup_of_engines_to_which_not_all_is_pushed(tmp_path: Path) -> None:
    values = config(tmp_path).model_dump(mode="json", exclude_defaults=True)
    model = tmp_path / "model"
    values["servers"]["policy"] |= {
        "model_path": str(write_checkpoint(model)),
        "groups": {"main": {"num_engines": 2, "engine": {"kind": "embedded"}}},
        "weights": {"not_pushed": ["lm_head.*"]},
    }
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    (group,) = json_of("plan", str(file))["groups"]
    assert group["weights_from"] == "CPU backup, then the push"
    assert group["host_bytes"] == 2 * (model / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("kind", "options", "copies", "weights_from"),
    [
        (
            "vllm",
            {"speculative-config": {"model": "DRAFT", "num_speculative_tokens": 2}},
            ["model", "draft"],
            "CPU backup (no push contains the draft DRAFT), then the push",
        ),
        ("vllm", {"speculative-config": {"method": "ngram"}}, [], "the push (all tensors)"),
        ("vllm", {}, [], "the push (all tensors)"),
        (
            "sglang",
            {"speculative-algorithm": "EAGLE3", "speculative-draft-model-path": "DRAFT"},
            ["draft"],
            "the push (all tensors)",
        ),
    ],
)
def test_a_plan_counts_the_copy_of_a_draft_and_says_why_there_is_one(
    kind: str, options: dict[str, Any], copies: list[str], weights_from: str, tmp_path: Path
) -> None:
    sizes = {}
    for name, tensors in (("model", DEFAULT_TENSORS), ("draft", DEFAULT_TENSORS[:1])):
        write_checkpoint(tmp_path / name, tensors)
        sizes[name] = (tmp_path / name / "model.safetensors").stat().st_size
    draft = str(tmp_path / "draft")
    values = config(tmp_path).model_dump(mode="json", exclude_defaults=True)
    named = json.loads(json.dumps(options).replace("DRAFT", draft))
    engine = {"kind": kind, "gpus": 0, "options": named}
    values["servers"]["policy"] |= {
        "model_path": str(tmp_path / "model"),
        "groups": {"main": {"num_engines": 2, "engine": engine}},
    }
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    found = json_of("plan", str(file))
    (planned,) = found["groups"]
    assert planned["host_bytes"] == 2 * sum(sizes[name] for name in copies)
    assert planned["weights_from"] == weights_from.replace("DRAFT", draft)
    notes = [note for note in found["notes"] if "draft" in note]
    # A test of the release policy has the whole texts.
    begin = f"servers.policy.groups.main: draft {draft}: over an offload its weights are kept by "
    assert [note.startswith(begin) for note in notes] == [True] * ("draft" in copies)
    assert all("accepted drafts fall with training" in note for note in notes)
    assert notes == [note for note in json_of("validate", str(file))["notes"] if "draft" in note]


def test_a_plan_counts_the_graphs_that_sglang_copies_to_the_host(tmp_path: Path) -> None:
    values = config(tmp_path).model_dump(mode="json", exclude_defaults=True)
    group = {"num_engines": 2, "engine": {"kind": "sglang", "gpus": 4}}
    values["servers"]["policy"]["groups"] = {"main": group}
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    (planned,) = json_of("plan", str(file))["groups"]
    assert planned["host_bytes"] == 2 * 4 * (800 << 20)


def test_a_plan_has_the_peaks_of_pushes(tmp_path: Path) -> None:
    values = config(tmp_path).model_dump(mode="json", exclude_defaults=True)
    model = Path(write_checkpoint(tmp_path / "model"))
    weights = {"bucket_bytes": 64}
    values["servers"]["policy"] |= {"model_path": str(model), "weights": weights}
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    sizes = push_sizes(str(model))
    assert sizes is not None
    peaks = [asdict(one) for one in push_memory(sizes, WeightsConfig(bucket_bytes=64))]
    assert json_of("plan", str(file))["servers"][0]["push_memory"] == peaks
    text = " ".join(run_command("plan", str(file)).split())
    assert "policy: a push by cuda_ipc, streamed, takes" in text
    assert "a push by shared_memory, copied, as by window.push, takes" in text


def test_a_plan_counts_the_graphs_that_sglang_copies_when_it_releases(tmp_path: Path) -> None:
    values = config(tmp_path).model_dump(mode="json", exclude_defaults=True)
    engine = {"kind": "sglang", "gpus": 2}
    values["servers"]["policy"]["groups"] = {
        "offloads": {"num_engines": 3, "engine": engine},
        "stays": {"needs_offload": False, "engine": engine},
    }
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    found = {one["group"]: one["host_bytes"] for one in json_of("plan", str(file))["groups"]}
    assert found == {"offloads": 6 * 800 << 20, "stays": 0}


def test_a_plan_has_what_standbys_take(tmp_path: Path) -> None:
    values = config(tmp_path).model_dump(mode="json", exclude_defaults=True)
    engine = {"kind": "sglang", "gpus": 4}
    group = {"num_engines": 2, "standby": 1, "engine": engine}
    values["servers"]["policy"]["groups"] = {"main": group}
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    (planned,) = json_of("plan", str(file))["groups"]
    asleep_bytes = 2 * 4 * KINDS["sglang"].asleep_bytes
    assert asleep_bytes
    assert planned["host_bytes"] == 2 * 2 * 4 * (800 << 20) + asleep_bytes
    text = " ".join(run_command("plan", str(file)).split())
    assert "2 more processes sleep, one beside each engine; each takes about 1 GiB" in text


def test_a_plan_says_how_a_model_that_sglang_packs_is_loaded(tmp_path: Path) -> None:
    values = config(tmp_path).model_dump(mode="json", exclude_defaults=True)
    model = Path(write_checkpoint(tmp_path / "model"))
    (model / "config.json").write_text('{"num_experts": 8}')
    attached = {"kind": "attached", "urls": ["http://127.0.0.1:1"]}
    values["servers"]["policy"] |= {
        "model_path": str(model),
        "groups": {"main": {"engine": attached}},
    }
    file = tmp_path / "rollout.json"
    notes = {}
    for update, stream in (("full", False), ("full", True), ("frozen", True)):
        weights = {"update": update, "stream": stream}
        weights |= {"transport": "shared_memory"} if stream else {}
        values["servers"]["policy"]["weights"] = weights
        file.write_text(json.dumps(values))
        notes[update, stream] = " ".join(json_of("plan", str(file))["notes"])
    assert "a push by shared memory is loaded in one call: at each load" in notes["full", False]
    assert "so once for each bucket; leave weights.stream out" in notes["full", True]
    assert "at each load" not in notes["frozen", True]


@pytest.mark.parametrize(
    ("weights", "note"),
    [
        (
            {"transport": "distributed"},
            "make_push and window.push cannot copy them; use offloaded(weights=",
        ),
        ({"update": "frozen"}, "the server never takes new weights; leave the function out"),
        ({}, ""),
    ],
)
def test_a_plan_says_which_offload_would_be_refused(
    weights: dict[str, str], note: str, tmp_path: Path
) -> None:
    values = config(tmp_path).model_dump(mode="json", exclude_defaults=True)
    values["servers"]["policy"]["weights"] = weights
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    notes = [one for one in json_of("plan", str(file))["notes"] if "offloaded(" in one]
    assert [note in one for one in notes] == [True] * bool(note)


def test_a_plan_shows_what_an_engine_is_started_with_and_what_overrides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = {
        "kind": "sglang",
        "gpus": 2,
        "options": {
            "speculative-algorithm": "EAGLE",
            "cuda-graph-backend-prefill": "full",
            "mem-fraction-static": 0.7,
        },
        "env": {"TMS_RETAIN_CPU_BACKUP": "0", "HF_TOKEN": "secret"},
    }
    values = config(tmp_path).model_dump(mode="json", exclude_defaults=True)
    values["servers"]["policy"]["groups"] = {"main": {"engine": engine}}
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TMS_INIT_ENABLE", "1")
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "0")
    start = json_of("plan", str(file))["groups"][0]["start"]
    assert {"RANK", "TMS_INIT_ENABLE"} <= set(start["dropped"])
    assert start["env"]["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"
    assert start["env"]["CUDA_VISIBLE_DEVICES"] == "its GPUs"
    assert start["env_of_config"] == ["HF_TOKEN"]
    assert start["options"] == {
        "cuda_graph_backend_prefill": "full",
        "enable_cache_report": True,
        "enable_draft_weights_cpu_backup": True,
    }
    assert start["memory_saver"] is True
    assert [
        (one["name"], one["default"], one["used"], one["by"]) for one in start["overrides"]
    ] == [
        ("cuda_graph_backend_prefill", "disabled", "full", "engine.options"),
        ("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1", "0", "the environment"),
        ("TMS_RETAIN_CPU_BACKUP", "1", "0", "engine.env"),
    ]
    assert (start["start_timeout_s"], start["kill_timeout_s"]) == (900, 150)
    text = " ".join(run_command("plan", str(file)).split())
    assert "policy/main: an engine has 900 s to start and 150 s to end" in text
    assert "TMS_RETAIN_CPU_BACKUP=0 instead of 1 (engine.env)" in text
    assert "secret" not in text


def test_a_plan_without_refusals_succeeds(tmp_path: Path) -> None:
    loaded = config(tmp_path)
    file = tmp_path / "rollout.json"
    file.write_text(loaded.model_dump_json(exclude_defaults=True))
    output = run_command("plan", str(file))
    assert "the push (all tensors)" in output
    assert "any free" in output
    assert json_of("validate", str(file))["is_valid"] is True


def test_a_plan_shows_which_servers_are_stacked_on_which(tmp_path: Path) -> None:
    groups = {"main": {"num_engines": 2, "engine": {"kind": "fake", "gpus": 1}}}
    values = config(tmp_path, groups).model_dump(mode="json", exclude_defaults=True)
    values["servers"]["reference"] = values["servers"]["policy"]
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps({**values, "cluster": {"trainer_gpus": 2}}))
    plan = json_of("plan", str(file))
    assert plan["stacked"] == {"reference": ["policy"]}
    assert [group["bundles"] for group in plan["groups"]] == [["0", "1"]] * 2
    assert plan["needs"] == {"GPU": 2.0, "CPU": 2.0}
    output = run_command("plan", str(file))
    assert "the trainer shares positions 0-1" in output
    assert "reference: on GPUs of policy, so it starts first and stays offloaded" in output


def test_serve_runs_until_it_is_stopped_by_name(tmp_path: Path) -> None:
    """Over an attached engine, which runs before and after."""
    with reserve_port() as reserved:
        port = reserved.port
    with program("-m", "engines.fake", "--port", str(port)) as engine:
        engine.wait_for("listens", 30)
        urls = [f"http://127.0.0.1:{port}"]
        httpx.post(f"{urls[0]}/update_weight_version", json={"new_version": "0"}, trust_env=False)
        serve_and_stop(tmp_path, urls)


def gate_of(status: dict[str, Any]) -> str | None:
    return status["policy"].get("gate", {}).get("state")


def config_of_attached(tmp_path: Path, urls: list[str]) -> Path:
    groups = {"main": {"needs_offload": False, "engine": {"kind": "attached", "urls": urls}}}
    loaded = config(tmp_path, groups, run_id="served")
    values = loaded.model_dump(mode="json", exclude_defaults=True)
    values["servers"]["policy"]["agents"] = {"workers": 1}
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    return file


def serve_and_stop(tmp_path: Path, urls: list[str]) -> None:
    file = config_of_attached(tmp_path, urls)
    with subprocess.Popen(
        [sys.executable, "-m", "rollout", "serve", str(file), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as served:
        journal = tmp_path / "served" / "policy" / "journal.json"
        until(
            lambda: served.poll() is not None or (journal.exists() and read(journal).page),
            "it serves",
        )
        assert served.poll() is None, served.communicate()
        until(
            lambda: gate_of(json_of("status", str(tmp_path / "served"))) == "open",
            "its engines serve",
        )
        (agents,) = json_of("status", str(tmp_path / "served"))["policy"]["agents_urls"]
        assert "stopped" in run_command("stop", str(tmp_path / "served"), "--yes")
        assert served.wait(30) == 0
        shown, _ = served.communicate()
    assert json.loads(shown)["agents"] == {"policy": [agents]}
    assert read(journal).is_ended
    with socket.create_server(Endpoint.of_url(agents)):  # its worker has ended, too
        pass


def test_serve_that_starts_is_ended_by_a_signal(tmp_path: Path) -> None:
    """Its engine never answers: SIGTERM does not wait for the end of the start."""
    with socket.create_server(("127.0.0.1", 0)) as engine:
        url = f"http://127.0.0.1:{engine.getsockname()[1]}"
        file = config_of_attached(tmp_path, [url])
        command = [sys.executable, "-m", "rollout", "serve", str(file)]
        with subprocess.Popen(command, stderr=subprocess.STDOUT) as served:
            engine.settimeout(60)
            connection, _ = engine.accept()
            served.terminate()
            assert served.wait(30) == 0
            connection.close()
    assert read(tmp_path / "served" / "policy" / "journal.json").is_ended


def test_help_and_status_fit_in_80_columns(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "..." not in run_command("--help").replace("[ARGS]...", "")
    lines = run_command("status", run).splitlines()
    for name in ("router http://", "agents http://", "page http://"):
        assert any(re.fullmatch(rf"{name}\S+", line.strip()) for line in lines)


def test_a_pipe_gets_each_fact_in_one_line(tmp_path: Path) -> None:
    values = config(tmp_path).model_dump(mode="json", exclude_defaults=True)
    values["servers"]["policy"]["groups"] = with_kinds({"main": {"num_engines": 500}})
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    notes = [line for line in run_command("plan", str(file)).splitlines() if "note" in line]
    assert any(line.endswith("a Ray cluster may have more (--backend ray)") for line in notes)


def test_every_command_with_output_can_print_json() -> None:
    commands = dict(typer.main.get_command(app).commands)
    # It becomes an example, and prints nothing itself.
    assert commands.pop("quickstart")
    assert commands.pop("schema")  # it prints nothing else
    commands |= commands.pop("debug").commands
    for name in ("record", "train"):  # they become the script of the user
        assert commands.pop(name)
    for name, command in commands.items():
        assert any("--json" in option.opts for option in command.params), name


@pytest.mark.parametrize(
    ("cumem", "offloads", "is_noted"), [("1", False, True), ("0", False, False), ("1", True, False)]
)
def test_a_plan_says_what_nccl_needs_of_the_trainers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cumem: str, offloads: bool, is_noted: bool
) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", cumem)
    values = config(tmp_path).model_dump(mode="json", exclude_defaults=True)
    group = {"needs_offload": offloads, "engine": {"kind": "sglang", "gpus": 1}}
    values["servers"]["policy"]["groups"] = {"main": group}
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps(values))
    notes = " ".join(json_of("plan", str(file))["notes"])
    assert ("set NCCL_CUMEM_ENABLE=0 in the environment of the trainer" in notes) is is_noted
