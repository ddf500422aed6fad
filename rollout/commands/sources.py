"""Where a running server can be asked: by the URL of its page, its run folder, or over Ray.

Always true: what is found is what answers now; a file left behind by a process that is gone is
called that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import httpx
import psutil
import typer

from rollout.errors import ConfigError, RolloutError
from rollout.run_folder import CONTROL_FILE

_TIMEOUT_S = 15.0
_SAME_PROCESS_S = 2.0

Run = Annotated[
    str,
    typer.Argument(
        help="A run: its folder, its id under ./runs, the URL of a page, or, with --ray, its id. "
        "Left out: the one run under ./runs that is going on."
    ),
]
Key = Annotated[str, typer.Option(envvar="ROLLOUT_KEY", help="Key of the page, if it needs one.")]
OverRay = Annotated[
    bool, typer.Option("--ray", help="Ask the actors of the run, on the cluster of --address.")
]
Address = Annotated[str, typer.Option(help="Ray address, with --ray.")]
Namespace = Annotated[str, typer.Option(help="Ray namespace, with --ray.")]


class Source(Protocol):
    """One running server.

    Attributes:
        name: the server's.
        where: how it was found, for messages.
        pid: of the process it runs in; None where unknown.
        folder: where it keeps its files; None where unknown.
    """

    name: str
    where: str
    pid: int | None
    folder: Path | None

    def state(self) -> dict[str, Any]: ...
    def log_tail(self, engine_id: str) -> str: ...
    def stop(self) -> None: ...


@dataclass(slots=True)
class PageSource:
    """A server asked over HTTP."""

    name: str
    where: str
    key: str = ""
    pid: int | None = None
    folder: Path | None = None

    def state(self) -> dict[str, Any]:
        told: dict[str, Any] = self._ask("GET", "/api/state?fresh=1")
        return told

    def log_tail(self, engine_id: str) -> str:
        return str(self._ask("GET", f"/api/engines/{engine_id}/log")["tail"])

    def stop(self) -> None:
        self._ask("POST", "/api/stop")

    def _ask(self, method: str, path: str) -> Any:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            answer = httpx.request(
                method, self.where + path, headers=headers, timeout=_TIMEOUT_S, trust_env=False
            )
        except httpx.HTTPError as error:
            raise RolloutError(f"page {self.where} does not answer: {error}") from None
        if answer.status_code == 401:
            raise RolloutError(f"page {self.where} needs its key: --key, or ROLLOUT_KEY")
        if not answer.is_success:
            raise RolloutError(f"page {self.where}: {method} {path}: {_said(answer)}")
        return answer.json()


def _said(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


def find(
    run: str, *, key: str = "", ray: bool = False, address: str = "auto", namespace: str = "rollout"
) -> list[Source]:
    """The running servers of a run.

    Raises:
        ConfigError: there is none; the message says where was looked.
    """
    if run.startswith(("http://", "https://")):
        return [PageSource(_name_of(run, key), run.rstrip("/"), key)]
    if ray:
        return _over_ray(run, address, namespace)
    files = _control_files(run)
    found: list[Source] = []
    gone = []
    for file in files:
        told = json.loads(file.read_text())
        if _is_gone(told):
            gone.append(f"{file}: process {told['pid']} is gone")
        else:
            found.append(PageSource(told["server"], told["url"], key, told["pid"], file.parent))
    if not run and len({one.folder.parent for one in found if one.folder}) > 1:
        runs = sorted({str(one.folder.parent) for one in found if one.folder})
        raise ConfigError(f"several runs are going on; name one: {', '.join(runs)}")
    if not found:
        looked = "; ".join(gone) or f"no {CONTROL_FILE} in {run or './runs'}"
        raise ConfigError(
            f"no running server found: {looked}. Give a run folder, the URL of a page, or "
            "--ray and the run's id; of a run that has died, `rollout attach RUN` says what is left"
        )
    return found


def _name_of(url: str, key: str) -> str:
    return str(PageSource("", url.rstrip("/"), key).state().get("server", ""))


def _control_files(run: str) -> list[Path]:
    for folder in (Path(run), Path("runs") / run):
        if run and folder.is_dir():
            for pattern in (CONTROL_FILE, f"*/{CONTROL_FILE}", f"*/*/{CONTROL_FILE}"):
                if files := sorted(folder.glob(pattern)):
                    return files
    return [] if run else sorted(Path("runs").glob(f"**/{CONTROL_FILE}"))


def _is_gone(told: dict[str, Any]) -> bool:
    try:
        began_s = psutil.Process(told["pid"]).create_time()
    except psutil.Error:
        return True
    return abs(began_s - float(told["began_s"])) > _SAME_PROCESS_S


def _over_ray(run: str, address: str, namespace: str) -> list[Source]:
    if not run:
        raise ConfigError("--ray needs the id of the run, its run_id")
    try:
        from rollout.actors.looking import find_servers
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError("--ray needs Ray; pip install 'ray-rollout[ray]'") from None
    return list(find_servers(run, address=address, namespace=namespace))


Finder = Callable[[], list[Source]]
