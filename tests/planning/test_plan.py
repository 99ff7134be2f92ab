"""The planner's sizes agree with real models, and its peaks with real runs."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.memory import measured_peak, peak_during
from brx.config.loading import apply_overrides, load_config
from brx.config.schema import MoEConfig
from brx.distributed.processes import DistributedWorld
from brx.methods.table import CUSTOM, METHODS
from brx.model.sizes import Size, stage_forward_flops
from brx.model.stage import make_stage, partition, whole_model
from brx.pipeline.delay import pipeline_delays
from brx.pipeline.forecasts import FORECAST_RULES
from brx.pipeline.versions import StageVersions
from brx.pipeline.world import Neighbours, World
from brx.planning.flops import products_of, rank_flops
from brx.planning.plan import plan_memory
from brx.planning.update_memory import rotated_sides
from brx.train.build import assemble, build_stages
from brx.train.saving import CheckpointWriter
from tests.pipeline.loops import STASHES

pytestmark = pytest.mark.usefixtures("own_code")
SMALL = {
    "model": {"blocks": 4, "width": 64, "heads": 2, "sequence_length": 64},
    "pipeline": {"stages": 4},
    "training": {"batch_size": 4, "iterations": 100},
    "checkpoint": {"background": False},
}


def small(*overrides):
    return apply_overrides(SMALL, overrides, "small")


def ring_dtype(matrices, dtype):
    return lambda name, weight: dtype if name in matrices else weight.dtype


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("paper-1b", []),
        ("paper-1b", ["pipeline.stash=predict"]),
        ("paper-moe-100m", ["runtime.precision=fp32"]),
    ],
)
def test_rings_are_the_engines(preset, overrides):
    config = load_config(preset, overrides)
    num_stages = config.pipeline.stages
    dtype = torch.bfloat16 if config.runtime.precision == "bf16" else torch.float32
    expected = []
    for index, blocks in enumerate(partition(config.model.blocks, num_stages)):
        stage = make_stage(config.model, config.data.vocabulary_size, blocks, seed=None)
        delay, stash = pipeline_delays(num_stages)[index], config.pipeline.stash
        versions = StageVersions(stage, index, delay, stash, ring_dtype(stage.matrices, dtype))
        size = sum(weight.nbytes for weight in versions.newest.values())
        # The predictor keeps the average step and the weights before it.
        kept = 2 * size if stash == "predict" and delay.tau else 0
        expected.append(versions.slots.nbytes + kept)
    assert [
        rank.rings for rank in plan_memory(config, "cuda", partition(num_stages, num_stages))
    ] == expected
    (alone,) = plan_memory(config, "cuda", [range(num_stages)])
    assert [stage.rings for stage in alone.by_stage] == expected


def held_by(stage):
    """Bytes of the older versions of a stage, and of all that predicts or corrects weights."""
    stage.correct_update()
    stage.record_update(1)
    extrapolation, feedback = stage._extrapolation, stage._error_feedback
    kept = tree_leaves(extrapolation.state)
    for flat in (extrapolation._before, *((feedback._before, feedback._last) if feedback else ())):
        kept += [] if flat is None else flat.views
    return stage.slots.nbytes + sum(x.nbytes for x in kept if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["pipeline.rings=host"],
        ["pipeline.delay=2bw", "pipeline.error_feedback=1"],
        *([f"pipeline.stash={stash}"] for stash in STASHES),
        *([f"pipeline.forecast={forecast}"] for forecast in FORECAST_RULES),
    ],
    ids=" ".join,
)
def test_rings_hold_what_their_settings_need(overrides, in_flight):
    config = small(*overrides)
    stages = build_stages(config, torch.device("cpu"), range(4), num_in_flight=in_flight)
    (rank,) = plan_memory(config, "cpu", [range(4)], in_flight=[in_flight])
    assert [stage.rings for stage in rank.by_stage] == list(map(held_by, stages))


# What decides a peak, one after the other: rings, batch, precision, logits in one piece and in
#     chunks, methods, modes.
RUNS = [
    [],
    ["pipeline.stages=1"],
    ["training.batch_size=16", "runtime.precision=bf16"],
    ["pipeline.stash=predict"],
    ["pipeline.forecast=average-update"],
    ["optimizer.method=examples/methods/xpipe.py:XPipe"],
    ["pipeline.delay=2bw", "pipeline.error_feedback=1"],
    ["pipeline.delay=7", "pipeline.accumulation=3", "pipeline.stash=none"],
    ["pipeline.recompute=true", "training.batch_size=16"],
    ["model.moe={experts: 4}", "runtime.precision=bf16"],
    ["data.tokenizer=gpt2", "training.batch_size=16"],
    [
        "optimizer={method: basis-rotation, frequency: 2}",
        "logging.update_norms=false",
        "training.batch_size=1",
    ],
    [
        "logging.staleness_every=2",
        "pipeline.delay=7",
        "training.batch_size=1",
        "logging.update_norms=false",
    ],
]
# Each has a quicker sibling of its kind in RUNS. For the methods it is
# `test_temporary_tensors_of_an_update_are_counted`.
SLOW_RUNS = [
    ["pipeline.delay=2bw", "pipeline.accumulation=2"],
    ["pipeline.forecast=last-update"],
    ["data.tokenizer=gpt2", "training.batch_size=2"],
    ["optimizer.method=nesterov"],
    [
        "optimizer={method: basis-rotation, frequency: 2, source: 1st, geometry: unilateral}",
        "runtime.precision=bf16",
    ],
    ["optimizer.method=delay-compensation"],
    ["optimizer.method=soap"],
    ["logging.staleness_every=5", "pipeline.accumulation=2", "runtime.precision=bf16"],
    [
        "logging.staleness_every=5",
        "optimizer={method: basis-rotation, frequency: 5}",
        "training.batch_size=1",
    ],
]


@pytest.mark.parametrize(
    "overrides",
    [*RUNS, *(pytest.param(overrides, marks=pytest.mark.slow) for overrides in SLOW_RUNS)],
    ids=" ".join,
)
def test_peak_is_the_measured_one(overrides):
    config = small(*overrides)
    (planned,) = plan_memory(config, "cpu")
    # The first basis comes with update 2, its first refresh with update 4; by update 10 the probe
    # has all older updates that it keeps.
    is_probed, has_bases = (
        config.logging.staleness_every is not None,
        config.optimizer.method == "basis-rotation",
    )
    iterations = 11 if is_probed else 5 if has_bases else 3
    assert planned.peak == pytest.approx(
        measured_peak(config, torch.device("cpu"), iterations), rel=0.1
    )


@pytest.mark.parametrize("method", [name for name in METHODS if name != CUSTOM])
def test_temporary_tensors_of_an_update_are_counted(method):
    # With one stage and one example, the update decides the peak. A method whose step makes copies
    # of the weights has to declare them (`Method.update_copies`).
    lean = ["pipeline.stages=1", "training.batch_size=1", "logging.update_norms=false"]
    config = small(f"optimizer.method={method}", *lean)
    (planned,) = plan_memory(config, "cpu")
    assert planned.peak > 0.92 * measured_peak(config, torch.device("cpu"), 3)


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


# What decides how many weights an asynchronous stage keeps, and no synchronous one does.
ASYNCHRONOUS_SETTINGS = [
    ["pipeline.stash=none"],
    ["pipeline.stash=predict"],
    ["pipeline.rings=host"],
    ["pipeline.forecast=average-update"],
    ["pipeline.forecast=last-update"],
    ["optimizer.method=examples/methods/xpipe.py:XPipe"],
]
SPLIT = ["pipeline.accumulation=4", "training.batch_size=2", "model.width=96"]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        # `test_peak_is_the_measured_one` has these settings on one device.
        pytest.param(["runtime.precision=bf16", "training.batch_size=16"], marks=pytest.mark.slow),
        ["pipeline.rings=host"],
        SPLIT,
        *([*SPLIT, *settings] for settings in ASYNCHRONOUS_SETTINGS[:4]),
    ],
    ids=" ".join,
)
def test_peak_with_micro_batches_in_flight(overrides):
    norms = "training.log_every=1"  # at every update: the peak is there
    config = small("model.blocks=8", "pipeline.stages=8", "pipeline.devices=4", norms, *overrides)
    planned = plan_memory(config, "cpu")[0]
    tokens = torch.zeros(config.training.batch_size, 64, dtype=torch.int64)

    def work():
        engine = assemble(config, lambda t: (tokens, tokens), world=FirstOfFour()).engine
        for _ in engine.run(1, lambda: 7):
            pass

    assert planned.peak == pytest.approx(peak_during(work, torch.device("cpu")), rel=0.1)


class Unconnected(DistributedWorld):
    """A rank of four, without the others."""

    num_ranks = 4

    def __init__(self, rank):
        self.rank = rank
        self._through_host = False
        self._timeout_s = 1.0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_links_are_the_buffers_of_the_channels(precision, monkeypatch):
    monkeypatch.setattr("brx.distributed.processes._make_group", lambda timeout_s: None)
    config = small("pipeline.devices=4", f"runtime.precision={precision}")
    shape = (config.training.batch_size, config.model.sequence_length, config.model.width)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    message = torch.empty(shape, dtype=dtype).nbytes
    expected = []
    for rank in range(4):
        channels = Unconnected(rank).connect(shape, dtype, torch.device("cpu"))
        both = [channels.activations, channels.gradients]
        received = sum(buffer.nbytes for channel in both for buffer in channel._free)
        # A message to each neighbour may be on its way, too.
        sent = sum(message for channel in both if channel._target is not None)
        expected.append(received + sent)
    assert [rank.links for rank in plan_memory(config, "cpu")] == expected


def batches_of(config):
    shape = (config.training.batch_size, config.model.sequence_length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    return lambda n: (tokens, tokens)


@pytest.mark.parametrize("every", [2, 5])
@pytest.mark.parametrize("delay", ["pipeline", 7])
def test_updates_that_the_probe_keeps_are_counted(every, delay):
    config = small("model.width=8", f"pipeline.delay={delay}", f"logging.staleness_every={every}")
    (rank,) = plan_memory(config, "cpu")
    (planned,) = {phase.items.get("older updates") for phase in rank.phases} - {None}
    assembly = assemble(config, batches_of(config))
    kept = 0
    for step in assembly.engine.run(1, lambda: 21):
        if (step.iteration + 1) % every == 0:  # the next update is measured
            updates = [assembly.probe.stage_state(stage) for stage in assembly.stages]
            kept = max(kept, sum(tensor.nbytes for tensor in tree_leaves(updates)))
    assert planned == kept


@pytest.mark.parametrize(
    "settings",
    [
        "optimizer={method: basis-rotation, frequency: 2}",
        "pipeline.stash=predict",
        "pipeline.forecast=last-update",
        "pipeline.forecast=average-update",
        "pipeline={stages: 4, delay: 2bw, error_feedback: 1.0}",
    ],
)
def test_checkpoint_copy_is_the_saved_content(settings):
    config = small("model.width=32", settings)
    assembly = assemble(config, batches_of(config))
    for _ in assembly.engine.run(1, lambda: 3):
        pass
    (rank,) = plan_memory(config, "cpu")
    for stage, planned in zip(assembly.stages, rank.by_stage, strict=True):
        content = {key: kept for key, kept in assembly.stage_state(stage).items() if key != "rng"}
        held = sum(leaf.nbytes for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor))
        assert planned.saved == pytest.approx(held, rel=0.001)


def test_checkpoint_without_rings_copies_none():
    full, short = (
        plan_memory(small("checkpoint.background=true", f"checkpoint.rings={rings}"), "cpu")[0]
        for rings in ("true", "false")
    )
    assert full.checkpoint - short.checkpoint == full.rings


def test_copy_for_a_checkpoint_is_the_measured_one(tmp_path):
    method = "optimizer={method: basis-rotation, frequency: 2}"
    config = small("checkpoint.background=true", method, "training.batch_size=1")
    assembly = assemble(config, batches_of(config))
    for _ in assembly.engine.run(1, lambda: 3):
        pass
    writer = CheckpointWriter(tmp_path, config, World())

    def save():
        writer.save(3, assembly, {"num_stages": 4})
        writer.settle()

    (planned,) = plan_memory(config, "cpu")
    assert planned.checkpoint == pytest.approx(peak_during(save, torch.device("cpu")), rel=0.02)


def test_peak_on_a_cpu_holds_the_copy():
    on = plan_memory(small("checkpoint.background=true"), "cpu")[0]
    off = plan_memory(small("checkpoint.background=false"), "cpu")[0]
    assert on.peak == off.peak + on.checkpoint


def test_copy_of_a_gpu_is_in_host_memory():
    on = plan_memory(small("checkpoint.background=true"), "cuda")[0]
    off = plan_memory(small("checkpoint.background=false"), "cuda")[0]
    assert on.peak == off.peak
    assert on.host - off.host == on.checkpoint > 0


def test_rings_in_host_memory_are_counted_there():
    device = plan_memory(small("pipeline.rings=device"), "cuda")[0]
    host = plan_memory(small("pipeline.rings=host"), "cuda")[0]
    assert host.host == device.rings


GRAPHED = ["optimizer={method: basis-rotation}", "runtime.graphs=true"]


def test_graphs_share_the_memory_of_the_largest():
    (rank,) = plan_memory(small(*GRAPHED), "cuda")
    assert rank.graphs == max(rank.update, rank.activations + rank.logits) > 0


def test_graphs_on_several_devices_hold_steps_alone():
    ranks = plan_memory(small(*GRAPHED, "pipeline.devices=2"), "cuda")
    assert [rank.graphs for rank in ranks] == [rank.update for rank in ranks]


def bytes_at(name, *overrides, rank=0):
    """The memory of a rank at a phase."""
    of_rank = plan_memory(small(*overrides), "cuda")[rank]
    (found,) = [phase.total for phase in of_rank.phases if phase.name == name]
    return found


def test_update_outside_of_graphs_needs_memory_besides():
    (rank,) = plan_memory(small(*GRAPHED), "cuda")
    found = bytes_at("an update outside of graphs", *GRAPHED)
    assert found == bytes_at("an update", GRAPHED[0]) + rank.graphs


def test_validation_needs_memory_beside_graphs():
    (rank,) = plan_memory(small(*GRAPHED), "cuda")
    always = rank.weights + rank.gradients + rank.moments + rank.rotation + rank.rings
    assert bytes_at("a validation", *GRAPHED) == always + rank.logits + rank.graphs


def test_probe_needs_memory_beside_graphs():
    (rank,) = plan_memory(small(*GRAPHED), "cuda")
    probed = [GRAPHED[0], "logging.staleness_every=5"]
    found = bytes_at("the loss of the probe", *probed, GRAPHED[1])
    assert found == bytes_at("the loss of the probe", *probed) + rank.graphs


def test_passes_of_several_devices_need_memory_beside_graphs():
    rank = plan_memory(small(*GRAPHED, "pipeline.devices=2"), "cuda")[1]
    found = bytes_at("the loss", *GRAPHED, "pipeline.devices=2", rank=1)
    plain = bytes_at("the loss", GRAPHED[0], "pipeline.devices=2", rank=1)
    assert found == plain + rank.graphs


def test_communicators_count_neighbours():
    ranks = plan_memory(small("pipeline.devices=3"), "cuda")
    per_neighbour = 2 * 32 * 4 * 2**20
    assert [rank.communicators for rank in ranks] == [
        per_neighbour,
        2 * per_neighbour,
        per_neighbour,
    ]


@pytest.mark.parametrize(
    ("overrides", "device_type"),
    [
        (["pipeline.devices=3"], "cpu"),
        (["pipeline.devices=3", "runtime.share_gpus=true"], "cuda"),
        ([], "cuda"),
    ],
)
def test_only_nccl_has_communicators(overrides, device_type):
    ranks = plan_memory(small(*overrides), device_type)
    assert [rank.communicators for rank in ranks] == [0] * len(ranks)


@pytest.mark.parametrize("overrides", [*RUNS[::3], *SLOW_RUNS[::5]], ids=" ".join)
def test_items_of_a_peak_add_up(overrides):
    (rank,) = plan_memory(small(*overrides), "cpu")
    for phase in rank.phases:
        assert phase.total == sum(phase.items.values())
    assert rank.peak == max(phase.total for phase in rank.phases)


def test_flops_are_those_that_torch_counts():
    config = small("model.width=32").model
    model = whole_model(config, 256, seed=0)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    # The counter does not know the CPU's fused attention.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(tokens, tokens)
    assert counter.get_total_flops() == stage_forward_flops(config, 256, range(4), 2)


def test_mixture_counts_the_chosen_experts_alone():
    config = small("model.width=32").model
    mixture = config.model_copy(update={"moe": MoEConfig(experts=8, top_k=2, every=1)})
    difference = stage_forward_flops(mixture, 256, range(4), 2) - stage_forward_flops(
        config, 256, range(4), 2
    )
    # With the router, and the mean of the experts' outputs.
    assert difference == 4 * 128 * (2 * 8 * 32**2 + 2 * 8 * 32 + 2 * 2 * 32)


def test_ranks_share_all_flops():
    config = load_config("paper-1b", ["optimizer.method=basis-rotation", "pipeline.devices=6"])
    parts = [rank_flops(config, own) for own in partition(24, 6)]
    assert sum(parts) == pytest.approx(rank_flops(config, range(24)), rel=1e-12)
    assert parts[-1] == max(parts)  # it has the head


def test_recomputation_repeats_blocks_and_not_the_head():
    config = small("pipeline.recompute=true")
    extra = rank_flops(config, range(4)) - rank_flops(small(), range(4))
    width, length = config.model.width, config.model.sequence_length
    tokens = config.training.batch_size * length
    assert extra == 4 * tokens * (24 * width**2 + 4 * length * width)


# An MLP matrix of width 8,192: BasisRotation rotates sides up to 16,384.
WIDE = (32_768, 8192)


@pytest.mark.parametrize("source", ["2nd", "1st"])
def test_sides_above_max_dim_are_not_rotated(source):
    config = small(f"optimizer={{method: basis-rotation, source: {source}}}")
    assert rotated_sides(config, WIDE) == (8192,)


def test_products_of_one_rotated_side():
    config = small("optimizer={method: basis-rotation}")
    sizes = {"blocks.0.mlp.up.weight": Size(WIDE, is_matrix=True)}
    found = products_of(config, sizes)
    product = 2 * 32_768 * 8192 * 8192
    assert found.rotations == pytest.approx(2 * product)
    assert found.covariances == pytest.approx(product)
    assert found.refreshes == pytest.approx((2 * product + 17 * 8192**3) / 10)


def test_products_of_covariances_at_refreshes_are_fewer():
    config = small("optimizer={method: basis-rotation, covariance: refresh}")
    sizes = {"blocks.0.mlp.up.weight": Size(WIDE, is_matrix=True)}
    assert products_of(config, sizes).covariances == pytest.approx(2 * 32_768 * 8192**2 / 10)


def test_products_of_newton_schulz():
    config = small("optimizer.method=muon")
    sizes = {"weight": Size((3, 100, 40), is_matrix=True), "bias": Size((100,))}
    assert products_of(config, sizes).total == 3 * 5 * (4 * 40**2 * 100 + 2 * 40**3)
