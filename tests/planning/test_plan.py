"""The planner: its sizes are those of real models, its peaks those of real runs, its refusal is one line."""

import re
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.memory import measured_peak, peak_during
from brx.cli.main import main
from brx.config.loading import apply_overrides, load_config
from brx.config.schema import MoEConfig, RunConfig
from brx.errors import UserError
from brx.methods.updater import MethodUpdater
from brx.model.sizes import stage_forward_flops, stage_shapes
from brx.model.stage import Stage, is_block_matrix, partition, whole_model
from brx.pipeline.delay import pipeline_delays
from brx.pipeline.versions import StageVersions
from brx.pipeline.world import Neighbours, World
from brx.planning import fit as memory_check
from brx.planning.optimizer_memory import method_flops, optimizer_bytes, rotation
from brx.planning.plan import (
    STAGE_PARTS,
    fits,
    plan_memory,
    rank_flops,
    smallest_num_ranks,
    what_would_fit,
)
from brx.planning.planned_run import PlannedRun
from brx.planning.prospects import time_lines
from brx.train import loop
from brx.train.build import assemble, build_stages
from brx.train.loop import train
from tests.train.helpers import tiny_config

PRESETS = ["paper-95m", "paper-1b", "paper-3b", "paper-moe-100m"]
SMALL = {
    "model": {"blocks": 4, "width": 64, "heads": 2, "sequence_length": 64},
    "pipeline": {"stages": 4},
    "training": {"batch_size": 4, "iterations": 100},
}


def small(*overrides):
    return apply_overrides(SMALL, overrides, "small")


@pytest.mark.parametrize("preset", PRESETS)
def test_shapes_are_the_models(preset):
    config = load_config(preset)
    vocabulary = config.data.vocabulary_size
    for blocks in partition(config.model.blocks, config.pipeline.stages):
        with torch.device("meta"):
            stage = Stage(config.model, vocabulary, blocks)
        found = {name: tuple(parameter.shape) for name, parameter in stage.named_parameters()}
        assert stage_shapes(config.model, vocabulary, blocks) == found


@pytest.mark.parametrize("overrides", [[], ["pipeline.stash=predict"], ["runtime.precision=fp32"]])
@pytest.mark.parametrize("preset", ["paper-1b", "paper-moe-100m"])
def test_rings_are_the_engines(preset, overrides):
    config = load_config(preset, overrides)
    num_stages = config.pipeline.stages
    dtype = torch.bfloat16 if config.runtime.precision == "bf16" else torch.float32
    expected = []
    for index, blocks in enumerate(partition(config.model.blocks, num_stages)):
        with torch.device("meta"):
            stage = Stage(config.model, config.data.vocabulary_size, blocks)
        delay, stash = pipeline_delays(num_stages)[index], config.pipeline.stash
        versions = StageVersions(
            stage, index, delay, stash, lambda name, w: dtype if is_block_matrix(name) else w.dtype
        )
        size = sum(weight.nbytes for weight in versions.newest.values())
        # The predictor keeps the average step and the weights before it.
        expected.append(versions.ring_bytes + (2 * size if stash == "predict" and delay.tau else 0))
    ranks = plan_memory(config, "cuda", partition(num_stages, num_stages))
    assert [rank.rings for rank in ranks] == expected
    (alone,) = plan_memory(config, "cuda", [range(num_stages)])
    assert [stage.rings for stage in alone.by_stage] == expected


