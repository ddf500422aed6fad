"""The sessions of one worker by id, within bounds, with a file for each.

Always true: a turn that is in a session's tree is in its file.  Files, and an entry for each, take
at most ``max_bytes`` and the turns that go past it, and no turn takes more in memory than in its
file.  There are at most ``max_sessions``, and of closed ones only digests.  When a bound is
reached, a further turn is refused before it is generated.  A session is kept until it is deleted or
has been idle for ``ttl_s``; one with a turn under way is not idle.

One thread writes and removes files, in the order of the calls: so the file of a session that has
ended is gone before another one of its id begins, and the event loop waits for no disk.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from engines.process.background import start_task
from rollout.agents.model.alignment import Drift
from rollout.agents.turns.files import SessionFiles, digest_of
from rollout.agents.turns.tree import Generated, Pinned, Prompt, Turn, TurnTree
from rollout.agents.wire.messages import History, Message

logger = logging.getLogger(__name__)

MAX_ID_CHARACTERS = 256
_BYTES_PER_SESSION = 4096
"""Memory of an empty session with the longest id, including its entry in an index."""
_MOST_EXPIRED_AT_ONCE = 32


@dataclass(eq=False, slots=True)
class Session:
    """One session, with its turns.

    Attributes:
        seen_s: end of its last turn.
        digest, id: of its id, and the id, which is not known before the first request.
        file_bytes: of the whole lines of its file.
        num_running: turns under way, and readings.
        pinned: what its turns stay with.
        tree: empty as long as it is not loaded.
        lock: held where ``tree`` and file change.
    """

    seen_s: float
    digest: bytes = b""
    id: str = ""
    file_bytes: int = 0
    num_running: int = 0
    pinned: Pinned = ()
    tree: TurnTree = field(default_factory=TurnTree)
    is_loaded: bool = True
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionStore:
    """Sessions, in the order of ``seen_s``; used on the event loop only.

    Those in the folder are there from the beginning, and are read when a request names them.

    Args:
        files: closed by ``stop``.
        now_s: the present time, as in all calls.

    Attributes:
        num_bytes: of files, and ``_BYTES_PER_SESSION`` for each session: equal before and after a
            restart.
        on_end: called with a session that has ended.
        num_turns: finished turns of all sessions in this process, also of closed ones, by drift.

    Raises:
        OSError: the folder cannot be read.
    """

    def __init__(
        self,
        files: SessionFiles,
        *,
        max_bytes: int,
        max_sessions: int,
        ttl_s: float,
        now_s: float = 0.0,
    ) -> None:
        self._files = files
        self._max_bytes = max_bytes
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._keeping: set[asyncio.Task[Turn]] = set()
        self._thread = ThreadPoolExecutor(1, "turn-files")
        self._is_stopped = False
        self.on_end: Callable[[Session], None] = lambda session: None
        self.num_bytes = 0
        self.num_turns = dict.fromkeys(Drift, 0)
        closed, self._num_closed_written = files.closed(max_sessions)
        self._closed = OrderedDict.fromkeys(closed)
        for file in sorted(files.listed(), key=lambda listed: -listed.age_s):
            if file.digest in self._closed:  # killed before it could remove it
                self._remove(file.digest)
                continue
            session = Session(now_s - file.age_s, file.digest, is_loaded=False)
            self._sessions[file.digest] = session
            self.num_bytes += _BYTES_PER_SESSION
            self._set_file_bytes(session, file.num_bytes)
        for digest, name in files.pins().items():
            if digest in self._sessions:
                self._sessions[digest].pinned = (name,)
            else:  # killed before its first turn was written
                self._remove(digest)

    def stop(self) -> None:
        """Write what is to be written, which blocks, and let another process have the folder."""
        self._is_stopped = True
        self._thread.shutdown()
        self._files.close()

    def why_full(self, session_id: str, now_s: float) -> str:
        """Why another turn of this session cannot be kept."""
        self.expire(now_s)
        if self.num_bytes >= self._max_bytes:
            return (
                f"sessions take {self.num_bytes} of {self._max_bytes} bytes "
                "(agents.max_session_bytes); take their samples and close them"
            )
        is_new = digest_of(session_id) not in self._sessions
        if is_new and len(self._sessions) >= self._max_sessions:
            return f"{len(self._sessions)} sessions are open (agents.max_sessions); close some"
        return ""

    def why_closed(self, session_id: str) -> str:
        """Why this session takes no further turn."""
        if digest_of(session_id) not in self._closed:
            return ""
        return (
            f"session {session_id} was closed, so this turn would not be collected; give each "
            "conversation an id of its own"
        )

    # -- versions of adapters -----------------------------------------------------------------

    def staying(self) -> list[tuple[bytes, str]]:
        """Digests of the sessions that stay with an adapter's version, and the version."""
        stay = [(digest, session.pinned) for digest, session in self._sessions.items()]
        return [(digest, pinned[0]) for digest, pinned in stay if pinned and pinned[0] is not None]

    async def stay(self, session: Session, name: str) -> None:
        """Write down which version a session stays with, so that ``staying`` has it at a start.

        Raises:
            OSError: it cannot be written.
        """
        if self._has(session) and not self._is_stopped:
            writing = partial(self._files.write_pin, session.digest, name)
            await asyncio.wrap_future(self._thread.submit(writing))

    # -- turns --------------------------------------------------------------------------------

    async def begin_turn(self, session_id: str, now_s: float) -> Session:
        """The session, loaded; it is made if there is none, before the first ``await`` of this.

        ``end_turn`` must follow; a session without a turn ends with it.

        Raises:
            UnreadableSession, OSError: its file cannot be read; no ``end_turn`` follows.
        """
        digest = digest_of(session_id)
        session = self._sessions.get(digest)
        if session is None:
            session = self._sessions[digest] = Session(now_s, digest)
            self.num_bytes += _BYTES_PER_SESSION
        session.id = session_id
        session.num_running += 1
        try:
            await self._load(session)
        except BaseException:
            self.end_turn(session, now_s)
            raise
        return session

    async def keep(
        self,
        session: Session,
        history: History,
        prompt: Prompt,
        generated: Generated,
        answer: Message,
    ) -> Turn:
        """Keep a finished turn: first in the file, then in the tree.

        Turns of one session are kept one behind the other.  A caller that is cancelled meanwhile
        does not end it.  A session that was closed meanwhile has no file.

        Raises:
            ValueError, OverflowError, TypeError: as ``TurnTree.made`` does.
            OSError: it cannot be written; it is not kept.
        """
        session.num_running += 1
        parts = (history, prompt, generated, answer)
        keeping = start_task(self._keep(session, *parts), "turn-keep")
        self._keeping.add(keeping)
        keeping.add_done_callback(self._keeping.discard)
        return await asyncio.shield(keeping)

    async def _keep(
        self,
        session: Session,
        history: History,
        prompt: Prompt,
        generated: Generated,
        answer: Message,
    ) -> Turn:
        try:
            async with session.lock:
                turn = session.tree.made(history, prompt, generated, answer)
                if self._has(session):
                    await self._write(session, turn)
                session.tree.add(turn)
            self.num_turns[prompt.drift] += 1
            return turn
        finally:
            self.end_turn(session, session.seen_s)

    async def _write(self, session: Session, turn: Turn) -> None:
        if self._is_stopped:
            raise OSError(errno.ESHUTDOWN, "this worker of agents stops")
        at = session.file_bytes
        writing = partial(self._files.append, session.id, turn, session.pinned, at)
        num_bytes = await asyncio.wrap_future(self._thread.submit(writing))
        if self._has(session):
            self._set_file_bytes(session, num_bytes)

    def end_turn(self, session: Session, now_s: float) -> None:
        session.num_running -= 1
        session.seen_s = now_s
        if self._has(session):  # it was not deleted meanwhile
            self._sessions.move_to_end(session.digest)
            self._end_if_empty(session)

    def _end_if_empty(self, session: Session) -> None:
        if session.is_loaded and not (session.tree.turns or session.num_running):
            self._delete(session.digest)

    async def get(self, session_id: str) -> Session | None:
        """A session, whose turns can be read until the next ``await``.

        Raises:
            UnreadableSession, OSError: its file cannot be read.
        """
        session = self._sessions.get(digest_of(session_id))
        if session is None:
            return None
        session.id = session_id
        session.num_running += 1
        try:
            await self._load(session)
        finally:
            session.num_running -= 1
        if self._has(session):
            self._end_if_empty(session)  # where the only line of its file is torn
        return session if self._has(session) else None

    async def _load(self, session: Session) -> None:
        if not session.is_loaded:
            async with session.lock:
                await self._read(session)

    async def _read(self, session: Session) -> None:
        if session.is_loaded:  # by another request meanwhile
            return
        found = await asyncio.to_thread(self._files.read, session.id)
        session.tree, session.pinned = found.tree, found.pinned
        session.is_loaded = True
        if self._has(session):
            self._set_file_bytes(session, found.num_bytes)

    # -- ends ---------------------------------------------------------------------------------

    async def close(self, session_id: str) -> bool:
        """Delete a session; the last ``max_sessions`` ids that were closed take no further turn.

        Returns:
            Whether there was one; no other id is kept, so that those of strangers displace none.
        """
        digest = digest_of(session_id)
        if digest not in self._sessions:
            return False
        self._forget(digest)
        self._closed[digest] = None
        if len(self._closed) > self._max_sessions:
            self._closed.popitem(last=False)
        if self._num_closed_written < 2 * self._max_sessions:
            writing = partial(self._files.add_closed, digest)
            self._num_closed_written += 1
        else:
            writing = partial(self._files.replace_closed, list(self._closed))
            self._num_closed_written = len(self._closed)
        self._in_thread(writing)
        await asyncio.wrap_future(self._remove(digest))
        return True

    def expire(self, now_s: float) -> None:
        """Delete sessions that have been idle for too long, some of them at a time."""
        since_s = now_s - self._ttl_s
        expired: list[bytes] = []
        for digest, session in self._sessions.items():
            if session.seen_s > since_s or len(expired) == _MOST_EXPIRED_AT_ONCE:
                break
            if not session.num_running:
                expired.append(digest)
        for digest in expired:
            self._delete(digest)

    def _delete(self, digest: bytes) -> None:
        self._forget(digest)
        self._remove(digest)

    def _forget(self, digest: bytes) -> None:
        session = self._sessions.pop(digest)
        self.on_end(session)
        self._set_file_bytes(session, 0)
        self.num_bytes -= _BYTES_PER_SESSION

    def _remove(self, digest: bytes) -> Future[None]:
        return self._in_thread(partial(self._files.remove, digest))

    def _in_thread(self, work: Callable[[], None]) -> Future[None]:
        """The end of work that may fail: the next start finds what is still there."""
        if self._is_stopped:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return self._thread.submit(_logged, work)

    def _has(self, session: Session) -> bool:
        return self._sessions.get(session.digest) is session

    def _set_file_bytes(self, session: Session, num_bytes: int) -> None:
        self.num_bytes += num_bytes - session.file_bytes
        session.file_bytes = num_bytes


def _logged(work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        logger.warning("sessions: %s", error)
