"""The folder of all runs of a user on a node, although anyone can predict its name.

    <base>/<run>/<node>/    held by the node's agent, as long as its process lives

Always true: a folder that was made or accepted here is no link, belongs to this user, and no other
user may enter it; so what lies in it was put there by this user or by root.  A node's folder is
removed only while no agent holds it; what is a link, or belongs to another user, is left alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from engines.process.locks import remove_unheld
from engines.process.own_files import NotOurs, OwnFolder
from rollout.core.errors import WeightsUnavailable

logger = logging.getLogger(__name__)

RETURNS = "returns"
"""A file in the folder of an agent that is started again when its process ends."""
_RETURN_S = 30.0
_LOCK = ".held"  # of an ``OwnFolder``
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def base_folder(path: str) -> Path:
    """The folder of all runs of this user, in the folder of ``weights.store.path``."""
    return Path(path) / f"rollout-store-{os.getuid()}"


def make_private_folder(path: Path) -> OwnFolder:
    """Make a folder, or accept the one that is there; returns it open.

    Raises:
        WeightsUnavailable: what is there may be another user's; it is not touched.
        OSError: it cannot be made.
    """
    while True:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            return OwnFolder.open(str(path), _OTHERS)
        except NotOurs as error:
            raise WeightsUnavailable(_refusal(error)) from None
        except FileNotFoundError:  # another process has just removed it
            if not path.parent.is_dir():
                raise


def why_not_private(path: Path) -> str:
    """Why the store does not use what is at this path, and what to do.

    Raises:
        FileNotFoundError: nothing is there.
    """
    try:
        OwnFolder.open(str(path), _OTHERS).close()
    except NotOurs as error:
        return _refusal(error)
    return ""


def _refusal(error: NotOurs) -> str:
    return (
        f"{error.strerror}: remove it, or set weights.store.path to a folder that only this user "
        "can write"
    )


@contextmanager
def locked(base: Path) -> Iterator[None]:
    """Meanwhile no other process starts or sweeps a run below ``base``. A kill releases it.

    Raises:
        WeightsUnavailable: ``base`` is not a folder that only this user can enter.
        OSError: there can be no lock on it.
    """
    while True:
        with closing(make_private_folder(base)) as folder:
            try:
                folder.lock(fcntl.LOCK_EX, os.O_CREAT)
            except FileNotFoundError:  # another process has just removed it
                continue
            yield
            return


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that is empty but for the file that ``locked`` locks."""
    with suppress(OSError):  # it is in use
        if os.listdir(folder) == [_LOCK]:
            (folder / _LOCK).unlink(missing_ok=True)
        folder.rmdir()


class Leftovers:
    """The folders below ``base`` that no agent holds."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._unheld_since: dict[Path, float] = {}

    def sweep(self, return_s: float = _RETURN_S) -> list[str]:
        """Remove them; returns their names.  Needs the lock of ``base``.

        Args:
            return_s: one with a file ``RETURNS`` stays until it was found without an agent for so
                long.
        """
        now_s, before, gone = time.monotonic(), self._unheld_since, list[str]()
        self._unheld_since = {}
        for run in _own_folders(self._base):
            for folder in filter(_is_unheld, _own_folders(run)):
                since_s = self._unheld_since[folder] = before.get(folder, now_s)
                if (folder / RETURNS).exists() and now_s < since_s + return_s:
                    continue
                if remove_unheld(folder, partial(remove_links, run), is_known=True):
                    gone.append(f"{run.name}/{folder.name}")
            remove_if_empty(run)
        if gone:
            logger.info("store: removed files of crashed runs: %s", ", ".join(gone))
        return gone


def _own_folders(folder: Path) -> list[Path]:
    """The folders in ``folder`` that belong to this user; what is a link is none."""
    with os.scandir(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if _is_own_folder(entry))


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # it was removed meanwhile
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _is_unheld(folder: Path) -> bool:
    with suppress(OSError), closing(OwnFolder.open(str(folder))) as own:
        own.lock(fcntl.LOCK_EX | fcntl.LOCK_NB, os.O_CREAT)
        return True
    return False


# -- links ----------------------------------------------------------------------------------------

# An engine over several nodes gets one path, and every rank reads it on its own node.  Links give
# the assembled folders, whose paths differ, the same path on every node.  A link's name is used
# once, for one engine and one version, so it points to the right folder, whichever node created
# it; it is removed before its folder.


def create_link(path: Path, folder: Path) -> None:
    """Link ``path`` to ``folder``. An existing link is kept: then another node shares the file
    system, and its folder has the same contents."""
    with suppress(FileExistsError):
        path.symlink_to(folder, target_is_directory=True)


def remove_link(path: Path, folder: Path) -> None:
    """Remove ``path`` if it points to ``folder`` or below."""
    with suppress(OSError):  # it does not exist, or is no link
        if Path(os.readlink(path)).is_relative_to(folder):
            path.unlink()


def remove_links(run: Path, folder: Path) -> None:
    """Remove all links in ``run`` that point to ``folder`` or below; ``run`` itself is no link."""
    for path in run.iterdir() if run.is_dir() and not run.is_symlink() else ():
        if path.is_symlink():
            remove_link(path, folder)
