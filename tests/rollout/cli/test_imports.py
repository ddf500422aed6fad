"""What a process loads for the package and for a help text: the time of both is that of imports."""

import subprocess
import sys

import pytest
import typer

from rollout.cli.main import app

COMMANDS = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
# Of the whole help; typer loads pydantic for the options of a command.
HEAVY = {"aiohttp", "asyncio", "fastapi", "orjson", "psutil", "pydantic", "ray", "rich"} | {
    *("torch", "transformers", "uvicorn", "uvloop", "xxhash", "yaml")
}
OF_TYPER = {"pydantic"}


def modules_after(code: str, *words: str) -> set[str]:
    """The names of all modules of a process that has run ``code``."""
    shown = f"{code}\nimport sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", shown, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stderr.split())


def modules_of_help(*words: str) -> set[str]:
    code = "from rollout.cli.main import app; app(standalone_mode=False)"
    return modules_after(code, *words, "--help")


def test_importing_the_package_loads_nothing_else() -> None:
    loaded = modules_after("import rollout")
    assert {name for name in loaded if name.startswith(("rollout", "engines"))} == {
        "rollout",
        "rollout.core",
    }
    assert not HEAVY & loaded


def test_the_help_loads_no_command() -> None:
    loaded = modules_of_help()
    assert not HEAVY & loaded
    assert {name for name in loaded if name.startswith("rollout.cli.")} == {"rollout.cli.main"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_does_not_load_it(command: str) -> None:
    loaded = modules_of_help(command)
    assert not (HEAVY - OF_TYPER) & loaded
    assert {name for name in loaded if name.startswith("rollout.cli.")} == {"rollout.cli.main"}
