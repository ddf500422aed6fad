"""Lets vLLM find ``engines``, the package that this file lies in, whatever else is beside it."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def register() -> None:
    """The entry point ``vllm.general_plugins`` of an environment without ray-rollout."""
    if "engines" not in sys.modules:
        folder = Path(__file__).resolve().parents[3]
        spec = spec_from_file_location(
            "engines", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules["engines"] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules["engines"])
    from engines.vllm_plugin.registration import register as add_backend

    add_backend()