# What decides a peak, one after the other: rings, batch, precision, logits in one piece and in chunks, methods, modes.
RUNS = [
    [],
    ["pipeline.stages=1"],
    ["training.batch_size=1"],
    ["training.batch_size=16", "runtime.precision=bf16"],
    ["pipeline.stash=predict"],
    ["pipeline.stash=none"],
    ["pipeline.rings=host"],
    ["pipeline.delay=2bw", "pipeline.accumulation=2"],
    ["pipeline.forecast=average-update"],
    ["pipeline.forecast=last-update"],
    ["optimizer.method=examples/methods/xpipe.py:XPipe"],
    ["pipeline.delay=7", "pipeline.accumulation=3", "pipeline.stash=none"],
    ["pipeline.recompute=true", "training.batch_size=16"],
    ["model.width=96", "model.blocks=8", "pipeline.stages=8"],
    ["model.moe={experts: 4}"],
    ["model.moe={experts: 4}", "runtime.precision=bf16"],
    ["data.tokenizer=gpt2", "training.batch_size=2"],
    ["data.tokenizer=gpt2", "training.batch_size=16"],
    ["optimizer.method=nesterov"],
    ["optimizer={method: basis-rotation, frequency: 2}"],
    ["optimizer={method: basis-rotation, frequency: 2}", "logging.update_norms=false", "training.batch_size=1"],
    [
        "optimizer={method: basis-rotation, frequency: 2, source: 1st, geometry: unilateral}",
        "runtime.precision=bf16",
    ],
    ["optimizer.method=delay-compensation"],
    ["optimizer.method=soap"],
    ["optimizer.method=muon"],
    ["optimizer.method=scion"],
    ["optimizer.method=muon", "model.moe={experts: 4}"],
    ["logging.staleness_every=5"],
    ["logging.staleness_every=2", "pipeline.delay=7", "training.batch_size=1", "logging.update_norms=false"],
    ["logging.staleness_every=5", "pipeline.accumulation=2", "runtime.precision=bf16"],
    ["logging.staleness_every=5", "optimizer={method: basis-rotation, frequency: 5}", "training.batch_size=1"],
]


@pytest.mark.parametrize("overrides", RUNS, ids=" ".join)
def test_peak_is_within_ten_percent_of_the_measured_one(overrides):
    config = small(*overrides)
    (planned,) = plan_memory(config, "cpu")
    # The first refresh comes with update 10; by then the probe has all older updates that it keeps.
    is_short = config.optimizer.method != "basis-rotation" and config.logging.staleness_every is None
    iterations = 3 if is_short else 11
    assert planned.peak == pytest.approx(measured_peak(config, torch.device("cpu"), iterations), rel=0.1)


class EchoChannel:
    """Takes what is sent, and receives ones."""

    def __init__(self, shape, dtype):
        self.buffers = [torch.ones(shape, dtype=dtype) for _ in range(2)]

    def send(self, tensor):
        self.sent = tensor.clone()

    def receive(self):
        return self.buffers[0]

    def post_receive(self):
        pass

    wait_for_send = post_receive


class FirstOfFour(World):
    """The world as the first of four devices sees it."""

    num_ranks = 4

    def connect(self, shape, dtype, device):
        channel = EchoChannel(shape, dtype)
        return Neighbours(channel, channel)


@pytest.mark.parametrize(
    "overrides", [[], ["runtime.precision=bf16", "training.batch_size=16"], ["pipeline.rings=host"]]
)
def test_peak_of_a_rank_with_several_micro_batches_in_flight(overrides):
    norms = "training.log_every=1"  # at every update: the peak is there
    config = small("model.blocks=8", "pipeline.stages=8", "pipeline.devices=4", norms, *overrides)
    planned = plan_memory(config, "cpu")[0]
    tokens = torch.zeros(config.training.batch_size, 64, dtype=torch.int64)

    def work():
        engine = assemble(config, lambda t: (tokens, tokens), world=FirstOfFour()).engine
        for _ in engine.run(1, lambda: 7):
            pass

    assert planned.peak == pytest.approx(peak_during(work, torch.device("cpu")), rel=0.1)


