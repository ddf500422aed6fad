"""A model directory becomes a model in its memory regions and a tokenizer."""

from __future__ import annotations

import ctypes
import warnings
from typing import Any

import torch

from engines.embedded.config import EngineConfig
from engines.embedded.memory import Memory
from engines.embedded.text import Text
from engines.embedded.weights import place


def load(config: EngineConfig) -> tuple[Any, Text, Memory]:
    """Load what ``config`` names; ``OSError`` or ``ValueError`` where it is no such model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    quiet: Any = logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    device = _device(config.device)
    memory = Memory(
        device,
        saver=config.enable_memory_saver,
        weights_backup=config.enable_weights_cpu_backup,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(
            config.model_path, dtype=config.dtype, local_files_only=True
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(config.model_path, local_files_only=True)
    model.eval()
    place(model, memory)
    ctypes.CDLL(None).malloc_trim(0)  # what the loader took and freed goes back to the machine
    vocabulary_size = model.get_input_embeddings().weight.shape[0]
    return model, Text(tokenizer, _eos_ids(model, tokenizer), vocabulary_size), memory


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids as SGLang gathers them: the model's, its generation config's, and the
    tokenizer's."""
    found: set[int] = set()
    owners = (model.config.get_text_config(), model.generation_config, tokenizer)
    for value in (getattr(owner, "eos_token_id", None) for owner in owners):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
