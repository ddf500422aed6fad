"""One path under which each node of an engine finds a folder of its own.

An engine over several nodes is told one path, and every rank reads it on its own node; what is
assembled has another path on each.

Always true: such a path is a link whose name is used once, for one engine and one version, so it
leads to what was assembled for that, whoever made it; it goes before the folder that it leads to.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def lead(path: Path, folder: Path) -> None:
    """Make ``path`` lead to ``folder``, unless it is there: then another node has the same file
    system, and its folder holds the same."""
    with suppress(FileExistsError):
        path.symlink_to(folder, target_is_directory=True)


def forget(path: Path, folder: Path) -> None:
    """Remove ``path``, if it leads to ``folder`` or below."""
    with suppress(OSError):  # it is gone, or no link
        if Path(os.readlink(path)).is_relative_to(folder):
            path.unlink()


def forget_all(run: Path, folder: Path) -> None:
    """Remove whatever in ``run`` leads to ``folder`` or below."""
    for path in run.iterdir() if run.is_dir() else ():
        if path.is_symlink():
            forget(path, folder)