@pytest.mark.parametrize(
    "optimizer",
    [
        "{method: pipedream}",
        "{method: nesterov}",
        "{method: basis-rotation}",
        "{method: basis-rotation, geometry: unilateral}",
        "{method: basis-rotation, source: 1st}",
        "{method: delay-compensation}",
        "{method: soap}",
        "{method: muon}",
        "{method: scion}",
    ],
)
@pytest.mark.parametrize("mixture", [[], ["model.moe={experts: 4}"]], ids=["dense", "mixture"])
def test_optimizer_state_is_the_optimizers(optimizer, mixture):
    config = small(f"optimizer={optimizer}", "model.width=16", *mixture)
    stages = build_stages(config, torch.device("cpu"), range(4))
    updater = MethodUpdater(config, stages)
    for stage in stages:
        for weight in stage.newest.values():
            weight.grad = torch.ones_like(weight)
    updater.step(1)
    held = sum(
        tensor.nbytes
        for one in updater.optimizers
        for state in one.state.values()
        for value in state.values()
        for tensor in (value if isinstance(value, list) else [value])  # SOAP keeps lists, and plain numbers
        if isinstance(tensor, torch.Tensor) and (tensor.ndim >= 2 or tensor.numel() > 8)  # not the counters
    )
    shapes = stage_shapes(config.model, 256, range(4))
    assert sum(optimizer_bytes(config, shapes)) == pytest.approx(held, rel=0.001)


def test_stages_hold_what_their_optimizers_and_weights_take():
    config = small("optimizer={method: basis-rotation}", "model.moe={experts: 4}")
    (planned,) = plan_memory(config, "cpu")
    for stage in planned.by_stage:
        built = build_stages(config, torch.device("cpu"), range(stage.stage, stage.stage + 1))
        assert stage.weights == sum(weight.nbytes for weight in built[0].newest.values())
        shapes = {name: tuple(weight.shape) for name, weight in built[0].newest.items()}
        assert (stage.moments, stage.rotation) == optimizer_bytes(config, shapes)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("overrides", [[], ["pipeline.recompute=true"], ["pipeline.rings=host"]])
def test_stages_add_up_to_their_rank(num_ranks, overrides):
    config = small("runtime.precision=bf16", *overrides)
    for rank in plan_memory(config, "cpu", partition(4, num_ranks)):
        assert [stage.stage for stage in rank.by_stage] == list(rank.stages)
        for part in STAGE_PARTS:
            together = sum(getattr(stage, part) for stage in rank.by_stage)
            exchanged = getattr(rank, part) - together
            assert exchanged > 0 if (part == "activations" and num_ranks > 1) else exchanged == 0


def test_flops_are_those_that_torch_counts():
    config = small("model.width=32").model
    model = whole_model(config, 256)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    # The counter does not know the CPU's fused attention.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(tokens, tokens)
    assert counter.get_total_flops() == stage_forward_flops(config, 256, range(4), 2)


def test_of_a_mixture_the_chosen_experts_count():
    dense = small().model
    mixture = dense.model_copy(update={"moe": MoEConfig(experts=8, top_k=2, every=1)})
    difference = stage_forward_flops(mixture, 256, range(4), 1) - stage_forward_flops(dense, 256, range(4), 1)
    one_mlp, router = 2 * 8 * 64**2, 2 * 8 * 64
    assert difference == 4 * 64 * (one_mlp + router)


def test_ranks_share_all_of_the_work():
    config = load_config("paper-1b", ["optimizer.method=basis-rotation", "pipeline.devices=6"])
    parts = [rank_flops(config, own) for own in partition(24, 6)]
    assert sum(parts) == pytest.approx(rank_flops(config, range(24)), rel=1e-12)
    assert parts[-1] == max(parts)  # it has the head


def test_the_synchronous_rival_is_the_best_cut_of_the_same_examples():
    settings = ["pipeline.devices=6", "training.batch_size=64", "optimizer.method=basis-rotation"]
    run = PlannedRun(load_config("paper-1b", settings), throughput=1e14)
    printed = " ".join(time_lines(run))
    cuts = list(run.synchronous({}, None))
    assert [cut.time for cut in cuts] == pytest.approx(sorted(cut.time for cut in cuts))
    assert {cut.num_micro_batches for cut in cuts} == {1, 2, 4, 8, 16, 32, 64}
    assert f"{cuts[0].schedule} with {cuts[0].num_micro_batches} micro-batches" in printed
    hours, synchronous = (float(hours) for hours in re.findall(r"([\d.e+]+) h", printed))
    assert synchronous == pytest.approx(hours * cuts[0].time / run.asynchronous({}, None).time, rel=0.01)
    # In less memory, another one; in none, none.
    few = replace(run, memory=min(cut.memory for cut in cuts))
    assert next(cut.schedule for cut in cuts if cut.memory == few.memory) in " ".join(time_lines(few))
    assert "No synchronous cut" in time_lines(replace(run, memory=1e6))[-1]


