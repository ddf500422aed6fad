"""Leaves out the tests whose optional package is not installed, and says how many and why.

A whole environment has every package of the extras, and leaves nothing out.  ``make test-pythons``
runs without torch and Ray, whose wheels are large: these tests count as deselected, so that every
skipped test of CI lacks something of the machine.
"""

import re
from collections import Counter
from collections.abc import Generator
from importlib.util import find_spec

import pytest

# What the extras of pyproject.toml install, by the name of the import, and trackers; not those for
# development.
OPTIONAL = (
    *("jinja2", "safetensors", "tokenizers", "torch", "transformers"),
    *("math_verify", "matplotlib", "numpy", "opentelemetry", "ray"),
    *("datasets", "mooncake", "peft", "trl"),
    *("mlflow", "tensorboardX", "trackio", "wandb"),
)
REASON = re.compile(r"could not import '(\w+)")
NEEDED_BY_MARKER = {"embedded": ("torch", "transformers"), "ray": ("ray",), "torch": ("torch",)}


def is_missing(package: str) -> bool:
    return find_spec(package) is None


def missing_package(error: BaseException | None) -> str:
    """The optional package that this import, or the one it was raised from, did not find."""
    while error is not None:
        name = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and name in OPTIONAL:
            return name
        error = error.__cause__ or error.__context__
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that cannot be imported for want of an optional package is left out."""
    report = yield
    call = getattr(report, "call", None)
    package = missing_package(call.excinfo.value) if call and call.excinfo else ""
    if package and is_missing(package):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, f"Skipped: could not import {package!r}")
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, packages in NEEDED_BY_MARKER.items():
        missing = [package for package in packages if is_missing(package)]
        if missing:
            skip = pytest.mark.skip(reason=f"could not import {missing[0]!r}")
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(skip)


def left_out_for(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The optional package that this skipped test or module lacks; empty for another reason."""
    found = REASON.search(report.longrepr[2]) if isinstance(report.longrepr, tuple) else None
    package = found[1] if found else ""
    return package if package in OPTIONAL and is_missing(package) else ""


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.pop("skipped", [])
    # By name: each process of xdist reports every module.
    left_out = {one.nodeid: one for one in skipped if left_out_for(one)}
    if others := [one for one in skipped if not left_out_for(one)]:
        terminalreporter.stats["skipped"] = others
    if left_out:
        terminalreporter.stats.setdefault("deselected", []).extend(left_out.values())
    for package, number in Counter(map(left_out_for, left_out.values())).items():
        terminalreporter.write_line(
            f"left out: {number} tests and test modules, {package} is not installed"
        )
