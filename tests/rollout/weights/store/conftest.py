"""A folder in shared memory in which a test must leave nothing."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rollout-test-", dir="/dev/shm"))
    yield folder
    left = [str(path) for path in folder.rglob("*") if path.is_file()]
    shutil.rmtree(folder)
    assert left == []
