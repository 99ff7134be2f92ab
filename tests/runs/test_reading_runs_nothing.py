"""Commands that read runs execute none of the code that came with them; what trains names it."""

import hashlib
import re
import shutil

import pytest
import yaml

from brx.cli.main import main
from brx.config import user_code
from brx.config.loading import load_config
from brx.errors import UserError
from brx.pipeline.delay import stage_delays
from brx.runs.frames import load
from brx.runs.run import Run
from brx.train.loop import train
from tests.train.helpers import tiny_config

DELAY = "def mine(stage, num_stages, n, seed):\n    return n % 3\n\n\nmine.most = 2\n"
METHOD = """
from brx.methods.method import Method


class Mine(Method):
    summary = "AdamW by another name"

    def correct_gradients(self, gradients, newest, used, state):
        pass
"""
OPTIMIZER = "import torch\n\n\nclass Mine(torch.optim.SGD):\n    pass\n"
KINDS = {
    "delay": (DELAY, "pipeline.delay={file}:mine"),
    "method": (METHOD, "optimizer.method={file}:Mine"),
    "optimizer": (OPTIMIZER, "optimizer.method={file}:Mine"),
}
SETTINGS = ("training.iterations=10", "pipeline.stages=2", "logging.staleness_every=4")


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    """Runs that somebody sent: the code of each would now leave a file behind."""
    folder = tmp_path_factory.mktemp("sent")
    train(tiny_config(folder, *SETTINGS, "pipeline.stages=1"), folder / "runs" / "undelayed")
    for kind, (text, setting) in KINDS.items():
        file = folder / f"{kind}_of_sender.py"
        file.write_text(text)
        run = folder / "runs" / kind
        train(tiny_config(folder, *SETTINGS, setting.format(file=file)), run)
        file.write_text(f"open({str(folder / 'ran')!r}, 'w')\n{text}")
        config = run / "config.yaml"
        now = hashlib.sha256(file.read_bytes()).hexdigest()
        config.write_text(re.sub("code_sha256: .*", f"code_sha256: {now}", config.read_text()))
    return folder


# With the exit code: 2 where such small runs have nothing for the command to show.
OF_MANY = (
    ("slowdown {runs}", 0),
    ("plot curves {runs} --out {out}/curves", 0),
    ("plot staleness {runs} --out {out}/staleness", 0),
    ("plot main --runs {runs} --out {out}", 2),
    ("claims --runs {runs}", 0),
    ("tables slowdown --runs {runs}", 2),
    ("report --runs {runs} --out {out}/report.html", 0),
    ("export {runs} --to {out}/exported", 0),
    ("compare --out {runs} --committed {runs}", 0),
    ("verdict {runs} --stages 4 --micro-batches 2", 2),
    ("effective-delay {runs}", 2),
)
# Oscillation trains on, for which it would need the code.
OF_ONE = (
    ("hessian-norm {run} --vectors 3 --batches-per-vector 2 --original", 0),
    ("oscillation {run} --checkpoint 7 --iterations 2 --batches 1 --power-iterations 1", 2),
    ("config show {run}", 0),
    ("plan {run}", 0),
    ("memory {run}", 0),
    ("similarity {run}", 0),
    ("similarity quick --like {run}", 0),
    ("data prepare --config {run}", 0),
)


@pytest.mark.parametrize(("command", "code"), OF_MANY)
def test_readers_of_many_run_nothing(command, code, sent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"runs": sent / "runs", "out": tmp_path}
    assert main([word.format(**places) for word in command.split()]) == code
    assert not (sent / "ran").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("command", "code"), OF_ONE)
def test_readers_of_one_run_nothing(command, code, kind, sent, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = sent / "runs" / kind
    assert main([word.format(run=run) for word in command.split()]) == code
    assert not (sent / "ran").exists()


def test_module_in_working_directory_is_not_imported(sent, tmp_path, monkeypatch):
    package = tmp_path / "sender"
    package.mkdir()
    (package / "__init__.py").write_text("open('ran', 'w')\n")
    (package / "mine.py").write_text("open('ran', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(sent / "runs" / "method", tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    content = yaml.safe_load(config.read_text())
    content["optimizer"] |= {"method": "sender.mine:Mine", "code_sha256": None}
    config.write_text(yaml.safe_dump(content))
    load([tmp_path / "run"])
    assert not (tmp_path / "ran").exists()


def test_largest_delay_is_noted(sent):
    assert Run.load(sent / "runs" / "delay").largest_delay == pytest.approx(2, abs=1.01)
    assert [delay.tau for delay in Run.load(sent / "runs" / "delay").delays] == [2, 2]


def test_noted_mean_delay_is_the_function_s(sent):
    facts = load_config(sent / "runs" / "delay").pipeline.delay.facts
    # Version n - 1 - n % 3 never runs backwards: ages 0, 1, 2 in turn become 0, 1, 1 or 2.
    newest = 0
    ages = []
    for n in range(1, 3001):
        newest = max(newest, n - 1 - n % 3)
        ages.append(n - 1 - newest)
    assert facts.mean == pytest.approx([sum(ages[2:]) / len(ages[2:])] * 2, abs=2e-3)


def test_method_is_noted(sent):
    facts = load_config(sent / "runs" / "method").optimizer.facts
    assert facts.kind == "method"
    assert facts.summary == "AdamW by another name"
    assert facts.corrects_gradients
    assert not facts.forecasts
    assert facts.optimizers == ["AdamW (2 groups)", "AdamW (2 groups)"]


def test_older_run_says_which_option_to_give(sent, tmp_path, monkeypatch, capsys):
    old = tmp_path / "old"
    shutil.copytree(sent / "runs" / "delay", old)
    content = yaml.safe_load((old / "config.yaml").read_text())
    del content["pipeline"]["delay"]["facts"]
    (old / "config.yaml").write_text(yaml.safe_dump(content))
    load([old])
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(old) in error
    assert "brx --run-code" in error
    with pytest.raises(UserError, match="reading a run executes none; brx --run-code"):
        stage_delays(load_config(old).pipeline)


def test_option_runs_the_code(sent, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(sent / "runs" / "delay", run)
    (tmp_path / "mine.py").write_text(DELAY + f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    content = yaml.safe_load((run / "config.yaml").read_text())
    content["pipeline"]["delay"] = f"{tmp_path / 'mine.py'}:mine"
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    assert main(["--run-code", "memory", str(run)]) == 0
    assert (tmp_path / "ran").exists()


def test_training_names_the_code_before(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("import sys\n\nprint('I run', file=sys.stderr)\n" + OPTIMIZER)
    user_code._tell.cache_clear()
    train(tiny_config(tmp_path, *SETTINGS, f"optimizer.method={file}:Mine"), tmp_path / "run")
    named, ran, *_ = capsys.readouterr().err.splitlines()
    assert named.startswith("brx: note: runs code that is not brx's:")
    assert str(file) in named
    assert ran == "I run"


def test_facts_tell_no_runs_apart(sent, tmp_path):
    (run,) = load([sent / "runs" / "delay"]).to_dict("records")
    assert not [key for key in run if "facts" in key]


def test_permission_ends_with_training(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OPTIMIZER)
    train(tiny_config(tmp_path, *SETTINGS, f"optimizer.method={file}:Mine"), tmp_path / "run")
    assert not user_code.is_allowed()


def test_reading_within_training_runs_nothing():
    with user_code.allowed(), user_code.reading():
        assert not user_code.is_allowed()
