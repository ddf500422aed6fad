"""Examples as programs, as a user runs them; the others are run in ``tests/end_to_end``."""

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


@pytest.mark.ray
def test_a_killed_engine_serves_the_pushed_weights_while_the_trainer_is_stopped() -> None:
    lines = output_of("kill_an_engine").splitlines()
    assert any("main-0 serves the pushed weights" in line for line in lines)
    for phase in ("fence", "boot", "admit", "readmit", "assemble", "update_weights_from_disk"):
        assert any(f" {phase} took " in line for line in lines), phase
