"""The import arrow: a folder imports only from itself and from folders before it in ``FOLDERS``.

ruff restricts imports of ray, torch and transformers (TID251); this test holds the folders' order.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import rollout

ROOT = Path(__file__).parents[1]

# Lowest first.  A row stands for the files directly in that folder.
FOLDERS = (
    "engines.protocol.census",
    "engines.protocol",
    "engines.http",
    "engines.process",
    "engines.tensors",
    "engines.tensors.collective",
    "engines.tensors.payload",
    "engines.embedded.core",
    "engines.embedded.memory",
    "engines.embedded.weights",
    "engines.embedded.generation",
    "engines.embedded.server",
    "engines.embedded",
    "engines.cpu.sglang.shims",
    "engines.cpu.sglang.without_kernels",
    "engines.cpu.sglang",
    "engines.vllm_plugin",
    "engines.cpu.vllm.on_path",
    "engines.cpu.vllm",
    "engines.cpu",
    "engines.vllm",
    "engines.fake.engine",
    "engines.fake",
    "engines.fake.vllm",
    "engines.sglang",
    "engines",
    "rollout.core",
    "rollout.config",
    "rollout.rules",
    "rollout.observability.timeline",
    "rollout.observability",
    "rollout.router.gate",
    "rollout.router.http",
    "rollout.router.continuation",
    "rollout.router.continuation.dialects",
    "rollout.router.state",
    "rollout.router.sessions",
    "rollout.router.proxy",
    "rollout.router",
    "rollout.driver.client",
    "rollout.driver.data",
    "rollout.driver.logprobs",
    "rollout.driver.stream",
    "rollout.driver",
    "rollout.weights.format",
    "rollout.weights.tensors",
    "rollout.weights.routes",
    "rollout.weights.push",
    "rollout.weights.store.layout",
    "rollout.weights.store.node",
    "rollout.weights.store.transfer",
    "rollout.weights.store",
    "rollout.weights.ranks",
    "rollout.weights",
    "rollout.control.engine",
    "rollout.control.group",
    "rollout.control.recovery",
    "rollout.control.server",
    "rollout.control",
    "rollout.observability.page",
    "rollout.runtime.calls",
    "rollout.runtime.handle",
    "rollout.runtime",
    "rollout.runtime.ray",
    "rollout",
    "rollout.adapters.trl",
    "rollout.adapters",
    "rollout.testing",
    "rollout.cli.lib",
    "rollout.cli.bench",
    "rollout.cli.trial",
    "rollout.cli",
)
ABOVE_ALL = ("rollout.__main__",)
MOST_ENTRIES = 12
NAMED_BY_PYTHON = ("__init__", "__main__")

# Folders and files of decisions: plain functions of their arguments.
PURE = (
    "engines.protocol.features",
    "engines.sglang.command",
    "engines.sglang.environment",
    "engines.sglang.features",
    "engines.sglang.parallel",
    "engines.vllm.features",
    "engines.vllm.update_info",
    "engines.vllm.vllm_json",
    "engines.tensors.fingerprint",
    "engines.tensors.flattened_bucket",
    "rollout.config.compatibility",
    "rollout.driver.client.partial",
    "rollout.driver.client.retry",
    "rollout.driver.data.batch",
    "rollout.driver.logprobs.comparison",
    "rollout.driver.logprobs.gap_cause",
    "rollout.driver.logprobs.gap_figures",
    "rollout.driver.stream.audit",
    "rollout.driver.stream.options",
    "rollout.driver.stream.step_metrics",
    "rollout.driver.stream.work_queue",
    "rollout.observability.timeline.analysis",
    "rollout.observability.timeline.export",
    "rollout.router.sessions.alignment",
    "rollout.router.sessions.answers",
    "rollout.router.sessions.chat_request",
    "rollout.router.sessions.messages",
    "rollout.router.sessions.session_store",
    "rollout.router.sessions.tool_calls",
    "rollout.router.sessions.tree",
    "rollout.rules",
    "rollout.weights.push.push_version",
    "rollout.weights.routes.choice",
    "rollout.weights.store.layout.commit",
)
NEED_TORCH = (
    "engines.cpu.vllm.worker",
    "engines.tensors.delta",
    "engines.tensors.torch_fingerprint",
    "rollout.__main__",
    "rollout.driver.data.batch_torch",
    "rollout.driver.logprobs.token_logprobs",
    "rollout.runtime.handle.pusher",
    "rollout.weights.routes.trainer_groups",
)
# Clocks, sockets, threads and processes.
NOT_IN_DECISIONS = {
    "aiohttp",
    "asyncio",
    "httpx",
    "multiprocessing",
    "psutil",
    "socket",
    "subprocess",
    "threading",
    "time",
    "uvicorn",
}


def module_name(path: Path) -> str:
    """The dotted name of a source file; a package's own file ends in ``__init__``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {
    module_name(path): path
    for package in ("rollout", "engines")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def is_in(module: str, place: str) -> bool:
    """Whether ``module`` is ``place`` or stands in it."""
    return module == place or module.startswith(f"{place}.")


