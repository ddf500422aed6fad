"""The output of a training program: progress, a line per step, a table, a picture, JSON."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import rollout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

MIB = 1024 * 1024
PHASES = (
    "rollout",
    "pause_generation",
    "flush_cache",
    "release_memory_occupation",
    "train",
    "onload_weights",
    "update_weights",
    "verify",
    "onload_kv",
    "continue_generation",
    "eval",
)
# By their first word, which is clear beside the others.
SHORT = {name: name.partition("_")[0] for name in PHASES} | {"rollout": "roll", "onload_kv": "kv"}


class Report:
    """Collects the figures of a run and prints them.

    Args:
        path: path of the picture and of the JSON file, without suffix.
        is_quiet: print nothing, as a rank that is not the first.
    """

    def __init__(self, path: Path, num_steps: int, *, is_quiet: bool = False) -> None:
        self._path = path
        self._console = Console(quiet=is_quiet)
        # Found out before the training, not after it.
        self._can_draw = importlib.util.find_spec("matplotlib") is not None
        if not self._can_draw:
            self._console.print("there will be no picture: pip install matplotlib")
        self._progress = Progress(
            TextColumn("[bold]GRPO"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._bar = self._progress.add_task("starting engines", total=num_steps)
        self._steps: list[dict[str, Any]] = []
        self._seconds: dict[str, float] = {}
        self._scores: dict[str, float] = {}
        self._before: dict[str, float] = {}

    def __enter__(self) -> Report:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Measure a phase that is not in the library's own report."""
        self._progress.update(self._bar, description=phase)
        started = time.monotonic()
        yield
        self._seconds[phase] = time.monotonic() - started

    def begin(self, scores: dict[str, float]) -> None:
        """Print the evaluation before the first step."""
        self._before = scores
        self.print(f"before training: accuracy {scores['eval/addition']:.1%} on held-out sums")

    def step(
        self, step: int, reward: float, scores: dict[str, float], boundary: rollout.StepReport
    ) -> None:
        """Record and print a finished step."""
        self._scores = scores
        phase_s = self._seconds | dict(boundary.phase_s)
        self._seconds = {}
        entry = {
            "step": step,
            "reward": reward,
            "accuracy": scores["eval/addition"],
            "phase_s": {phase: round(phase_s.get(phase, 0.0), 4) for phase in PHASES},
            "freed_bytes": boundary.freed_bytes,
            "weight_version": boundary.weight_version,
        }
        self._steps.append(entry)
        times = " ".join(f"{SHORT[phase]} {phase_s.get(phase, 0.0):.2f}" for phase in PHASES)
        self.print(
            f"step {step:2d}  reward {reward:.3f}  accuracy {entry['accuracy']:6.1%}  "
            f"freed {boundary.freed_bytes / MIB:.0f} MiB  version {boundary.weight_version}  "
            f"[dim]{times}[/dim]"
        )
        self._progress.advance(self._bar)

    def finish(self) -> None:
        """Print the evaluation and the table of phases; write the picture and the JSON file."""
        self.print(f"[EVAL RESULT] eval {len(self._steps)}: {self._scores}".replace("[", "\\[", 1))
        table = Table("phase", "median s", "max s", "total s", title="Seconds per step, by phase")
        for phase in PHASES:
            seconds = sorted(step["phase_s"][phase] for step in self._steps)
            median = seconds[len(seconds) // 2]
            table.add_row(phase, f"{median:.3f}", f"{seconds[-1]:.3f}", f"{sum(seconds):.2f}")
        self._console.print(table)
        self._path.with_suffix(".json").write_text(
            json.dumps(
                {"before": self._before, "steps": self._steps, "eval": self._scores}, indent=1
            )
            + "\n"
        )
        written = f"figures: {self._path}.json"
        if self._can_draw:
            self._draw(self._path.with_suffix(".png"))
            written = f"picture and figures: {self._path}.png, .json"
        self.print(
            f"accuracy {self._before['eval/addition']:.1%} -> {self._scores['eval/addition']:.1%}; "
            f"{written}"
        )

    def _draw(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        steps = [step["step"] for step in self._steps]
        figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True)
        above.plot(steps, [step["reward"] for step in self._steps], label="reward (sampled)")
        above.plot(
            [0, *steps],
            [self._before["eval/addition"], *(step["accuracy"] for step in self._steps)],
            label="accuracy (held out, greedy)",
        )
        above.set(ylim=(0, 1), ylabel="share right", title="Colocated GRPO on two-digit addition")
        above.grid(alpha=0.3)
        above.legend(loc="lower right")
        bottom = [0.0] * len(steps)
        for color, phase in zip(matplotlib.colormaps["tab20"].colors, PHASES, strict=False):
            height = [step["phase_s"][phase] for step in self._steps]
            below.bar(steps, height, bottom=bottom, label=phase, color=color)
            bottom = [low + high for low, high in zip(bottom, height, strict=True)]
        below.set(xlabel="step", ylabel="seconds")
        below.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", reverse=True)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
