"""``rollout debug``: the rollout without a trainer, and a trainer without engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

import rollout
from rollout.cli.main import app
from rollout.config import RolloutConfig
from rollout.config.fakes import with_fakes
from rollout.core.errors import ConfigError, WeightMismatch
from rollout.driver.data.saved_groups import read_groups
from rollout.runtime.local import launch_local
from tests.support.builders import write_checkpoint
from tests.support.processes import importing_us
from tests.support.served_fakes import launched

# README's loop: launch, rollout, offloaded window, push.
TRAIN = """
import rollout, torch

config = rollout.RolloutConfig.from_file("rollout.yaml")
model = {"lm_head.weight": torch.zeros(16, 8), "model.embed_tokens.weight": torch.zeros(16, 8),
         "model.layers.0.mlp.weight": torch.zeros(8, 8)}
prompts = [rollout.Prompt((token,)) for token in (3, 4)]
sampling = rollout.SamplingParams(max_new_tokens=4)
with rollout.launch(config) as deployment:
    policy = deployment["policy"]
    with rollout.Driver(policy.url, reward=lambda sample: sample.output_ids[0]) as driver:
        for step in (1, 2):
            groups = driver.rollout(step, prompts, group_size=2, sampling=sampling).result()
            with policy.offloaded() as window:
                for group in groups:
                    for sample in group:
                        model["lm_head.weight"] += sample.reward * step
                window.push(model, version=step)
            total = model["lm_head.weight"].sum().item()
            print(step, policy.weight_version, total, [sample.output_ids for sample in groups[0]])
