"""The saved state of a stream on disk, kept up to date while samples are generated.

Always true: a file begins with the whole state, and each line behind it has what changed; there is
the newest file, and the one before it for a trainer that restarts from the save before the last
one.  A line that a crash cut short is ignored.  A disk that is full or slow delays no sample: what
is not on disk in time is reported once, and a new file is begun as soon as the disk takes it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import orjson

from engines.plain_json import WRONG_FORM
from engines.process.background import in_own_thread
from engines.process.locks import FileLock
from engines.process.own_files import make_folders, new_file
from rollout.core.errors import ConfigError
from rollout.core.machine import sync_folder
from rollout.driver.data.prompt import PromptSource, checked_name
from rollout.driver.stream.saved_state import Changes, SavedState, State
from rollout.driver.user_code import user_code

logger = logging.getLogger(__name__)

SWEEP_S = 1.0
"""Between two lines while samples are generated."""
_WITHIN_S = 2.0
_AGAIN_S = 10.0
_MAX_BYTES = 1 << 30
_SUFFIX = ".jsonl"
_NAME = "name"
"""The key in the first line of a file: of which data set it is."""

Line = Callable[[Changes, int], State | None]


class JournalFiles:
    """The files of one stream, by number; everything here blocks.

    Args:
        folder: theirs alone, which is created; its name is that of the data set, and in each file.

    Attributes:
        folder: absolute.
        num_bytes: of the newest file, if this process has begun it.

    Raises:
        ConfigError: another driver has it, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._file = -1
        self.num_bytes = 0
        try:
            make_folders(str(self.folder))
            self._lock = FileLock(self.folder / "lock")
            try:
                self._lock.take()
            except OSError:
                self._lock.release()
                raise
        except OSError as error:
            is_locked = isinstance(error, BlockingIOError)
            raise ConfigError(
                f"{'another driver has it' if is_locked else error}; choose another folder",
                setting="journal",
                value=str(folder),
            ) from None

    def numbers(self) -> list[int]:
        """The files that there are, the oldest first."""
        return sorted(int(path.stem) for path in self.folder.glob(f"[0-9]*{_SUFFIX}"))

    def read(self, from_step: int) -> SavedState:
        """What they have, for a trainer that has this step still before it.

        Raises:
            ConfigError: they are of another data set, or a line in front of the last one is
                damaged.
        """
        saved = SavedState(from_step)
        for number in self.numbers():
            for at, line in enumerate(self._lines(self._path(number)), 1):
                if "audit" in line and (name := line.get(_NAME)) != self.folder.name:
                    raise ConfigError(
                        f"{self._path(number).name} is of data set {name!r}, not of "
                        f"{self.folder.name!r}; choose another folder, or rename this one",
                        setting="journal",
                        value=str(self.folder),
                    )
                try:
                    saved.add(line)
                except WRONG_FORM:
                    raise self._damaged(self._path(number), at) from None
        return saved

    def _damaged(self, path: Path, line: int) -> ConfigError:
        return ConfigError(
            f"line {line} of {path.name} is damaged; choose another folder, and restore what "
            "state_of returned, if it was saved",
            setting="journal",
            value=str(self.folder),
        )

    def write(self, lines: Sequence[tuple[bytes, bool]]) -> None:
        """Write lines to the disk, each with whether it begins a file.

        Raises:
            OSError: the disk does not take them; a part of the last one may be there.
        """
        for line, is_first in lines:
            if is_first:
                self._begin(line)
            else:
                self._append(line)
        os.fsync(self._file)

    def _begin(self, line: bytes) -> None:
        """Begin a new file with this line, and remove all but it and the one before.

        Raises:
            OSError: the disk does not take it; the files are those of before.
        """
        self._close_file()
        numbers = self.numbers()
        path = self._path(numbers[-1] + 1 if numbers else 0)
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)  # of a trainer that was killed
        self._file = new_file(str(part))
        self.num_bytes = 0
        try:
            self._append(line)
            os.fsync(self._file)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        sync_folder(self.folder)
        for number in numbers[:-1]:
            self._path(number).unlink(missing_ok=True)

    def _append(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            num = os.write(self._file, rest)
            rest, self.num_bytes = rest[num:], self.num_bytes + num

    def close(self) -> None:
        self._close_file()
        self._lock.release()

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08}{_SUFFIX}"

    def _lines(self, path: Path) -> Iterator[State]:
        damaged = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if damaged:
                    raise self._damaged(path, damaged)
                try:
                    state = orjson.loads(line)
                except orjson.JSONDecodeError:
                    damaged = number
                    continue
                if not isinstance(state, dict):
                    raise self._damaged(path, number)
                yield state


