"""A witness that runs under a guard, forked or started by ``exec``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from engines.process.guarded_process import KILL, GuardedProcess
from tests.support.forking.starts import Starts
from tests.support.processes import wait_until

WITNESS = "tests.support.forking.witness_worker"
WAYS = ("exec", "fork")


def choose(made: Starts, way: str) -> None:
    made.is_forking = way == "fork"
    made.reasons.clear()


def was_forked(made: Starts) -> bool:
    return not made.reasons


class GuardedWitness:
    """A witness under a guard, whose log is read.

    Args:
        words: for the witness.
        options: of the guarded process.
    """

    def __init__(
        self, folder: Path, *words: str, python: str = sys.executable, **options: Any
    ) -> None:
        self.log = folder / "engine.log"
        options = {"env": os.environ, **options}
        self.guarded = GuardedProcess([python, "-m", WITNESS, *words], log_path=self.log, **options)

    def has_ended(self) -> bool:
        self.guarded.hear()
        return self.guarded.report.exit_status is not None

    def is_gone(self) -> bool:
        self.guarded.hear()
        return self.guarded.is_gone

    def ended(self) -> tuple[int | None, str]:
        """Its exit status and what it wrote."""
        assert wait_until(self.is_gone, 30)
        return self.guarded.report.exit_status, self.log.read_text()

    def has_ended_or_waits(self) -> bool:
        # The guard may report its start after its first words.
        return self.has_ended() or (
            self.guarded.report.pid is not None and "waits" in self.log.read_text()
        )

    def waits(self) -> int:
        """Its pid, when it runs."""
        assert wait_until(self.has_ended_or_waits, 30)
        assert self.guarded.report.pid is not None, self.log.read_text()
        return self.guarded.report.pid

    def end(self) -> None:
        self.guarded.send(KILL)
        assert wait_until(self.is_gone, 30)


def plain(report: str) -> dict[str, Any]:
    """The first line of a witness."""
    found: dict[str, Any] = json.loads(report.splitlines()[0])
    return found
