"""The examples whose trainer has several ranks, as a user runs them."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.weights.routes.buffers import remove_leftovers
from tests.support.kinds import chaos_for
from tests.support.processes import ROOT, Program, program, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.embedded, pytest.mark.timeout(480)]

SHARED_MEMORY = Path("/dev/shm")
COMMANDS = {
    "fsdp2_grpo": ("-m", "torch.distributed.run", "--nproc-per-node", "2"),
    "ray_trainer_grpo": (),
}
# In the command line of each rank's process.
OF_RANKS = {"fsdp2_grpo": "-u examples/fsdp2_grpo.py", "ray_trainer_grpo": "ray::Rank"}
both = pytest.mark.parametrize(
    "name", ["fsdp2_grpo", pytest.param("ray_trainer_grpo", marks=pytest.mark.ray)]
)


@pytest.fixture(autouse=True)
def no_files_of_killed_ranks() -> Iterator[None]:
    """Their files stay until the next push or launch on the host."""
    yield
    remove_leftovers(SHARED_MEMORY)


# Of a run that is ended before it has learned.
FEW = ("--prompts", "4")


def command(name: str, model: Path, out: Path, *more: str) -> list[str]:
    options = ("--model", str(model), "--out", str(out), *more)
    return [*COMMANDS[name], f"examples/{name}.py", *options]


def ranks_of(running: Program, name: str) -> list[int]:
    return sorted(running.descendants(OF_RANKS[name]))


def ends_with_all_it_started(running: Program) -> None:
    assert running.finish(90) != 0, running.output
    assert wait_until(lambda: not running.descendants(), 30), running.descendants()


@both
def test_the_ranks_learn_and_write_what_the_quickstart_writes(
    name: str, warm_started: Path, tmp_path: Path
) -> None:
    with program(*command(name, warm_started, tmp_path, "--steps", "6")) as example:
        assert example.finish(400) == 0, example.output
        assert wait_until(lambda: not example.descendants(), 20), example.descendants()
    figures = json.loads((tmp_path / f"{name}.json").read_text())
    assert figures["before"]["eval/addition"] < 0.5
    assert figures["steps"][-1]["accuracy"] == figures["eval"]["eval/addition"] > 0.8
    assert [step["weight_version"] for step in figures["steps"]] == list(range(1, 7))
    assert all(step["freed_bytes"] > 100 * 2**20 for step in figures["steps"])
    for phase in (
        "pause_generation",
        "release_memory_occupation",
        "train",
        "onload_weights",
        "update_weights",
        "continue_generation",
    ):
        assert all(step["phase_s"][phase] > 0 for step in figures["steps"]), phase
    assert re.findall(r"step +(\d) ", example.output) == list("123456")


@both
@chaos_for("ray_trainer_grpo")
def test_ctrl_c_ends_everything(name: str, untaught: Path, tmp_path: Path) -> None:
    """Over Ray, ``test_colocated_grpo.py`` does it in CI."""
    with program(*command(name, untaught, tmp_path, *FEW)) as example:
        example.wait_for("step  1", 150)
        ranks = ranks_of(example, name)
        assert len(ranks) == 2
        pushed = [f for pid in ranks for f in SHARED_MEMORY.glob(f"rollout-push-{pid}-*")]
        assert pushed
        os.killpg(example.process.pid, signal.SIGINT)
        ends_with_all_it_started(example)
        assert "interrupted: engines" in example.output
    if name == "fsdp2_grpo":
        assert not [path for path in pushed if path.exists()]


@both
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.chaos)])
@chaos_for("ray_trainer_grpo")
def test_the_end_of_one_rank_ends_everything(
    name: str, rank: int, untaught: Path, tmp_path: Path
) -> None:
    """All: ``make test-chaos PYTEST_ARGS=tests/end_to_end/test_rank_examples.py``."""
    with program(*command(name, untaught, tmp_path, *FEW)) as example:
        example.wait_for("step  1", 150)
        os.kill(ranks_of(example, name)[rank], signal.SIGKILL)
        ends_with_all_it_started(example)


def test_without_torchrun_it_names_the_command(tmp_path: Path) -> None:
    with program("examples/fsdp2_grpo.py", "--out", str(tmp_path)) as example:
        assert example.finish(60) == 2
    assert "torchrun --nproc-per-node 2 examples/fsdp2_grpo.py" in example.output


@pytest.mark.parametrize("name", COMMANDS)
def test_they_are_short(name: str) -> None:
    lines = (ROOT / f"examples/{name}.py").read_text().splitlines()
    glue = [line for line in lines if re.search(r"\b(rollout|policy|driver|pusher)\.", line)]
    assert len(lines) <= 120
    assert len(glue) <= 15
