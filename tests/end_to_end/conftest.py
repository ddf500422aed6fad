"""A warm-started model for the tests of the example; made once, since that is the slow part."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def warm_started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    sys.path.insert(0, str(EXAMPLES))
    try:
        from arithmetic import make_warm_started_model
    finally:
        sys.path.remove(str(EXAMPLES))
    path = tmp_path_factory.mktemp("warm") / "model"
    # On one thread: a model this small is far slower on two where the cores are busy.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        make_warm_started_model(path, 0)
    finally:
        torch.set_num_threads(num_threads)
    return path


@pytest.fixture
def untaught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy that was hardly taught, for tests in which it does not matter what it scores."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from arithmetic import make_warm_started_model

    make_warm_started_model(tmp_path / "untaught", 0, num_steps=1)
    return tmp_path / "untaught"
