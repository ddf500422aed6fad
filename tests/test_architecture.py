"""What `.importlinter` cannot say of the folders, and what importing the library loads.

ruff restricts imports of ray, torch and transformers (TID251); ``lint-imports`` checks the order.
"""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from functools import cache
from pathlib import Path

import pytest

import rollout
from tools import public_names

ROOT = Path(__file__).parents[1]

MOST_ENTRIES = 13  # of rollout itself, one for each role; all others have at most 12
NAMED_BY_PYTHON = ("__init__", "__main__")

NEED_TORCH = (
    "engines.tensors.delta",
    "engines.tensors.payload.encodings",
    "engines.tensors.torch_fingerprint",
    "rollout.__main__",
    "rollout.driver.data.batch_torch",
    "rollout.driver.logprobs.token_logprobs",
    "rollout.runtime.handle.pusher",
    "rollout.weights.routes.trainer_groups",
)


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


def contract(name: str, option: str) -> list[str]:
    """The lines of an option of a contract."""
    contracts = ConfigParser()
    contracts.read(ROOT / ".importlinter")
    return contracts[f"importlinter:contract:{name}"][option].split()


def test_the_order_names_every_folder_without_folders() -> None:
    folders = {module_name(path.parent) for path in MODULES.values()}
    lowest = {one for one in folders if not any(two.startswith(f"{one}.") for two in folders)}
    assert set(contract("order", "layers")) == lowest


# A line that each contract refuses, and the file of the copy that it is added to.
PLANTED = {
    "order": ("rollout/rules/probe.py", "from rollout.observability.timeline import export"),
    "circles": ("rollout/rules/probe.py", "from rollout.rules import fingerprint_check"),
    "engines": ("engines/launch.py", "import rollout.core.errors"),
    "kinds": ("engines/kinds.py", "import engines.embedded"),
    "decisions": ("rollout/rules/lifecycle.py", "def now():\n    import time"),
}


