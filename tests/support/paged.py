"""The page of a running deployment, and pushes the fakes accept."""

from collections.abc import Callable

import httpx

from rollout.config import RolloutConfig
from rollout.config.run_dir import JOURNAL_FILE, RunFolder
from rollout.control.server.journal import read
from rollout.core.types import StepReport
from rollout.runtime.handle import ServerHandle
from tests.support import builders
from tests.support.processes import wait_until


def page_of(config: RolloutConfig, server: str = "policy") -> httpx.Client:
    """A client of the page, found as people find it: through the run folder."""
    journal = read(RunFolder.of(config).of_server(server) / JOURNAL_FILE)
    return httpx.Client(base_url=journal.page, timeout=30.0, trust_env=False)


def until(is_so: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    """Wait for what other threads do; fails with ``what`` if it does not come."""
    assert wait_until(lambda: bool(is_so()), timeout_s), f"{what}: not within {timeout_s:g} s"


def step(server: ServerHandle, version: int) -> StepReport:
    """One whole step: offload, then onload with new weights."""
    down = server.offload().result(60)
    return down.merged(server.push(builders.push(version)).result(60))
