"""The runs in the folder of this page's run with their servers, and what two runs are compared by.

Always true: only runs and servers that the folder lists can be named; a page that does not answer
within its deadline is shown with the reason.  The key of this page is sent only to the other
servers of its own run, which its user has launched with it.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from fastapi import APIRouter
from fastapi.responses import JSONResponse

from engines.plain_json import read_json
from engines.process.process_identity import is_running
from engines.protocol.plain_text import describe
from rollout.config.run_dir import FIGURES_FILE, JOURNAL_FILE, LAUNCH_FILE, SPANS_SUFFIX, RunFolder
from rollout.control.server.journal import JournalRecord, read
from rollout.core.errors import RolloutError
from rollout.observability.page.access import error_response
from rollout.observability.page.outgoing_http import get, outgoing_session
from rollout.observability.recorded import recorded_curves

_MAX_RUNS = 40
_MAX_SERVERS = 64
_TIMEOUT_S = 3.0
_AT_ONCE = 8
_MAX_BYTES = 64 << 10
# One look at the folder serves all clients of the page.
_FRESH_S = 2.0


@dataclass(frozen=True, slots=True)
class KnownServer:
    """One server of a run; ``journal`` is None if it has no page on this machine."""

    name: str
    journal: JournalRecord | None
    is_recorded: bool


@dataclass(frozen=True, slots=True)
class KnownRun:
    """One run; ``began_s`` is the Unix second of its last launch."""

    run_id: str
    began_s: float
    servers: tuple[KnownServer, ...]


class RunsOfHost:
    """Lists runs, requests the summaries of their servers, and reads their curves.

    Args:
        run: the run of this page, and ``server`` the server of it.
        key: of this page; empty if it needs none.
    """

    def __init__(self, run: RunFolder, server: str, key: str) -> None:
        self._run = run
        self._server = server
        self._key = key
        self._last: tuple[float, list[dict[str, Any]]] = (-_FRESH_S, [])
        self._listing = asyncio.Lock()

    async def overview(self) -> list[dict[str, Any]]:
        """All runs with their servers, the run of this page first, then the latest launched."""
        async with self._listing:
            if time.monotonic() - self._last[0] >= _FRESH_S:
                self._last = (time.monotonic(), await self._overview())
            return self._last[1]

    async def _overview(self) -> list[dict[str, Any]]:
        runs = await asyncio.to_thread(known_runs, self._run.path.parent, self._run.path.name)
        limit = asyncio.Semaphore(_AT_ONCE)
        async with outgoing_session(_TIMEOUT_S) as session:

            async def look(run: KnownRun, server: KnownServer) -> dict[str, Any]:
                is_own_run = run.run_id == self._run.path.name
                shown: dict[str, Any] = {
                    "server": server.name,
                    "is_here": is_own_run and server.name == self._server,
                    "is_recorded": server.is_recorded,
                    "url": server.journal.page if server.journal else "",
                    "summary": None,
                    "trouble": "" if server.journal else "stopped, or on another host",
                }
                if server.journal is not None:
                    key = self._key if is_own_run else ""
                    try:
                        async with limit:
                            shown["summary"] = await _summary(session, server.journal, key)
                    except Exception as error:  # this server's alone
                        shown["trouble"] = describe(error)
                return shown

            return [
                {
                    "run_id": run.run_id,
                    "began_s": round(run.began_s, 3),
                    "servers": await asyncio.gather(*(look(run, one) for one in run.servers)),
                }
                for run in runs
            ]

    def curves(self, run_id: str, server: str) -> dict[str, Any] | None:
        """The recorded curves of a server; of the run's first server if it has none of the name.

        Returns None if there is no such run, or nothing is recorded of it.  It reads files.
        """
        runs = known_runs(self._run.path.parent, self._run.path.name)
        recorded = {
            run.run_id: [one.name for one in run.servers if one.is_recorded] for run in runs
        }
        names = recorded.get(run_id, [])
        if not names:
            return None
        chosen = server if server in names else names[0]
        run = RunFolder(self._run.path.parent / run_id, run_id)
        found = recorded_curves(run.of_server(chosen), run.last_launch())
        return {"run_id": run_id, "server": chosen, "curves": found}


async def _summary(session: aiohttp.ClientSession, journal: JournalRecord, key: str) -> Any:
    """
    Raises:
        PermissionError: its page needs a key that this page does not have.
    """
    if journal.page_needs_key and not key:
        raise PermissionError("its page needs its key")
    url = f"{journal.page}/api/summary"
    return read_json(await get(session, url, key=key, max_bytes=_MAX_BYTES))


def known_runs(folder: Path, own: str) -> list[KnownRun]:
    """The run ``own`` and the latest launched others in a folder; with servers, in order."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                launched = entry.is_dir() and os.stat(Path(entry.path, LAUNCH_FILE))
            except OSError:
                continue  # no run, or one of another user
            if launched:
                found.append((entry.name != own, -launched.st_mtime, entry.name))
    return [
        KnownRun(name, -began, tuple(_servers(folder / name)))
        for _, began, name in sorted(found)[:_MAX_RUNS]
    ]


def _servers(run: Path) -> list[KnownServer]:
    found = []
    for folder in sorted(one for one in run.iterdir() if one.is_dir())[:_MAX_SERVERS]:
        files = (folder / FIGURES_FILE, folder / f"{folder.name}{SPANS_SUFFIX}")
        is_recorded = any(file.exists() for file in files)
        journal = _running(folder / JOURNAL_FILE)
        if journal is not None or is_recorded:
            found.append(KnownServer(folder.name, journal, is_recorded))
    return found


def _running(file: Path) -> JournalRecord | None:
    """The journal of a server, if its page is on this machine."""
    try:
        journal = read(file)
    except RolloutError:
        return None  # no such file, or one that is broken
    is_page = urlsplit(journal.page).scheme in ("http", "https")
    return journal if is_page and is_running(journal.process) else None


def run_routes(runs: RunsOfHost) -> APIRouter:
    """The routes of the list of runs, and of the curves of one of them."""
    routes = APIRouter()

    @routes.get("/api/runs")
    async def known() -> dict[str, Any]:
        """The runs in the folder of this one, each with its servers."""
        return {"runs": await runs.overview()}

    @routes.get("/api/runs/{run_id}/curves")
    def curves(run_id: str, server: str = "") -> JSONResponse:
        """The curves that one of these runs has recorded."""
        found = runs.curves(run_id, server)
        if found is None:
            return error_response(404, "not_found", f"nothing is recorded of a run {run_id!r}")
        return JSONResponse(found)

    return routes
