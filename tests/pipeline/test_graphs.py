"""Whole iterations that are recorded and replayed, on the CPU: a recording holds operations and
addresses (`tests.pipeline.recorded`), as a CUDA graph does. Eager iterations are the oracle, bit
for bit."""

import random

import pytest
import torch
from torch import nn

from brx.errors import RunError, UserError
from brx.optim import BasisRotation
from brx.optim.graphs import GraphedSteps
from brx.pipeline.delay import StageDelay
from brx.pipeline.graphs import NUM_WARM_UPS, GraphedPasses, PassResults
from brx.pipeline.versions import StageVersions
from brx.train.build import assemble
from brx.train.checks import check_method
from tests.pipeline.recorded import OperationsGraphMaker
from tests.pipeline.test_engine import make_config, micro_batch

ITERATIONS = 14


@pytest.fixture
def numbers_on_device(monkeypatch):
    """Steps of basis rotation read their numbers from the device, as on a GPU."""
    monkeypatch.setattr("brx.optim.gradient_guard.ASYNCHRONOUS_DEVICES", ("cpu",))
    monkeypatch.setattr("brx.optim.step_scalars.ON_DEVICE", ("cpu",))


def train(config, make_graph=None, iterations=ITERATIONS):
    """An assembly after some iterations, and what they reported."""
    assembly = assemble(config, micro_batch, make_graph=make_graph)
    return assembly, list(assembly.engine.run(1, lambda: iterations))


def check_equal(assembly, expected):
    for stage, twin in zip(assembly.stages, expected.stages, strict=True):
        state, wanted = stage.state_dict(), twin.state_dict()
        torch.testing.assert_close(state["weights"], wanted["weights"], rtol=0, atol=0)
        torch.testing.assert_close(state["ring"], wanted["ring"], rtol=0, atol=0)


CASES = {
    "AdamW": ("pipedream", []),
    "one stage": ("pipedream", ["pipeline.stages=1"]),
    "bf16": ("pipedream", ["runtime.precision=bf16"]),
    "rings on the host": ("pipedream", ["pipeline.rings=host"]),
    "two micro-batches": ("pipedream", ["pipeline.accumulation=2"]),
    "three micro-batches, bf16": (
        "pipedream",
        ["pipeline.accumulation=3", "runtime.precision=bf16"],
    ),
    "a correction": ("delay-compensation", []),
    "a forecast": ("pipedream", ["pipeline.forecast=last-update"]),
    "llama": ("pipedream", ["model.class=llama"]),
    "another library": ("scion", []),
}


@pytest.mark.parametrize("case", CASES)
def test_replayed_iterations_equal_eager_ones(case):
    method, settings = CASES[case]
    config = make_config(method, 3, "exact", 24, *settings)
    maker = OperationsGraphMaker()
    assembly, results = train(config, maker)
    expected, wanted = train(config)
    assert maker.num_replays >= ITERATIONS - NUM_WARM_UPS
    check_equal(assembly, expected)
    assert [result.loss for result in results] == [result.loss for result in wanted]
    for result, one in zip(results, wanted, strict=True):
        assert torch.equal(result.grad_norms, one.grad_norms)


@pytest.mark.usefixtures("numbers_on_device")
@pytest.mark.parametrize("settings", [[], ["optimizer.source=1st"]], ids=str)
def test_replayed_refreshes_equal_eager_ones(settings):
    config = make_config("basis-rotation", 3, "exact", 24, "runtime.precision=bf16", *settings)
    maker = OperationsGraphMaker()
    assembly, _ = train(config, maker)
    expected = assemble(config, micro_batch)
    expected.updater.wrap_steps(without_waiting)
    list(expected.engine.run(1, lambda: ITERATIONS))
    assert maker.num_replays >= 2 * (ITERATIONS - NUM_WARM_UPS - 4)
    check_equal(assembly, expected)


class RunAgain:
    """A graph that runs the host's part again, too."""

    def __init__(self, work):
        self.replay = work


def without_waiting(optimizer, step):
    """A step of basis rotation that looks at no gradient, as recorded ones do not; as it is."""
    if not isinstance(optimizer, BasisRotation):
        return step
    return GraphedSteps(optimizer, RunAgain, "cpu").step


def test_accumulated_passes_have_a_graph_each():
    config = make_config("pipedream", 3, "exact", 24, "pipeline.accumulation=3")
    maker = OperationsGraphMaker()
    train(config, maker)
    assert len(maker.graphs) == 3  # the first, the middle, the last micro-batch of an update


def test_evaluation_between_replays_changes_nothing():
    config = make_config("pipedream", 3, "exact")
    assembly = assemble(config, micro_batch, make_graph=OperationsGraphMaker())
    for t in range(1, ITERATIONS + 1):
        list(assembly.engine.run(t, lambda t=t: t))
        assembly.engine.evaluate([micro_batch(100)])
    expected, _ = train(config)
    check_equal(assembly, expected)


