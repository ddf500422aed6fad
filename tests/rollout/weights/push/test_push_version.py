"""A weight version is checked before anything is sent, and never stands for two contents."""

from typing import Any

import pytest

from rollout.config import WeightUpdate
from rollout.core.errors import WeightMismatch
from rollout.runtime.handle.server_handle import ServerHandle
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.push_version import MAX_VERSION, LastPush, checked_version, why_not_newer
from rollout.weights.push.weight_push import WeightPush
from tests.support.builders import manifest, server_config

WRONG = [2**70, 2**63, -1, 7.0, "7", True, None, [7]]
PRINTS = Manifest(manifest().tensors, dict.fromkeys(manifest().tensors, "x:1"))
OTHERS = Manifest(manifest().tensors, dict.fromkeys(manifest().tensors, "x:2"))
PLAIN = manifest()


class Unused:
    """A caller that nothing may reach."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


class Index:
    """An integer of another library."""

    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize("version", [0, 1, MAX_VERSION])
def test_versions_that_fit(version: int) -> None:
    assert checked_version(version) == version
    assert WeightPush(version, manifest()).version == version


def test_an_integer_of_another_library_becomes_one_of_python() -> None:
    assert type(WeightPush(Index(), manifest()).version) is int  # type: ignore[arg-type]


@pytest.mark.parametrize("version", WRONG, ids=repr)
def test_a_version_that_is_no_integer_or_too_large_is_refused(version: Any) -> None:
    with pytest.raises(WeightMismatch, match=r"is not an integer from 0 to 2\*\*63 - 1"):
        WeightPush(version, manifest())


ENTRIES = {
    "push": lambda server, version: server.push({}, version=version),
    "phases.update_weights": lambda server, version: server.phases.update_weights(
        {}, version=version
    ),
    "checks.push_path": lambda server, version: server.checks.push_path({}, version=version),
    "phases.make_push": lambda server, version: server.phases.make_push({}, version),
    "phases.make_push of a base": lambda server, version: server.phases.make_push(
        {}, version, is_base=True
    ),
    "phases.make_push of an adapter": lambda server, version: server.phases.make_push(
        {}, version, adapter={}
    ),
    "offloaded": lambda server, version: server.offloaded(version=version),
    "window.push": lambda server, version: server.offloaded().push({}, version=version),
    "window.push of a base": lambda server, version: server.offloaded().push(
        {}, version=version, is_base=True
    ),
    "window.push of an adapter": lambda server, version: server.offloaded().push(
        {}, version=version, adapter={}
    ),
}


@pytest.mark.parametrize("version", [one for one in WRONG if one is not None], ids=repr)
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_call_that_takes_a_version_refuses_it_before_it_does_anything(
    entry: str, version: Any
) -> None:
    server = ServerHandle("policy", server_config({"main": {}}), Unused())
    with pytest.raises(WeightMismatch, match="weight version"):
        ENTRIES[entry](server, version)


# -- the same version again ---------------------------------------------------------------------


def served(contents: Manifest = PRINTS) -> LastPush:
    return LastPush(3, contents, has_served=True)


def not_served(contents: Manifest = PRINTS) -> LastPush:
    return LastPush(3, contents, has_served=False)


# version, contents, last push -> why not
CASES = {
    "newer": (4, PLAIN, served(), ""),
    "older": (2, PRINTS, served(), "not newer than 3"),
    "the checkpoint's": (0, PRINTS, LastPush(), "push as version 1"),
    "equal contents": (3, PRINTS, served(), ""),
    "other contents": (3, OTHERS, served(), "served with other contents"),
    "other contents, not served": (3, OTHERS, not_served(), ""),
    "unknown contents, not served": (3, PLAIN, not_served(PLAIN), ""),
    "unknown contents": (3, PLAIN, served(), "push it as version 4"),
    "contents of a stream": (3, PRINTS, served(PLAIN), "push it as version 4"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_version_that_has_served_is_used_again_for_equal_contents_alone(case: str) -> None:
    version, contents, last, expected = CASES[case]
    why = why_not_newer(version, contents, last)
    assert expected in why
    assert bool(why) == bool(expected)


FULL, PARTIAL, LORA = WeightUpdate.FULL, WeightUpdate.PARTIAL, WeightUpdate.LORA
# pushes (contents, adapter), then the versions of the adapters that serve, and of their base
PUSHES = {
    "the first adapter": ([(LORA, "a")], {"a": 1}, 0),
    "more adapters": ([(LORA, "a"), (LORA, "b"), (LORA, "a")], {"a": 3, "b": 2}, 0),
    "an adapter over a pushed base": ([(FULL, ""), (LORA, "a")], {"a": 2}, 1),
    "base and adapter merged": ([(LORA, "a"), (FULL, "")], {}, 2),
    "some of the base under an adapter": ([(LORA, "a"), (PARTIAL, "")], {"a": 1}, 2),
    "no adapters": ([(PARTIAL, ""), (PARTIAL, "")], {}, 2),
}


@pytest.mark.parametrize("case", PUSHES)
def test_an_adapter_serves_until_a_whole_base_is_pushed(case: str) -> None:
    pushes, adapters, base_version = PUSHES[case]
    last = LastPush()
    for version, (contents, name) in enumerate(pushes, 1):
        last = last.then(version, PRINTS, contents, name)
    assert last == LastPush(len(pushes), PRINTS, False, adapters, base_version)
