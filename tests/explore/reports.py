"""What is counted and shown, over restarts of each side: driver, router, server, group.

A driver reports steps to the router, a group records spans, and the page of the server takes both.
Each of the four can be lost at any time, also while the page waits for its answer, and the server
in the middle of a line of its file.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.core.types import ServerStatus
from rollout.observability.page.state_cache import StateCache
from rollout.observability.server_snapshot import ServerSnapshot
from rollout.observability.step_reports import Report, ReportFile, standing
from rollout.observability.timeline.recorder import Timeline
from rollout.observability.timeline.span import START, Cursor, Kind
from rollout.router.proxy.figures import StepMetrics
from tests.explore.explorer import ExploredLoop, Violation

SIDES = ("driver", "router", "server", "group", "server in a line")
_SPANS = frozenset(Kind)
_STATUS = ServerStatus("policy", "serving", 0, "", "open", "", ())


class Reports:
    """One run: a ``Scenario`` of the explorer."""

    def __init__(self, folder: Path, num_steps: int = 3) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._folder = folder
        self._script = ["step", "look"] * num_steps + ["look"]
        self._is_cut = False
        self._step = self._number = 0
        self._lives = dict.fromkeys(SIDES, 0)
        # What was done, and what the page had the time to see of it.
        self._unseen: list[int] = []
        self._seen: list[int] = []
        self._spans: list[str] = []
        self._shown_spans: list[str] = []
        self._answer: asyncio.Future[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._router = StepMetrics()
        self._group = Timeline("policy/main")
        self._begin_server()

    def start(self, loop: ExploredLoop) -> None:
        self._loop = loop

    def _begin_server(self) -> None:
        self._file = ReportFile(self._folder, "launch")
        self._cache = StateCache(
            self._observe, on_figures=self._file.append, reports=self._file.read()
        )

    async def _observe(self, cursors: Mapping[str, Cursor]) -> ServerSnapshot:
        answer = self._answer = self._loop.create_future()
        await answer
        excerpt = self._group.since(cursors.get("policy/main", START))
        figures = {"figures": self._router.last()}
        return ServerSnapshot(_STATUS, {"policy/main": excerpt}, figures)

    # -- events ---------------------------------------------------------------------------------

    def num_options(self) -> int:
        return len(SIDES) + 1 if self._script or self._answer else 0

    def take(self, option: int) -> str:
        if option:
            self._lose(SIDES[option - 1])
            return f"{SIDES[option - 1]} is lost"
        if self._answer is not None:
            self._answers()
            return "the page has its answer"
        what = self._script.pop(0)
        if what == "step":
            self._report()
        else:
            self._looking = self._loop.create_task(self._cache.refresh())
        return what

    def _report(self) -> None:
        report = {
            "driver": f"driver {self._lives['driver']}",
            "step": self._step,
            "metrics": {"rollout/reward/mean": float(self._number)},
        }
        self._router.put(report, 100)
        self._unseen.append(self._number)
        self._group.event("step", str(self._number))
        self._spans.append(str(self._number))
        self._step, self._number = self._step + 1, self._number + 1

    def _answers(self) -> None:
        assert self._answer is not None
        self._answer.set_result(None)
        self._answer = None
        self._num_written = len(self._unseen)
        self._seen += self._unseen
        self._shown_spans += self._spans
        self._unseen, self._spans = [], []

    def _lose(self, side: str) -> None:
        self._lives[side] += 1
        if side == "driver":  # its trainer begins at the save before the last step
            self._step = max(0, self._step - 1)
        elif side == "router":
            self._router, self._unseen = StepMetrics(), []
        elif side == "group":
            self._group, self._spans = Timeline("policy/main"), []
        else:
            if side == "server in a line":
                self._cut_line()
            self._lose_server()

    def _lose_server(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._answer = None
        self._begin_server()
        # Its groups, which it has lost too, are others in the same place.
        self._group, self._spans, self._shown_spans = Timeline("policy/main"), [], []

    def _cut_line(self) -> None:
        """The report that was written last is there in part; it is the router's to give again."""
        kept = [int(one["metrics"]["rollout/reward/mean"]) for one in self._router.last()]
        if self._answer is None and self._seen and self._seen[-1] in kept:
            file = self._folder / "figures.jsonl"
            with file.open("rb+") as lines:
                lines.truncate(file.stat().st_size - 9)
            self._unseen.insert(0, self._seen.pop())

    # -- what must hold ---------------------------------------------------------------------

    def check(self) -> None: ...

    def finish(self) -> None:
        written = [_number(one) for one in ReportFile(self._folder, "launch").read()]
        shown = self._cache.history.to_dict()["figures"]
        if written != self._seen:
            raise Violation(f"written are {written}, and reported were {self._seen}")
        if [_number(one) for one in shown] != self._seen:
            raise Violation(f"shown are {[_number(one) for one in shown]}, not {self._seen}")
        spans = [one.said for one in self._cache.history.spans_since(START, _SPANS)]
        if spans != self._shown_spans:
            raise Violation(f"shown are the spans {spans}, and recorded were {self._shown_spans}")
        newest = {one["step"]: _number(one) for one in shown}
        if {one["step"]: _number(one) for one in standing(shown)} != newest:
            raise Violation(f"of the steps stand {standing(shown)}, and the last are {newest}")
        if len(standing(shown)) != len(newest):
            raise Violation("a step that was done twice is counted twice")


def _number(report: Report) -> Any:
    return int(report["metrics"]["rollout/reward/mean"])