def data_name(source: PromptSource) -> str:
    """The name under which a journal knows a source.

    Raises:
        ConfigError: it has none, or one that cannot be that of a folder.
    """
    name = getattr(source, "name", None)
    if name is None:
        raise ConfigError(
            f"this {type(source).__name__} has no name under which the journal can find it again: "
            "give it an attribute `name`, a text that is the same in each launch",
            setting="name",
        )
    return checked_name(name)


class Journal:
    """Writes the lines of one stream, in its event loop.

    Args:
        line: makes the next line, of groups delivered in this step if it has any.
        on_loss: called with the seconds for which not everything was on disk, once when that is
            noticed; and with 0 when everything is there again.
    """

    def __init__(
        self,
        files: JournalFiles,
        line: Line,
        on_loss: Callable[[float], None] = lambda lost_s: None,
    ) -> None:
        self._files = files
        self._line = line
        self._on_loss = on_loss
        self._changes: Changes | None = None
        self._step = -1
        self._lines: list[tuple[bytes, bool]] = []
        self._thread: Future[None] | None = None  # of the newest write
        self._writing: asyncio.Future[None] | None = None
        self._most_bytes = _MAX_BYTES
        self._written_at_s = self._again_at_s = 0.0
        self._is_lost = self._has_unkept = False
        self._now_s = asyncio.get_running_loop().time

    async def read(self, from_step: int) -> SavedState:
        """What the files have, for a trainer that has this step still before it.

        Raises:
            ConfigError: they are damaged.
        """
        self._step, self._written_at_s = from_step - 1, self._now_s()
        return await asyncio.to_thread(self._files.read, from_step)

    def begin_file(self) -> None:
        """The trainer saves its state: the next line begins a file."""
        self._changes = None

    def note(self, step: int = -1) -> None:
        """Take what has changed until now, for the next ``write``."""
        self._step = max(self._step, step)
        if self._is_lost and (self._writing is not None or self._now_s() < self._again_at_s):
            return
        is_first = self._changes is None or self._files.num_bytes > self._most_bytes
        if self._changes is None or is_first:
            self._changes = Changes(self._step, self._note_unkept)
        try:
            with user_code("the source"):
                line = self._line(self._changes, step)
            if line is not None and is_first:
                line[_NAME] = self._files.folder.name
            data = b"" if line is None else orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
        except Exception as error:  # of the user's source, whose state can be anything
            self._lose(f"it cannot be written as JSON: {error!r:.500}")
            return
        if is_first:
            self._most_bytes = max(_MAX_BYTES, 2 * len(data))
        if data:
            self._lines.append((data, is_first))

    async def write(self) -> None:
        """Wait until all that was noted is on disk, but no longer than it may take."""
        until_s = self._now_s() + _WITHIN_S
        while self._lines or self._writing is not None:
            if self._writing is None:
                lines, self._lines = self._lines, []
                work = partial(self._files.write, lines)
                self._thread = in_own_thread(work, "driver-journal")
                self._writing = asyncio.wrap_future(self._thread)
                self._writing.add_done_callback(self._has_written)
            writing = {self._writing}
            done, _ = await asyncio.wait(writing, timeout=max(0.0, until_s - self._now_s()))
            if not done:
                self._lose(f"the disk has not taken it within {_WITHIN_S:g} s")
                return

    async def close(self) -> None:
        """Write what was noted and give the files back, where the disk is slow as it answers."""
        await self.write()
        if self._writing is None or self._thread is None:
            self._files.close()
        else:  # in its thread, because this loop may have ended then
            self._thread.add_done_callback(lambda _: self._files.close())

    def _note_unkept(self, what: str) -> None:
        """Report the first group that is not kept whole; there may be as many as groups."""
        if not self._has_unkept:
            self._has_unkept = True
            logger.error(
                "driver's journal in %s: %s; a crash now loses them or has them generated again; "
                "others alike are not reported",
                self._files.folder,
                what,
            )

    def _has_written(self, writing: asyncio.Future[None]) -> None:
        self._writing = None
        if (error := writing.exception()) is not None:
            self._lose(str(error))
        elif self._is_lost and self._changes is None:
            self._again_at_s = 0.0  # the disk was slow, and answers now
        elif not self._lines:
            self._written_at_s = self._now_s()
            if self._is_lost:
                self._is_lost = False
                logger.info("driver's journal: everything is on disk again")
                self._on_loss(0.0)

    def _lose(self, why: str) -> None:
        """What was noted is not on disk; a new file will have it."""
        self._changes, self._lines = None, []
        self._again_at_s = self._now_s() + _AGAIN_S
        if not self._is_lost:
            self._is_lost = True
            logger.error(
                "driver's journal in %s: %s; generation goes on, and a crash now loses samples or "
                "delivers some again",
                self._files.folder,
                why,
            )
            self._on_loss(max(_WITHIN_S, self._now_s() - self._written_at_s))
