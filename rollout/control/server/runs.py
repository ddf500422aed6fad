"""Finds the runs of this host by their folders, and their servers by their journals.

Always true: a server has no ``trouble`` only if its process runs on this machine; a process id that
another process got since does not count.  Runs on a Ray cluster are found by their actors
(``runtime/ray/find_servers.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engines.process.process_identity import is_running
from rollout.config.run_dir import FIGURES_FILE, JOURNAL_FILE, LAUNCH_FILE, SPANS_SUFFIX
from rollout.config.sources.environment import default_log_dir
from rollout.control.server.journal import JournalRecord, read
from rollout.core.errors import ConfigError, RolloutError

_MAX_RUNS = 40
_MAX_SERVERS = 64


@dataclass(frozen=True, slots=True)
class FoundJournal:
    """The journal of one server.

    Attributes:
        record: None if it cannot be read.
        trouble: why its page cannot be queried, or empty if it can.
    """

    file: Path
    record: JournalRecord | None
    trouble: str


@dataclass(frozen=True, slots=True)
class KnownServer:
    """One server of a run; ``journal`` is None if it has no page on this machine."""

    name: str
    journal: JournalRecord | None
    is_recorded: bool


@dataclass(frozen=True, slots=True)
class KnownRun:
    """One run; ``began_s`` is the Unix second of its last launch."""

    run_id: str
    began_s: float
    servers: tuple[KnownServer, ...]


def named_folders(run: str | Path) -> tuple[Path, Path]:
    """Where a run may be that is named by its folder, or by its id in the default folder."""
    return Path(run), Path(default_log_dir(), run)


def recorded_run(run: Path) -> Path:
    """The folder of a run, named by it or by its id in the default folder; or one of its files.

    Raises:
        ConfigError: there is none.
    """
    for path in named_folders(run):
        if path.exists():
            return path
    raise ConfigError(f"there is no run {run}; {runs_here()}")


def runs_here() -> str:
    """The newest runs of the default folder, for messages."""
    runs = default_log_dir()
    folders = [path for path in Path(runs).glob("*") if path.is_dir()]
    newest = sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)
    more = f" and {len(newest) - 5} more" if len(newest) > 5 else ""
    if newest:
        return f"runs here: {', '.join(map(str, newest[:5]))}{more}"
    return f"there is no {os.path.join('.', runs)}"


def journals_here() -> list[FoundJournal]:
    """The journals of all runs in the default folder."""
    return [_examined(file) for file in sorted(Path(default_log_dir()).glob(f"**/{JOURNAL_FILE}"))]


def journals_of(run: str | Path, *, has_many: bool = False) -> list[FoundJournal]:
    """The journals of a run's servers.

    Args:
        run: the folder of the run or of one server, or the run's id in the default folder.
        has_many: it may also be a folder of runs.
    """
    above = ("", "*/", "*/*/") if has_many else ("", "*/")
    for folder in named_folders(run):
        for folders in above:
            if files := sorted(folder.glob(f"{folders}{JOURNAL_FILE}")):
                return [_examined(file) for file in files]
    return []


def known_runs(folder: Path, own: str) -> list[KnownRun]:
    """The run ``own`` and the latest launched others in a folder; with servers, in order."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                launched = entry.is_dir() and os.stat(Path(entry.path, LAUNCH_FILE))
            except OSError:
                continue  # no run, or one of another user
            if launched:
                found.append((entry.name != own, -launched.st_mtime, entry.name))
    return [
        KnownRun(name, -began, tuple(_servers(folder / name)))
        for _, began, name in sorted(found)[:_MAX_RUNS]
    ]


def _servers(run: Path) -> Iterable[KnownServer]:
    for folder in sorted(path for path in run.iterdir() if path.is_dir())[:_MAX_SERVERS]:
        files = (folder / FIGURES_FILE, folder / f"{folder.name}{SPANS_SUFFIX}")
        is_recorded = any(file.exists() for file in files)
        found = _examined(folder / JOURNAL_FILE)
        record = None if found.trouble else found.record
        if record is not None or is_recorded:
            yield KnownServer(folder.name, record, is_recorded)


def _examined(file: Path) -> FoundJournal:
    try:
        record = read(file)
    except RolloutError as error:  # no such file, of another user, or of another version
        return FoundJournal(file, None, str(error))
    trouble = ""
    if record.is_ended:
        trouble = f"{file}: it was stopped"
    elif not is_running(record.process):
        trouble = f"{file}: process {record.process.pid} is gone, or elsewhere"
    elif not str(record.page).startswith(("http://", "https://")):
        trouble = f"{file}: the server has not started yet"
    return FoundJournal(file, record, trouble)
