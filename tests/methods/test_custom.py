"""A user's own methods: the examples do what they say, an edited file is another run, faults name
file and line."""

import math
import shutil
from pathlib import Path

import pytest
import torch

from brx.cli.main import main
from brx.config import user_code
from brx.errors import RunError, UserError
from brx.methods.updater import MethodUpdater
from brx.runs.folder import default_folder
from brx.runs.trajectory import settings_key
from brx.train.checks import check_method
from brx.train.loop import train
from tests.pipeline.test_engine import (
    NaiveUpdate,
    assert_equals_naive,
    make_config,
    make_versions,
    run_engine,
)
from tests.train.helpers import losses, steps_of, tiny_config

pytestmark = pytest.mark.usefixtures("own_code")
CPU = torch.device("cpu")
EXAMPLES = Path(__file__).parents[2] / "examples" / "methods"
STALENESS = f"{EXAMPLES}/staleness_aware_rate.py:StalenessAware"
LION = f"{EXAMPLES}/lion_on_matrices.py:LionOnMatrices"
CORRECTOR = f"{EXAMPLES}/drift_corrector.py:DriftCorrector"
XPIPE = f"{EXAMPLES}/xpipe.py:XPipe"
DAMPED = f"{EXAMPLES}/delay_damped.py:Damped"


def weights_of(method, stages, *extra, iterations=10):
    _, versions = run_engine(
        make_config(method, stages, "exact", 24, "optimizer.lr=0.001", *extra), iterations
    )
    return torch.cat(
        [weight.detach().flatten() for stage in versions for weight in stage.newest.values()]
    )


@pytest.mark.parametrize("method", [STALENESS, CORRECTOR, XPIPE])
def test_without_delay_these_are_adamw(method):
    assert torch.equal(weights_of(method, 1), weights_of("pipedream", 1))
    assert not torch.equal(weights_of(method, 4), weights_of("pipedream", 4))


def updater_with_gradients(config, value):
    versions = make_versions(config)
    for stage in versions:
        for weight in stage.newest.values():
            weight.grad = torch.full_like(weight, value)
    return versions, MethodUpdater(config, versions)


def test_staleness_aware_rate_is_the_rate_over_tau():
    _, updater = updater_with_gradients(
        make_config(STALENESS, 4, "exact", 24, "optimizer.arguments={power: 0.5}"), 0.0
    )
    updater.step(2)
    for optimizer in updater.optimizers:
        rates = {group["delay"]: group["lr"] for group in optimizer.param_groups}
        assert rates == pytest.approx({tau: rates[0] / max(1, tau) ** 0.5 for tau in range(4)})


def test_lion_is_lion_on_the_matrices_alone():
    (stage,), updater = updater_with_gradients(
        make_config(LION, 1, "exact", 24, "training.clip=1e9"), -2.0
    )
    before = {name: weight.detach().clone() for name, weight in stage.newest.items()}
    updater.step(10)
    lr, query, bias = updater.lr(10), "blocks.0.attention.query.weight", "head.linear.bias"
    torch.testing.assert_close(
        stage.newest[query].detach(), before[query] * (1 - 0.2 * lr * 0.1) + 0.2 * lr
    )
    torch.testing.assert_close(stage.newest[bias].detach(), torch.full_like(before[bias], lr))


class DampedUpdate(NaiveUpdate):
    """SGD without momentum, at a learning rate that is divided by 1 + tau."""

    def make(self, copies):
        return [torch.optim.SGD(copies.values())]

    def lr(self, k, t):
        return super().lr(k, t) / (1 + self.taus[k])


def test_damped_gradients_equal_naive_simulation():
    config = make_config(DAMPED, 4, "exact", 24)
    assert_equals_naive(config, [3, 2, 1, 0], DampedUpdate(config))


class XPipeUpdate(NaiveUpdate):
    """Remembers Adam's step of each stage and version."""

    def __init__(self, config, taus):
        super().__init__(config, taus)
        self.ahead = {}

    def make(self, copies):
        return [torch.optim.AdamW(copies.values(), fused=True)]

    def __call__(self, k, newest, gradients, t):
        weights = super().__call__(k, newest, gradients, t)
        copies, (adam,) = self.optimizers[k]
        for name, copy in copies.items():
            mean = adam.state[copy]["exp_avg"] / (1 - 0.9**t)
            root = (adam.state[copy]["exp_avg_sq"] / (1 - 0.999**t)).sqrt()
            self.ahead.setdefault((k, t), {})[name] = -self.lr(k, t) * mean / (root + 1e-8)
        return weights

    def forecast(self, k, version, tau):
        return {name: tau * step for name, step in self.ahead[k, version].items()}