"""


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, ["debug", *words], env={"COLUMNS": "200", "NO_COLOR": "1"})


def output_of(*words: str) -> str:
    result = invoke(*words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def write_config(folder: Path, engine: dict[str, Any], **server: Any) -> None:
    groups = {"main": {"num_engines": 1, "engine": engine}}
    model_path = write_checkpoint(folder)
    of_server = {"model_path": model_path, "groups": groups, "agents": {"workers": 0}}
    config = {"servers": {"policy": of_server | server}}
    (folder / "rollout.yaml").write_text(yaml.safe_dump(config))


def run_debug(folder: Path, *words: str) -> str:
    """The lines of a training script that a command has run."""
    done = subprocess.run(
        [sys.executable, "-m", "rollout", "debug", *words, "--", sys.executable, "train.py"],
        cwd=folder,
        env=importing_us(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.torch
def test_an_unchanged_script_trains_on_its_recording_without_engines_and_gpus(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    write_config(tmp_path, {"kind": "fake"})
    lines = run_debug(tmp_path, "record", "saved")
    assert [line.split()[:2] for line in lines.splitlines()] == [["1", "1"], ["2", "2"]]
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == [
        "000001.jsonl",
        "000002.jsonl",
    ]
    # What this machine cannot launch, and what must not be written again.
    write_config(
        tmp_path,
        {"kind": "sglang", "gpus": 8, "options": {"tp-size": 8}},
        weights={"transport": "disk", "disk_path": str(tmp_path / "ckpt/{version}")},
    )
    assert run_debug(tmp_path, "train", "saved") == lines
    assert not (tmp_path / "ckpt").exists()
    assert {folder.name for folder in (tmp_path / "runs").iterdir()} == {"run", "run-replay"}


def test_a_push_of_a_wrong_shape_is_refused_in_a_replay(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    write_config(tmp_path, {"kind": "sglang", "gpus": 8})
    config = RolloutConfig.from_file(tmp_path / "rollout.yaml")
    config = config.model_copy(update={"log_dir": str(tmp_path / "runs")})
    with launch_local(with_fakes(config, keeps_gpus=False)) as deployment:
        policy = deployment["policy"]
        tensors = {"lm_head.weight": torch.zeros(16, 9)}
        with (
            pytest.raises(WeightMismatch, match=r"lm_head\.weight"),
            policy.offloaded() as window,
        ):
            window.push(tensors, version=1)


def test_a_replay_connects_to_itself_and_never_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("run", "runs/run", "runs/run/policy", "run-replay")
    with launched(launch_local, tmp_path, {"main": {}}, log_dir="runs") as live:
        monkeypatch.setenv("ROLLOUT_REPLAY", "saved")
        for name in names:
            with pytest.raises(ConfigError, match=r"no launch of run '\S*run-replay"):
                rollout.connect(name)
        with rollout.launch(live.config) as replay:
            urls = {rollout.connect(name)["policy"].url for name in names}
            assert urls == {replay["policy"].url} != {live["policy"].url}


def test_a_replay_keeps_gpus_for_trainers_that_are_placed_beside_engines(tmp_path: Path) -> None:
    write_config(
        tmp_path,
        {"kind": "sglang", "gpus": 4, "nodes": 2, "env": {"A": "b"}, "python": "/x/python"},
        health={"weights_path": "/ckpt/{version}"},
        weights={"store": True},
    )
    config = RolloutConfig.from_file(tmp_path / "rollout.yaml")
    config = RolloutConfig.from_dict(
        config.model_dump(mode="json") | {"run_id": "x" * 63, "cluster": {"trainer_gpus": 4}}
    )
    placed = with_fakes(config, keeps_gpus=True)
    engine = placed.servers["policy"].groups["main"].engine
    assert (engine.gpus, engine.nodes, engine.python, dict(engine.env)) == (4, 2, "", {})
    assert placed.cluster.trainer_gpus == 4
    alone = with_fakes(config, keeps_gpus=False)
    engine = alone.servers["policy"].groups["main"].engine
    assert (engine.gpus, engine.nodes, alone.cluster.trainer_gpus) == (0, 1, 0)
    server = alone.servers["policy"]
    assert (server.weights.store, server.health.weights_path) == (None, None)
    assert alone.run_id == "x" * 56 + "-replay"
    # What it made would be read from a file, too.
    assert RolloutConfig.from_dict(alone.model_dump(mode="json")) == alone


# -- the rollout alone ----------------------------------------------------------------------------

PROMPTS = [{"prompt_ids": [3], "answer": 2}, {"prompt_ids": [4, 5], "answer": 0}]
FEW = ("--num", "2", "--group-size", "2", "--max-new-tokens", "4")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with prompts and a reward."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in PROMPTS))
    (tmp_path / "debug_rewards.py").write_text(
        "def judge(sample):\n    return float(sample.metadata['answer'])\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_router_that_serves_is_sampled_and_its_groups_are_saved(folder: Path) -> None:
    words = ("--prompts", "prompts.jsonl", "--reward", "debug_rewards:judge", *FEW)
    with launched(launch_local, folder, {"main": {"num_engines": 2}}) as deployment:
        url = deployment["policy"].url
        output = output_of("rollout", url, *words, "--out", "out/groups.jsonl")
        figures = json.loads(output_of("rollout", url, *words, "--json"))["figures"]
    assert "groups, samples" in output
    assert "1 on average, 0 to 2" in output
    assert "rollout debug train out/groups.jsonl -- python my_train.py" in output
    groups = read_groups(folder / "out/groups.jsonl")
    assert [group.rewards for group in groups] == [[2.0, 2.0], [0.0, 0.0]]
    assert all(len(sample.output_ids) == 4 for group in groups for sample in group)
    assert figures["rollout/reward/mean"] == 1.0
    assert figures["rollout/tokens_per_s"] > 0
    assert read_groups(folder / "groups.jsonl")
    shown = output_of("samples", "out/groups.jsonl", "--num", "1")
    assert "reward 2, 4 tokens" in shown
    assert "> ids 3" in shown
    assert "reward 0, " not in shown


def test_a_configuration_is_launched_and_stopped_and_a_reward_that_raises_is_shown(
    folder: Path,
) -> None:
    write_config(folder, {"kind": "fake"})
    (folder / "debug_rewards_2.py").write_text("def judge(sample):\n    return 1 / 0\n")
    words = ("--prompts", "prompts.jsonl", "--reward", "debug_rewards_2:judge", *FEW)
    output = output_of("rollout", "rollout.yaml", *words)
    assert "100.0%: 4 reward_error" in output
    assert "ZeroDivisionError" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "nothing", "--", "python", "x.py"), "nothing"),
        (("train", ".", "--", "python", "x.py"), "STEP.jsonl"),
        (("train", "prompts.jsonl", "--", "python", "x.py"), "no column 'rollout_id'"),
        (("record", "saved", "--", "no-such-command"), "there is no command 'no-such-command'"),
        (("samples", "prompts.jsonl"), "no column 'rollout_id'"),
        (("rollout", "none.yaml", "--prompts", "prompts.jsonl"), "none.yaml"),
        (("rollout", "rollout.yaml", "--prompts", "none.jsonl"), "there is no file none.jsonl"),
        pytest.param(
            ("rollout", "rollout.yaml", "--prompts", "texts.jsonl"),
            "tokenizer.json",
            marks=pytest.mark.torch,  # its extra has tokenizers
        ),
        (("rollout", "http://127.0.0.1:9", "--prompts", "texts.jsonl"), "need --model"),
        (("rollout", "rollout.yaml", "--prompts", "prompts.jsonl", "--server", "x"), "policy"),
        (
            ("rollout", "rollout.yaml", "--prompts", "prompts.jsonl", "--reward", "a.b"),
            "no module:function",
        ),
        (
            ("rollout", "rollout.yaml", "--prompts", "prompts.jsonl", "--reward", "os:path"),
            "'os:path' is no function",
        ),
        (("rollout", "http://", "--prompts", "prompts.jsonl"), "url = 'http:'"),
        (
            ("rollout", "http://127.0.0.1:9", "--prompts", "prompts.jsonl", "--key", "ü"),
            "printable ASCII",
        ),
        (("rollout", "rollout.yaml", "--prompts", "empty.jsonl"), "no rows"),
        (
            ("rollout", "rollout.yaml", "--prompts", "prompts.jsonl", "--out", "groups.txt"),
            "--out groups.txt",
        ),
    ],
)
def test_what_cannot_be_done_is_named(folder: Path, words: tuple[str, ...], message: str) -> None:
    write_config(folder, {"kind": "fake"})
    (folder / "texts.jsonl").write_text('{"prompt": "1 + 1"}')
    (folder / "empty.jsonl").touch()
    result = invoke(*words)
    assert isinstance(result.exception, ConfigError), result.output
    assert message in str(result.exception)
