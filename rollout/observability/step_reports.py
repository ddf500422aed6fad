"""Reports of drivers on their steps: the file of them, and which of several of one step hold.

Always true: a report has a name, that of its router's process and its number there, and is written
once under it: also if that router, the process that writes, or both are lost in between.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engines.plain_json import WRONG_FORM, read_json
from engines.process.own_files import open_or_new_file
from rollout.config.run_dir import FIGURES_FILE, OLD_FIGURES_FILE

Report = Mapping[str, Any]

# Once as much is kept, in the file before this one.
_MAX_FILE_BYTES = 256 << 20
# More than a page shows, and than a router keeps.
_MAX_READ_BYTES = 16 << 20


class Taken:
    """Which reports were taken, by the name of the router's process and the number there.

    Args:
        reports: taken before, in their order.
    """

    def __init__(self, reports: Iterable[Report] = ()) -> None:
        self._last: dict[str, int] = {}
        self.new(report for report in reports if is_named(report))

    def new(self, reports: Iterable[Report]) -> list[Report]:
        """The reports among them that were not taken; they are now."""
        found = []
        for report in reports:
            router, serial = report["router"], report["serial"]
            if serial > self._last.get(router, 0):
                self._last[router] = serial
                found.append(report)
        return found


class ReportFile:
    """The reports to one server, one a line, of all its launches.

    Args:
        folder: of the server.
        launch: the reports that are read and written are of this one.
    """

    def __init__(self, folder: Path, launch: str) -> None:
        self._file = folder / FIGURES_FILE
        self._old = folder / OLD_FIGURES_FILE
        self._launch = launch
        self._may_be_cut = True

    def read(self) -> list[dict[str, Any]]:
        """The last reports, oldest first."""
        lines = [*last_lines(self._old, _MAX_READ_BYTES), *last_lines(self._file, _MAX_READ_BYTES)]
        return [
            {name: value for name, value in report.items() if name != "launch"}
            for report in parsed(lines)
            if report.get("launch", "") == self._launch and _is_whole(report)
        ]

    def append(self, report: Report) -> None:
        """Write one.

        Raises:
            OSError: it is not there as a whole.
        """
        with suppress(FileNotFoundError):
            if self._file.stat().st_size > _MAX_FILE_BYTES:
                self._file.replace(self._old)
        line = json.dumps({**report, "launch": self._launch}) + "\n"
        if self._may_be_cut and _is_cut(self._file):
            line = "\n" + line
        self._may_be_cut = True
        with os.fdopen(open_or_new_file(str(self._file), os.O_APPEND), "a") as lines:
            lines.write(line)
        self._may_be_cut = False


def _is_whole(report: Report) -> bool:
    """Whether it has the form that a router gives on."""
    gaps, samples = report.get("logprob_gaps", {}), report.get("samples", [])
    tables = [report.get("lengths", {}), *(gaps.values() if isinstance(gaps, Mapping) else [0])]
    return isinstance(samples, list) and all(isinstance(table, Mapping) for table in tables)


def _is_cut(file: Path) -> bool:
    """Whether a process was lost, or a disk full, in the middle of the last line."""
    try:
        with file.open("rb") as lines:
            if not lines.seek(0, os.SEEK_END):
                return False
            lines.seek(-1, os.SEEK_END)
            return lines.read(1) != b"\n"
    except FileNotFoundError:
        return False


def is_named(report: Report) -> bool:
    """Whether it says which one of which router it is."""
    return isinstance(report.get("router"), str) and isinstance(report.get("serial"), int)


def standing(reports: Sequence[Report], step: int | None = None) -> list[Report]:
    """The reports of one server that hold, of one step or of all, in their order.

    A driver that was started again does steps again: what it reports of one takes the place of
    what another had reported of it before, which reports no more.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for place, report in enumerate(reports):
        driver = report.get("driver", "")
        first.setdefault(driver, place)
        last[driver] = place
    found: list[Report] = []
    begun: dict[tuple[int, str], int] = {}
    for report in reversed(reports):
        if step is not None and report["step"] != step:
            continue
        driver = report.get("driver", "")
        figures = [(report["step"], name) for name in report["metrics"]]
        # Two drivers that report by turns are both there.
        if not any(begun.get(figure, -1) > last[driver] for figure in figures):
            found.append(report)
        for figure in figures:
            begun[figure] = max(begun.get(figure, -1), first[driver])
    return found[::-1]


def last_lines(file: Path, max_bytes: int) -> list[str]:
    """The whole lines in the last ``max_bytes`` of a file; none if it does not exist."""
    try:
        with file.open("rb") as lines:
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(0, size - max_bytes))
            raw = lines.read(min(size, max_bytes))
    except FileNotFoundError:
        return []
    if size > max_bytes:
        raw = raw.partition(b"\n")[2]
    return raw.decode(errors="replace").splitlines()


def parsed(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The reports in these lines; those that are none are skipped."""
    found = []
    for line in lines:
        try:
            report = read_json(line)
            at_s, step, metrics = report["at_s"], report["step"], report["metrics"]
            names = report.get("launch", ""), report.get("driver", "")
        except WRONG_FORM:
            continue
        values = (at_s, step, *metrics.values()) if isinstance(metrics, Mapping) else ("",)
        has_names = all(isinstance(name, str) for name in names)
        if has_names and all(isinstance(value, int | float) for value in values):
            found.append(report)
    return found
