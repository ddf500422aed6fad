"""Payloads for other processes, opened there with single files of SGLang."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu.machine import PROGRAM_TIMEOUT_S, program
from tests.support.gpu.payload_reader import FILES
from tools.cpu_engines import install

SOURCES_VARIABLE = "SGLANG_SOURCES"


def sglang_sources() -> Path:
    """A folder with SGLang's files, installed or copied; the test is skipped without."""
    found = [Path(os.environ[SOURCES_VARIABLE])] if SOURCES_VARIABLE in os.environ else []
    venv = install.python_of("sglang").parents[1]
    found += venv.glob("lib/python3*/site-packages/sglang/srt")
    for folder in found:
        if all((folder / file).is_file() for file in FILES):
            return folder
    pytest.skip(f"no files of SGLang: name their folder in {SOURCES_VARIABLE}")


def opened(payloads: Sequence[bytes], **env: str) -> list[dict[str, Any]]:
    """Each payload opened by a process of its own, all at once: what they say of the tensors."""
    sources = str(sglang_sources())
    processes = [program("payload_reader", sources, **env) for _ in payloads]
    try:
        for process, payload in zip(processes, payloads, strict=True):
            assert process.stdin is not None
            process.stdin.write(base64.b64encode(payload).decode())
            process.stdin.close()
            process.stdin = None
        found = []
        for process in processes:
            text, _ = process.communicate(timeout=PROGRAM_TIMEOUT_S)
            assert process.returncode == 0, f"status {process.returncode}: {text}"
            found.append(json.loads(text.splitlines()[-1]))
        return found
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