def row_of(module: str) -> int:
    """The place of a module's folder in the order; what stands for others' packages is one folder
    with all in it."""
    if module in ABOVE_ALL:
        return len(FOLDERS)
    folder = module.rpartition(".")[0]
    for whole in ("engines.cpu.sglang.shims", "engines.cpu.sglang.without_kernels"):
        folder = whole if is_in(folder, whole) else folder
    return FOLDERS.index(folder)


def resolve(name: str) -> str | None:
    """The module of ours that importing ``name`` loads last, or None if it is not ours."""
    return next((found for found in (name, f"{name}.__init__") if found in MODULES), None)


@cache
def imported_names(path: Path) -> tuple[str, ...]:
    """Every dotted name a file imports, wherever in the file it does so."""
    return tuple(dict.fromkeys(names_imported_in(path)))


def names_imported_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports are not used here"
            assert node.module
            for alias in node.names:
                nested = f"{node.module}.{alias.name}"
                yield nested if resolve(nested) else node.module


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_nothing_from_a_higher_folder(module: str) -> None:
    own = row_of(module)
    for name in imported_names(MODULES[module]):
        target = resolve(name)
        assert target is None or row_of(target) <= own, (
            f"{module} imports {target}, whose folder is higher than its own"
        )


def test_no_module_imports_itself_through_others_also_for_its_types() -> None:
    """What a circle has is read as one module, whatever its files are."""
    imported = {
        module: {target for name in imported_names(path) if (target := resolve(name))}
        for module, path in MODULES.items()
    }
    sorter = TopologicalSorter({one: names - {one} for one, names in imported.items()})
    sorter.prepare()  # a CycleError names the modules


def test_the_order_names_every_folder_once_and_no_other() -> None:
    rows = [row_of(module) for module in MODULES if module not in ABOVE_ALL]
    assert set(rows) == set(range(len(FOLDERS)))
    assert len(set(FOLDERS)) == len(FOLDERS)


def test_no_folder_has_more_entries_than_a_reader_takes_in() -> None:
    folders = {path.parent for path in MODULES.values()}
    folders = {folder for folder in folders if "shims" not in folder.parts}
    for folder in sorted(folders):
        entries = [
            entry.name
            for entry in folder.iterdir()
            if (entry.suffix == ".py" and entry.stem not in NAMED_BY_PYTHON) or entry in folders
        ]
        assert len(entries) <= MOST_ENTRIES, f"{folder.relative_to(ROOT)}: {sorted(entries)}"


def test_no_module_imports_from_a_module_of_tests() -> None:
    """One that an environment leaves out is not there for the others: they share a plain module."""
    named = re.compile(r"^\s*(?:from|import) tests(?:\.\w+)*\.test_\w+", re.MULTILINE)
    found = {
        str(path.relative_to(ROOT)): match[0].strip()
        for path in (ROOT / "tests").rglob("*.py")
        if (match := named.search(path.read_text()))
    }
    assert not found


def test_a_name_of_ours_in_a_test_exists() -> None:
    """A test may replace a function by its name, or import it in a function or behind a skip."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for folder in ("tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for line, name in names_of_ours(path)
        if not is_a_name(name)
    ]
    assert wrong == []


def names_of_ours(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a file that are such names, and the names that it imports, with their lines."""
    dotted = re.compile(r"(?:rollout|engines)(?:\.\w+)+")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and dotted.fullmatch(str(node.value)):
            yield node.lineno, str(node.value)
        elif isinstance(node, ast.ImportFrom) and is_ours(node.module or ""):
            yield from ((node.lineno, f"{node.module}.{one.name}") for one in node.names)


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("rollout", "engines")


