"""What is made once for several files: a warm-started model, policies on real engines."""

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.real_fixtures import real_policies

__all__ = ["real_policies"]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def warm_started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for all processes of the run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / "warm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "warm").exists():
            make_model(folder / "new")
            (folder / "new").rename(folder / "warm")
    return folder / "warm"


@pytest.fixture(scope="session")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that was hardly taught, for tests in which it does not matter what it scores."""
    path = tmp_path_factory.mktemp("untaught") / "model"
    make_model(path, num_steps=1)
    return path


def make_model(path: Path, **how: Any) -> None:
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        from arithmetic import make_warm_started_model
    # On one thread: a model this small is far slower on two where the cores are busy.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        make_warm_started_model(path, 0, **how)
    finally:
        torch.set_num_threads(num_threads)
