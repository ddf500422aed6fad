"""Folders of the store: of this user alone, although anyone can predict their names.

Always true: a folder that was made or accepted here is no link, belongs to this user, and no other
user may enter it; so what lies in it was put there by this user or by root.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rollout.core.errors import WeightsUnavailable

_MODE = 0o700


def base_folder(path: str) -> Path:
    """The folder of all runs of this user, in the folder of ``weights.store.path``."""
    return Path(path) / f"rollout-store-{os.getuid()}"


def make_private_folder(path: Path) -> None:
    """Make a folder, or accept the one that is there.

    Raises:
        WeightsUnavailable: what is there may be another user's; it is not touched.
        OSError: it cannot be made.
    """
    try:
        path.mkdir(mode=_MODE)
    except FileExistsError:
        if why_not := why_not_private(path):
            raise WeightsUnavailable(why_not) from None


def why_not_private(path: Path) -> str:
    """Why the store does not use what is at this path, and what to do; empty if it does.

    Raises:
        FileNotFoundError: nothing is there.
    """
    found, own = path.lstat(), os.getuid()
    mode = stat.S_IMODE(found.st_mode)
    is_folder = stat.S_ISDIR(found.st_mode)
    if is_folder and found.st_uid == own and mode & 0o777 == _MODE:
        return ""
    what = "a folder" if is_folder else "a link" if stat.S_ISLNK(found.st_mode) else "no folder"
    return (
        f"{path} is {what}, of uid {found.st_uid} with mode {mode:04o}, and not a folder of uid "
        f"{own} with mode {_MODE:04o}, so another user may have put it there: remove it, or set "
        "weights.store.path to a folder that only this user can write"
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