@pytest.mark.parametrize(
    ("extra", "taus"),
    [
        ([], [3, 2, 1, 0]),
        (["pipeline.delay=[5, 0, 2, 3]", "pipeline.accumulation=2"], [5, 0, 2, 3]),
    ],
)
def test_prediction_by_moments_equals_naive_simulation(extra, taus):
    config = make_config(XPIPE, 4, "exact", 24, *extra)
    update = XPipeUpdate(config, taus)
    assert_equals_naive(config, taus, update, update.forecast)


OWN_AVERAGE = """import torch

class Mine(Method):
    def forecast(self, newest, update, tau, state):
        for kept, one in zip(state, update, strict=True):
            kept["count"] = kept.get("count", 0) + 1
            kept["average"] = 0.9 * kept.get("average", torch.zeros_like(one)) + (1 - 0.9) * one
        unbiased = 1 - 0.9 ** state[0]["count"]
        kept = [entry["average"] / unbiased for entry in state]
        return [weight + tau * average for weight, average in zip(newest, kept, strict=True)]
"""


def test_own_average_equals_the_pipelines_prediction(tmp_path):
    own = weights_of(write(tmp_path, OWN_AVERAGE), 4)
    torch.testing.assert_close(
        own, weights_of("pipedream", 4, "pipeline.forecast=average-update"), rtol=0, atol=1e-6
    )
    assert (own - weights_of("pipedream", 4)).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            "pipeline.forecast=average-update",
            r"^pipeline\.forecast: .*xpipe\.py:XPipe has its own prediction",
        ),
        (
            "pipeline.stash=predict",
            r"^pipeline\.stash: the prediction of .*xpipe\.py:XPipe needs exact",
        ),
    ],
)
def test_one_prediction_at_a_time(extra, message):
    with pytest.raises(UserError, match=message):
        check_method(make_config(XPIPE, 2, "exact", 24, extra), CPU)


IMPORT = "from brx.methods.method import Method\n\n\n"


def write(folder, body, name="mine.py", first=IMPORT):
    path = folder / name
    path.write_text(first + body)
    return f"{path}:Mine"


PLAIN = "class Mine(Method):\n    pass\n"
EDITED = "class Mine(Method):\n    pass  # edited\n"


def of_own_file(folder):
    """The configuration of a run of four iterations with `mine.py`, to be stopped after two."""
    settings = ("optimizer.method=mine.py:Mine", "training.iterations=4", "training.stop_after=2")
    return tiny_config(folder, *settings)


@pytest.fixture(scope="module")
def before_the_edit(tmp_path_factory):
    """A folder with a run of `mine.py`, stopped after two iterations."""
    folder = tmp_path_factory.mktemp("edited")
    write(folder, PLAIN)
    with pytest.MonkeyPatch.context() as patch, user_code.allowed():
        patch.chdir(folder)
        train(of_own_file(folder), folder / "run")
    return folder


@pytest.fixture
def edited(before_the_edit, tmp_path, monkeypatch):
    """A copy of that folder, to work in, whose file has been edited since."""
    folder = shutil.copytree(before_the_edit, tmp_path / "edited")
    write(folder, EDITED)
    monkeypatch.chdir(folder)
    return folder


def test_run_of_a_file_is_named_after_it(edited):
    file = edited / "tiny.yaml"
    file.touch()
    assert default_folder(of_own_file(edited), file).name == "tiny-mine.Mine-p4-s0"


def test_edited_file_does_not_resume(before_the_edit, edited):
    config = of_own_file(before_the_edit)  # with the data there
    with pytest.raises(UserError, match=r"optimizer\.code_sha256 was '\w+' and is now '\w+'"):
        train(config, edited / "run", resume=True)


def test_edit_is_told_on_the_command_line(edited, refused):
    told = refused("train", edited / "run", "--resume", "--set", "training.stop_after=4")
    assert "mine.py:Mine: its file has changed since this run was set up" in told


def test_new_run_takes_the_file_as_it_is(edited, printed):
    printed("train", "run", "--out", "as-it-is")


def test_new_run_takes_another_file(edited, printed):
    write(edited, PLAIN, "other.py")
    printed("train", "run", "--out", "another", "--set", "optimizer.method=other.py:Mine")


def test_run_is_read_without_its_file(edited, printed):
    (edited / "mine.py").unlink()
    printed("config", "show", edited / "run")


