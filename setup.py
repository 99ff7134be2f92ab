"""Puts the presets of `configs/` into the package that is built; everything else is in
pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithPresets(build_py):
    """Copies `configs/` to brx/presets. An editable installation reads them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                ROOT / "configs", Path(self.build_lib) / "brx" / "presets", dirs_exist_ok=True
            )


setup(cmdclass={"build_py": BuildWithPresets})
