"""Screenshots of the page for the documentation, written to a folder that is the argument.

Four fake engines in processes of their own serve a training loop; one of them is killed and comes
back, and one hangs in the last release.  Another run is there to be compared with.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import httpx

from rollout.core.errors import PhaseFailed
from rollout.core.types import EngineStatus
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from rollout.runtime.local import launch_local
from tests.support.browser import chromium, open_page
from tests.support.paged import page_of, step, until
from tests.support.served_fakes import config

_NUM_STEPS = 12
_HANGS = f"release_memory_occupation#{_NUM_STEPS + 1}:hang"
_GROUPS = {
    "shared": {"num_engines": 3, "engine": {"kind": "fake"}},
    "late": {"num_engines": 1, "engine": {"kind": "fake", "options": {"fault": _HANGS}}},
}
_HEALTH = {"probe_interval_s": 0.5}


def take_screenshots(folder: Path) -> None:
    """Write the PNG files that the documentation shows to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as runs, chromium() as browser:
        with _run(Path(runs), "baseline") as deployment:
            _train(deployment["policy"], 0.4, 1, _NUM_STEPS)
        with _run(Path(runs), "longer-answers") as deployment:
            policy = deployment["policy"]
            with page_of(deployment.config) as client:
                url = str(client.base_url)
            with open_page(browser, url) as page:
                _train(policy, 0.7, 1, 8)
                _lose_one(policy)
                _train(policy, 0.7, 9, _NUM_STEPS)
                page.select_option("#compare", "baseline")
                page.wait_for_selector("#comparison figure")
                page.locator("#runs").screenshot(path=folder / "compared_runs.png")
                page.select_option("#compare", "")
                stuck = policy.offload()
                page.wait_for_selector(".finding.stuck .advice")
                page.screenshot(path=folder / "live_page.png", full_page=True)
        with suppress(PhaseFailed):  # the stop of the run ends it
            stuck.result(30)


@contextmanager
def _run(runs: Path, run_id: str) -> Iterator[DeploymentHandle]:
    deployment = launch_local(config(runs, _GROUPS, health=_HEALTH, run_id=run_id))
    try:
        yield deployment
    finally:
        deployment.stop()


def _train(policy: ServerHandle, reward: float, first: int, last: int) -> None:
    chance = Random(reward)
    for number in range(first, last + 1):
        step(policy, number)
        done = 1 - math.exp(-number / 4)
        metrics = {
            "rollout/reward/mean": reward * done + 0.03 * chance.random(),
            "rollout/tokens_per_s": 900 + 150 * chance.random(),
            "rollout/response_len/mean": 120 + 200 * reward * done + 5 * chance.random(),
            "rollout/engine_busy_share": 0.8 + 0.1 * chance.random(),
        }
        report = {"step": number, "metrics": metrics}
        httpx.post(f"{policy.url}/figures", json=report, trust_env=False).raise_for_status()


def _lose_one(policy: ServerHandle) -> None:
    """Kill an engine, and wait until recovery has restarted it."""

    def engines() -> dict[str, EngineStatus]:
        groups = policy.status().result(30).groups
        return {engine.engine_id: engine for group in groups for engine in group.engines}

    lost = engines()["shared-1"]
    assert lost.pid is not None
    os.kill(lost.pid, signal.SIGKILL)
    until(lambda: engines()["shared-1"].pid not in (lost.pid, None), "shared-1 is back", 60)


if __name__ == "__main__":
    take_screenshots(Path(sys.argv[1]))
