"""The tokenizer in a model's folder.

Without transformers, whose import takes seconds and loads torch.  The package tokenizers, of the
extra ``agents``, is imported by the first call.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.http.chat_template import read_tokenizer
from rollout.core.errors import ConfigError
from rollout.core.optional_deps import optional_import

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SETTING = "router.tokenizer_path"


def folder_in(info: Any) -> str:
    """The tokenizer's folder in an engine's reply to ``/model_info``, or vLLM's ``/v1/models``.

    Raises:
        WRONG_FORM: it is no such reply.
    """
    if "data" in info:
        return str(info["data"][0]["root"])
    return str(info.get("tokenizer_path") or info["model_path"])


def load_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer of a model's folder alone.

    Raises:
        ConfigError: the package or the file is missing, or it cannot be read.
    """
    with optional_import("agents", "texts of token ids need tokenizers"):
        import tokenizers  # noqa: F401
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise no_tokenizer(folder, f"{file} is not on this machine")
    try:
        return _read_tokenizer(file, file.stat().st_mtime_ns)
    except (OSError, ValueError) as error:
        raise no_tokenizer(folder, f"the tokenizer in {folder} cannot be read: {error}") from error


@lru_cache(1)  # sessions and failovers need the same one
def _read_tokenizer(file: Path, modified_ns: int) -> Tokenizer:
    return read_tokenizer(file)


def no_tokenizer(folder: str, why: str) -> ConfigError:
    """The error about a model's folder without what is needed of it."""
    return ConfigError(
        f"{why}; set {_SETTING} to a folder with tokenizer.json and a chat template",
        setting=_SETTING,
        value=folder,
    )
