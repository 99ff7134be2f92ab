"""The engine against the naive simulation and against an ordinary training loop. `StageVersions`,
`StageDelay`, the forecasts and `MethodUpdater` have their tests here, with the engine that uses
them."""

import math
import re
import time
from itertools import product
from pathlib import Path

import pytest
import torch

from brx.config.loading import apply_overrides
from brx.errors import DivergedError
from brx.methods.bf16_products import fast_bf16_products
from brx.methods.table import CUSTOM, METHODS
from brx.model.stage import make_stage, partition, whole_model
from brx.pipeline.delay import StageDelay, delays_of
from brx.pipeline.engine import Stopwatch, check_finite
from brx.pipeline.versions import StageVersions
from brx.train.build import assemble, build_stages
from tests.pipeline.loops import STASHES
from tests.pipeline.naive import NaivePipeline

VOCABULARY = 256
OVERRIDES = {
    "pipedream": [],
    "pipedream-lr": ["optimizer.annealing_fraction=0.5"],
    "nesterov": [],
    # The smaller side only: the larger one's covariance starts rank-deficient, and any rounding
    #     decides its null space.
    "basis-rotation": ["optimizer.frequency=3", "optimizer.geometry=unilateral"],
    # Far above the paper's range: at these weights a smaller lambda would hardly show.
    "delay-compensation": ["optimizer.compensation=1.0"],
    # No SOAP: it rotates both sides, from covariances that start rank-deficient
    #     (tests/methods/test_table.py has it).
    "muon": [],
    "scion": [],
    "lion": [],
    "adan": [],
    "torch.optim:SGD": ["optimizer.arguments={momentum: 0.9, nesterov: true}"],
}


def make_config(method, stages, stash, iterations=24, *extra):
    content = {
        # Up to P = 5 one stage has two blocks.
        "model": {"blocks": min(stages + 1, 8), "width": 8, "heads": 2, "sequence_length": 6},
        "pipeline": {"stages": stages, "stash": stash},
        "optimizer": {"method": method, "lr": 0.01},
        "training": {
            "iterations": iterations,
            "batch_size": 2,
            "clip": 0.5,
            "warmup_fraction": 0.1,
        },
    }
    return apply_overrides(content, [*OVERRIDES.get(method, []), *extra], "test")


def make_modules(config, dtype=torch.float32):
    modules = []
    for blocks in partition(config.model.blocks, config.pipeline.stages):
        module = make_stage(config.model, VOCABULARY, blocks, seed=0)
        modules.append(module.to(dtype))
    return modules


def make_versions(config):
    return build_stages(config, torch.device("cpu"), range(config.pipeline.stages))


def micro_batch(t):
    tokens = torch.randint(
        17, (6, 7), generator=torch.Generator().manual_seed(t)
    )  # few, which come again
    return tokens[:, :-1], tokens[:, 1:]


def run_engine(config, iterations, dtype=torch.float32):
    assembly = assemble(config, micro_batch, dtype=dtype)
    return list(assembly.engine.run(1, lambda: iterations)), assembly.stages


def library_optimizers(method, weights, lr, rest_lr):
    """The baselines' optimizers as a user of the libraries would write them, and the parameters
    that they take apart. That is of a mixture's stacks each expert's (view, stack, place)."""
    import pytorch_optimizer  # takes a second, which only these tests need

    matrices, embeddings, vectors, rest, members = [], [], [], [], []
    for name, parameter in weights.items():
        inside = (
            ("attention." in name or "mlp." in name) and "router" not in name and "norm" not in name
        )
        if not (inside and parameter.ndim >= 2 and name.endswith("weight")):
            rest.append(parameter)  # whole: AdamW does not care
        is_stack = parameter.ndim == 3 or (
            parameter.ndim == 2 and ".mlp." in name and name.endswith("bias")
        )
        of_stack = (
            [(view, parameter, i) for i, view in enumerate(parameter.detach().unbind())]
            if is_stack
            else []
        )
        for member in [view for view, _, _ in of_stack] or [parameter]:
            (vectors if member.ndim == 1 else matrices if inside else embeddings).append(member)
        members += of_stack
    if method == "soap":
        options = {
            "betas": (0.9, 0.999),
            "weight_decay": 0.01,
            "precondition_frequency": 10,
            "eps": 1e-8,
        }
        first = [pytorch_optimizer.SOAP(matrices, lr=lr, **options)]
    elif method == "muon":
        first = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        ]
    elif method == "lion":
        first = [pytorch_optimizer.Lion(matrices, lr=lr, weight_decay=0.01)]
    else:
        assert method == "scion"
        kinds = ((matrices, 2, 50.0), (embeddings, 4, 3000.0), (vectors, 5, 1.0))
        options = {"lr": lr, "constraint": True}
        return [
            pytorch_optimizer.SCION(k, norm_type=norm, scale=s, **options)
            for k, norm, s in kinds
            if k
        ], members
    return [*first, torch.optim.AdamW(rest, lr=rest_lr, fused=True)], members


