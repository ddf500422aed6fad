"""Groups of engines that somebody else launched: their configuration and their place."""

from __future__ import annotations

from typing import Any

import pytest

from engines.fake import FakeLauncher
from engines.fake.launcher import FakeRunningEngine
from engines.protocol.spec import EngineSpec
from rollout.config import RolloutConfig
from rollout.core.errors import ConfigError, EngineFailure
from rollout.rules.placement import assign_slots, local_bundles, plan_placement
from tests.support.builders import make_group, restart

URLS = ["http://10.0.0.1:30000", "http://10.0.0.2:30000/"]


def config(group: dict[str, Any] | None = None, **engine: Any) -> RolloutConfig:
    engine = {"kind": "attached", "urls": URLS} | engine
    groups = {"theirs": {"engine": engine, **(group or {})}}
    return RolloutConfig.from_dict({"servers": {"policy": {"model_path": "m", "groups": groups}}})


def test_a_group_has_as_many_engines_as_urls() -> None:
    assert config().servers["policy"].groups["theirs"].num_engines == 2
    assert config({"num_engines": 2}).servers["policy"].groups["theirs"].num_engines == 2


@pytest.mark.parametrize(
    ("group", "engine", "message"),
    [
        ({"num_engines": 3}, {}, "num_engines 3, but 2 urls"),
        ({}, {"urls": []}, "needs urls"),
        ({}, {"urls": ["http://a:1", "http://a:1"]}, "name an engine twice"),
        ({}, {"urls": ["10.0.0.1:30000"]}, "http://host:port"),
        ({}, {"urls": ["https://a:1"]}, "http://host:port"),
        ({}, {"urls": ["http://a"]}, "http://host:port"),
        ({}, {"urls": ["http://a:1/v1"]}, "http://host:port"),
        ({}, {"options": {"tp": 2}}, "options cannot be set"),
        ({}, {"gpus": 1, "python": "p"}, "gpus, python cannot be set"),
        ({}, {"kind": "sglang", "urls": [], "takeover": True}, "takeover is for attached"),
        ({}, {"kind": "sglang"}, "urls are for engines of kind attached"),
    ],
)
def test_a_wrong_setting_is_named(
    group: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(group, **engine)


def test_attached_engines_take_no_place_of_ours() -> None:
    loaded = config()
    plan = plan_placement({"policy": loaded.servers["policy"].groups})
    assert plan.bundles == ()
    slots = assign_slots(plan, local_bundles(plan, [], 1.0))["policy", "theirs"]
    assert [slot.engine_id for slot in slots] == ["theirs-0", "theirs-1"]
    assert {slot.bundle_indices for slot in slots} == {()}


class Theirs(FakeLauncher):
    """Launches engines that a kill of ours does not touch."""

    async def launch(self, spec: EngineSpec) -> FakeRunningEngine:
        running = await super().launch(spec)

        async def kill() -> None:
            running.num_kills += 1

        running.kill = kill  # type: ignore[method-assign]
        return running


async def test_a_fenced_engine_of_others_comes_back_only_after_they_ended_it() -> None:
    launcher = Theirs()
    engine = {"kind": "attached", "urls": URLS[:1]}
    group, _ = make_group(1, name="theirs", launcher=launcher, engine=engine)
    await group.start()
    await group.fence("theirs-0", "it answered nonsense")
    with pytest.raises(EngineFailure, match="is attached, and it still runs; its owner"):
        await restart(group, "theirs-0")
    assert len(launcher.specs) == 1
    launcher["theirs-0"].die("its owner ended it")
    await restart(group, "theirs-0")
    assert launcher.specs[1].url == URLS[0]
    await group.stop()
