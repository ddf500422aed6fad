"""Finds the running servers of a run: by the URL of a page, by the run folder, or over Ray.

Always true: a server whose process is gone is not returned; if no other is found, the error names
its file and process.
"""

from __future__ import annotations

from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from engines.plain_json import WRONG_FORM, read_json
from engines.protocol import ProcessIdentity
from rollout.config.run_dir import JOURNAL_FILE
from rollout.config.sources.environment import default_log_dir
from rollout.control.server.runs import journals_here, journals_of, runs_here
from rollout.core.errors import ConfigError, RolloutError
from rollout.core.optional_deps import optional_import

_TIMEOUT_S = 15.0
_without_proxy = build_opener(ProxyHandler({}))


class RunningServer(Protocol):
    """One running server.

    Attributes:
        where: how it was found, for messages.
        process: what runs it, or None if unknown.
    """

    name: str
    where: str
    process: ProcessIdentity | None

    def state(self) -> dict[str, Any]: ...
    def log_tail(self, engine_id: str) -> str: ...
    def stop(self) -> None: ...


@dataclass(slots=True)
class ServerViaPage:
    """A server queried over HTTP, through its page."""

    name: str
    where: str
    key: str = ""
    process: ProcessIdentity | None = None

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._request("GET", "/api/state?fresh=1")
        return state

    def log_tail(self, engine_id: str) -> str:
        return str(self._request("GET", f"/api/engines/{engine_id}/log")["tail"])

    def stop(self) -> None:
        self._request("POST", "/api/stop")

    def _request(self, method: str, path: str) -> Any:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        request = Request(self.where + path, headers=headers, method=method)
        try:
            with _without_proxy.open(request, timeout=_TIMEOUT_S) as response:
                return read_json(response.read())
        except HTTPError as error:
            if error.code == 401:
                raise RolloutError(
                    f"page {self.where} needs its key: --key, or ROLLOUT_KEY"
                ) from None
            raise RolloutError(
                f"page {self.where}: {method} {path}: {_error_text(error)}"
            ) from None
        except (OSError, HTTPException, ValueError) as error:
            raise RolloutError(f"page {self.where} does not answer: {error}") from None


def _error_text(error: HTTPError) -> str:
    with error:
        try:
            return str(read_json(error.read())["error"]["message"])
        except (OSError, HTTPException, *WRONG_FORM):
            return f"HTTP {error.code}"


def find(
    run: str, *, key: str = "", ray: bool = False, address: str = "auto", namespace: str = "rollout"
) -> list[RunningServer]:
    """The running servers of a run.

    Raises:
        ConfigError: there is none; the message names the searched files.
    """
    if run.startswith(("http://", "https://")):
        server = ServerViaPage("", run.rstrip("/"), key)
        server.name = str(server.state().get("server", ""))
        return [server]
    if ray:
        return _over_ray(run, address, namespace)
    found: list[RunningServer] = []
    gone = []
    runs = set()
    for journal in journals_of(run, has_many=True) if run else journals_here():
        record = journal.record
        if record is None or (journal.trouble and not record.is_ended):
            gone.append(journal.trouble)
        elif not record.is_ended:
            found.append(ServerViaPage(record.server, record.page, key, record.process))
            runs.add(str(journal.file.parent.parent))
    if not run and len(runs) > 1:
        raise ConfigError(f"several runs are active; name one: {', '.join(sorted(runs))}")
    if not found:
        searched = "; ".join(gone) or f"there is no {JOURNAL_FILE} below {run or default_log_dir()}"
        raise ConfigError(
            f"no running server found: {searched}. Give a run folder, the URL of a page, or --ray "
            f"and the run's id; {runs_here()}. After a crash, `rollout attach RUN` lists its "
            "leftovers"
        )
    return found


def _over_ray(run: str, address: str, namespace: str) -> list[RunningServer]:
    if not run:
        raise ConfigError("--ray needs the id of the run, its run_id")
    with optional_import("ray", "--ray needs Ray"):
        from rollout.runtime.ray.find_servers import find_servers
    return list(find_servers(run, address=address, namespace=namespace))
