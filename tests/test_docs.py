"""README and docs: links lead somewhere, and commands parse."""

import ast
import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
import torch
import typer

from brx.cli.main import COMMANDS, app
from brx.config.loading import load_config
from brx.sweep.spec import Sweep

ROOT = Path(__file__).resolve().parents[1]
FRONT = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "brx" / "optim" / "README.md"]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PAGES = [*FRONT, *sorted((ROOT / "docs").glob("*.md"))]

names = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes from the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@names
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    # Paths of this repository without a link; patterns with a star may match anything.
    for one in re.findall(
        r"`((?:brx|configs|results|figures|benchmarks|tests|examples)/[\w./*-]+)`", page.read_text()
    ):
        assert list(ROOT.glob(one.rstrip("/"))), one


def defined_names(file: Path) -> set[str]:
    """Functions, classes and constants of a module, and `Class.method`."""
    defined: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.FunctionDef(name=name):
                defined.add(name)
            case ast.ClassDef(name=name, body=body):
                defined.add(name)
                defined |= {f"{name}.{m.name}" for m in body if isinstance(m, ast.FunctionDef)}
            case ast.Assign(targets=targets):
                defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    return defined


def test_answers_to_where_is_exist():
    rows = re.findall(r"^\| .+ \| (\[.+\)) \| (.+) \|$", ARCHITECTURE, flags=re.M)
    assert rows
    for links, answers in rows:
        known: set[str] = set()
        for link in re.findall(r"\]\(([^)]+)\)", links):
            known |= defined_names(ROOT / "docs" / link)
        assert set(re.findall(r"`([\w.]+)`", answers)) <= known, links


@pytest.mark.parametrize("package", ["pipeline", "model", "train", "runs", "planning"])
def test_larger_packages_list_their_files(package):
    _, _, section = ARCHITECTURE.partition(f"\n`brx/{package}`")
    table, _, _ = section.partition("\n`brx/")
    listed = set(re.findall(r"`(\w+\.py)`", table))
    files = {path.name for path in (ROOT / "brx" / package).glob("*.py")} - {"__init__.py"}
    assert files <= listed


@names
def test_commands_parse(page, monkeypatch):
    """Every `brx ...` line of a code block has arguments that the command takes and settings that
    exist."""
    monkeypatch.chdir(ROOT)
    root = typer.main.get_command(app)
    context = typer.Context(root, info_name="brx")
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.S)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] != ["brx"]:
            continue
        command = root
        arguments = words[1:]
        while isinstance(command, typer.core.TyperGroup):
            command = command.get_command(context, arguments[0])
            arguments = arguments[1:]
        parameters = command.make_context(command.name, arguments, parent=context).params
        if parameters.get("overrides"):
            load_config(parameters["config"], parameters["overrides"])


