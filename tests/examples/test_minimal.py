"""The trainer in 40 lines: its length, its page, and that it learns."""

import re
from pathlib import Path

import pytest
from tests.support.processes import program, wait_until

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "examples/minimal_grpo.py"


def code() -> str:
    """The program without its docstring."""
    return SOURCE.read_text().split('"""', 2)[2].strip() + "\n"


def test_the_trainer_has_at_most_forty_lines_and_needs_no_other_example() -> None:
    lines = [line for line in code().splitlines() if line.strip()]
    assert len(lines) <= 40
    beside = {path.stem for path in SOURCE.parent.glob("*.py")}
    imported = set(re.findall(r"^(?:from|import) (\w+)", code(), re.MULTILINE))
    assert not imported & beside


def test_the_page_of_trainers_shows_the_whole_program() -> None:
    page = (ROOT / "docs/trainers.md").read_text()
    assert re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL) == [code()]


def test_the_page_of_agents_shows_lines_of_the_example_with_verifiers() -> None:
    page = (ROOT / "docs/how-to/agents.md").read_text()
    (shown,) = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    example = (ROOT / "examples/verifiers_grpo.py").read_text().splitlines()
    remaining = iter([line.strip() for line in example])
    assert [line for line in shown.splitlines() if line.strip() not in remaining] == []


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.timeout(560)
def test_the_trainer_learns_to_answer_in_digits(tmp_path: Path) -> None:
    with program(str(SOURCE), cwd=tmp_path) as running:
        assert running.finish(500) == 0, running.output
        assert wait_until(lambda: not running.descendants(), 20), running.descendants()
    rewards = [float(reward) for reward in re.findall(r"reward ([\d.]+)", running.output)]
    assert len(rewards) == 20
    assert rewards[0] < 0.1 < 0.8 < min(rewards[-3:])