def test_evaluation_sees_the_newest_weights():
    config = make_config("pipedream", 3, "exact")
    assembly, _ = train(config, OperationsGraphMaker())
    expected, _ = train(config)
    loss = assembly.engine.evaluate([micro_batch(100)])
    assert loss == expected.engine.evaluate([micro_batch(100)])


def test_micro_batch_of_another_shape_runs_eagerly():
    def shrinking(n):
        inputs, targets = micro_batch(n)
        return (inputs[:4], targets[:4]) if n == ITERATIONS - 1 else (inputs, targets)

    config = make_config("pipedream", 3, "exact")
    maker = OperationsGraphMaker()
    assembly = assemble(config, shrinking, make_graph=maker)
    expected = assemble(config, shrinking)
    for one in (assembly, expected):
        list(one.engine.run(1, lambda: ITERATIONS))
    assert len(maker.graphs) == 1
    check_equal(assembly, expected)


def test_restored_state_is_replayed():
    config = make_config("pipedream", 3, "exact")
    source, _ = train(config)
    saved = [{**source.stage_state(stage)} for stage in source.stages]
    assembly, _ = train(config, OperationsGraphMaker(), iterations=6)
    for stage, state in zip(assembly.stages, saved, strict=True):
        stage.load_state_dict(state["versions"])
    assembly.updater.load_stage_states(dict(enumerate(saved)), torch.device("cpu"))
    for one in (assembly, source):
        list(one.engine.run(ITERATIONS + 1, lambda: ITERATIONS + 4))
    check_equal(assembly, source)


def test_results_outlive_the_next_replay():
    _, results = train(make_config("pipedream", 3, "exact"), OperationsGraphMaker())
    losses = [result.loss.item() for result in results]
    assert len(set(losses)) == ITERATIONS


def single_stage(module):
    return StageVersions(module, 0, StageDelay(1))


def passes_of(stage):
    """Both passes of a micro-batch through a module that gives a loss."""

    def passes(n, inputs, targets):
        loss = stage.module(inputs.float())
        loss.backward()
        for newest, in_use in zip(stage.newest.values(), stage.in_use, strict=True):
            newest.grad, in_use.grad = in_use.grad, None
        return PassResults(loss.detach(), None, None)

    return passes


def run_passes(module, number=NUM_WARM_UPS + 2):
    stage = single_stage(module)
    graphed = GraphedPasses([stage], passes_of(stage), OperationsGraphMaker())
    for n in range(1, number + 1):
        graphed.run(n, *micro_batch(n))
    return stage, graphed


class Weighted(nn.Module):
    """The mean of the inputs, times a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return x.mean() * self.weight


def test_changed_buffer_is_replayed():
    class Counting(Weighted):
        def forward(self, x):
            self.count += 1
            return super().forward(x)

    stage, _ = run_passes(Counting(), NUM_WARM_UPS + 4)
    assert stage.module.count == NUM_WARM_UPS + 4


def test_new_buffer_is_refused():
    class Renewing(Weighted):
        def forward(self, x):
            self.count = self.count + 1
            return super().forward(x)

    with pytest.raises(RunError, match="stage 0, buffer count is another tensor after a pass"):
        run_passes(Renewing())


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(()).item()])
def test_random_numbers_of_the_host_are_refused(draw):
    class Drawing(Weighted):
        def forward(self, x):
            return super().forward(x) * (1 + draw())

    with pytest.raises(RunError, match="draws random numbers on the host"):
        run_passes(Drawing())


def test_question_to_the_device_is_refused():
    class Asking(Weighted):
        def forward(self, x):
            return super().forward(x) * x.mean().item()

    with pytest.raises(RunError, match=r"cannot be recorded \(operation not permitted"):
        run_passes(Asking())


def test_moved_weight_is_refused():
    stage, graphed = run_passes(Weighted())
    stage.in_use[0].data = stage.in_use[0].data.clone()
    with pytest.raises(RunError, match="stage 0, weight in use has moved"):
        graphed.run(NUM_WARM_UPS + 3, *micro_batch(1))


REFUSALS = {
    "pipeline.stash=none": "needs pipeline.stash: exact, and it is none",
    "pipeline.recompute=true": "records no passes with pipeline.recompute",
    "model.moe={experts: 4}": "records no mixture of experts",
    "pipeline.devices=2": "on 2 pipeline.devices it records steps of basis rotation alone",
}


@pytest.mark.parametrize("setting", REFUSALS)
def test_settings_that_no_graph_holds_are_refused(setting):
    config = make_config("pipedream", 3, "exact", 24, "runtime.graphs=true", setting)
    with pytest.raises(UserError, match=f"runtime.graphs: {REFUSALS[setting]}"):
        check_method(config, torch.device("cuda"))


@pytest.mark.usefixtures("own_code")
def test_own_correction_is_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from brx.methods.method import Method\n"
        "class Mine(Method):\n"
        "    def correct_gradients(self, gradients, newest, used, state):\n"
        "        pass\n"
    )
    config = make_config(f"{path}:Mine", 3, "exact", 24, "runtime.graphs=true")
    with pytest.raises(UserError, match="records no correct_gradients of your own"):
        check_method(config, torch.device("cuda"))
