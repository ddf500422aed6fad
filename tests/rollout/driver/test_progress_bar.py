"""The progress bar."""

from rollout.driver.progress_bar import ProgressBar
from rollout.driver.stream.step_metrics import Progress


def test_the_bar_shows_what_is_ready_open_and_dropped(capsys) -> None:
    with ProgressBar("step 3") as bar:
        bar(Progress(num_ready=2, num_wanted=8, num_open=5, num_rejected=1))
    shown = capsys.readouterr().out
    assert "step 3" in shown
    assert "2/8" in shown
    assert "5 open, 1 dropped" in shown
