"""Write tests.yml from tests.yml.in: one test job for each Python version of pyproject.toml.

    python .github/workflows/generate.py

Each version is a job instead of an entry of GitHub's matrix, so that a branch rule can require it
by name, and a suite can have its own limits.  The template is filled with ``str.replace``, because
a workflow contains ``${{ }}``, which is also jinja2's syntax.  So no package is needed to generate
or check it.
"""

import re
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
TEMPLATE = HERE / "tests.yml.in"
GENERATED = HERE / "tests.yml"
PYPROJECT = HERE.parents[1] / "pyproject.toml"

# The lines between the two marks are one job, repeated for each version.
REPEATED = re.compile(r"^ *# for each @python@\n(.*?)^ *# end\n", re.MULTILINE | re.DOTALL)


def python_versions() -> list[str]:
    """The supported versions in pyproject.toml, oldest first."""
    classifiers = tomllib.loads(PYPROJECT.read_text())["project"]["classifiers"]
    prefix = "Programming Language :: Python :: 3."
    minors = sorted(
        int(line.removeprefix(prefix)) for line in classifiers if line.startswith(prefix)
    )
    return [f"3.{minor}" for minor in minors]


def render() -> str:
    """The text that tests.yml should have."""
    versions = python_versions()

    def repeat(match: re.Match[str]) -> str:
        return "\n".join(
            match[1].replace("@python@", version).replace("@id@", version.replace(".", "-"))
            for version in versions
        )

    text = REPEATED.sub(repeat, TEMPLATE.read_text())
    return text.replace("@oldest@", versions[0])


if __name__ == "__main__":
    GENERATED.write_text(render())
    print(f"wrote {GENERATED}")
