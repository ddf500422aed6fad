"""Models of the Hugging Face Hub: an id as ``model_path``, and the folder of its files.

Always true: a folder of that name wins.  The folder of a download is of one commit, and its path
names it, so that other nodes fetch the same files.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from rollout.core.errors import ConfigError

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w][\w./-]*))?")
_SNAPSHOT = re.compile(r".*/models--(.+)--(.+)/snapshots/([0-9a-f]{40})")
# Copies of the weights in other formats, which no engine reads beside safetensors.
_OTHER_FORMATS = (
    *("*.bin", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.pt", "*.pth"),
    *("onnx/*", "original/*"),
)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the Hub.

    Attributes:
        repo: ``organisation/name``.
        revision: a branch, a tag or a commit.
    """

    repo: str
    revision: str = "main"

    @classmethod
    def named(cls, model_path: str) -> HubModel | None:
        """The model of ``organisation/name`` or ``organisation/name@revision``.

        None of a folder, of another text, and where ``huggingface_hub`` is not installed.
        """
        match = _ID.fullmatch(model_path)
        if match is None or Path(model_path).is_dir() or not has_hub():
            return None
        return cls(match[1], match[2] or "main")

    @classmethod
    def downloaded(cls, folder: str) -> HubModel | None:
        """The model and commit whose files are in a folder of the Hub's cache."""
        match = _SNAPSHOT.fullmatch(folder.rstrip("/"))
        return cls(f"{match[1]}/{match[2]}", match[3]) if match else None

    def folder(self, *, may_download: bool = True) -> str:
        """The folder of its files; what is missing is downloaded, with a progress bar.

        Raises:
            ConfigError: they are not there, and cannot or may not be downloaded.
        """
        from huggingface_hub import snapshot_download

        try:
            return str(
                snapshot_download(
                    self.repo,
                    revision=self.revision,
                    ignore_patterns=list(_OTHER_FORMATS),
                    local_files_only=not may_download,
                )
            )
        except Exception as error:  # also those of its HTTP client, which depends on the version
            raise ConfigError(self._why_not(error, may_download=may_download)) from error

    def _why_not(self, error: Exception, *, may_download: bool) -> str:
        from huggingface_hub import constants
        from huggingface_hub.errors import (
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        match error:
            case GatedRepoError():
                return "the Hub asks to accept its terms: do that on its page, and set HF_TOKEN"
            case RepositoryNotFoundError():
                return "is neither a folder nor a model of the Hub; a private one needs HF_TOKEN"
            case RevisionNotFoundError():
                return f"the Hub has no revision {self.revision!r} of {self.repo}"
            case LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
                why = "HF_HUB_OFFLINE is set"
            case LocalEntryNotFoundError() if may_download:
                why = "the Hub cannot be reached"
            case LocalEntryNotFoundError():
                why = "nothing is downloaded here"
            case _:
                reason = str(error).strip().partition("\n")[0]
                return f"its download failed: {type(error).__name__}: {reason}"
        command = f"hf download {self.repo}"
        command += "" if self.revision == "main" else f" --revision {self.revision}"
        return f"is not in the cache of the Hub, and {why}; get it with `{command}`"


def has_hub() -> bool:
    """Whether ``huggingface_hub`` is installed."""
    return importlib.util.find_spec("huggingface_hub") is not None
