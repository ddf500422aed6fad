"""Folders of the store: of this user alone, although anyone can predict their names.

Always true: a folder that was made or accepted here is no link, belongs to this user, and no other
user may enter it; so what lies in it was put there by this user or by root.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from engines.process.own_files import NotOurs, OwnFolder
from rollout.core.errors import WeightsUnavailable

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
    """Why the store does not use what is at this path, and what to do; empty if it does.

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


def own_folders(folder: Path) -> list[Path]:
    """The folders in ``folder`` that belong to this user; what is a link is none."""
    with os.scandir(folder) as entries:
        return sorted(Path(entry.path) for entry in entries if _is_own_folder(entry))


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # it was removed meanwhile
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
