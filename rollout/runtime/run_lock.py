"""The lock of a run's folder: one launch of a run id at a time.

Always true: the lock ends with its process.  The file stays, with the id of the last launch.
"""

from __future__ import annotations

import logging
import secrets
import time
from pathlib import Path

from engines.process.locks import FileLock, owner_of, read_values
from engines.process.own_files import make_folders
from rollout.config.run_dir import LAUNCH_FILE, RunFolder
from rollout.core.errors import ConfigError
from rollout.core.os_errors import naming_setting

logger = logging.getLogger(__name__)


class RunLock:
    """Held by one launch, from before anything is started until everything has stopped.

    Args:
        is_detached: the launch outlives its script, and can be connected to.

    Raises:
        ConfigError: another launch of this run id still runs, or the folder cannot be written.
    """

    def __init__(self, run: RunFolder, *, is_detached: bool = False) -> None:
        path = run.path / LAUNCH_FILE
        with naming_setting("log_dir", run.path.parent):
            make_folders(str(run.path))
            self._file = FileLock(path)
        try:
            self._take(run, path)
            launched = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
            with naming_setting("log_dir", run.path.parent):
                self._file.write(
                    launch=f"{launched}-{secrets.token_hex(2)}",
                    **({"detached": "true"} if is_detached else {}),
                )
        except BaseException:
            self.release()
            raise

    def _take(self, run: RunFolder, path: Path) -> None:
        try:
            self._file.take()
        except BlockingIOError:
            way_out = f"end it (rollout stop {run.path})"
            if read_values(path).get("detached"):
                way_out = (
                    f"it is detached: go on with it (rollout.connect({run.run_id!r}, "
                    f"backend='ray')), end it (rollout stop {run.run_id} --ray)"
                )
            raise ConfigError(
                f"run_id = {run.run_id!r}: this run is launched already, by {owner_of(path)}; "
                f"{way_out}, or choose another run_id",
                setting="run_id",
                value=run.run_id,
            ) from None
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked: %s", path, error)

    def release(self) -> None:
        """Let another launch take the folder; repeated calls do nothing."""
        self._file.release()