@names
def test_sweep_files_load(page, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for block in re.findall(r"```yaml\n(base:.*?)```", page.read_text(), flags=re.S):
        path = tmp_path / "sweep.yaml"
        path.write_text(block)
        assert Sweep.load(path).cells


def text_of_table(path: Path) -> str:
    return pd.read_csv(path).to_string() if path.suffix == ".csv" else path.read_text()


def stale_numbers(page: Path) -> list[tuple[str, str]]:
    """Numbers of a page that no table supports, as (files, number).

    A block below `<!-- numbers: FILE FILE -->` ends at an empty line. Its decimals, percentages and
    cells with a single number must be roundings of numbers in these files. A number with a minus
    sign must have it there, too; one without may be the size of a negative number."""
    stale = []
    for files, block in re.findall(
        r"<!-- numbers: ([^>]+) -->\n\s*(.+?)(?=\n\s*\n|\Z)", page.read_text(), flags=re.S
    ):
        tables = " ".join(text_of_table(ROOT / file) for file in files.split())
        known = [
            float(number.replace(",", ""))
            for number in re.findall(r"(?:(?<![\w.])-)?\d[\d,]*(?:\.\d+)?", tables)
        ]
        sizes = [abs(value) for value in known]
        sign = r"(?:(?<![\w.])-)?"
        for number in re.findall(
            rf"(?<![\w.])({sign}\d+\.\d+|{sign}\d+(?= %)|(?<=\| )-?\d+(?= \|))", block
        ):
            tolerance = 0.5001 * 10.0 ** -len(number.partition(".")[2])
            among = known if number.startswith("-") else sizes
            if not any(abs(value - float(number)) <= tolerance for value in among):
                stale.append((files, number))
    return stale


WITH_NUMBERS = [page for page in PAGES if "<!-- numbers: " in page.read_text()]


@pytest.mark.parametrize("page", WITH_NUMBERS, ids=lambda page: page.name)
def test_numbers_of_a_page_come_from_tables(page):
    assert stale_numbers(page) == []


def test_pages_of_results_name_their_tables():
    pages = {"README.md", "results.md", "results-open.md", "results-appendix.md", "compare.md"}
    pages |= {"similarity.md", "causes.md", "models.md"}
    assert pages <= {page.name for page in WITH_NUMBERS}


def test_a_stale_number_is_found(tmp_path):
    page = tmp_path / "page.md"
    marked = "<!-- numbers: results/tables/compare.md -->"
    page.write_text(
        f"{marked}\nLosses of 2.27 and 1.234, 66 % and 31 %, by -66 %.\n\n"
        f"{marked}\n| a | 47 | 15.7 |\n\n9.87"
    )
    assert [number for _, number in stale_numbers(page)] == ["1.234", "31", "-66", "47"]


def test_quick_start_shows_the_committed_runs(printed, monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    lines = printed("slowdown", "results/quick-start").splitlines()
    assert [line.rstrip() for line in lines] == shown[0].splitlines()


def test_hours_of_the_committed_runs():
    summaries = sorted((ROOT / "results" / "similar").glob("*/summary.json"))
    seconds = [json.loads(path.read_text())["training_seconds"] for path in summaries]
    minutes = pd.Series(seconds) / 60
    hours = round(minutes.sum() / 60)
    readme = (ROOT / "README.md").read_text()
    each = f"{minutes.median():.0f} minutes in the median, {minutes.max():.0f} at most"
    assert f"{hours} core-hours: {len(minutes)} runs on one core each, {each}" in readme
    assert f"The {hours} hours were measured" in readme


@pytest.mark.parametrize("study", ["tuned", "llama", "causes", "little-momentum"])
def test_hours_of_the_runs_of_the_other_studies(study):
    summaries = sorted((ROOT / "results" / study).glob("*/summary.json"))
    seconds = [json.loads(path.read_text())["training_seconds"] for path in summaries]
    told = f"{sum(seconds) / 3600:.0f} core-hours for {len(summaries)} runs"
    assert told in (ROOT / "README.md").read_text()


def test_count_of_the_runs_that_make_reproduce_adds():
    # A run's folder ends in the identity of its settings.
    committed = {path.name.rpartition("--")[2] for path in (ROOT / "results" / "similar").iterdir()}
    wanted = set()
    for path in (ROOT / "configs" / "sweeps" / "similar").rglob("*.yaml"):
        wanted.update(cell.trajectory_id for cell in Sweep.load(path).cells)
    num_missing = len(wanted - committed)
    assert f"it also makes {num_missing} runs" in (ROOT / "README.md").read_text()


@pytest.fixture
def model():
    """32 blocks between an embedding and a head."""
    blocks = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(32)))
    return torch.nn.Sequential(torch.nn.Embedding(10, 8), blocks, torch.nn.Linear(8, 10))


def front_page_example(model: torch.nn.Module, word: str) -> dict[str, object]:
    """Run the Python example of the README that contains `word`; return the names it defines."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    [code] = [code for code in examples if word in code]
    names: dict[str, object] = {"model": model}
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_front_page_delays_any_loop(model):
    pipeline = front_page_example(model, "delayed(")["pipeline"]
    model(torch.arange(10)).square().mean().backward()
    assert pipeline.delay_of(model[1][0].weight) == 31


@pytest.mark.parametrize("word", ["delayed(", "BasisRotation("])
def test_front_page_optimizer_trains_every_parameter(model, word):
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = front_page_example(model, word)["optimizer"]
    model(torch.arange(10)).square().mean().backward()
    optimizer.step()
    changed = [
        bool((old != new).any()) for old, new in zip(before, model.parameters(), strict=True)
    ]
    assert all(changed)


def test_methods_on_the_page_are_those_of_the_examples():
    page = (ROOT / "docs" / "methods.md").read_text()
    examples = [path.read_text() for path in (ROOT / "examples" / "methods").glob("*.py")]
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    assert len(blocks) == 2
    for block in blocks:
        assert any(block in example for example in examples)


def test_every_command_is_in_the_how_to():
    how_to = (ROOT / "docs" / "how-to.md").read_text()
    assert {command for command in COMMANDS if f"brx {command}" not in how_to} <= {"demo"}


def test_every_package_is_in_the_architecture():
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    packages = [path.parent.name for path in (ROOT / "brx").glob("*/__init__.py")]
    assert [name for name in sorted(packages) if f"`brx/{name}`" not in architecture] == []
