"""Old module paths: the same modules as the new ones, with a warning."""

import importlib
import importlib.util
import subprocess
import sys
import warnings

import pytest

import rollout
from rollout.core.moved_names import NEW_PATH, redirect_old_paths


@pytest.fixture
def fresh() -> None:
    for old in NEW_PATH:
        sys.modules.pop(old, None)


@pytest.mark.parametrize("old", [old for old in NEW_PATH if "ray" not in NEW_PATH[old]])
def test_an_old_path_gives_the_module_of_the_new_one_and_warns(old: str, fresh: None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = importlib.import_module(old)
    assert found is importlib.import_module(NEW_PATH[old])
    assert f"{old} is now {NEW_PATH[old]}" in [str(warning.message) for warning in caught]


def test_every_new_path_exists() -> None:
    for new in NEW_PATH.values():
        assert importlib.util.find_spec(new) is not None


def test_a_name_is_imported_from_an_old_path_in_a_program_of_its_own() -> None:
    code = "from rollout.timeline.span import Span; print(Span.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "rollout.observability.timeline.span")


def test_a_path_that_never_was_is_an_ordinary_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"rollout\.nowhere"):
        importlib.import_module("rollout.nowhere")


def test_the_finder_is_installed_once() -> None:
    before = len(sys.meta_path)
    redirect_old_paths()
    assert rollout.__version__
    assert len(sys.meta_path) == before
