import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _lost_processes() -> Iterator[None]:
    """What they had begun is never awaited; no later test has to hear of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        yield
        gc.collect()
