"""Bytes from others make values, never objects: by the source of both packages.

Two places unpickle, and neither reads what a stranger wrote: calls of ``rollout.connect``, behind
the run's key, and the router's pipe to the process that it has started.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_UNPICKLE = {"rollout/runtime/control_socket.py", "rollout/router/http/reading_process.py"}
STUBS_OF_RAY = "rollout/testing/"

MODULES = {
    *("marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "_pickle"),
    *("multiprocessing.connection", "multiprocessing.managers"),
}
"""Nothing of them is used."""
UNPICKLES = {"pickle.load", "pickle.loads", "pickle.Unpickler"}
UNSAFE = {
    *("eval", "exec", "compile", "__import__"),
    *("numpy.load", "numpy.loadtxt", "torch.load", "torch.jit.load", "torch.hub.load"),
    *("torch.package.PackageImporter", "torch.serialization.load", "pandas.read_pickle"),
    *("yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load"),
    *("yaml.full_load_all", "yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader"),
}
BUILTINS = frozenset(dir(builtins))
STRICT_JSON = {
    "engines/plain_json.py": "it is the reader",
    "engines/process/guard.py": "the order of the process that starts it",
    "rollout/config/sources/parsers.py": "the user's own file: a key that stands twice is refused",
    "rollout/router/http/fast_json.py": "bodies and replies: NaN is taken, or refused",
    "rollout/router/http/request.py": "a body with one field of the router's, which knows it",
    "rollout/router/continuation/fast_path.py": "a list of which nothing but digits was found",
    "rollout/agents/wire/messages.py": "arguments of a tool call, which stay text otherwise",
    "rollout/driver/math_judge/child.py": "what the driver sends to its own child",
    "rollout/driver/math_judge/judges.py": "two truth values of its own child",
    "rollout/driver/data/sample_rows.py": "rows that this library has saved",
    "engines/fake/engine/fake_weights.py": "a file of the tests",
}
"""``json.loads`` raises ``RecursionError``; these know it, or read what this library wrote."""


@cache
def names(source: str) -> list[tuple[int, str]]:
    """What ``_names`` gives."""
    return list(_names(source))


def _names(source: str) -> Iterator[tuple[int, str]]:
    """Each name of a library or of Python that a source mentions, in full, with its line."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                known[one.asname or one.name.partition(".")[0]] = (
                    one.name if one.asname else one.name.partition(".")[0]
                )
                yield node.lineno, one.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                known[one.asname or one.name] = f"{node.module}.{one.name}"
                yield node.lineno, f"{node.module}.{one.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            parts: list[str] = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                # A variable may be named as a module is.
                is_builtin = not parts and inner.id in BUILTINS
                first = known.get(inner.id, inner.id if is_builtin else "a variable")
                yield node.lineno, ".".join((first, *reversed(parts)))
        elif isinstance(node, ast.Constant) and node.value in MODULES | {"pickle"}:
            yield node.lineno, f"{node.value}.by_name"


def unsafe_names(source: str) -> list[str]:
    """What a source mentions that makes objects of bytes."""
    found = []
    for line, name in names(source):
        is_of_module = any(name == one or name.startswith(f"{one}.") for one in MODULES)
        if is_of_module or name in UNPICKLES | UNSAFE or name == "pickle.by_name":
            found.append(f"{line} {name}")
    return found + unsafe_yaml(source)


def unsafe_yaml(source: str) -> list[str]:
    """The calls of ``yaml.load`` whose loader is none of PyYAML's safe ones."""
    tree = ast.parse(source)
    safe = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and [*map(ast.unparse, node.bases)] == ["yaml.SafeLoader"]
    }
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "yaml.load"
    ]
    return [
        f"{call.lineno} yaml.load"
        for call in calls
        if not (len(call.args) == 2 and ast.unparse(call.args[1]) in safe | {"yaml.SafeLoader"})
    ]


@cache
def sources() -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for package in ("rollout", "engines")
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def test_no_code_makes_objects_of_bytes() -> None:
    found = {
        path: unsafe
        for path, source in sources().items()
        if not path.startswith(STUBS_OF_RAY) and (unsafe := unsafe_names(source))
    }
    assert found.keys() == MAY_UNPICKLE, found
    for path in MAY_UNPICKLE:
        assert {one.partition(" ")[2] for one in found[path]} <= UNPICKLES, found[path]


@pytest.mark.parametrize(
    "line",
    [
        "import pickle\npickle.loads(b'')",
        "import pickle as p\nread = p.load",
        "from pickle import loads as read\nread(b'')",
        "import pickle\nclass Mine(pickle.Unpickler): ...",
        "import importlib\nimportlib.import_module('pickle')",
        "import torch\ntorch.load('x', weights_only=False)",
        "from torch import load",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import marshal",
        "from multiprocessing.connection import Client",
        "import shelve",
        "eval('1')",
        "run = exec",
        "import yaml\nyaml.load('x', yaml.Loader)",
        "import yaml\nyaml.load('x', Loader=loader)",
        "import yaml\nyaml.unsafe_load('x')",
        "def later():\n    import cloudpickle",
    ],
)
def test_each_way_to_make_objects_of_bytes_is_found(line: str) -> None:
    assert unsafe_names(line)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle\npickle.dumps(1)",
        "model.eval()",
        "import re\nre.compile('x')",
        "import yaml\nclass L(yaml.SafeLoader): ...\nyaml.load('x', L)",
        "from torch.multiprocessing import reductions",
    ],
)
def test_what_makes_no_objects_is_not_found(line: str) -> None:
    assert not unsafe_names(line)


def test_json_of_others_has_one_reader() -> None:
    found = {
        path
        for path, source in sources().items()
        if not path.startswith(STUBS_OF_RAY)
        and any(name in ("json.loads", "json.load") for _, name in names(source))
    }
    assert found == STRICT_JSON.keys()


def test_payloads_of_tensors_have_one_reader() -> None:
    """The embedded engine, vLLM's client and the store; and the fake engine."""
    who = {"load_payload": set[str](), "read_pickle": set[str](), "rebuild_cuda_tensor": set[str]()}
    for path, source in sources().items():
        for _, name in names(source):
            if (last := name.rpartition(".")[2]) in who:
                who[last].add(path)
    payload = "engines/tensors/payload/weight_payload.py"
    assert who["load_payload"] == {
        "engines/embedded/weights/payload_tensors.py",
        "engines/vllm/update_info.py",
        "engines/fake/engine/fake_weights.py",
        "rollout/weights/store/push_reader.py",
    }
    assert who["read_pickle"] == {payload}
    # Of a handle that was read as values, and whose sizes were compared.
    assert who["rebuild_cuda_tensor"] == {
        "engines/embedded/weights/payload_tensors.py",
        "engines/vllm_plugin/pushed_handles.py",
    }
