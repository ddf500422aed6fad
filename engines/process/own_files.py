"""Folders and files of ours where others can put theirs: shared memory, and wherever a user wants.

Always true: what is made here was not there before, and is no link; what is opened, locked or
removed is what its descriptor says, and belongs to this user, so a stranger's link, folder or file
of the same name is left as it is and named with its owner and mode.  Who lives is answered by the
kernel: a lock on a folder or file ends with its process, in whatever container that is, and a file
that any process has open or mapped is not removed.

Standard library only, and little of it: every guard imports it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from contextlib import suppress

SHARED_MEMORY = "/dev/shm"
_LOCK = ".held"
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotOurs(PermissionError):
    """What is at a path belongs to another user, or others may change it; it was not touched."""


class OwnFolder:
    """An open folder of this user, in which no other user can put anything.

    Who uses it has locked a file in it; a folder without that file is not known to be of this
    library.

    Attributes:
        path: where it was made or found.
        descriptor: descriptor of the folder; what is in it is named relative to that.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._lock = -1

    @classmethod
    def make(cls, path: str, lock: int = fcntl.LOCK_SH, mode: int = 0o700) -> OwnFolder:
        """A new folder, which is locked, unless its file system has no locks.

        Args:
            lock: ``fcntl.LOCK_SH`` or ``LOCK_EX``.

        Raises:
            FileExistsError: something is there.
            OSError: it cannot be made.
        """
        while True:
            os.mkdir(path, mode)
            with suppress(FileNotFoundError):  # not locked yet, it was taken for a leftover
                folder = cls.open(path)
                try:
                    folder._lock = new_file(_LOCK, folder.descriptor)
                    with suppress(OSError):  # some network file systems have no locks
                        fcntl.flock(folder._lock, lock)
                    if folder.is_locked_there():
                        return folder
                except BaseException:
                    folder.close()
                    raise
                folder.close()

    @classmethod
    def open(cls, path: str, forbidden: int = _OTHERS_WRITE) -> OwnFolder:
        """The folder that is there.

        Args:
            forbidden: what of its mode others may not have.

        Raises:
            FileNotFoundError: nothing is there.
            NotOurs: it is no folder, or another user's, who does not own the folder that it is in
                either, or others may write in it.
        """
        try:
            descriptor = os.open(path, _FOLDER_FLAGS)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
                raise not_ours(path, os.lstat(path)) from None
            raise
        found = os.fstat(descriptor)
        if not _is_expected(path, found) or found.st_mode & forbidden:
            os.close(descriptor)
            raise not_ours(path, found)
        return cls(path, descriptor)

    def lock(self, how: int, flags: int = 0) -> None:
        """Lock it, as others have who made it.

        Args:
            how: operation of ``fcntl.flock``.
            flags: ``os.O_CREAT`` also for a folder without a file to lock.

        Raises:
            FileNotFoundError: it has no file to lock, or is removed.
            OSError: another process has a lock that forbids it, or its file system has no locks.
        """
        flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(_LOCK, flags, 0o600, dir_fd=self.descriptor)
        fcntl.flock(self._lock, how)
        if not self.is_locked_there():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)

    def try_alone(self) -> None:
        """The only lock, of one that is locked already.

        Raises:
            OSError: another process has one, or its file system has no locks.
        """
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def is_locked_there(self) -> bool:
        """Whether its path still leads to it, and its lock is the one that others see."""
        try:
            at_path, in_it = os.lstat(self.path), os.stat(_LOCK, dir_fd=self.descriptor)
            is_there = os.path.samestat(at_path, os.fstat(self.descriptor))
            return is_there and os.path.samestat(in_it, os.fstat(self._lock))
        except OSError:
            return False

    def read(self, name: str, most_bytes: int) -> bytes:
        """A small file in it.

        Raises:
            OSError: it cannot be read, or is no file.
            ValueError: it is larger.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self.descriptor)
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(min(os.fstat(descriptor).st_size, most_bytes) + 1)
        if len(content) > most_bytes:
            raise ValueError(f"{self.path}/{name} has more than {most_bytes} bytes")
        return content

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file in it, completely or not at all: then the old one stays.

        Raises:
            OSError: it cannot be written.
        """
        part = f"{name}.part"
        with suppress(FileNotFoundError):  # of a process that was killed
            os.unlink(part, dir_fd=self.descriptor)
        descriptor = new_file(part, self.descriptor)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.rename(part, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except OSError:
            os.unlink(part, dir_fd=self.descriptor)
            raise

    def remove(self) -> None:
        """Remove it with all that is in it, and close it.  Links in it are not followed.

        The file that is locked goes last: then a removal that was killed is done again.

        Raises:
            OSError: something in it cannot be removed; the rest is gone.
        """
        import shutil  # not at the start of a guard

        try:
            if not self.is_locked_there():
                return
            for name in os.listdir(self.descriptor):
                if name == _LOCK:
                    continue
                if stat.S_ISDIR(os.lstat(name, dir_fd=self.descriptor).st_mode):
                    shutil.rmtree(name, ignore_errors=True, dir_fd=self.descriptor)
                else:
                    with suppress(OSError):
                        os.unlink(name, dir_fd=self.descriptor)
            if left := set(os.listdir(self.descriptor)) - {_LOCK}:
                what = f"{', '.join(sorted(left))} in it cannot be removed"
                raise OSError(errno.ENOTEMPTY, what, self.path)
            os.unlink(_LOCK, dir_fd=self.descriptor)
            with suppress(OSError):  # another process removes it, too
                os.rmdir(self.path)
        finally:
            self.close()

    def close(self) -> None:
        """Let it go, and its lock; repeated calls do nothing."""
        for descriptor in (self._lock, self.descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock = self.descriptor = -1


def new_file(name: str, folder: int | None = None, mode: int = 0o600) -> int:
    """The descriptor of a new file, to write.

    Args:
        folder: the descriptor of the folder that a relative name is in.

    Raises:
        FileExistsError: something is there, maybe a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, mode, dir_fd=folder)


def make_folders(path: str) -> None:
    """Make a folder, and what is missing above it, for this user alone; or accept what is there.

    A folder that is there, or the one that a link of this user leads to, belongs to this user, or
    to the owner of the folder that it is in.  In no folder above it another user may have put what
    is on the way.

    Raises:
        NotOurs: what is there may be another user's.
        OSError: it cannot be made.
    """
    _check_way(path)
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        make_folders(os.path.dirname(os.path.abspath(path)))
        make_folders(path)
    except FileExistsError:
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode) and _is_expected(path, found):
            found = os.stat(path)
        if not stat.S_ISDIR(found.st_mode) or not _is_expected(path, found):
            raise not_ours(path, found) from None


def _check_way(path: str) -> None:
    """Refuse a path on which another user put something into a folder that everybody writes."""
    for way in (os.path.abspath(path), os.path.realpath(path)):
        parent = os.path.dirname(way)
        while way != parent:
            with suppress(FileNotFoundError, NotADirectoryError):
                found, above = os.lstat(way), os.stat(parent)
                is_planted = found.st_uid not in (os.getuid(), 0, above.st_uid)
                if above.st_mode & stat.S_IWOTH and is_planted:
                    raise not_ours(way, found)
            way, parent = parent, os.path.dirname(parent)


def open_or_new_file(path: str, flags: int = 0) -> int:
    """The descriptor of a file, to read and write, which is made for this user if there is none.

    One that is there is no link, and belongs to this user, or to the owner of its folder.

    Args:
        flags: more of those of ``os.open``.

    Raises:
        NotOurs: what is there may be another user's.
        OSError: it cannot be opened.
    """
    flags |= os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EACCES) and os.path.lexists(path):
            raise not_ours(path, os.lstat(path)) from None
        raise
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and _is_expected(path, found):
        os.set_blocking(descriptor, True)  # it may become an output of a program
        return descriptor
    os.close(descriptor)
    raise not_ours(path, found)


def _is_expected(path: str, found: os.stat_result) -> bool:
    # The second: on some network file systems what root makes belongs to another user.
    return found.st_uid in (os.getuid(), os.stat(os.path.dirname(os.path.abspath(path))).st_uid)


def remove_unused_file(path: str, since_s: float = 0.0) -> bool:
    """Remove a file of this user that no process has open or mapped, in any container.

    The kernel grants a lease for writing only on such a file (``F_SETLEASE`` in ``fcntl(2)``).

    Args:
        since_s: a file that was last changed before this time, in seconds since 1970, stays.

    Returns:
        Whether nothing is there any more.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            return False
        if found.st_ctime < since_s:
            return False
        # Who opens it during the lease would make the kernel send SIGIO, which ends a process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        if os.path.samestat(os.lstat(path), found):
            os.unlink(path)
        return True
    except FileNotFoundError:
        return True
    except OSError:  # in use
        return False
    finally:
        os.close(descriptor)


def not_ours(path: str, found: os.stat_result) -> NotOurs:
    """The error for what is at a path."""
    return NotOurs(errno.EACCES, why_not_ours(path, found), path)


def why_not_ours(path: str, found: os.stat_result) -> str:
    """What is at a path, in words, with its owner and mode."""
    mode = found.st_mode
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFREG: "a file"}
    what = kinds.get(stat.S_IFMT(mode), "no folder and no file")
    return (
        f"{path} is {what}, of uid {found.st_uid} with mode {stat.S_IMODE(mode):04o}; another user "
        f"than uid {os.getuid()} may have put it there or may change it, so it is not used"
    )
