"""Finished turns in files, from which a worker that was killed continues.

A session's file is ``<digest of its id>.jsonl``: a line with the format and the id, and a line for
each turn.  A line is a JSON object that begins with the CRC-32 of all behind it; its arrays are
base64 of unsigned 32-bit ids and of doubles, little-endian, so log-probs keep their bits, NaN too.
Beside it, ``<digest>.pin`` has the version of an adapter that the session stays with, for a start.

Always true: the lines of a file are its turns in their order, all whole but perhaps the last one,
of which the next append takes the place.  A line is at least as long as its turn is in memory,
filled up with spaces: so the length of a file is a bound for both, also before it is read.  No file
is a link, and only the process that has locked the folder changes what is in it.  What was written
outlives this process; without ``fsync``, it does not outlive the machine.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import time
from array import array
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from zlib import crc32

from engines.plain_json import WRONG_FORM, read_json
from engines.process.own_files import (
    OwnFolder,
    make_folders,
    not_ours,
    open_or_new_file,
    why_not_ours,
)
from engines.protocol import FinishReason, VersionSpan
from engines.protocol.logprob_kind import LogprobKind
from rollout.agents.model.alignment import Checkpoint, Drift
from rollout.agents.model.images import NO_IMAGES, Images
from rollout.agents.turns.tree import IDS, LOGPROBS, Generated, Pinned, Prompt, Turn, TurnTree
from rollout.core.errors import RolloutError
from rollout.router.http.fast_json import dumps

logger = logging.getLogger(__name__)

FORMAT = 1
DIGEST_BYTES = 16
_NAME = re.compile(rf"([0-9a-f]{{{2 * DIGEST_BYTES}}})\.jsonl")
_CLOSED = "closed"
_PIN_NAME = re.compile(rf"([0-9a-f]{{{2 * DIGEST_BYTES}}})\.pin")
_MOST_PIN_BYTES = 4096
_BEGIN = b'{"crc32":"'
_NUM_BEGIN = len(b'%s%08x",' % (_BEGIN, 0))
_PIECE = 3 << 18
"""Bytes that are one piece of base64: it takes 1 ms of the interpreter's lock."""
_TEXT_PIECE = _PIECE // 3 * 4
_NOTHING: Mapping[str, bytes] = {}
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class UnreadableSession(Exception):
    """A session's file is damaged, or of another format or session; it is named with the line."""


class FolderInUse(RolloutError):
    """Another process has the folder."""


def digest_of(session_id: str) -> bytes:
    """What a file is named by: so no text of a client is a part of a path."""
    data = session_id.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


# -- lines (pure) -----------------------------------------------------------------------------


def first_line(session_id: str) -> list[bytes]:
    return _line({"format": FORMAT, "session_id": session_id})


def line_of(turn: Turn, pinned: Pinned = ()) -> list[bytes]:
    """A turn as a line, in pieces.

    Args:
        pinned: what its session stays with.
    """
    prompt, generated, finish = turn.prompt, turn.generated, turn.generated.finish
    fields = {
        "turn": turn.number,
        "parent": prompt.parent,
        "drift": prompt.drift,
        "first_difference": prompt.first_difference,
        "checkpoints": [
            (point.num_characters, point.num_ids, point.digest.hex())
            for point in prompt.checkpoints
        ],
        "versions": [(span.version, span.start, span.end) for span in generated.versions],
        "finish": (finish.kind, finish.matched, finish.message),
        "text": generated.text,
        "logprob_kind": generated.logprob_kind,
        "num_cached": generated.num_cached,
        "engine_id": generated.engine_id,
        "digests": [turn.exact.hex(), turn.loose.hex(), turn.asked.hex()],
        "images": (prompt.images.placeholder, prompt.images.digests, prompt.images.sizes),
        "pinned": pinned,
    }
    data = {
        "prompt_ids": array(IDS, prompt.ids).tobytes(),
        "output_ids": array(IDS, generated.ids).tobytes(),
        "output_logprobs": array(LOGPROBS, generated.logprobs).tobytes(),
    }
    if generated.experts is not None:
        data["routed_experts"] = generated.experts
    return _line(fields, data, turn.num_bytes)


def _line(
    fields: Mapping[str, Any], data: Mapping[str, bytes] = _NOTHING, num_bytes: int = 0
) -> list[bytes]:
    pieces, check = [dumps(fields)[1:-1]], 0
    for name, value in data.items():
        pieces.append(b',"%s":"' % name.encode())
        parts = memoryview(value)
        pieces += [
            b2a_base64(parts[at : at + _PIECE], newline=False)
            for at in range(0, len(value), _PIECE)
        ]
        pieces.append(b'"')
    pieces.append(b" " * (num_bytes - sum(map(len, pieces))) + b"}")
    for piece in pieces:
        check = crc32(piece, check)
    return [_begin(check), *pieces, b"\n"]


def _begin(check: int) -> bytes:
    return b'%s%08x",' % (_BEGIN, check)