def test_time_of_an_asynchronous_iteration_is_that_of_the_busiest_rank():
    for method in ("pipedream", "basis-rotation"):
        run = PlannedRun(load_config("paper-1b", [f"optimizer.method={method}", "pipeline.devices=6"]), throughput=1e14)
        busiest = max(rank_flops(run.config, own) for own in partition(24, 6))
        assert run.seconds(run.asynchronous({}, None)) == pytest.approx(busiest / 1e14)


def test_uneven_cuts_are_named_with_even_ones():
    def uneven(*settings):
        return PlannedRun(load_config("paper-1b", [f"pipeline.{setting}" for setting in settings])).uneven

    assert uneven("devices=6") is None
    assert uneven("devices=16") == "The cut is uneven: 1 or 2 blocks per device; 12 or 24 device(s) would be even."
    # Devices hold whole stages: five of 4, 5, 5, 5, 5 blocks are even nowhere but on one device.
    assert uneven("stages=5", "devices=5") == "The cut is uneven: 4 or 5 blocks per device; 1 device(s) would be even."


@pytest.mark.parametrize("source", ["2nd", "1st"])
def test_sides_above_max_dim_are_not_planned(source):
    # An MLP matrix of width 8,192: BasisRotation rotates sides up to 16,384, as its constructor has it.
    optimizer = small(f"optimizer={{method: basis-rotation, source: {source}}}").optimizer
    kept = rotation(optimizer, (32_768, 8192))
    assert (kept.sides, kept.bases) == ((8192,), 8192**2)
    assert kept.covariances == (8192**2 if source == "2nd" else 0)
    config = small("optimizer={method: basis-rotation}")
    shapes = {"blocks.0.mlp.up.weight": (32_768, 8192)}
    product = 2 * 32_768 * 8192 * 8192
    assert method_flops(config, shapes) == pytest.approx(3 * product + (2 * product + 7 * 8192**3) / 10)
    assert sum(optimizer_bytes(config, shapes)) == 4 * (2 * 32_768 * 8192 + 2 * 8192**2)


def test_smallest_number_of_ranks_is_the_smallest():
    config = load_config("paper-1b")
    memory = 30e9
    smallest = smallest_num_ranks(config, "cuda", memory)
    assert 1 < smallest < 24
    assert fits(plan_memory(config, "cuda", partition(24, smallest)), memory)
    assert not fits(plan_memory(config, "cuda", partition(24, smallest - 1)), memory)


@pytest.mark.parametrize("memory", [6e9, 16e9, 30e9, 45e9])
def test_what_is_said_to_fit_fits(memory):
    config = load_config("paper-1b")
    for remedy in what_would_fit(config, "cuda", memory):
        changed: RunConfig = load_config("paper-1b", remedy.split())
        assert fits(plan_memory(changed, "cuda"), memory)
    assert memory < 10e9 or what_would_fit(config, "cuda", memory)


def test_run_that_cannot_fit_is_refused_in_one_line(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, "training.batch_size=64")
    needed = plan_memory(config, "cpu")[0].peak
    monkeypatch.setattr(memory_check, "free_memory", lambda device: needed - 1)
    expected = r"rank 0 \(stages 0-3\): .* GB needed \(weights .*free on cpu; would fit: pipeline\.recompute=true"
    with pytest.raises(UserError, match=f"^not enough memory: {expected}$"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "data").exists()  # before any data are prepared
    monkeypatch.setattr(memory_check, "free_memory", lambda device: needed)
    found = memory_check.check_memory(config, torch.device("cpu"), World(), [range(4)])
    assert found.peak == needed


