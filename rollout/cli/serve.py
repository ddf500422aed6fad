"""``rollout serve``: engines, router and page without a trainer."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Sequence

import rollout
from rollout.cli.lib.config_file import launch, load_config
from rollout.cli.lib.find_run import find
from rollout.cli.lib.output import print_json, show
from rollout.cli.lib.server_view import render_server
from rollout.config.run_dir import RunFolder
from rollout.core.errors import RolloutError


def serve_until_stopped(config: Sequence[str], backend: str, *, as_json: bool) -> None:
    """Start a configuration, print its addresses, and wait for SIGINT or SIGTERM.

    Args:
        config: files and overrides, as they were typed.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    loaded = load_config(config)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # as Ctrl-C, also while engines start
    with launch(loaded, backend) as deployment:
        found = deployment.status().result()
        urls = {name: status.router_url for name, status in found.items()}
        if as_json:
            agents = {name: status.agents_urls for name, status in found.items()}
            run = str(RunFolder.of(loaded).path)
            print_json({"run": run, "routers": urls, "agents": agents})
        else:
            _show(loaded, urls)
        threading.Event().wait()


def _show(config: rollout.RolloutConfig, urls: dict[str, str]) -> None:
    folder = RunFolder.of(config).path
    try:
        for server in find(str(folder)):
            show(render_server(server.state(), server.where))
    except RolloutError:  # the page is disabled or needs a key: show the routers
        for name, url in urls.items():
            show(f"{name}: router {url}")
    show(f"serving; files in {folder}; stop with Ctrl-C")
