"""Everything is in pyproject.toml but one step of the build."""

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


setup(cmdclass={"build_py": BuildWithExamples})
