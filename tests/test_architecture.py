"""The import arrow: a file imports from its own row or from rows above, never from below.

ruff keeps ray, torch and transformers where they belong (TID251); the rows are kept here.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ROWS = ("words", "decisions", "effects", "ray", "doors")
# The longest prefix wins.  What is not named here is an effect.
ROW_OF = {
    "engines": "effects",
    "engines.deadlines": "words",
    "engines.errors": "words",
    "engines.features": "decisions",
    "engines.fingerprint": "decisions",
    "engines.flat": "decisions",
    "engines.protocol": "words",
    "engines.spec": "words",
    "engines.invocation": "decisions",
    "engines.sglang.command": "decisions",
    "engines.sglang.environment": "decisions",
    "engines.sglang.parallel": "decisions",
    "rollout": "effects",
    "rollout.__init__": "doors",
    "rollout.__main__": "doors",
    "rollout.actors": "ray",
    "rollout.admission": "decisions",
    "rollout.canary": "decisions",
    "rollout.checking_cost": "words",
    "rollout.cli": "doors",
    "rollout.choosing": "decisions",
    "rollout.commands": "doors",
    "rollout.config": "words",
    "rollout.diagnosis": "decisions",
    "rollout.driver.audit": "decisions",
    "rollout.driver.batch": "decisions",
    "rollout.driver.concurrency": "decisions",
    "rollout.driver.door": "words",
    "rollout.driver.metrics": "decisions",
    "rollout.driver.options": "decisions",
    "rollout.driver.partial": "decisions",
    "rollout.driver.plan": "decisions",
    "rollout.driver.prompts": "words",
    "rollout.driver.retry": "decisions",
    "rollout.driver.work": "decisions",
    "rollout.driver.works": "decisions",
    "rollout.errors": "words",
    "rollout.health": "decisions",
    "rollout.lifecycle": "decisions",
    "rollout.observation": "words",
    "rollout.page.exposition": "decisions",
    "rollout.picture": "decisions",
    "rollout.placement": "decisions",
    "rollout.policy": "decisions",
    "rollout.router.settings": "words",
    "rollout.routing": "decisions",
    "rollout.run_folder": "words",
    "rollout.samples": "words",
    "rollout.timeline.analysis": "decisions",
    "rollout.timeline.export": "decisions",
    "rollout.timeline.span": "words",
    "rollout.types": "words",
    "rollout.weights.store.commit": "decisions",
    "rollout.weights.store.limits": "decisions",
    "rollout.weights.choice": "decisions",
    "rollout.weights.joining": "decisions",
    "rollout.weights.fingerprint": "decisions",
}
# Clocks, sockets, threads and processes: a decision is a plain function of its arguments.
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


def row_of(module: str) -> str:
    """The row a module belongs to."""
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(ROW_OF[prefix] for prefix in prefixes if prefix in ROW_OF)


def resolve(name: str) -> str | None:
    """The module of ours that importing ``name`` loads last, or None if it is not ours."""
    return next((found for found in (name, f"{name}.__init__") if found in MODULES), None)


def imported_names(path: Path) -> Iterator[str]:
    """Every dotted name a file imports, wherever in the file it does so."""
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
def test_a_module_imports_nothing_from_a_row_below_its_own(module: str) -> None:
    own = ROWS.index(row_of(module))
    for name in imported_names(MODULES[module]):
        target = resolve(name)
        if target is None:
            continue
        below = row_of(target)
        assert ROWS.index(below) <= own, (
            f"{module} ({ROWS[own]}) imports {target} ({below}), which is below it"
        )


def test_engines_never_import_rollout() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        if module.startswith("engines")
        for name in imported_names(path)
        if name.split(".")[0] == "rollout"
    ]
    assert wrong == []


@pytest.mark.parametrize("module", [name for name in MODULES if row_of(name) == "decisions"])
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
        if not name.startswith(("rollout.actors", "engines.embedded", "engines.sglang_cpu.shims"))
        and not name.startswith("rollout.weights.tensors")
        and name not in ("rollout.__main__", "rollout.driver.tensors")
    ]
    missing = "import sys; sys.modules |= dict.fromkeys(['ray', 'torch', 'transformers'])"
    code = f"{missing}; import {', '.join(bare)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