def _is_whole(line: bytes) -> bool:
    check = crc32(memoryview(line)[_NUM_BEGIN:-1])
    return line.endswith(b"\n") and line.startswith(_begin(check))


@dataclass(slots=True)
class Found:
    """What is in a session's file.

    Attributes:
        pinned: what the session stays with.
        num_bytes: of the whole lines.
    """

    tree: TurnTree = field(default_factory=TurnTree)
    pinned: Pinned = ()
    num_bytes: int = 0


def read_lines(path: str, session_id: str, lines: Iterable[bytes]) -> Found:
    """The turns in the lines of a file.

    A last line that is torn or damaged is not there: its turn was not answered, or is lost alone.

    Raises:
        UnreadableSession: a line before it is damaged, or they are of another format or session.
    """
    found, torn, number = Found(), b"", 0
    for number, line in enumerate(lines, 1):
        if torn:
            raise UnreadableSession(f"{path}, line {number - 1}: it is damaged")
        if not _is_whole(line):
            torn = line
            continue
        try:
            fields = read_json(line)
            if number == 1:
                _check_first(fields, session_id)
            else:
                found.tree.add(_turn_of(fields))
                found.pinned = _pinned_of(fields["pinned"])
        except WRONG_FORM as error:
            raise UnreadableSession(f"{path}, line {number}: {error}") from error
        found.num_bytes += len(line)
    # The quotes of a text are escaped, so this begins a line, whose end before it is damaged.
    if torn.find(_BEGIN, 1) > 0:
        raise UnreadableSession(f"{path}, line {number}: its end is damaged")
    return found


def _check_first(fields: Mapping[str, Any], session_id: str) -> None:
    if fields["format"] != FORMAT:
        raise ValueError(f"it has format {fields['format']!r}, and this program reads {FORMAT}")
    if fields["session_id"] != session_id:
        raise ValueError(f"it is of session {fields['session_id']!r:.300}, not of this one")


def _pinned_of(values: list[Any]) -> Pinned:
    """Raises what ``WRONG_FORM`` has."""
    if not values:
        return ()
    (name,) = values
    if not (name is None or isinstance(name, str)):
        raise ValueError(f"a session stays with {name!r:.80}")
    return (name,)


def _images_of(placeholder: int, digests: list[str], sizes: list[int]) -> Images:
    """Raises what ``WRONG_FORM`` has."""
    return Images(placeholder, tuple(digests), tuple(sizes)) if digests else NO_IMAGES


def _turn_of(fields: Mapping[str, Any]) -> Turn:
    """Raises what ``WRONG_FORM`` has."""
    kind, experts = fields["logprob_kind"], fields.get("routed_experts")
    prompt = Prompt(
        fields["parent"],
        array(IDS, _bytes(fields["prompt_ids"])),
        Drift(fields["drift"]),
        fields["first_difference"],
        [Checkpoint(num, at, bytes.fromhex(text)) for num, at, text in fields["checkpoints"]],
        _images_of(*fields["images"]),
    )
    generated = Generated(
        array(IDS, _bytes(fields["output_ids"])),
        array(LOGPROBS, _bytes(fields["output_logprobs"])),
        tuple(VersionSpan(*span) for span in fields["versions"]),
        FinishReason(*fields["finish"]),
        fields["text"],
        None if experts is None else _bytes(experts),
        None if kind is None else LogprobKind(kind),
        fields["num_cached"],
        fields["engine_id"],
    )
    return Turn(fields["turn"], prompt, generated, *map(bytes.fromhex, fields["digests"]))


def _bytes(text: str) -> bytes:
    pieces = range(0, len(text), _TEXT_PIECE)
    return b"".join([a2b_base64(text[at : at + _TEXT_PIECE]) for at in pieces])


# -- files ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listed:
    """A session's file that was not read.

    Attributes:
        age_s: seconds since its last turn was written.
    """

    digest: bytes
    num_bytes: int
    age_s: float