@cache
def is_a_name(dotted: str) -> bool:
    """A module has this name, or contains it; names of no folder of ours are not judged."""
    parts = dotted.split(".")
    if not any(is_in(module, ".".join(parts[:2])) for module in MODULES):
        return True
    num = max(n for n in range(1, len(parts) + 1) if has_modules(".".join(parts[:n])))
    module = ".".join(parts[:num])
    source = MODULES.get(module, MODULES.get(f"{module}.__init__"))
    text = source.read_text() if source is not None else ""
    return num == len(parts) or re.search(rf"\b{parts[num]}\b", text) is not None


def has_modules(name: str) -> bool:
    return any(is_in(module, name) for module in MODULES)


def test_engines_never_import_rollout() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        if module.startswith("engines")
        for name in imported_names(path)
        if name.split(".")[0] == "rollout"
    ]
    assert wrong == []


def importers_of(place: str) -> set[str]:
    """The modules outside a folder that import from it."""
    return {
        module
        for module, path in MODULES.items()
        if not is_in(module, place) and any(is_in(name, place) for name in imported_names(path))
    }


def test_nobody_imports_what_runs_engines_on_cpus() -> None:
    """Its recipes are loaded by the names in ``CPU_PYTHONS``."""
    assert importers_of("engines.cpu") == set()


def test_nobody_imports_the_embedded_engine() -> None:
    """It is one kind of several, loaded by the name of its command in ``engines.kinds``."""
    assert importers_of("engines.embedded") == set()


DECISIONS = [module for module in MODULES if any(is_in(module, place) for place in PURE)]


def test_every_place_of_decisions_exists() -> None:
    assert [place for place in PURE if not any(is_in(module, place) for module in MODULES)] == []


@pytest.mark.parametrize("module", DECISIONS)
def test_a_decision_neither_awaits_nor_reads_a_clock_nor_opens_a_socket(module: str) -> None:
    tops = {name.split(".")[0] for name in imported_names(MODULES[module])}
    assert tops & NOT_IN_DECISIONS == set()
    asynchronous = ast.AsyncFunctionDef, ast.Await, ast.AsyncWith, ast.AsyncFor
    tree = ast.parse(MODULES[module].read_text())
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, asynchronous)] == []


def test_every_package_of_ours_says_that_it_is_typed() -> None:
    assert (ROOT / "rollout/py.typed").exists()
    assert (ROOT / "engines/py.typed").exists()


def test_import_rollout_needs_neither_ray_nor_torch() -> None:
    bare = [
        name.removesuffix(".__init__")
        for name in MODULES
        if not name.startswith(
            (
                *("rollout.runtime.ray", "engines.embedded", "engines.cpu.sglang.shims"),
                *("engines.tensors.collective", "engines.vllm_plugin"),
            )
        )
        and not name.startswith(("rollout.weights.tensors", "rollout.weights.ranks"))
        and name not in NEED_TORCH
    ]
    missing = "import sys; sys.modules |= dict.fromkeys(['ray', 'torch', 'transformers'])"
    code = f"{missing}; import {', '.join(bare)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def loaded_by(code: str) -> set[str]:
    """The modules that a new process has after this code."""
    code += "; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_import_rollout_loads_what_is_used_and_no_server_of_the_router() -> None:
    assert not {"pydantic", "aiohttp", "asyncio"} & loaded_by("import rollout")
    assert "fastapi" not in loaded_by("from rollout import *")


@pytest.mark.ray
def test_the_process_of_an_engine_actor_loads_no_server() -> None:
    loaded = loaded_by("import rollout.runtime.ray.engine_handle")
    assert not {"fastapi", "pydantic", "rollout.control.server.server"} & loaded - ray_modules()


def ray_modules() -> set[str]:
    return loaded_by("import ray")


def test_the_public_names_are_the_same_for_a_type_checker_and_at_run_time() -> None:
    tree = ast.parse((ROOT / "rollout/__init__.py").read_text())
    checked = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert checked == rollout._HOME
    assert set(rollout.__all__) == {*checked, "launch", "connect"}
    for name in rollout.__all__:
        assert getattr(rollout, name).__name__ == name
        assert name in dir(rollout)
