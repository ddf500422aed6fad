"""Examples as programs, as a user runs them; the others are run in ``tests/end_to_end``."""

import re
from pathlib import Path
from statistics import fmean

import pytest
from tests.support.processes import program, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.embedded, pytest.mark.timeout(420)]


def output_of(example: str, *arguments: str) -> str:
    with program(f"examples/{example}.py", *arguments) as running:
        assert running.finish(400) == 0, running.output
        assert wait_until(lambda: not running.descendants(), 20), running.descendants()
    return running.output


def test_the_training_loop_takes_three_steps() -> None:
    last = output_of("training_loop").splitlines()[-1]
    assert last.startswith("serving at http://127.0.0.1:")
    assert last.endswith("weight version 3")


def test_an_agent_learns_what_to_call_by_its_rewards(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    output = output_of("agent_tools", "--out", str(tmp_path))
    accuracies = [float(one) for one in re.findall(r"^step .* accuracy +([\d.]+)%", output, re.M)]
    assert len(accuracies) == 26
    assert accuracies[0] < 30 < 80 < fmean(accuracies[-3:])
    assert max(accuracies[-3:]) > 90
    # Tokens that the engine did not generate, or under other weights, would have another log-prob.
    assert max(map(float, re.findall(r"log-prob gap (\S+)", output))) < 1e-4


def test_an_environment_of_verifiers_trains_a_policy_with_exact_token_ids(tmp_path: Path) -> None:
    pytest.importorskip("verifiers")  # it brings many packages, so it is in no extra
    output = output_of("verifiers_grpo", "--out", str(tmp_path))
    accuracies = [float(one) for one in re.findall(r"^step .* accuracy +([\d.]+)%", output, re.M)]
    assert len(accuracies) == 26
    assert accuracies[0] < 30 < 60 < fmean(accuracies[-3:])
    assert max(map(float, re.findall(r"log-prob gap (\S+)", output))) < 1e-4


@pytest.mark.ray
def test_a_killed_engine_serves_the_pushed_weights_while_the_trainer_is_stopped() -> None:
    lines = output_of("kill_an_engine").splitlines()
    assert any("main-0 serves the pushed weights" in line for line in lines)
    for phase in ("fence", "boot", "admit", "readmit", "assemble", "update_weights_from_disk"):
        assert any(f" {phase} took " in line for line in lines), phase
