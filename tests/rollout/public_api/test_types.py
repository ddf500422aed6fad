"""Type checkers see the types of the calls that are not written as plain methods."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
RIGHT = """
from typing import assert_type
import rollout

def use(driver: rollout.Driver, policy: rollout.ServerHandle) -> None:
    prompts = [rollout.Prompt((1,))]
    sampling = rollout.SamplingParams()
    groups = driver.rollout(1, prompts, group_size=2, sampling=sampling)
    assert_type(groups, rollout.Pending[list[rollout.SampleGroup]])
    assert_type(driver.check_logprobs(groups.result(), []), rollout.LogprobReport)
    assert_type(driver.restore(rollout.PromptData([]), driver.state_of(rollout.PromptData([])),
        num_groups=1, group_size=1, sampling=sampling), None)
    with rollout.Driver(policy.url, lambda sample: 1.0, max_in_flight=4) as own:
        assert_type(own, rollout.Driver)
    assert_type(policy.generate([1]).result(), rollout.GenerateReply)
    assert_type(policy.phases.verify().result(), rollout.StepReport)
"""
WRONG = """
import rollout

def use(driver: rollout.Driver) -> None:
    driver.rollout(1, [rollout.Prompt((1,))], group_size="2", sampling=rollout.SamplingParams())
    driver.rollout(1, [rollout.Prompt((1,))], group_size=2)
    rollout.Driver("http://host:1", max_in_fligth=4)
"""


def errors_of(program: str, folder: Path) -> list[str]:
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    command += ["--config-file", str(ROOT / "pyproject.toml"), str(folder / "program.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [line.partition(": error: ")[2] for line in done.stdout.splitlines() if "error" in line]


def test_the_right_types_are_seen(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    assert errors_of(RIGHT, tmp_path) == []


def test_wrong_arguments_of_the_driver_are_seen(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    kind, missing, unknown = errors_of(WRONG, tmp_path)
    assert 'Argument "group_size" has incompatible type "str"' in kind
    assert 'Missing named argument "sampling"' in missing
    assert 'Unexpected keyword argument "max_in_fligth"' in unknown