class FourRanksOnTwoMachines:
    rank, num_ranks, local_rank, num_local_ranks = 2, 4, 0, 2


def test_ranks_of_one_machine_share_its_memory(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, "pipeline.devices=4")
    ranges = partition(4, 4)
    peaks = [rank.peak for rank in plan_memory(config, "cpu", ranges)]
    world = FourRanksOnTwoMachines()
    monkeypatch.setattr(memory_check, "free_memory", lambda device: peaks[2] + peaks[3])
    assert memory_check.check_memory(config, torch.device("cpu"), world, ranges).rank == 2
    monkeypatch.setattr(memory_check, "free_memory", lambda device: peaks[2] + peaks[3] - 1)
    with pytest.raises(UserError, match="not enough memory: 2 ranks on this machine, the largest: "):
        memory_check.check_memory(config, torch.device("cpu"), world, ranges)
    monkeypatch.setattr(memory_check, "free_memory", lambda device: peaks[2])
    assert memory_check.check_memory(config, torch.device("cuda"), world, ranges).peak <= peaks[2]


def test_bf16_where_there_is_none_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(loop, "choose_device", lambda *_: (torch.device("cuda"), "told so"))
    monkeypatch.setattr(loop, "set_up", lambda *_: None)
    with pytest.raises(UserError, match=r"^runtime\.precision: bf16 is not supported by Tesla V100; use fp32$"):
        train(tiny_config(tmp_path, "runtime.precision=bf16"), tmp_path / "run")
    assert not (tmp_path / "data").exists()


def test_budget_beyond_the_tokens_asked_for_is_refused_before_they_are_prepared(tmp_path):
    config = tiny_config(tmp_path, "data.tokens=1000", "training.iterations=100")
    with pytest.raises(UserError, match=r"the run reads 3,200 tokens, there are 1,000: 3\.20 epochs; allow it with"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "data").exists()


def test_host_memory_is_known_here():
    free = memory_check.free_memory(torch.device("cpu"))
    assert free is None or free > 2**20


def test_command_prints_a_table_to_act_on(capsys):
    assert main(["plan", "paper-1b", "--devices", "6", "--device-memory", "80GB", "--throughput", "A100"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines()[:16])) <= 80
    assert next(line for line in printed.splitlines() if "fits" in line).count("yes") == 6
    assert "Fits into 80.0 GB per device; the smallest R that fits is" in printed
    assert "At 124.8 TFLOP/s per device" in printed
    assert "The best synchronous cut of the same 8 examples, " in printed
    assert main(["plan", "paper-1b", "--device-memory", "16GB"]) == 0
    assert "Does not fit into 16.0 GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--device-memory", "many"], "--device-memory many: must be a number above 0 with a unit"),
        (["--device-memory", "0GB"], "--device-memory 0GB: must be"),
        (["--throughput", "Abacus"], "--throughput Abacus: write FLOP/s as a number, for example 120T, or one of:"),
        (["--devices", "99"], "pipeline: devices must be at most stages"),
    ],
)
def test_wrong_options_are_one_line(arguments, expected, capsys):
    assert main(["plan", "quick", *arguments]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 5\ninactive_file 50\n"}, 350),
        ({"memory.max": "1000", "memory.current": "1200"}, 0),
        ({"memory.max": "max", "memory.current": "700"}, None),
        (
            {
                "memory/memory.limit_in_bytes": "900",
                "memory/memory.usage_in_bytes": "100",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 20\n",
            },
            820,
        ),
        ({}, None),
    ],
)
def test_free_memory_of_a_container_is_what_is_left_of_its_limit(files, expected, tmp_path, monkeypatch):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(memory_check, "CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(memory_check, "_available_on_host", lambda: None)
    assert memory_check.free_memory(torch.device("cpu")) == expected