GROUPS_AND_MOMENTUM = """import torch

class Mine(Method):
    def rest(self, groups):
        halves = []
        for group in groups:
            even, odd = slice(0, None, 2), slice(1, None, 2)
            for part, options in ((even, {}), (odd, {"lr": 1e-5, "weight_decay": 0.5})):
                halves.append({**group, **options, "params": group["params"][part]})
        return self.adamw(halves)

    def correct_gradients(self, gradients, newest, used, state):
        for gradient, kept in zip(gradients, state, strict=True):
            kept["count"] = kept.get("count", 0) + 1
            kept["average"] = 0.9 * kept.get("average", torch.zeros_like(gradient)) + 0.1 * gradient
            gradient.add_(kept["average"])
"""


# As MADGRAD and StableSPAM of pytorch-optimizer count, and Scion's option is an enumeration's.
FOR_ALL_PARAMETERS = """import enum
import torch

class Kind(enum.IntEnum):
    FIRST = 1

class Mine(torch.optim.SGD):
    updates = 0

    def __init__(self, groups, lr):
        options = {"kind of norm": Kind.FIRST, "class": Kind, "rule": abs, "own rule": lambda x: x}
        super().__init__([{**group, **options} for group in groups], lr)

    def step(self, closure=None):
        if "k" not in self.state:
            self.state["k"] = torch.zeros(1, dtype=torch.long)
        self.state["k"].add_(1)
        self.updates += 1
        for group in self.param_groups:
            for weight in group["params"]:
                factor = int(self.state["k"]) + self.updates + group["kind of norm"]
                weight.grad.mul_(group["own rule"](group["rule"](group["class"](1) * factor)))
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "updates": self.updates}

    def load_state_dict(self, state_dict):
        self.updates = state_dict["updates"]
        super().load_state_dict(state_dict)
"""
NOISY = """import torch

class Mine(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad.add_(torch.randn_like(weight), alpha=0.01)
        return super().step(closure)
"""


@pytest.mark.parametrize(
    "method", [LION, XPIPE, OWN_AVERAGE, GROUPS_AND_MOMENTUM, FOR_ALL_PARAMETERS, NOISY]
)
def test_own_method_resumes_exactly(method, tmp_path):
    name = method if ":" in method.splitlines()[0] else write(tmp_path, method)
    settings = (f"optimizer.method={name}", "training.iterations=14")
    train(tiny_config(tmp_path, *settings), tmp_path / "whole")
    for stop in (5, 12, 14):
        train(
            tiny_config(tmp_path, *settings, f"training.stop_after={stop}"),
            tmp_path / "run",
            resume=True,
        )
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole")


SCHEDULE_FREE = """import torch

class Mine(torch.optim.SGD):
    is_training = False

    def eval(self):
        self.is_training = False
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["kept"] = weight.detach().clone()
                weight.data.zero_()

    def train(self):
        self.is_training = True
        for group in self.param_groups:
            for weight in group["params"]:
                if "kept" in self.state[weight]:
                    weight.data.add_(self.state[weight]["kept"])
                    weight.data.add_(0.01)  # it need not come back to the same weights

    def step(self, closure=None):
        assert self.is_training, "call train() before the first step"
        return super().step(closure)
"""


def test_weights_for_evaluation_are_the_optimizers(tmp_path):
    """Zero weights give equal logits; the training goes on from the weights that it had."""
    settings = ("training.iterations=6", "training.validation_every=2", "training.stop_after=6")
    runs = {"plain": "torch.optim:SGD", "own": write(tmp_path, SCHEDULE_FREE)}
    for name, method in runs.items():
        train(tiny_config(tmp_path, *settings, f"optimizer.method={method}"), tmp_path / name)
    records = losses(tmp_path / "own")
    validations = [record["val_loss"] for record in records if "val_loss" in record]
    assert validations == pytest.approx(3 * [math.log(256)], abs=1e-4)
    assert steps_of(tmp_path / "own") == steps_of(tmp_path / "plain")


def mine(rule, *lines):
    """A method of one rule, whose first line is the sixth of its file."""
    return "\n".join(
        ["class Mine(Method):", f"    def {rule}:", *(f"        {line}" for line in lines), ""]
    )


OPTIMIZERS, MATRICES, RATE = (
    "optimizers(self, stages)",
    "matrices(self, groups)",
    "lr_divisor(self, tau, t, T)",
)
FORECAST = "forecast(self, newest, update, tau, state)"
COPIES = (
    "for group in groups:",
    "    group['params'] = [(n, p.detach().clone()) for n, p in group['params']]",
)
STRANGERS = "return SGD([p for group in groups for _, p in group['params']], lr=1.0)"