class NaiveUpdate:
    """Each stage has a torch optimizer of its own over copies of its weights."""

    def __init__(self, config, taus=None):
        self.config = config
        self.taus = list(range(config.pipeline.stages))[::-1] if taus is None else taus
        self.optimizers = {}

    def rule(self, newest, gradients, seen):
        if self.config.optimizer.method != "delay-compensation":
            return gradients
        strength = self.config.optimizer.compensation
        return {
            name: g + strength * g * g * (newest[name] - seen[name].detach())
            for name, g in gradients.items()
        }

    def __call__(self, k, newest, gradients, t):
        if k not in self.optimizers:
            copies = {name: torch.nn.Parameter(weight.clone()) for name, weight in newest.items()}
            self.optimizers[k] = copies, self.make(copies)
        copies, optimizers = self.optimizers[k]
        for name, copy in copies.items():
            copy.data.copy_(newest[name])
            copy.grad = gradients[name]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr(k, t)
            with fast_bf16_products(copies.values()):  # rounded like brx's
                optimizer.step()
        return {name: copy.detach().clone() for name, copy in copies.items()}

    def make(self, copies):
        from brx.optim.basis_rotation import BasisRotation

        method = self.config.optimizer.method
        if method == "torch.optim:SGD":
            return [torch.optim.SGD(copies.values(), momentum=0.9, nesterov=True)]
        if method == "adan":
            import pytorch_optimizer

            return [pytorch_optimizer.Adan(copies.values(), weight_decay=0.01)]
        if method in ("muon", "scion", "lion"):
            return library_optimizers(method, copies, 0.01, 0.01)[0]
        if method == "nesterov":
            options = {"betas": (0.99, 0.999), "weight_decay": 0.01, "decoupled_weight_decay": True}
            return [torch.optim.NAdam(copies.values(), **options)]
        if method == "basis-rotation":
            inside = {name for name in copies if "attention." in name or "mlp." in name}
            chosen = {
                n for n in inside if copies[n].ndim >= 2 and "router" not in n and "bias" not in n
            }
            matrices = [copy for name, copy in copies.items() if name in chosen]
            rest = [copy for name, copy in copies.items() if name not in chosen]
            return [
                BasisRotation(matrices, frequency=3, geometry="unilateral"),
                torch.optim.AdamW(rest, fused=True),
            ]
        assert method in ("pipedream", "pipedream-lr", "delay-compensation")
        return [torch.optim.AdamW(copies.values(), fused=True)]

    def lr(self, k, t):
        total, peak = self.config.training.iterations, self.config.optimizer.lr
        warmup = round(0.1 * total)
        if t <= warmup:
            lr = peak * t / warmup
        else:
            lr = peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (t - warmup) / (total - warmup))))
        if self.config.optimizer.method == "pipedream-lr":
            lr /= max(1, self.taus[k] / self.config.pipeline.accumulation) ** (
                1 - min(t / (0.5 * total), 1)
            )
        return lr


