"""Errors of the operating system in a user's words: the setting, its path, and the way out."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout.core.errors import ConfigError, RolloutError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_FOLDER = (errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.EISDIR)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)


def way_out(error: OSError, setting: str) -> str:
    """What to do about an error at the path of a setting."""
    if error.errno in _NO_SPACE:
        return f"free space there (in Docker, /dev/shm has --shm-size), or set {setting} elsewhere"
    if error.errno in _REFUSED:
        return f"make it writable for this user, or set {setting} to a folder that is"
    if error.errno in _NO_FOLDER:
        return f"set {setting} to a folder"
    if error.errno in _TOO_MANY:
        return "raise the limit of open files: ulimit -n"
    return f"check {setting}"


@contextmanager
def naming_setting(
    setting: str, path: str | Path, raised: type[RolloutError] = ConfigError
) -> Iterator[None]:
    """A block that uses ``path``; an OSError in it becomes an error that names the setting."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        message = f"{setting} = {str(path)!r}: {error.strerror or error} ({where})"
        message = f"{message}; {way_out(error, setting)}"
        if raised is ConfigError:
            raise ConfigError(message, setting=setting, value=str(path)) from error
        raise raised(message) from error


def why_not_writable(path: str | Path) -> str:
    """Why no files can be made in this folder.

    A folder that does not exist is judged by the folder in which it would be made.
    """
    place = Path(path).absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        return f"{place} is not a folder"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} cannot be written by this user"
    return ""
