"""The fork servers that one process may have: for our own modules, and for real engines.

A real engine on the CPU runs in an interpreter of its own, and so does its fork server.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from engines.launch import EngineSpec, invocation
from engines.protocol import Endpoint
from tests.support.forking import server
from tools.cpu_engines import install

FORKED = re.compile(r"engines\.embedded|tests\.([a-z_]+\.)*[a-z]+_(trainer|worker)")
_PROGRAMS = {
    "sglang": re.compile(r"sglang\.launch_server|.*/engines/sglang/start\.py"),
    "vllm": re.compile(r"vllm\.entrypoints\.openai\.api_server"),
}
# Of what tests give to engines: what these read where they use it.
_READ_LATE = {
    "sglang": frozenset({"SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_VLM_CACHE_SIZE_MB"}),
    "vllm": frozenset({"VLLM_CPU_OMP_THREADS_BIND"}),
}


@dataclass(frozen=True)
class Origin:
    """What a fork server is to be, and what it forks.

    Attributes:
        python: its interpreter.
        programs: names of the modules and the files that it forks.
        modules: that it imports.
        environment: that its children have, but for what may differ.
        read_late: variables that are not read at an import.
        why_not: why there can be none; empty if there can.
    """

    python: str
    programs: re.Pattern[str]
    modules: Sequence[str]
    environment: Callable[[], Mapping[str, str]]
    read_late: frozenset[str] = frozenset()
    why_not: Callable[[], str] = lambda: ""

    def is_of(self, command: Sequence[str]) -> bool:
        """Whether the command is ``[python, "-m", program, ...]``, or ``[python, file, ...]``."""
        python, *words = command
        program = words[1:2] if words[:1] == ["-m"] else words[:1]
        return python == self.python and any(map(self.programs.fullmatch, program))


def own_origin(modules: Sequence[str] = server.MODULES) -> Origin:
    """That of our own modules, in this interpreter."""
    why_not = _why_no_torch if modules == server.MODULES else lambda: ""
    return Origin(sys.executable, FORKED, modules, partial(dict, os.environ), why_not=why_not)


def real_origins() -> list[Origin]:
    """Those of the real engines that are installed here."""
    found = []
    for kind, programs in _PROGRAMS.items():
        python = install.python_of(kind)
        if python.exists():
            found.append(
                Origin(
                    str(python),
                    programs,
                    [f"{__package__}.{kind}_modules"],
                    partial(_environment_of, kind),
                    _READ_LATE[kind],
                )
            )
    return found


def _environment_of(kind: str) -> Mapping[str, str]:
    """Of an engine that is started now, without settings of its own."""
    spec = EngineSpec(
        f"{kind}-0", model_path=os.curdir, log_path="", **install.launch_settings(kind)
    )
    return invocation(spec, Endpoint(spec.host, 1), os.environ).env


def _why_no_torch() -> str:
    # The fast tests run where torch is not installed.
    return "torch is not installed" if find_spec("torch") is None else ""