# Delays that an update's micro-batches see from one version or from two, older and younger than the
# update.
PROFILES = {
    "5": [5, 5, 5],
    "[0, 4, 0]": [0, 4, 0],
    "[0, 1, 7]": [0, 1, 7],
    "{like: 8}": [7, 4, 0],  # 3.5 rounds to the even 4
    "pipeline": [2, 1, 0],
}
MIXTURE = ["model.moe={experts: 4, every: 2}"]
FORECASTS = [f"pipeline.forecast={name}-update" for name in ("last", "average")]
# What a method does with a stage is the same at every P: those of libraries have P = 3 alone, and a
#     quick test of one setting, with two micro-batches per update.
LIBRARY_METHODS = ("muon", "scion", "lion", "adan", "torch.optim:SGD")
OWN_METHODS = [method for method in OVERRIDES if method not in LIBRARY_METHODS]
DEEP = [(method, 8, stash, [], None) for method, stash in product(OWN_METHODS, STASHES)]
TWO_BUFFERED = [
    (method, 3, "predict", ["pipeline.delay=2bw", "pipeline.accumulation=3"], [3, 3, 3])
    for method in OVERRIDES
]
FORECAST = [
    (method, 3, "exact", [FORECASTS[index % 2]], None) for index, method in enumerate(OVERRIDES)
]
FEEDBACK = ["pipeline.delay=[2, 2, 0]", "pipeline.accumulation=2", "pipeline.error_feedback=0.7"]
WITH_FEEDBACK = [
    (method, 3, stash, FEEDBACK, [2, 2, 0])
    for method in OVERRIDES
    for stash in (STASHES if method == "pipedream" else ("exact",))
]


def is_own(method, stash):
    return method in OWN_METHODS


def if_quick(is_quick, cases):
    """The cases, those slow for which `is_quick(method, stash)` does not hold."""
    for case in cases:
        method, _, stash, *_ = case
        yield pytest.param(*case, marks=[] if is_quick(method, stash) else [pytest.mark.slow])


CASES = [
    *((method, 3, stash, [], None) for method, stash in product(OWN_METHODS, STASHES)),
    # A second each; one is a quick test, as P = 3 has the methods and the stash modes.
    *if_quick(lambda method, stash: (method, stash) == ("pipedream", "exact"), DEEP),
    *((method, 1, "exact", [], None) for method in OWN_METHODS),
    *(
        (method, 3, "exact", ["pipeline.delay=3", "pipeline.accumulation=2"], [3, 3, 3])
        for method in OVERRIDES
    ),
    *if_quick(is_own, TWO_BUFFERED),
    *if_quick(is_own, FORECAST),
    (
        "delay-compensation",
        3,
        "exact",
        ["pipeline.delay=5", "pipeline.accumulation=2", FORECASTS[1]],
        [5] * 3,
    ),
    *(
        (method, 4, stash, MIXTURE, None)
        for method in ("pipedream", "basis-rotation")
        for stash in STASHES
    ),
    *if_quick(is_own, WITH_FEEDBACK),
    *(
        ("pipedream", 3, stash, [f"pipeline.delay={delay}", f"pipeline.accumulation={M}"], taus)
        for delay, taus in PROFILES.items()
        for M in (1, 3)
        for stash in (STASHES if M > 1 else ("none",))
    ),
]


def test_every_method_is_simulated():
    elsewhere = {"soap", CUSTOM}  # torch.optim:SGD stands for the second
    assert OVERRIDES.keys() - {"torch.optim:SGD"} == METHODS.keys() - elsewhere


@pytest.mark.usefixtures("own_code")  # a method of torch.optim is imported
@pytest.mark.parametrize(("method", "stages", "stash", "extra", "taus"), CASES)
def test_engine_equals_naive_simulation(method, stages, stash, extra, taus):
    assert_equals_naive(make_config(method, stages, stash, 24, *extra), taus)


