"""The folder of a run, ``<log_dir>/<run_id>``, with one folder per server in it.

Always true: writers and readers of a file take its name from this module.  The folder is used again
by a later launch of the same run id; ``launch.json`` describes the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engines.plain_json import read_json
from rollout.config import RolloutConfig

JOURNAL_FILE = "journal.json"
LAUNCH_FILE = "launch.json"
FIGURES_FILE = "figures.jsonl"
OLD_FIGURES_FILE = "old_figures.jsonl"
"""What ``FIGURES_FILE`` was when it became too long."""
SPANS_SUFFIX = ".spans.jsonl"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run."""

    path: Path
    run_id: str

    @classmethod
    def of(cls, config: RolloutConfig) -> RunFolder:
        """The folder of the run of ``config``; it may not exist yet."""
        return cls(Path(config.log_dir).absolute() / config.run_id, config.run_id)

    def of_server(self, name: str) -> Path:
        """The folder of one server."""
        return self.path / name

    def of_agents(self, server: str) -> Path:
        """The folder of a server's agents: with the sessions of its workers while they run."""
        return self.of_server(server) / "agents"

    def last_launch(self) -> str:
        """The id of the last launch, which is the current one while it runs, or empty if
        unknown."""
        try:
            return str(read_json((self.path / LAUNCH_FILE).read_bytes())["launch"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def span_files(self) -> list[Path]:
        """The files of recorded spans; the rotated (older) part of each comes first."""
        found = [*self.path.glob(f"*/*{SPANS_SUFFIX}.1"), *self.path.glob(f"*/*{SPANS_SUFFIX}")]
        return sorted(found, key=lambda path: (path.name.removesuffix(".1"), path.suffix != ".1"))

    def figure_files(self) -> list[Path]:
        """The files of figures that drivers reported at each step."""
        return sorted(self.path.glob(f"*/{FIGURES_FILE}"))
