"""Finds the running servers of a run: by the URL of a page, by the run folder, or over Ray.

Always true: a server whose process is gone is not returned; if no other is found, the error names
its file and process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import httpx
import typer

from rollout.config.run_dir import CONTROL_FILE
from rollout.core.errors import ConfigError, RolloutError
from rollout.observability.control_file import ControlFile

_TIMEOUT_S = 15.0

Run = Annotated[
    str,
    typer.Argument(
        help="The run: its folder, its id under ./runs, the URL of its page, or, with --ray, its "
        "id. Default: the only active run under ./runs."
    ),
]
Key = Annotated[str, typer.Option(envvar="ROLLOUT_KEY", help="Key of the page, if it needs one.")]
OverRay = Annotated[
    bool, typer.Option("--ray", help="Query the actors of the run, on the cluster of --address.")
]
Address = Annotated[str, typer.Option(help="Ray address, with --ray.")]
Namespace = Annotated[str, typer.Option(help="Ray namespace, with --ray.")]


class RunningServer(Protocol):
    """One running server.

    Attributes:
        where: how it was found, for messages.
        pid: the process that runs it; None if unknown.
    """

    name: str
    where: str
    pid: int | None

    def state(self) -> dict[str, Any]: ...
    def log_tail(self, engine_id: str) -> str: ...
    def stop(self) -> None: ...


@dataclass(slots=True)
class ServerViaPage:
    """A server queried over HTTP, through its page."""

    name: str
    where: str
    key: str = ""
    pid: int | None = None

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._request("GET", "/api/state?fresh=1")
        return state

    def log_tail(self, engine_id: str) -> str:
        return str(self._request("GET", f"/api/engines/{engine_id}/log")["tail"])

    def stop(self) -> None:
        self._request("POST", "/api/stop")

    def _request(self, method: str, path: str) -> Any:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            response = httpx.request(
                method, self.where + path, headers=headers, timeout=_TIMEOUT_S, trust_env=False
            )
        except httpx.HTTPError as error:
            raise RolloutError(f"page {self.where} does not answer: {error}") from None
        if response.status_code == 401:
            raise RolloutError(f"page {self.where} needs its key: --key, or ROLLOUT_KEY")
        if not response.is_success:
            raise RolloutError(f"page {self.where}: {method} {path}: {_error_text(response)}")
        return response.json()


def _error_text(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"


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
    for file in _control_files(run):
        control = ControlFile.read(file)
        if control.is_gone:
            gone.append(f"{file}: process {control.pid} is gone")
        else:
            found.append(ServerViaPage(control.server, control.url, key, control.pid))
            runs.add(str(file.parent.parent))
    if not run and len(runs) > 1:
        raise ConfigError(f"several runs are active; name one: {', '.join(sorted(runs))}")
    if not found:
        searched = "; ".join(gone) or f"no {CONTROL_FILE} in {run or './runs'}"
        raise ConfigError(
            f"no running server found: {searched}. Give a run folder, the URL of a page, or --ray "
            "and the run's id; if the run has crashed, `rollout attach RUN` lists its leftovers"
        )
    return found


def _control_files(run: str) -> list[Path]:
    if not run:
        return sorted(Path("runs").glob(f"**/{CONTROL_FILE}"))
    return files_of_run(run, CONTROL_FILE, f"*/{CONTROL_FILE}", f"*/*/{CONTROL_FILE}")


def files_of_run(run: str, *patterns: str) -> list[Path]:
    """The files of the first pattern that has any; ``run`` is a folder, or an id under ./runs."""
    for folder in (Path(run), Path("runs", run)):
        for pattern in patterns:
            if files := sorted(folder.glob(pattern)):
                return files
    return []


def _over_ray(run: str, address: str, namespace: str) -> list[RunningServer]:
    if not run:
        raise ConfigError("--ray needs the id of the run, its run_id")
    try:
        from rollout.runtime.ray.find_servers import find_servers
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError("--ray needs Ray; pip install 'ray-rollout[ray]'") from None
    return list(find_servers(run, address=address, namespace=namespace))
