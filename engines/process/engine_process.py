"""One engine's processes: started under a guard, awaited, stopped, confirmed gone.

What always holds: the engine's processes end with this process, however it ends (``guard.py``);
``stop`` and ``kill`` return only when the last of them is reaped, so a GPU may be used again; and
no method but these two ends a running engine.  Everything is safe to call again, and from other
event loops and threads than the one that spawned.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from engines.process.guarded_process import KILL, TERMINATE, GuardedProcess
from engines.process.process_identity import resident_bytes_of
from engines.protocol import ProcessIdentity
from engines.protocol.errors import EngineError, EngineHung, EngineNotReady, PortTaken
from engines.protocol.plain_text import shortened

logger = logging.getLogger(__name__)

Probe = Callable[[], Awaitable[bool]]

_TAIL_BYTES = 256 * 1024
# SGLang writes all its settings in one line, of 15 KB.
_LINE_CHARACTERS = 300
_GUARD_START_S = 30.0
_KILL_S = 10.0
_NOTE_S = 5.0


class EngineProcess:
    """A running engine.  Made by ``spawn``; the caller of ``spawn`` stops it.

    If the engine dies by itself, its guard removes it and all it started; ``kill`` then only
    confirms that.
    """

    def __init__(
        self,
        guarded: GuardedProcess,
        *,
        engine_id: str,
        log_path: Path,
        kill_timeout_s: float = _KILL_S,
    ) -> None:
        self.engine_id = engine_id
        self.log_path = log_path
        self._guarded = guarded
        self._kill_timeout_s = kill_timeout_s

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        engine_id: str = "",
        cleanup: Sequence[str] = (),
        folder_variable: str = "",
        kill_timeout_s: float = _KILL_S,
    ) -> EngineProcess:
        """Starts ``command`` and returns when its program is loaded.

        Args:
            log_path: takes its stdout and stderr; appended to, and never removed here.
            env: the whole environment, or None for a copy of this process's own.
            cleanup: glob patterns of files to remove when the engine is gone.  ``{pid}`` stands
                for each of its processes; a pattern without it removes only files in /dev/shm
                that the engine was seen to hold (when it became ready, or when killed).
            folder_variable: the variable that names a folder of this engine alone, for its sockets
                and the like; the folder is removed with the engine.  None is made where ``env``
                has the variable.
            kill_timeout_s: from SIGKILL until the last of its processes is gone.

        Raises:
            EngineNotReady: the guard could not start.  A command that cannot be run is an engine
                that exits with status 127; its log has the reason.
        """
        guarded = GuardedProcess(
            command,
            env=os.environ if env is None else env,
            log_path=log_path,
            cwd=cwd,
            cleanup=cleanup,
            folder_variable=folder_variable,
            name=engine_id,
        )
        process = cls(
            guarded, engine_id=engine_id, log_path=log_path, kill_timeout_s=kill_timeout_s
        )
        try:
            await process._wait(
                lambda: process.pid is not None or process._guarded.is_lost, _GUARD_START_S
            )
            if process.pid is None:
                raise process._not_ready("its guard did not start")
        except BaseException:
            guarded.send(KILL)
            await process._wait(process._is_gone, kill_timeout_s)  # also when cancelled
            raise
        logger.info(
            "engine process started", extra={"engine_id": engine_id, "engine_pid": process.pid}
        )
        return process

    @property
    def pid(self) -> int | None:
        """The engine's main process, leader of its own session and process group."""
        self._guarded.hear()
        return self._guarded.report.pid

    @property
    def identity(self) -> ProcessIdentity | None:
        """Finds it again, also after this process has ended."""
        self._guarded.hear()
        return self._guarded.report.identity

    @property
    def exit_status(self) -> int | None:
        """Exit status like ``Popen.returncode``: None while it runs, negative for a signal."""
        self._guarded.hear()
        return self._guarded.report.exit_status

    def is_alive(self) -> bool:
        """Whether the engine's main process runs."""
        return self.exit_status is None

    async def wait_until_ready(
        self, probe: Probe, deadline_s: float, *, interval_s: float = 0.1
    ) -> None:
        """Returns when ``probe`` returns True.

        A probe that raises an ``EngineError`` other than ``PortTaken`` counts as False.  On
        failure the process keeps running, so that the caller can inspect and then kill it.

        Raises:
            EngineNotReady: it died first, or the deadline came first; with the end of its log.
            PortTaken: of the probe; another program has its port.
        """
        started = time.monotonic()
        last_answer = "not ready"
        try:
            async with asyncio.timeout(deadline_s) as scope:
                while self.is_alive():
                    try:
                        if await probe():
                            break
                    except PortTaken:
                        raise
                    except EngineError as error:
                        last_answer = str(error)
                    await asyncio.sleep(interval_s)
                else:
                    elapsed_s = time.monotonic() - started
                    raise self._not_ready(
                        f"exited with status {self.exit_status} after {elapsed_s:.1f} s"
                    )
        except TimeoutError:
            if not scope.expired():
                raise
            raise self._not_ready(
                f"not ready after {deadline_s:g} s (last probe: {last_answer})"
            ) from None
        await self._note()

    async def stop(self, grace_s: float = 10.0) -> bool:
        """SIGTERM to the process group, after ``grace_s`` SIGKILL to all that remain.

        Cancelled in between, it leaves the rest to the guard: everything is killed at once.

        Returns:
            Whether anything had to be killed.
        """
        self._guarded.send(TERMINATE)
        try:
            if await self._wait(self._is_gone, grace_s):
                return self._guarded.report.num_killed > 0 or self._guarded.is_lost
        except BaseException:
            self._guarded.send(KILL)
            raise
        logger.warning(
            "engine ignored SIGTERM for %g s and is killed",
            grace_s,
            extra={"engine_id": self.engine_id},
        )
        await self.kill()
        return True

    async def kill(self) -> None:
        """SIGKILL to every process of the engine; returns when they are gone.

        The command is sent before the first await, so it holds even if the caller is cancelled.

        Raises:
            EngineHung: something survives SIGKILL (stuck in a driver); its GPU is not free.
        """
        self._guarded.send(KILL)
        timeout_s = self._kill_timeout_s
        if not await self._wait(self._is_gone, timeout_s):
            left = ", ".join(map(str, self._guarded.processes()))
            raise EngineHung(
                f"{self._name}: processes still there {timeout_s:g} s after SIGKILL: {left}",
                engine=self.engine_id,
                operation="kill",
                budget_s=timeout_s,
            )

    def pids(self) -> set[int]:
        """All its processes that run now."""
        self._guarded.hear()
        return set(self._guarded.processes())

    def resident_bytes(self) -> int:
        """Memory of all its processes; pages that they share are counted in each."""
        self._guarded.hear()
        return resident_bytes_of(self._guarded.processes())

    def log_tail(self, num_lines: int = 40) -> str:
        """The last lines this process wrote, each cut to 300 characters."""
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._guarded.log_start, size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        lines = text.splitlines()[-num_lines:]
        return "\n".join(shortened(line, _LINE_CHARACTERS) for line in lines)

    def _is_gone(self) -> bool:
        if self._guarded.is_lost:
            return not self._guarded.sweep()
        return self._guarded.is_gone

    async def _note(self) -> None:
        """Has the guard note what to clean up, while the engine surely lives."""
        self._guarded.note()
        await self._wait(lambda: self._guarded.report.is_noted or not self.is_alive(), _NOTE_S)

    async def _wait(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Polls, for a pipe reader would tie the process to one event loop."""
        deadline = time.monotonic() + timeout_s
        pause_s = 0.002
        while True:
            self._guarded.hear()
            if is_so():
                return True
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            await asyncio.sleep(min(pause_s, remaining_s))
            pause_s = min(1.5 * pause_s, 0.05)

    @property
    def _name(self) -> str:
        return f"engine {self.engine_id}" if self.engine_id else f"engine process {self.pid}"

    def _not_ready(self, what: str) -> EngineNotReady:
        tail = self.log_tail()
        ending = f"; end of {self.log_path}:\n{tail}" if tail else f"; {self.log_path} is empty"
        return EngineNotReady(
            f"{self._name}: {what}{ending}",
            engine=self.engine_id,
            log_tail=tail,
            exit_status=self.exit_status,
        )