def assert_equals_naive(config, taus=None, update=None, forecast=None):
    """In float64, where the two may only differ by rounding: any wrong version shows at once.
    `update` and `forecast` of the naive simulation are by default what the configuration says."""
    method, stages, stash = config.optimizer.method, config.pipeline.stages, config.pipeline.stash
    accumulation = config.pipeline.accumulation
    iterations = 3 * stages + 4
    results, versions = run_engine(config, iterations, torch.float64)
    modules, update = make_modules(config, torch.float64), update or NaiveUpdate(config, taus)
    clip, forecast = config.training.clip, forecast or config.pipeline.forecast
    feedback = config.pipeline.error_feedback
    naive = NaivePipeline(modules, stash, update, clip, taus, accumulation, forecast, feedback)
    for t in range(1, iterations + 1):
        naive.step(
            t, [micro_batch(n) for n in range((t - 1) * accumulation + 1, t * accumulation + 1)]
        )
    losses = torch.stack([r.loss for r in results])
    torch.testing.assert_close(
        losses, torch.tensor(naive.losses, dtype=torch.float64), rtol=1e-9, atol=0
    )
    norms = torch.stack([r.grad_norms for r in results])
    torch.testing.assert_close(
        norms, torch.tensor(naive.norms, dtype=torch.float64), rtol=1e-6, atol=1e-12
    )
    for k, stage in enumerate(versions):
        for name, weight in stage.newest.items():
            # Eigenvectors of close eigenvalues magnify rounding; a wrong version would show at
            # 1e-3.
            tolerance = 1e-6 if method == "basis-rotation" else 1e-8
            torch.testing.assert_close(
                weight.detach(), naive.versions[k][-1][name], rtol=0, atol=tolerance
            )


@pytest.mark.numerics
def test_one_stage_equals_ordinary_training_loop():
    config = make_config("pipedream", 1, "exact")
    results, versions = run_engine(config, 12)
    model = whole_model(config.model, VOCABULARY, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01, fused=True)
    naive = NaiveUpdate(config)
    for t, result in enumerate(results, start=1):
        optimizer.param_groups[0]["lr"] = naive.lr(0, t)
        loss = model(*micro_batch(t)).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert result.loss == loss.detach()
        assert result.grad_norms.item() == norm
    for name, weight in model.named_parameters():
        assert torch.equal(weight, versions[0].newest[name]), name


@pytest.mark.parametrize("accumulation", [1, 2])  # after an update of 1, no stage holds a slot
@pytest.mark.parametrize("stash", STASHES)
def test_validation_loss_is_the_mean_over_examples_with_the_newest_weights(stash, accumulation):
    config = make_config("pipedream", 3, stash, 24, f"pipeline.accumulation={accumulation}")
    assembly = assemble(config, micro_batch, dtype=torch.float64)
    inputs, targets = (
        torch.cat(both) for both in zip(*map(micro_batch, (31, 32, 33)), strict=True)
    )
    model = whole_model(config.model, VOCABULARY, seed=0).double()
    for t in range(1, 8):
        list(assembly.engine.run(t, lambda t=t: t))
        with torch.no_grad():
            for stage in assembly.stages:
                for name, weight in stage.newest.items():
                    model.get_parameter(name).copy_(weight)
        # The last batch is smaller.
        batches = list(zip(torch.split(inputs, 7), torch.split(targets, 7), strict=True))
        assert len(batches[-1][0]) == 4
        expected = model(inputs, targets).loss.item()
        assert assembly.engine.evaluate(batches) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("stash", STASHES)
def test_bf16_ring_gives_the_same_numbers(stash, monkeypatch):
    config = make_config("pipedream", 4, stash, 24, "runtime.precision=bf16")

    def losses(ring_dtype):
        monkeypatch.setattr("brx.train.build.ring_matrix_dtype", lambda config: ring_dtype)
        return [result.loss.item() for result in run_engine(config, 12)[0]]

    # Not of `none` and `predict`: an fp32 ring is cast in the forward pass, and the backward pass
    # sees that old cast.
    assert (losses(torch.bfloat16) == losses(torch.float32)) == (stash == "exact")


@pytest.mark.numerics
def test_recomputed_activations_give_the_same_numbers():
    configs = [
        make_config("pipedream", 4, "exact", 24, f"pipeline.recompute={on}")
        for on in ("true", "false")
    ]
    recomputed, plain = ([r.loss.item() for r in run_engine(config, 12)[0]] for config in configs)
    assert recomputed == plain