BODIES = [
    (
        "import nothing_of_this_name\n",
        r"mine\.py cannot be imported: .*mine\.py:4: ModuleNotFoundError: No module",
    ),
    ("class Mine(Method:\n", r"mine\.py cannot be imported: .*mine\.py:4: SyntaxError: "),
    ("import sys\nsys.exit(3)\n", r"mine\.py cannot be imported: .*mine\.py:5: SystemExit: 3"),
    (
        "class Other(Method):\n    pass\n",
        r"Mine is no Method and no torch\.optim\.Optimizer of .*\(there: Other\)",
    ),
    (
        mine("__init__(self)", "1 / 0"),
        r"optimizer\.method .*: its constructor: .*mine\.py:6: ZeroDivisionError",
    ),
    (mine("__init__(self)", "assert not self"), r"its constructor: .*mine\.py:6: AssertionError$"),
    (
        mine(MATRICES, "return self.none(groups)"),
        r"its optimizers: .*mine\.py:6: AttributeError: 'Mine' object has",
    ),
    (
        mine(OPTIMIZERS, "return super().optimizers(stages)[:1]"),
        r"py: ValueError: .* \d+ more are given to no opt",
    ),
    (
        mine(OPTIMIZERS, "return 2 * super().optimizers(stages)"),
        r"py: ValueError: .* are given to two optimizers",
    ),
    (
        mine(OPTIMIZERS, "return super().optimizers(stages)[0]"),
        r"mine\.py: TypeError: 'AdamW' object is not iterable",
    ),
    (
        mine("rest(self, groups)", "from torch.optim import SGD", STRANGERS),
        r"mine\.py: ValueError: .* must be those",
    ),
    (
        mine(MATRICES, *COPIES, "return self.adamw(groups)"),
        r"mine\.py: ValueError: .* to an optimizer as a copy",
    ),
    (
        mine(RATE, "return tau"),
        r"iteration 1: its lr_divisor: .*mine\.py: ValueError: .* \(in a trial on a",
    ),
    # Asked at the run's own delays, of which the trial keeps few versions; on the run's device.
    (mine(RATE, "return 1 if tau < 10**9 else 1 / 0"), r"its lr_divisor: .*ZeroDivisionError"),
    (mine(MATRICES, "raise ValueError(groups[0]['params'][0][1].device)"), "ValueError: meta"),
]
BODIES.append(
    (
        SCHEDULE_FREE.replace("self.is_training = True", "1 / 0"),
        r"optimizer\.method .*mine\.py:Mine: its train: .*mine\.py:\d+: ZeroDivisionError",
    )
)
BODIES.append(
    (
        mine(
            OPTIMIZERS,
            "made = super().optimizers(stages)",
            "del made[0].param_groups[0]['lr']",
            "return made",
        ),
        r"mine\.py: ValueError: .* have no lr, which brx schedules",
    )
)
KEEPS_A_QUEUE = """import collections
import torch

class Mine(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["queue"] = collections.deque([weight.grad.clone()])
        return super().step(closure)
"""
BODIES.append((KEEPS_A_QUEUE, r"keeps what no checkpoint can hold \(queue: deque\)"))
WRAPS_ANOTHER = """import torch

class Mine(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        self.inner = torch.optim.SGD(groups, lr, momentum=0.9)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        self.inner.step()

    def state_dict(self):
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict["inner"])
"""
BODIES.append(
    (WRAPS_ANOTHER, r"its load_state_dict: .*ValueError: state_dict\(\) must have torch's form")
)
COUNTS_FOR_ITSELF = """import torch

class Mine(torch.optim.SGD):
    updates = 0

    def step(self, closure=None):
        self.updates += 1
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad.mul_(self.updates)
        return super().step(closure)
"""
BODIES.append((COUNTS_FOR_ITSELF, r"a resumed run would train otherwise; its state_dict\(\) must"))
HAS_RANK = "assert min(min(p.shape) for group in groups for _, p in group['params']) >= 4"
LOW_RANK = mine(MATRICES, HAS_RANK, "return self.adamw(groups)")
DATA_CLASS = (
    "import dataclasses\n\n@dataclasses.dataclass\nclass Mine(Method):\n    power: float = 1.0\n"
)


