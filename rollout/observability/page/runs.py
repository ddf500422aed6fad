"""The runs in the folder of this page's run with their servers, and what two runs are compared by.

Always true: only runs and servers that the folder lists can be named; a page that does not answer
within its deadline is shown with the reason.  The key of this page is sent only to the other
servers of its own run, which its user has launched with it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
from fastapi import APIRouter
from fastapi.responses import JSONResponse

from engines.plain_json import read_json
from engines.protocol.plain_text import describe
from rollout.config.run_dir import RunFolder
from rollout.control.server.journal import JournalRecord
from rollout.control.server.runs import KnownRun, KnownServer, known_runs
from rollout.observability.page.access import error_response
from rollout.observability.page.outgoing_http import get, outgoing_session
from rollout.observability.recorded import recorded_curves

_TIMEOUT_S = 3.0
_AT_ONCE = 8
_MAX_BYTES = 64 << 10
# One look at the folder serves all clients of the page.
_FRESH_S = 2.0


class RunsOfHost:
    """Lists runs, requests the summaries of their servers, and reads their curves.

    Args:
        run: the run of this page, and ``server`` the server of it.
        key: of this page, or empty if it needs none.
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
                    "servers": await asyncio.gather(*(look(run, server) for server in run.servers)),
                }
                for run in runs
            ]

    def curves(self, run_id: str, server: str) -> dict[str, Any] | None:
        """The recorded curves of a server; of the run's first server if it has none of the name.

        Returns None if there is no such run, or nothing is recorded of it.  It reads files.
        """
        runs = known_runs(self._run.path.parent, self._run.path.name)
        recorded = {
            run.run_id: [server.name for server in run.servers if server.is_recorded]
            for run in runs
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
