"""The environment that CPU SGLang runs in, in the user's cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engines.process.cached_environment import CachedEnvironment, Recipe

RECIPE = Recipe(
    name="sglang-cpu",
    product="CPU SGLang",
    torch="torch==2.13.0",
    pins=Path(__file__).with_name("pins.txt"),
    shims=Path(__file__).with_name("shims"),
    first_import="sglang.srt.server_args",
    variables={"SGLANG_USE_CPU_ENGINE": "1"},
)


class Installation(CachedEnvironment):
    """That of CPU SGLang."""

    def __init__(
        self, cache: Path | None = None, *, execute: Callable[[list[str]], str] | None = None
    ) -> None:
        super().__init__(RECIPE, cache, execute=execute)
