"""What the environment that CPU SGLang runs in is made of."""

from __future__ import annotations

from pathlib import Path

from engines.process.cached_environment import Recipe

RECIPE = Recipe(
    name="sglang-cpu",
    product="CPU SGLang",
    torch="torch==2.13.0",
    pins=Path(__file__).with_name("pins.txt"),
    shims=Path(__file__).with_name("shims"),
    first_import="sglang.srt.server_args",
    variables={"SGLANG_USE_CPU_ENGINE": "1"},
)