@pytest.mark.parametrize(("body", "message"), BODIES)
def test_fault_before_training_is_one_line(body, message, tmp_path):
    config = make_config(write(tmp_path, body), 2, "exact", 24, "pipeline.delay=[1000000000, 0]")
    with pytest.raises(UserError, match=message) as caught:
        check_method(config, torch.device("meta") if "device" in body else CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", [LOW_RANK, DATA_CLASS])
def test_what_has_to_pass_the_trial(body, tmp_path):
    name = write(tmp_path, body, first=f"from __future__ import annotations\n\n{IMPORT}")
    check_method(make_config(name, 4, "exact"), CPU)


def test_broken_package_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken_for_brx").mkdir()
    (tmp_path / "broken_for_brx" / "__init__.py").write_text("nothing_of_this_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UserError,
        match=r"broken_for_brx\.mine cannot be imported: name 'nothing_of_this_name' is not",
    ):
        check_method(make_config("broken_for_brx.mine:Mine", 2, "exact"), CPU)


def test_key_error_of_an_installed_package_says_what_it_is():
    assert user_code.fault(KeyError("percentile"), "torch.optim:SGD") == "KeyError: 'percentile'"


def test_missing_file_is_one_line(tmp_path):
    with pytest.raises(
        UserError, match=r"optimizer: method: .*none\.py cannot be read: No such file"
    ):
        make_config(f"{tmp_path}/none.py:Mine", 2, "exact")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            mine(RATE, "return 1 / (t - 1)"),
            r"iteration 1: its lr_divisor: .*mine\.py:6: ZeroDivisionError",
        ),
        (
            mine("correct_gradients(self, *of)", "of[9]"),
            r"iteration \d: its correct_gr.*mine\.py:6: IndexError",
        ),
        (mine(FORECAST, "return state[99]"), r"its forecast: .*mine\.py:6: IndexError"),
        (
            mine(FORECAST, "return newest[1:]"),
            r"its forecast: .*mine\.py: ValueError: must return one tensor for",
        ),
    ],
)
def test_faults_while_training_are_one_line(body, message, tmp_path):
    with pytest.raises(RunError, match=message) as caught:
        run_engine(make_config(write(tmp_path, body), 3, "exact"), 6)
    assert "\n" not in str(caught.value)


SGD = """import torch

class Mine(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                change = group["lr"] * weight.grad
                {}
"""


@pytest.mark.parametrize(
    "write_weights",
    ["weight.data = weight.data - change", "weight.set_(weight - change)"],
    ids=["data", "set"],
)
def test_step_may_give_weights_other_memory(write_weights, tmp_path):
    in_place = write(tmp_path, SGD.format("weight -= change"), "in_place.py")
    elsewhere = write(tmp_path, SGD.format(write_weights), "elsewhere.py")
    assert torch.equal(weights_of(elsewhere, 4), weights_of(in_place, 4))


def test_step_that_changes_the_form_of_weights_is_one_line(tmp_path):
    name = write(tmp_path, SGD.format("weight.data = (weight - change).double()"))
    message = r"its step: .*it changed the dtype of embed.* from torch.float32 to torch.float64"
    with pytest.raises((UserError, RunError), match=message) as caught:
        check_method(make_config(name, 4, "exact"), CPU)
    assert "\n" not in str(caught.value)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """An importable module with the content of an example's file; gives its class."""
    (tmp_path / "my_module_for_brx.py").write_text(Path(STALENESS.partition(":")[0]).read_text())
    monkeypatch.syspath_prepend(tmp_path)
    return "my_module_for_brx:StalenessAware"


def test_module_trains_as_its_file_does(module):
    assert torch.equal(weights_of(module, 4), weights_of(STALENESS, 4))


def test_module_has_the_fingerprint_of_its_file(module):
    found, expected = (
        make_config(name, 2, "exact").optimizer.code_sha256 for name in (module, STALENESS)
    )
    assert found == expected
    assert found is not None


def test_installed_package_has_no_fingerprint():
    assert make_config("torch.optim:SGD", 2, "exact").optimizer.code_sha256 is None


def test_own_method_is_described(capsys):
    assert main(["methods", STALENESS]) == 0
    assert f"{STALENESS}: AdamW at lr / tau^power" in capsys.readouterr().out


@pytest.mark.parametrize(("body_in_sub", "num_methods"), [(PLAIN, 1), (EDITED, 2)])
def test_method_is_its_files_name_with_content(body_in_sub, num_methods, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    write(tmp_path, PLAIN)
    write(tmp_path / "sub", body_in_sub)
    keys = set()
    for file in ("mine.py", "./mine.py", f"{tmp_path}/mine.py", "sub/../sub/mine.py"):
        keys.add(settings_key(tiny_config(tmp_path, f"optimizer.method={file}:Mine")))
    assert len(keys) == num_methods
