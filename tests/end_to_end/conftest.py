"""A warm-started model for the tests of the example; made once, since that is the slow part."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def warm_started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from arithmetic import make_warm_started_model
    finally:
        sys.path.remove(str(EXAMPLES))
    path = tmp_path_factory.mktemp("warm") / "model"
    make_warm_started_model(path, 0)
    return path
