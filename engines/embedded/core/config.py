"""Settings of an embedded engine.  Flag names, defaults and meanings are SGLang's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any


def flag(default: Any, help_text: str, **options: Any) -> Any:
    """A field that is also a command line flag of the same name."""
    return field(default=default, metadata={"help": help_text, "options": options})


@dataclass(frozen=True, slots=True)
class EmbeddedConfig:
    """Settings of one engine process.  The text of each field is its command line help."""

    model_path: str = flag("", "directory of a Hugging Face causal language model", required=True)
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(30000, "port to listen on; 0 takes a free one and logs it")
    weight_version: str = flag("0", "version the weights on disk are called by")
    enable_memory_saver: bool = flag(False, "let release_memory_occupation give memory back")
    enable_weights_cpu_backup: bool = flag(
        False, "copy weights aside at release, so that they are bit-equal after resume"
    )
    dtype: str = flag(
        "auto",
        "weights and KV cache; auto: that of the checkpoint",
        choices=["auto", "float32", "bfloat16", "float16"],
    )
    device: str = flag("auto", "cpu or cuda; auto: cuda where there is one")
    max_total_tokens: int = flag(16384, "tokens the KV cache holds, over all requests")
    max_running_requests: int = flag(256, "requests in one batch; the others wait")
    context_length: int = flag(0, "longest prompt plus completion; 0: the model's own")
    enable_lora: bool = flag(False, "take LoRA adapters")
    max_lora_rank: int = flag(64, "largest rank of an adapter")
    random_seed: int | None = flag(None, "seed of requests that bring none", type=int)
    served_model_name: str = flag("", "name under /v1/models; empty: the model path")
    log_level: str = flag("info", "debug, info, warning or error")
    num_threads: int = flag(1, "torch threads of the forward pass")


def parse_args(arguments: Sequence[str] | None = None) -> EmbeddedConfig:
    """Read a command line; argparse exits with status 2 if it is invalid."""
    parser = argparse.ArgumentParser(prog="python -m engines.embedded", description=__doc__)
    for item in fields(EmbeddedConfig):
        name = "--" + item.name.replace("_", "-")
        options = dict(item.metadata["options"])
        if isinstance(item.default, bool):
            options["action"] = "store_true"
        else:
            options.setdefault("type", type(item.default))
            options.setdefault("default", item.default)
        parser.add_argument(name, help=item.metadata["help"], **options)
    return EmbeddedConfig(**vars(parser.parse_args(arguments)))
