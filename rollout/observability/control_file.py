"""``control.json`` in the folder of a server: where its page is, and which process runs it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import psutil

from rollout.config.run_dir import CONTROL_FILE

_SAME_PROCESS_S = 2.0


@dataclass(frozen=True, slots=True)
class ControlFile:
    """A server that runs, or that was killed.

    Attributes:
        url: of its page; ``needs_key``: for viewing.
        pid: of the process that runs it, which began at the Unix second ``began_s``.
    """

    server: str
    url: str
    pid: int
    began_s: float
    run_id: str = ""
    needs_key: bool = False

    @classmethod
    def read(cls, path: Path) -> ControlFile:
        """
        Raises:
            OSError, ValueError, TypeError: it cannot be read, or is none.
        """
        names = {field.name for field in fields(cls)}
        values = json.loads(path.read_bytes())
        if not isinstance(values, dict):
            raise ValueError(f"{path} is no JSON object")
        return cls(**{name: value for name, value in values.items() if name in names})

    def write(self, folder: Path) -> None:
        """Replace the file in the folder of the server."""
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{CONTROL_FILE}.part"
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        part.replace(folder / CONTROL_FILE)

    @property
    def is_gone(self) -> bool:
        """Whether no process of this machine runs the server."""
        try:
            began_s = psutil.Process(self.pid).create_time()
        except psutil.Error:
            return True
        return abs(began_s - float(self.began_s)) > _SAME_PROCESS_S
