"""``python -m engines.embedded``: check what can be checked cheaply, load the model, serve.

Errors of the command line, the model directory or the installed packages are one line on standard
error and exit status 2, most of them before torch is imported, which takes seconds.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from engines.embedded.core.config import EmbeddedConfig, parse_args
from engines.embedded.core.model_config import refuse_architecture
from engines.plain_json import read_json


def main() -> None:
    # All that is imported and loaded stays: collecting garbage in it takes a quarter of the start.
    gc.disable()
    config = parse_args()
    check_model_directory(config.model_path)
    listener = listen(config)
    # One thread per pool unless set otherwise: engines share machines.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.num_threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # torch looks through all installed packages for other devices, and this serves none of them.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        from engines.embedded.server.http_server import serve
    except ImportError as error:  # a library is missing, or one of a version that another refuses
        give_up(f"cannot be imported by {sys.executable}: {first_line(error)}")
    try:
        serve(config, listener)
    except MemoryError as error:
        give_up(
            f"no memory for {config.model_path} with max-total-tokens {config.max_total_tokens}: "
            f"{first_line(error)}; lower that option, or run fewer engines here"
        )
    except (OSError, ValueError) as error:
        give_up(f"cannot serve {config.model_path}: {first_line(error)}")


def check_model_directory(path: str) -> None:
    if not Path(path).is_dir():
        give_up(f"model path {path} is not a directory")
    try:
        model_config = read_json((Path(path) / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        give_up(f"model path {path} has no readable config.json: {error}")
    if not isinstance(model_config, dict) or "model_type" not in model_config:
        give_up(f"model path {path}: config.json names no model_type")
    try:
        refuse_architecture(model_config)
    except ValueError as error:
        give_up(f"model path {path}: {error}")


def listen(config: EmbeddedConfig) -> socket.socket:
    """Take the port now, so that a taken one is known before the model is loaded."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        give_up(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}")
    return listener


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else repr(error)


def give_up(reason: str) -> NoReturn:
    print(f"engines.embedded: {reason}", file=sys.stderr, flush=True)
    # Not sys.exit: after a region of torch_memory_saver in mode torch, that ends with status 1.
    os._exit(2)


if __name__ == "__main__":
    main()
