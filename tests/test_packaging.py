"""The built package contains the presets and the report's template."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_built_package_finds_its_presets(tmp_path):
    build = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path / "base")]
    subprocess.run(
        [*build, "--build-lib", str(tmp_path / "lib")], cwd=ROOT, check=True, capture_output=True
    )
    assert (tmp_path / "lib" / "brx" / "report" / "template" / "page.html").is_file()
    found = subprocess.run(
        [sys.executable, "-m", "brx", "config", "show", "quick"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "lib")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith("model:")
    built = tmp_path / "lib" / "brx" / "presets"
    source = ROOT / "configs"
    assert {path.relative_to(built) for path in built.rglob("*.yaml")} == {
        path.relative_to(source) for path in source.rglob("*.yaml")
    }
