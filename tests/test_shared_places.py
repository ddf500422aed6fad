"""Names in places that others can write come from one module, and files are made in known places.

``tests/end_to_end/test_shared_host.py`` sees it of a run, under ``strace``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OWN = "engines/process/own_files.py"

# Modules that may name a shared place, or make temporary files.
NAMES = {
    OWN: "the helper",
    "rollout/config/weights.py": "defaults of settings",
    "rollout/core/os_errors.py": "advice in a message",
    "rollout/runtime/preflight.py": "advice in a message",
    "rollout/weights/store/node/agent.py": "advice in a message",
    "rollout/weights/routes/buffers.py": "the default of a setting",
    "engines/protocol/spec.py": "patterns of what engines leave; removed by the helper",
    "engines/sglang/environment.py": "patterns of what engines leave; removed by the helper",
    "engines/vllm/invocation.py": "patterns of what engines leave; removed by the helper",
    "engines/vllm_plugin/pushed_files.py": "a file without a name",
}
# Modules that make, rename or remove files, and where.
EFFECTS = {
    OWN: "the helper",
    "engines/process/engine_records.py": "an empty folder, not locked by its guard yet",
    "engines/process/locks.py": "an empty folder of ours, which its maker had not locked yet",
    "rollout/agents/turns/files.py": "in a folder of the helper",
    "rollout/cli/lib/output.py": "the file that the user names",
    "rollout/control/engine/claim.py": "in the store's folder",
    "rollout/control/server/journal.py": "in the run's folder",
    "rollout/driver/data/saved_groups.py": "in the folder that the user names",
    "rollout/driver/stream/journal.py": "in the folder that the user names",
    "rollout/observability/step_reports.py": "in the run's folder",
    "rollout/observability/timeline/span_file.py": "in the run's folder",
    "rollout/weights/routes/buffers.py": "in a folder of the helper",
    "rollout/weights/routes/disk.py": "in weights.disk_path, and in a folder of the helper there",
    "rollout/weights/store/node/assembly.py": "in the store's folder",
    "rollout/weights/store/node/files.py": "in the store's folder",
    "rollout/weights/store/node/base_folder.py": "the store's folder, opened by the helper",
    "engines/fake/engine/fake_weights.py": "in the folder that a test names",
}
_METHODS = {
    "chmod",
    "chown",
    "hardlink_to",
    "lchmod",
    "link",
    "makedirs",
    "mkdir",
    "mkfifo",
    "mknod",
    "removedirs",
    "renames",
    "rmdir",
    "rmtree",
    "symlink",
    "symlink_to",
    "touch",
    "truncate",
    "unlink",
    "write_bytes",
    "write_text",
}
_OF_OS = {"remove", "rename", "replace"}
_TEMPORARY = {"tempfile", "multiprocessing.shared_memory"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in ("rollout", "engines"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def texts(tree: ast.Module) -> Iterator[str]:
    """The texts of a module that are no docstrings."""
    notes = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in notes:
            yield node.value


def names_a_shared_place(tree: ast.Module) -> bool:
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
        )
    }
    return bool(imported & _TEMPORARY) or any(
        "/dev/shm" in text or text == "/tmp" or "/tmp/" in text for text in texts(tree)
    )


def is_effect(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "open" and _makes(call, 1)
    if not isinstance(function, ast.Attribute):
        return False
    is_os = isinstance(function.value, ast.Name) and function.value.id == "os"
    if function.attr == "open":
        return any(
            isinstance(node, ast.Attribute) and node.attr == "O_CREAT" for node in ast.walk(call)
        ) or (not is_os and _makes(call, 0))
    if function.attr in _OF_OS:
        # Texts and lists have methods of these names, with more and other arguments.
        is_path = function.attr != "remove" and len(call.args) == 1 and not call.keywords
        return is_os or (is_path and not isinstance(call.args[0], ast.Constant))
    return function.attr in _METHODS


def _makes(call: ast.Call, at: int) -> bool:
    modes = [*call.args[at : at + 1], *(key.value for key in call.keywords if key.arg == "mode")]
    return any(
        isinstance(mode, ast.Constant)
        and isinstance(mode.value, str)
        and set(mode.value) & set("wax")
        for mode in modes
    )


def has_effects(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Call) and is_effect(node) for node in ast.walk(tree))


def test_shared_places_are_named_by_one_module() -> None:
    found = {name for name, tree in sources() if names_a_shared_place(tree)}
    assert found == set(NAMES)


def test_files_are_made_and_removed_in_known_places() -> None:
    found = {name for name, tree in sources() if has_effects(tree)}
    assert found == set(EFFECTS)
