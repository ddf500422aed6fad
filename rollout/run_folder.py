"""Where a run keeps its files: ``<log_dir>/<run_id>``, and in it a folder per server.

Always true: who writes a file and who looks for it take its name from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollout.config import RolloutConfig

CONTROL_FILE = "control.json"
JOURNAL_FILE = "journal.json"
FIGURES_FILE = "figures.jsonl"
SPANS_SUFFIX = ".spans.jsonl"
LOG_SUFFIX = ".log"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run."""

    path: Path
    run_id: str

    @classmethod
    def of(cls, config: RolloutConfig) -> RunFolder:
        """The one that a configuration asks for; it need not be there yet."""
        return cls(Path(config.log_dir).absolute() / config.run_id, config.run_id)

    def of_server(self, name: str) -> Path:
        """A server's part of it."""
        return self.path / name

    def control_files(self) -> list[Path]:
        """Says of each running server where its page is."""
        return sorted(self.path.glob(f"*/{CONTROL_FILE}"))

    def journals(self) -> list[Path]:
        """What each server wrote down for the time after a crash."""
        return sorted(self.path.glob(f"*/{JOURNAL_FILE}"))

    def span_files(self) -> list[Path]:
        """What was recorded, the older part of each file first."""
        found = [*self.path.glob(f"*/*{SPANS_SUFFIX}.1"), *self.path.glob(f"*/*{SPANS_SUFFIX}")]
        return sorted(found, key=lambda one: (one.name.removesuffix(".1"), one.suffix != ".1"))

    def figure_files(self) -> list[Path]:
        """What drivers told of their steps."""
        return sorted(self.path.glob(f"*/{FIGURES_FILE}"))
