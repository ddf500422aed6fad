"""``ROLLOUT_LOG_LEVEL`` of the script is the level in the processes of its actors."""

import logging
from pathlib import Path

import pytest

from engines.fake import FakeEngine
from engines.fake.http_fake import HttpFakeLauncher, make_engine
from engines.launch import EngineSpec
from engines.protocol import Endpoint
from tests.support.ray_worlds import RayWorld
from tests.support.served_fakes import config

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def log_level(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    """A fake engine; beside the log of its process stands the level in the process of its actor."""
    names = ("rollout", "engines")
    levels = [logging.getLevelName(logging.getLogger(name).level) for name in names]
    Path(spec.log_path).with_suffix(".levels").write_text(" ".join(levels))
    return make_engine(spec, endpoint)


@pytest.mark.parametrize(("level", "seen"), [("debug", "DEBUG DEBUG"), ("", "NOTSET NOTSET")])
def test_the_actor_of_an_engine_has_it(
    level: str,
    seen: str,
    ray_cluster: RayWorld,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ROLLOUT_LOG_LEVEL", level)
    whole = config(tmp_path, {"main": {"num_engines": 1}}, run_id="levels")
    launch_ray = ray_cluster.load("launch").launch_ray
    handle = launch_ray(whole, launcher=HttpFakeLauncher(log_level))
    try:
        (file,) = tmp_path.rglob("*.levels")
        assert file.read_text() == seen
    finally:
        handle.stop()
