"""The engine's own modules load no transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rollout.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.embedded
PROGRAM = """
import sys

import torch
from engines.embedded.core.model_config import read_model_config
from engines.embedded.generation import batcher
from engines.embedded.memory.regions import Memory
from engines.embedded.weights.model_loading import load_model

memory = Memory(torch.device("cpu"), saver=False, weights_backup=False)
load_model(read_model_config(sys.argv[1]), sys.argv[1], "auto", memory)
print(sorted({"transformers", "accelerate", "huggingface_hub"} & sys.modules.keys()))
"""


def test_a_model_is_loaded_without_transformers(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model")
    command = [sys.executable, "-c", PROGRAM, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
