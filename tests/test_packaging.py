"""The package that is built from a source distribution contains the presets and the report's
template."""

import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def setup_py(folder: Path, *arguments: str | Path) -> None:
    command = [sys.executable, "setup.py", "-q", *map(str, arguments)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def test_built_package_finds_its_presets(tmp_path):
    setup_py(ROOT, "egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    library = tmp_path / "lib"
    setup_py(unpacked, "build", "--build-base", tmp_path / "base", "--build-lib", library)

    assert (library / "brx" / "py.typed").is_file()
    assert (library / "brx" / "report" / "template" / "page.html").is_file()
    found = subprocess.run(
        [sys.executable, "-m", "brx", "config", "show", "quick"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(library)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith("model:")
    built = library / "brx" / "presets"
    source = ROOT / "configs"
    assert {path.relative_to(built) for path in built.rglob("*.yaml")} == {
        path.relative_to(source) for path in source.rglob("*.yaml")
    }