class Addresses:
    """A watcher that notes, at every update, where the tensors lie that an iteration touches."""

    def __init__(self, assembly):
        self.assembly = assembly
        self.by_update = []

    def before_forward(self, micro_batch):
        pass

    def before_step(self, t):
        self.tensors = []
        for stage in self.assembly.stages:
            self.tensors += [*stage.newest.values(), *stage.in_use, *stage.module.parameters()]
            self.tensors += [weight.grad for weight in stage.newest.values()]
            self.tensors += [view for slot in stage.slots.slots for view in slot.views]

    def after_step(self, t):
        for optimizer in self.assembly.updater.optimizers:
            for state in optimizer.state.values():
                self.tensors += [value for value in state.values() if torch.is_tensor(value)]
        self.by_update.append([tensor.data_ptr() for tensor in self.tensors])


@pytest.mark.parametrize("method", ["pipedream", "nesterov", "basis-rotation"])
@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["pipeline.accumulation=2"],
        ["pipeline.stash=predict"],
        ["runtime.precision=bf16"],
        ["pipeline.rings=host"],
    ],
    ids=" ".join,
)
def test_iterations_keep_every_address(method, settings):
    assembly = assemble(make_config(method, 3, "exact", 24, *settings), micro_batch)
    watcher = Addresses(assembly)
    assembly.engine.watchers.append(watcher)
    for _ in assembly.engine.run(1, lambda: 8):
        pass
    # The optimizers' state comes with update 1, the first bases with update 2.
    assert watcher.by_update[2:] == [watcher.by_update[2]] * 6


@pytest.mark.parametrize("stages", [1, 3])
def test_several_passes_bind_again_before_backward(stages):
    """On a rank with several micro-batches in flight, the weights in use are no longer those of the
    forward pass when its backward pass begins."""
    module = torch.nn.Linear(1, 1, bias=False)
    versions = StageVersions(module, 0, StageDelay(3), num_in_flight=3)
    seen = {}
    for n in range(1, 12):
        versions.bind(n)
        output = module(torch.ones(1))
        seen[n] = module.weight.item(), output
        if n >= stages:
            used, output = seen.pop(n - stages + 1)
            versions.bind_backward(n - stages + 1)
            assert module.weight.item() == used
            output.backward()  # which a weight that has changed by autograd's count would refuse
            with torch.no_grad():
                versions.newest["weight"].add_(1)
            versions.record_update(n - stages + 1)


def test_worked_tables_of_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "semantics.md").read_text()
    rows = re.findall(r"^\| (\d|all, 2BW) \| (\d) \|((?: \d+ \|){7,12})$", text, flags=re.M)
    assert len(rows) == 4 + 1 + 4
    for stage, tau, numbers in rows:
        versions = [int(version) for version in re.findall(r"\d+", numbers)]
        profile, index = ("2bw", 0) if "2BW" in stage else ("pipeline", int(stage))
        delay = delays_of(profile, 4, accumulation={7: 1, 12: 4}[len(versions)])[index]
        assert delay.tau == int(tau)
        assert versions == [delay.version_used(n) for n in range(1, len(versions) + 1)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: times work on its stream")
def test_stopwatch_on_cuda_times_the_work():
    matrix = torch.randn(4096, 4096, device="cuda")
    stopwatch, started = Stopwatch(matrix.device), time.perf_counter()
    for _ in range(20):
        matrix @ matrix
    launched = time.perf_counter() - started
    stopwatch.stop()
    assert stopwatch.seconds() > launched


@pytest.mark.parametrize(
    ("iteration", "advice"), [(1, "look at the model and its initial weights"), (2, "try a lower")]
)
@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (2.0, math.inf)])
def test_advice_is_about_what_can_be_the_cause(iteration, advice, loss, norm):
    with pytest.raises(DivergedError, match=rf"iteration {iteration}: the .*; {advice}"):
        check_finite(iteration, torch.tensor(loss), torch.tensor([norm]), first_stage=0)
