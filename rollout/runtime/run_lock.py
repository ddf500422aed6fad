"""The lock of a run's folder: one launch of a run id at a time.

Always true: the lock ends with its process, also after SIGKILL, and a forked child does not hold
it.  The file stays, with the id of the last launch.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path

from rollout.config.run_dir import LAUNCH_FILE, RunFolder
from rollout.core.errors import ConfigError
from rollout.core.os_errors import naming_setting

logger = logging.getLogger(__name__)

_NUM_BYTES = 512


class RunLock:
    """Held by one launch, from before anything is started until everything has stopped.

    Raises:
        ConfigError: another launch of this run id still runs, or the folder cannot be written.
    """

    def __init__(self, run: RunFolder) -> None:
        path = run.path / LAUNCH_FILE
        with naming_setting("log_dir", run.path.parent):
            run.path.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _LOCKED.add(self)
        try:
            self._take(run, path)
            with naming_setting("log_dir", run.path.parent):
                self._write()
        except BaseException:
            self.release()
            raise

    def _take(self, run: RunFolder, path: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run_id = {run.run_id!r}: this run is launched already, by {_owner(path)}; end it "
                f"(rollout stop {run.path}), or choose another run_id",
                setting="run_id",
                value=run.run_id,
            ) from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked: %s", path, error)

    def _write(self) -> None:
        values = {
            "launch": f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}",
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        # The lock is on this file, so it is not replaced.  One write of one length: a kill leaves
        # the old values or the new ones.
        os.pwrite(self._descriptor, json.dumps(values).ljust(_NUM_BYTES).encode(), 0)

    def release(self) -> None:
        """Let another launch take the folder; repeated calls do nothing."""
        if self in _LOCKED:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a child may be forked just now
            self.forget()

    def forget(self) -> None:
        """In a forked child: leave the lock to the parent alone."""
        _LOCKED.discard(self)
        os.close(self._descriptor)


def _owner(path: Path) -> str:
    try:
        values = json.loads(path.read_bytes())
        return f"process {values['pid']} on {values['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


_LOCKED: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_LOCKED):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
