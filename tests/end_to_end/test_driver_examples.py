"""The examples of the driver as a user runs them."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.processes import ROOT, program, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.embedded, pytest.mark.timeout(480)]
SMALL = ("--prompts", "8", "--group-size", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It can hardly add: what is looked at here does not need it to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        from arithmetic import make_warm_started_model
    path = tmp_path_factory.mktemp("model") / "model"
    make_warm_started_model(path, 0, num_steps=2, batch_size=4)
    return path


def run(example: str, model: Path, out: Path, *more: str) -> list[str]:
    arguments = [f"examples/{example}.py", "--model", str(model), "--out", str(out), *more]
    with program(*arguments, *SMALL) as running:
        assert running.finish(200) == 0, running.output
        assert wait_until(lambda: not running.descendants(), 20), running.descendants()
    return running.output.splitlines()


def test_asynchronous_training_can_be_replayed_without_engines(model: Path, tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    more = ("--steps", "3")
    first = run("async_grpo", model, tmp_path, "--dump", str(dumps), *more)
    again = run("async_grpo", model, tmp_path, "--replay", str(dumps), *more)
    steps = [line for line in first if line.startswith("step")]
    assert len(steps) == 3
    assert [line for line in again if line.startswith("step")] == steps
    assert any("version_lag" in line for line in first)


def test_asynchronous_training_continues_after_it_is_killed(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "last"
    more = ("--steps", "4", "--checkpoint", str(kept))
    arguments = ["examples/async_grpo.py", "--model", str(model), "--out", str(tmp_path), *more]
    with program(*arguments, *SMALL) as running:
        assert wait_until((kept / "trainer.pt").exists, 120), running.output
        os.kill(running.process.pid, signal.SIGKILL)
        assert wait_until(lambda: not running.descendants(), 20), running.descendants()
    again = run("async_grpo", model, tmp_path, *more)
    first = next(line for line in again if line.startswith("step"))
    assert not first.startswith("step  1 ")
    assert any(line.startswith("step  4 ") for line in again)


def test_turns_with_a_tool_mask_what_the_tool_says(model: Path, tmp_path: Path) -> None:
    lines = run("multi_turn", model, tmp_path)
    (told,) = [line.split() for line in lines if "tokens of response" in line]
    assert 0 < int(told[4]) < int(told[0])


def test_lora_engines_generate_with_the_adapter_that_was_trained(
    model: Path, tmp_path: Path
) -> None:
    lines = run("lora_grpo", model, tmp_path, "--steps", "3", "--engines", "1")
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 3
    # From the second step on the adapter is no longer zero, so an engine without it would differ.
    gaps = [float(line.partition("logprob gap ")[2].split()[0]) for line in steps]
    assert max(gaps) < 1e-4
    assert [line.partition("version ")[2].split()[0] for line in steps] == ["1", "2", "3"]
    assert any("as on disk" in line for line in lines)