class SessionFiles:
    """The files of one worker's sessions; all calls block.

    Args:
        path: the folder, which is made if it is not there.

    Raises:
        FolderInUse: another process has it.
        NotOurs: another user may change it.
        OSError: it cannot be used.
    """

    def __init__(self, path: str) -> None:
        make_folders(path)
        self._folder = OwnFolder.open(path)
        try:
            self._folder.lock(fcntl.LOCK_EX | fcntl.LOCK_NB, os.O_CREAT)
        except BlockingIOError:
            self._folder.close()
            raise FolderInUse(
                f"another process keeps its sessions in {path}; end it, or give each worker a "
                "folder of its own"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self._folder.close()
                raise
            logger.warning("%s cannot be locked: %s", path, error)

    def close(self) -> None:
        """Let another process have the folder; repeated calls do nothing."""
        self._folder.close()

    def path_of(self, digest: bytes) -> str:
        return f"{self._folder.path}/{_name(digest)}"

    def listed(self) -> Iterator[Listed]:
        """The session files of the folder.  Files of others are left alone, and logged."""
        now_s = time.time()
        with os.scandir(self._folder.descriptor) as entries:
            for entry in entries:
                if (match := _NAME.fullmatch(entry.name)) is None:
                    continue
                seen = entry.stat(follow_symlinks=False)
                if self._is_ours(seen):
                    age_s = max(0.0, now_s - seen.st_mtime)
                    yield Listed(bytes.fromhex(match[1]), seen.st_size, age_s)
                else:
                    path = f"{self._folder.path}/{entry.name}"
                    logger.warning("%s", why_not_ours(path, seen))

    def read(self, session_id: str) -> Found:
        """The turns of a session.

        Raises:
            UnreadableSession: its file is damaged, or is gone.
            OSError: it cannot be read.
        """
        path = self.path_of(digest_of(session_id))
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            raise UnreadableSession(f"{path}: it is gone") from None
        with os.fdopen(descriptor, "rb") as file:
            seen = os.fstat(descriptor)
            if not self._is_ours(seen):
                raise not_ours(path, seen)
            return read_lines(path, session_id, file)

    def append(self, session_id: str, turn: Turn, pinned: Pinned, at: int) -> int:
        """Write a turn; what fails leaves the turns before it as they are.

        Args:
            at: bytes of the turns before it; what is behind them is cut off.

        Returns:
            bytes with this turn.

        Raises:
            OSError: it cannot be written completely.
        """
        pieces = [] if at else first_line(session_id)
        pieces += line_of(turn, pinned)
        return _append(self.path_of(digest_of(session_id)), pieces, at)

    def remove(self, digest: bytes) -> None:
        """Remove a session's files, if there are any.

        Raises:
            OSError: they cannot be removed, or are not ours.
        """
        folder = self._folder.descriptor
        for name in (_pin_name(digest), _name(digest)):
            with suppress(FileNotFoundError):
                seen = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if not self._is_ours(seen):
                    raise not_ours(f"{self._folder.path}/{name}", seen)
                os.unlink(name, dir_fd=folder)

    def write_pin(self, digest: bytes, name: str) -> None:
        """Write down which version of an adapter a session stays with.

        Raises:
            OSError: it cannot be written.
        """
        self._folder.replace(_pin_name(digest), dumps(name))

    def pins(self) -> dict[bytes, str]:
        """All that ``write_pin`` has written; what cannot be read is left out, and logged."""
        found = {}
        for entry in os.listdir(self._folder.descriptor):
            if (match := _PIN_NAME.fullmatch(entry)) is not None:
                try:
                    name = read_json(self._folder.read(entry, _MOST_PIN_BYTES))
                    found[bytes.fromhex(match[1])] = str(name)
                except (OSError, *WRONG_FORM) as error:
                    logger.warning("%s/%s: %s", self._folder.path, entry, error)
        return found

    def closed(self, most: int) -> tuple[list[bytes], int]:
        """The last digests of closed ids, and the number of all.

        Raises:
            OSError: they cannot be read.
        """
        descriptor = open_or_new_file(f"{self._folder.path}/{_CLOSED}")
        with os.fdopen(descriptor, "rb") as file:
            num = os.fstat(descriptor).st_size // DIGEST_BYTES
            file.seek(max(0, num - most) * DIGEST_BYTES)
            return [file.read(DIGEST_BYTES) for _ in range(min(num, most))], num

    def add_closed(self, digest: bytes) -> None:
        """Write down that an id is closed.

        Raises:
            OSError: it cannot be written.
        """
        path = f"{self._folder.path}/{_CLOSED}"
        num = os.lstat(path).st_size // DIGEST_BYTES
        _append(path, [digest], num * DIGEST_BYTES)

    def replace_closed(self, digests: Iterable[bytes]) -> None:
        """Write all closed ids; raises OSError as ``add_closed`` does."""
        self._folder.replace(_CLOSED, b"".join(digests))

    def _is_ours(self, seen: os.stat_result) -> bool:
        # As on network file systems, where what root makes may belong to another user.
        owners = (os.getuid(), os.fstat(self._folder.descriptor).st_uid)
        return stat.S_ISREG(seen.st_mode) and seen.st_uid in owners


def _name(digest: bytes) -> str:
    return f"{digest.hex()}.jsonl"


def _pin_name(digest: bytes) -> str:
    return f"{digest.hex()}.pin"


def _append(path: str, pieces: Sequence[bytes], at: int) -> int:
    num_bytes = sum(map(len, pieces))
    descriptor = open_or_new_file(path, os.O_APPEND)
    try:
        num_before = os.fstat(descriptor).st_size
        if num_before < at:
            raise OSError(errno.EIO, f"it has {num_before} bytes, and had {at}")
        if num_before > at:
            os.ftruncate(descriptor, at)
        num_written = os.writev(descriptor, pieces)
        if num_written < num_bytes:
            raise OSError(errno.ENOSPC, f"{num_written} of {num_bytes} bytes were written")
    except OSError as error:
        with suppress(OSError):  # then the next append does it
            os.ftruncate(descriptor, min(at, os.fstat(descriptor).st_size))
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(descriptor)  # some network file systems fail only here
    return at + num_bytes
