"""The examples are programs, not a package: put their directory where ``python FILE`` does."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small run no faster on two threads, and far slower where the cores are busy."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
