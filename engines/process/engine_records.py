"""Records of the engines that run here, by which a launch clears the leftovers of a crash.

Always true: a guard makes a folder for its engine in shared memory, keeps it locked with a record
in it, and removes it when nothing of the engine is left.  So a record whose folder is not locked is
that of a killed guard.  Only folders of this user are believed, and an engine whose guard lives, in
whatever container, is left alone.
"""

from __future__ import annotations

import fcntl
import glob
import logging
import os
from contextlib import suppress
from dataclasses import dataclass

from engines.plain_json import WRONG_FORM, read_json
from engines.process.guard import (
    FOLDER_PREFIX,
    RECORD,
    folder_path,
    place,
    remove_files,
)
from engines.process.own_files import OwnFolder
from engines.process.process_identity import end, identity_at
from engines.protocol import ProcessIdentity

logger = logging.getLogger(__name__)

# As for an engine on GPUs: a record does not say what it runs on.
_END_TIMEOUT_S = 150.0
# Names of some hundred files.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One record.

    Attributes:
        identity: of the engine's process; None in another container, where it cannot be seen.
        files: patterns of the files to remove when the engine has ended.
        since_s: when the engine began, in seconds since 1970.
    """

    name: str
    identity: ProcessIdentity | None
    files: tuple[str, ...]
    since_s: float


def clear_crashed() -> list[str]:
    """Ends the engines whose guard was killed, and removes their shared memory.

    Returns:
        Their names.

    Raises:
        EngineHung: a process survives SIGKILL; what it holds is not free.
    """
    cleared = []
    for path in glob.glob(f"{FOLDER_PREFIX}*"):
        folder = _unlocked(path)
        if folder is None:
            continue
        token = path.removeprefix(FOLDER_PREFIX)
        record = _read(folder, token)
        try:
            if record is not None and record.identity is not None:
                end(record.identity, _END_TIMEOUT_S)
            if _clear(folder, record):
                cleared.append(token if record is None else record.name or f"engine {token}")
        finally:
            folder.close()
    return cleared


def end_and_clear(identity: ProcessIdentity, timeout_s: float) -> int:
    """``end``, and the removal of the shared memory that remains."""
    num_killed = end(identity, timeout_s)
    clear_files(identity.token)
    return num_killed


def clear_files(token: str) -> bool:
    """Removes what an engine of which no process is left has in shared memory; then its record.

    Returns:
        Whether its folder is gone; else its guard lives, or somebody clears it just now, or another
        process has a file of it, which stays.
    """
    folder = _unlocked(folder_path(token))
    if folder is None:
        return not os.path.lexists(folder_path(token))
    try:
        return _clear(folder, _read(folder, token))
    finally:
        folder.close()


def _unlocked(path: str) -> OwnFolder | None:
    """The folder of an engine whose guard has ended, locked, or None for any other."""
    try:
        folder = OwnFolder.open(path)
    except OSError:
        return None
    try:
        folder.lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # its guard was killed before it had a lock; one that lives goes on
        folder.close()
        with suppress(OSError):
            os.rmdir(path)
        return None
    except OSError:
        folder.close()
        return None
    return folder


def _clear(folder: OwnFolder, record: EngineRecord | None) -> bool:
    """Whether nothing is left.  In another container what is held may be of the engine: it stays,
    with the record, until it is let go."""
    left = [] if record is None else remove_files(list(record.files), record.since_s)
    if left and record is not None and record.identity is None:
        return False
    try:
        folder.remove()
    except OSError as error:
        logger.warning("%s cannot be removed: %s", folder.path, error)
        return False
    return True


def _read(folder: OwnFolder, token: str) -> EngineRecord | None:
    """What the guard has written, or None if it was killed before."""
    with suppress(OSError, *WRONG_FORM):
        values = read_json(folder.read(RECORD, _MOST_BYTES))
        pid, started = map(int, values["engine"])
        identity = identity_at(pid, started, token) if values["place"] == place() else None
        since_s = float(values["since_s"])
        record = EngineRecord(values["name"], identity, tuple(values["files"]), since_s)
        if all(isinstance(text, str) for text in (record.name, *record.files)):
            return record
    return None
