"""The README shows what is: its diagram and its configuration are the library's own."""

import re
from pathlib import Path

import pytest
import yaml

from rollout.config import RolloutConfig
from rollout.rules.lifecycle import diagram
from tests.support.suites import suites_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_diagram_is_drawn_from_the_table() -> None:
    assert blocks("mermaid") == [diagram() + "\n"], (
        'stale: python -c "from rollout.rules.lifecycle import diagram; print(diagram())"'
    )


def test_the_configuration_shown_is_valid() -> None:
    for text in blocks("yaml"):
        assert RolloutConfig.from_dict(yaml.safe_load(text)).servers["policy"].groups


def test_the_python_shown_compiles_and_uses_only_public_names() -> None:
    import rollout

    for text in blocks("python"):
        compile(text, "README.md", "exec")
        assert set(re.findall(r"\brollout\.([A-Za-z]\w*)\(", text)) <= set(rollout.__all__)


def test_the_commands_to_try_it_and_to_test_it_come_first() -> None:
    shell, *_ = blocks("")
    assert [line.partition("#")[0].split() for line in shell.splitlines()] == [
        ["make", "quickstart"],
        ["make", "test"],
    ]
    assert README.index(shell) < README.index("```yaml") < README.index("```mermaid")


def section(title: str) -> str:
    return README.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_each_measured_figure_is_one_of_the_benchmarks() -> None:
    measured = set(re.findall(r"\d+(?:\.\d+)?", (ROOT / "benchmarks/README.md").read_text()))
    costs = section("Two questions first").partition("What does a step cost me")[2]
    costs = re.sub(r"\]\([^)]*\)", "", costs)
    for text in (costs, section("What it contains").partition("[Agents]")[2].partition("- **")[0]):
        figures = re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?= |\.$|\.\n)", text)
        assert figures
        assert set(figures) - {"28"} <= measured, "copy the figures of benchmarks/README.md"


def test_each_accuracy_is_one_of_the_printed_runs() -> None:
    text = section("Try it")
    for page, figures in {
        "getting-started.md": "28.9 99.6",
        "how-to/agents.md": "9.4 97.9",
    }.items():
        assert page in text
        printed = re.findall(r"\d+(?:\.\d+)?(?= ?%)", (ROOT / "docs" / page).read_text())
        for figure in figures.split():
            assert f"{figure} %" in text
            assert figure in printed


@pytest.mark.embedded  # without torch and Ray these files have no tests
@pytest.mark.ray
def test_each_guarantee_names_the_suites_that_run_its_tests() -> None:
    rows = re.findall(r"^\| .* \| (.*\]\(tests/.*) \| (.*) \|$", README, re.M)
    assert len(rows) > 15
    links = [re.findall(r"\]\((tests/[\w/]+\.py)\)", tests) for tests, _ in rows]
    suites = suites_of({file for row in links for file in row})
    for files, (_, shown) in zip(links, rows, strict=True):
        expected = [
            ", ".join(suite.removeprefix("test-") for suite in suites[file]) for file in files
        ]
        assert shown == "; ".join(expected), files
