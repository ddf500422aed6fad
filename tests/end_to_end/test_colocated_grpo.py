"""The example as a user runs it: it learns, it depends on the push, and it leaves nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kinds import chaos_for
from tests.support.processes import ROOT, program, shared_memory_of, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.embedded, pytest.mark.timeout(480)]
EXAMPLE = "examples/colocated_grpo.py"
MIB = 1024 * 1024
# Of a run in which nothing is learned.
FEW = ("--prompts", "4")
SHARED_MEMORY = Path("/dev/shm")


def arguments(model: Path, out: Path, *more: str) -> list[str]:
    return [EXAMPLE, "--model", str(model), "--out", str(out), *more]


@pytest.mark.ray
def test_accuracy_climbs_and_engine_memory_is_freed_each_step(
    warm_started: Path, tmp_path: Path
) -> None:
    with program(*arguments(warm_started, tmp_path, "--steps", "6")) as example:
        assert example.finish(200) == 0, example.output
        assert wait_until(lambda: not example.descendants(), 20), example.descendants()
    figures = json.loads((tmp_path / "colocated_grpo.json").read_text())
    steps = figures["steps"]
    assert figures["before"]["eval/addition"] < 0.5
    assert steps[3]["accuracy"] > figures["before"]["eval/addition"] + 0.2
    assert figures["eval"]["eval/addition"] > 0.8
    assert [step["weight_version"] for step in steps] == list(range(1, 7))
    assert all(step["freed_bytes"] > 100 * MIB for step in steps)
    assert (tmp_path / "colocated_grpo.png").stat().st_size > 10_000
    assert "[EVAL RESULT] eval 6: {'eval/addition':" in example.output


def test_accuracy_does_not_climb_when_the_push_is_skipped(
    warm_started: Path, tmp_path: Path
) -> None:
    more = ("--steps", "4", "--skip-push", "--backend", "local")
    with program(*arguments(warm_started, tmp_path, *more)) as example:
        assert example.finish(200) == 0, example.output
    figures = json.loads((tmp_path / "colocated_grpo.json").read_text())
    assert {step["weight_version"] for step in figures["steps"]} == {0}
    accuracies = [step["accuracy"] for step in figures["steps"]]
    assert max(accuracies) - figures["before"]["eval/addition"] < 0.05, accuracies


def test_the_commands_that_end_its_output_work_and_are_those_of_the_page(
    untaught: Path, tmp_path: Path
) -> None:
    more = ("--steps", "1", "--engines", "1", "--backend", "local", *FEW)
    started = (str(ROOT / EXAMPLE), "--model", str(untaught), *more)
    with program(*started, cwd=tmp_path) as example:
        assert example.finish(200) == 0, example.output
    plan, serve = (line.strip() for line in example.output.splitlines()[-2:])
    done = subprocess.run(plan, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "needs 1 CPU" in done.stdout
    shell = f"import os; os.execv('/bin/sh', ['sh', '-c', {serve!r}])"
    with program("-c", shell, cwd=tmp_path) as served:
        served.wait_for("serving; files in", 100)
        os.killpg(served.process.pid, signal.SIGINT)
        served.finish(60)
        assert wait_until(lambda: not served.descendants(), 20), served.descendants()
    assert "Traceback" not in served.output
    page = (ROOT / "docs/getting-started.md").read_text()
    installed = str(Path(sys.executable).with_name("rollout"))
    for line in (plan, serve):
        assert line.replace(installed, ".venv/bin/rollout") in page


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
@chaos_for("ray")
def test_sigkill_of_the_driver_leaves_no_engine(
    backend: str, untaught: Path, tmp_path: Path
) -> None:
    """Over Ray: ``make test-chaos PYTEST_ARGS=tests/end_to_end/test_colocated_grpo.py``; in CI,
    ``test_driver_crash.py`` kills a driver over Ray."""
    with program(*arguments(untaught, tmp_path, "--backend", backend, *FEW)) as example:
        example.wait_for("step  1", 120)
        assert len(example.descendants("engines.embedded")) >= 2
        example.process.kill()
        assert wait_until(lambda: not example.descendants("engines."), 30), example.descendants()


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_ctrl_c_ends_everything_with_one_line(backend: str, untaught: Path, tmp_path: Path) -> None:
    with program(*arguments(untaught, tmp_path, "--backend", backend, *FEW)) as example:
        example.wait_for("step  2", 120)
        pushed = f"rollout-push-{example.process.pid}-*"
        mapped = shared_memory_of(example.process.pid)
        assert list(SHARED_MEMORY.glob(pushed))
        os.killpg(example.process.pid, signal.SIGINT)
        assert example.finish(60) != 0
        assert "Traceback" not in example.output
        assert "interrupted" in example.output
        assert wait_until(lambda: not example.descendants(), 20), example.descendants()
    assert not list(SHARED_MEMORY.glob(pushed))
    assert not [path for path in mapped if path.exists()]
