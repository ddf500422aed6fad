"""A folder in shared memory in which a test must leave nothing."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import FOLDER_OF_A_TEST, MARK


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    prefix = f"{FOLDER_OF_A_TEST}{os.environ[MARK]}-"
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/dev/shm"))
    yield folder
    left = [str(path) for path in folder.rglob("*") if path.is_file()]
    shutil.rmtree(folder)
    assert left == []
