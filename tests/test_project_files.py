"""The files with which others join the project are complete and agree with the package."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_agrees_with_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    assert {"cff-version", "message", "title", "type"} <= citation.keys()


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")))
def test_a_form_of_issues_asks_questions_with_ids_of_their_own(form: Path) -> None:
    values = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= values.keys()
    ids = [part["id"] for part in values["body"]]
    assert len(set(ids)) == len(ids) > 0
    assert all(part["attributes"]["label"] for part in values["body"])


def test_the_hooks_before_a_commit_are_steps_of_make_check() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    command = ["make", "-n", "check"]
    check = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert len(hooks) == 4
    for hook in hooks:
        words = [word for word in hook["entry"].split() if not word.startswith("-")]
        assert words[-1] in check, hook["entry"]


# MkDocs checks the links of docs/ (``make docs``).
LINKING = [*ROOT.glob("*.md"), ROOT / "benchmarks/README.md", ROOT / "engines/fake/README.md"]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_the_files_beside_the_documentation_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!http|mailto)([^)#]+)", text):
        assert (page.parent / target).exists(), target