def test_an_import_that_a_contract_refuses_is_found_in_a_copy(tmp_path: Path) -> None:
    """In a function, too."""
    for name in ("rollout", "engines"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, line in PLANTED.values():
        with (tmp_path / file).open("a") as source:
            source.write(f"\n{line}\n")
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [linter, ROOT / ".importlinter", "--no-cache"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    for line in (
        "rollout.rules.probe -> rollout.observability.timeline.export",
        "No cycles are allowed in rollout.rules.",
        "engines.launch -> rollout.core.errors",
        "engines.kinds -> engines.embedded",
        "rollout.rules.lifecycle -> time",
    ):
        assert line in done.stdout


def test_no_folder_has_more_entries_than_a_reader_takes_in() -> None:
    folders = {path.parent for path in MODULES.values()}
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


def test_a_name_of_ours_exists_in_what_ci_does_not_run() -> None:
    """Where a GPU or minutes are needed; the other tests fail by themselves."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for folder in ("tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\b(gpu|chaos)\b", path.read_text()) or folder != "tests"
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


def test_no_decision_awaits() -> None:
    places = contract("decisions", "source_modules")
    found = [
        module
        for module, path in MODULES.items()
        if any(is_in(module, place) for place in places)
        and re.search(r"^\s*async |\bawait ", path.read_text(), re.MULTILINE)
    ]
    assert found == []


def test_every_package_of_ours_says_that_it_is_typed() -> None:
    assert (ROOT / "rollout/py.typed").exists()
    assert (ROOT / "engines/py.typed").exists()


def test_import_rollout_needs_neither_ray_nor_torch() -> None:
    bare = [
        name.removesuffix(".__init__")
        for name in MODULES
        if not name.startswith(
            (
                *("rollout.runtime.ray", "engines.embedded"),
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
        home = importlib.import_module(rollout._HOME.get(name, "rollout"))
        assert getattr(rollout, name) is getattr(home, name)
        assert name in dir(rollout)


def test_the_list_of_public_names_is_that_of_the_modules() -> None:
    assert public_names.FILE.read_text() == public_names.listing(), (
        "stale: python -m tools.public_names"
    )


def test_each_public_name_is_there_where_the_list_has_it() -> None:
    for module, names in public_names.public_names().items():
        found = importlib.import_module(module)
        assert [name for name in names if not hasattr(found, name)] == []


# Real time passes in whatever has this mark, of pytest or in a comment with a reason.
CLOCK = re.compile(r"pytest\.mark\.clock\b|^# clock: \w", re.MULTILINE)
SLEEP = re.compile(r"\b(?:asyncio|time)\.sleep(?=[(),])(?!\(0[,)])")
# They poll, or let virtual time pass.
WAITS = ("processes", "waits", "virtual_time", "kill_an_engine")


def sleeps(source: str) -> list[int]:
    """The lines with a sleep, also those of a program in a string; zero seconds are a turn."""
    lines = enumerate(source.splitlines(), 1)
    return [] if CLOCK.search(source) else [number for number, line in lines if SLEEP.search(line)]


def test_tests_wait_by_gates_and_sleep_only_in_files_that_are_marked_clock() -> None:
    paths = [path for folder in ("tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    others = [path for path in paths if path.stem not in WAITS and path != Path(__file__)]
    found = {str(path.relative_to(ROOT)): sleeps(path.read_text()) for path in others}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("await asyncio.sleep(0)", False),
        ('loop.submit(asyncio.sleep(0, "done"))', False),
        ("await asyncio.sleep(0.01)", True),
        ('PROGRAM = "import time; time.sleep(600)"', True),
        ("process.call(time.sleep, 600.0)", True),
        ("pytestmark = pytest.mark.clock; time.sleep(1)", False),
        ("# clock: pauses of random length.\ntime.sleep(1)", False),
    ],
)
def test_what_is_a_sleep(line: str, is_found: bool) -> None:
    assert bool(sleeps(line)) is is_found


# -- what is sent ---------------------------------------------------------------------------------


def test_addresses_of_a_trainers_tensors_are_taken_behind_the_comparison_with_the_plan() -> None:
    """A new file here works on bytes that something else describes: it takes ``Pairs`` only."""
    places = {name for name, path in MODULES.items() if "data_ptr" in path.read_text()}
    assert {name for name in places if is_in(name, "rollout")} == {
        "rollout.weights.tensors.aliases",  # compares them
        "rollout.weights.tensors.bucket_bytes",
        "rollout.weights.tensors.finite_check",
        "rollout.weights.tensors.shard_gather",  # before the comparison: torch checks its sizes
        "rollout.weights.tensors.sources",  # compares them
    }


# -- deltas -----------------------------------------------------------------------------------

NAME_DELTAS = {
    "engines.tensors.delta": "reads, writes and applies one",
    "engines.tensors.payload.encodings": "its row in the engines",
    "rollout.config.weights": "the setting",
    "rollout.weights.store.delta_chain": "those that the nodes of the store lack",
    "rollout.weights.store.node.rebuilt": "a node applies them",
    "rollout.weights.store.store": "keeps the chain",
    "rollout.weights.tensors.delta_base": "makes them",
    "rollout.weights.push.encodings": "its row in the trainer",
}
OTHER_DELTAS = {
    "engines.embedded.server.openai_api": "a field of OpenAI's streams",
    "engines.embedded.weights.lora_adapters": "what an adapter adds",
    "rollout.router.continuation.dialects.openai": "a field of OpenAI's streams",
    "rollout.agents.answers": "a field of OpenAI's streams",
    "rollout.weights.tensors.adapters": "what an adapter adds",
}


def test_only_the_modules_of_deltas_name_them() -> None:
    """Others know an ``Encoding``, or an engine's ``encodings``."""
    found = {
        name
        for name, path in MODULES.items()
        if re.search(r"(?<!time)delta", path.read_text(), re.IGNORECASE)
    }
    assert found - OTHER_DELTAS.keys() == NAME_DELTAS.keys()
    assert OTHER_DELTAS.keys() <= found
    assert len(NAME_DELTAS) <= 12
