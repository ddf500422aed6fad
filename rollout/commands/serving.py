"""``rollout serve``: engines, router and page without a trainer."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Annotated, Literal

import typer

import rollout
from rollout.commands.output import AsJson, console, print_json
from rollout.commands.planning import ConfigPath, load
from rollout.commands.sources import find
from rollout.commands.status import picture
from rollout.errors import ConfigError, RolloutError
from rollout.handle import DeploymentHandle
from rollout.run_folder import RunFolder

Backend = Annotated[str, typer.Option(help="'local': child processes of this one; 'ray': actors.")]


def serve(config: ConfigPath, backend: Backend = "local", as_json: AsJson = False) -> None:
    """Run engines, router and page without a trainer until Ctrl-C."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    loaded = load(config)
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: done.set())
    with launched(loaded, backend) as deployment:
        urls = {name: one.router_url for name, one in deployment.status().result().items()}
        if as_json:
            print_json({"run": str(RunFolder.of(loaded).path), "routers": urls})
        else:
            _show(loaded, urls)
        done.wait()


def launched(config: rollout.RolloutConfig, backend: str) -> DeploymentHandle:
    """What ``config`` asks for, serving; to be stopped by the caller.

    Raises:
        ConfigError: there is no such back end.
    """
    chosen: Literal["local", "ray"] = "ray" if backend == "ray" else "local"
    if backend != chosen:
        raise ConfigError(f"--backend {backend!r}: must be 'local' or 'ray'")
    return rollout.launch(config, backend=chosen)


def _show(config: rollout.RolloutConfig, urls: dict[str, str]) -> None:
    folder = RunFolder.of(config).path
    try:
        for source in find(str(folder)):
            console().print(picture(source.state(), source.where))
    except RolloutError:  # without a page, or with a key: the routers are what matters
        for name, url in urls.items():
            console().print(f"{name}: router {url}")
    console().print(f"serving; files in {folder}; Ctrl-C ends it")
