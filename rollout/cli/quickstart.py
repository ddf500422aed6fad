"""``rollout quickstart``: the example ``colocated_grpo.py``, from a clone or from a wheel."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import rollout
from rollout.core.errors import ConfigError
from rollout.core.optional_deps import install_command

_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "jinja2")


def run_example(options: Sequence[str]) -> None:
    """Become the example, with these options.

    Raises:
        ConfigError: a package that it needs is not installed.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        command = install_command("embedded", "examples")
        raise ConfigError(
            f"the quickstart needs {', '.join(missing)}: {command}; pip takes "
            "torch's build for CUDA unless a build for CPUs is installed already"
        )
    script = example_folder() / "colocated_grpo.py"
    backend = [] if find_spec("ray") else ["--backend", "local"]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(script), *backend, *options])


def example_folder() -> Path:
    """Where the examples are: in the installed package, or in the clone."""
    package = Path(rollout.__file__).parent
    installed = package / "examples"
    return installed if installed.is_dir() else package.parent / "examples"
