"""Leaves out the tests whose optional package is not installed, and says how many and why.

A whole environment has every package of the extras, and leaves nothing out.  ``make test-pythons``
runs without torch and Ray, whose wheels are large.
"""

from collections import Counter
from collections.abc import Generator
from importlib.util import find_spec

import pytest

# What the extras of pyproject.toml install, by the name of the import; not those for development.
OPTIONAL = (
    *("accelerate", "jinja2", "safetensors", "tokenizers", "torch", "transformers"),
    *("math_verify", "matplotlib", "numpy", "opentelemetry", "pyarrow", "ray"),
    *("datasets", "trl"),
)
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
    """A module that cannot be imported for want of an optional package counts as skipped."""
    report = yield
    call = getattr(report, "call", None)
    package = missing_package(call.excinfo.value) if call and call.excinfo else ""
    if package and is_missing(package):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, f"Skipped: {package} is not installed")
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, packages in NEEDED_BY_MARKER.items():
        missing = [package for package in packages if is_missing(package)]
        if missing:
            skip = pytest.mark.skip(reason=f"{' and '.join(missing)}: not installed")
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", ())
    modules = {one.nodeid: one for one in skipped if isinstance(one, pytest.CollectReport)}
    reasons = Counter(one.longrepr[2].removeprefix("Skipped: ") for one in modules.values())
    for reason, number in reasons.items():
        terminalreporter.write_line(f"test modules left out: {number}, {reason}")
