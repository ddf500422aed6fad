"""A deployment over fake engines that listen, with its page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout.config.run_dir import RunFolder
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.browser import CHROMIUM, chromium
from tests.support.paged import page_of
from tests.support.served_fakes import launched


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    agents = {"agents": {"workers": 1}}
    with launched(launch_local, tmp_path_factory.mktemp("run"), server=agents) as handle:
        yield handle


@pytest.fixture(scope="module")
def folder(deployment: DeploymentHandle) -> Path:
    return RunFolder.of(deployment.config).of_server("policy")


@pytest.fixture(scope="module")
def page(deployment: DeploymentHandle) -> Iterator[httpx.Client]:
    with page_of(deployment.config) as client:
        yield client


# Not for the whole session: Playwright keeps an event loop, and coroutines of tests need their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium here (apt-get install chromium)")
    with chromium() as started:
        yield started
