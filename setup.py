"""Everything is in pyproject.toml but one step of the build, and the description."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    """Adds the examples to a wheel: ``rollout quickstart`` runs one of them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / "rollout/examples"
            folder.mkdir(parents=True, exist_ok=True)
            for path in Path("examples").glob("*.py"):
                if not path.name.startswith("test_"):
                    shutil.copy(path, folder)


def outside_the_repository(readme: str) -> str:
    """README.md for a package index: no picture, and a path instead of a link to a file."""
    without_pictures = re.sub(r"^!\[.*\n", "", readme, flags=re.MULTILINE)
    return re.sub(r"\[([^]]+)\]\((?!https?:)([^)]+)\)", r"\1 (`\2`)", without_pictures)


setup(
    cmdclass={"build_py": BuildWithExamples},
    long_description=outside_the_repository(Path("README.md").read_text()),
    long_description_content_type="text/markdown",
)
