"""A progress bar for a rollout: ``on_progress=bar``."""

from __future__ import annotations

from rich import progress

from rollout.driver.stream.step_metrics import Progress


class ProgressBar:
    """Shows ready groups of wanted groups; a context manager."""

    def __init__(self, description: str = "rollout") -> None:
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[more]}"),
            progress.TimeElapsedColumn(),
        )
        self._task = self._bar.add_task(description, total=None, more="")

    def __call__(self, now: Progress) -> None:
        more = f"{now.num_open} open"
        if now.num_rejected:
            more += f", {now.num_rejected} dropped"
        self._bar.update(self._task, completed=now.num_ready, total=now.num_wanted, more=more)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
