"""`delayed` against the engine, against a naive simulation, and under other people's trainers."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from brx import delayed
from brx.errors import UserError
from brx.model.stage import whole_model
from brx.train.build import assemble
from tests import processes
from tests.pipeline.test_engine import VOCABULARY, make_config, micro_batch


def start(net=None, stages=4, delay="pipeline", **settings):
    """A model under delay, its optimizer and its pipeline."""
    net = make_net() if net is None else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer, delayed(net, optimizer, stages, delay, **settings)


@pytest.mark.parametrize(
    ("profile", "stash", "forecast", "accumulation"),
    [
        ("pipeline", "none", None, 3),
        ("2bw", "predict", None, 3),
        ("3", "exact", "last-update", 1),
        ("{like: 16}", "exact", "average-update", 3),
        ("[7, 0, 3, 1, 1, 2, 5, 4]", "exact", None, 3),
    ],
)
def test_is_the_engine_bit_for_bit(profile, stash, forecast, accumulation):
    settings = [
        f"pipeline.delay={profile}",
        f"pipeline.accumulation={accumulation}",
        "training.clip=.inf",
    ]
    settings += [
        f"pipeline.forecast={forecast or 'null'}",
        "training.warmup_fraction=0",
        "training.batch_size=2",
    ]
    config = make_config("pipedream", 8, stash, 24, *settings, "training.final_lr_fraction=1")
    assembly = assemble(config, micro_batch)
    expected = [result.loss for result in assembly.engine.run(1, lambda: 10)]
    model = whole_model(config.model, VOCABULARY, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    delay = config.pipeline.delay
    settings = {"accumulation": accumulation, "stash": stash, "forecast": forecast}
    pipeline = delayed(model, optimizer, 8, delay, **settings)
    found = []
    for t in range(10):
        losses = []
        for n in range(t * accumulation + 1, (t + 1) * accumulation + 1):
            loss = model(*micro_batch(n)).loss
            loss.backward()
            losses.append(loss.detach())
        for weight in model.parameters():
            weight.grad /= accumulation
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses[0] if accumulation == 1 else torch.stack(losses).mean())
    assert torch.equal(torch.stack(found), torch.stack(expected))
    weights = dict(model.named_parameters())
    for stage in assembly.stages:
        assert all(torch.equal(weight, weights[name]) for name, weight in stage.newest.items())
    taus = [pipeline.delay_of(weights[f"blocks.{k}.mlp.up.bias"]) for k in range(8)]
    assert taus == [stage.delay.tau_updates for stage in assembly.stages]


class Net(nn.Module):
    """Blocks with a skip connection over stages, a tied output and, on demand, recomputed
    activations."""

    def __init__(self, num_blocks=4, recompute=None):
        super().__init__()
        self.enter = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(num_blocks)
        )
        self.leave = nn.Linear(6, 5, bias=False)
        self.recompute = recompute

    def forward(self, x):
        first = x = self.enter(x)
        for block in self.blocks:
            x = x + (
                block(x)
                if self.recompute is None
                else checkpoint(block, x, use_reentrant=self.recompute)
            )
        # enter.weight is used again at the end: a tied weight is of its first use's stage.
        return (self.leave(x + first) + x @ self.enter.weight).square().mean()


def make_net(**settings):
    torch.manual_seed(0)
    return Net(**settings).double()


def data(n):
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def naive(taus, num_updates, accumulation=1, tau_at=None, short=()):
    """Losses and final weights: all versions in a list, momentum SGD by hand; the `short` take a
    micro-batch less."""
    net = make_net()
    names = [name for name, _ in net.named_parameters()]
    stage = {
        n: int(n.split(".")[1]) if n.startswith("blocks") else 0 if "enter" in n else len(taus) - 1
        for n in names
    }
    versions = [{name: weight.detach().clone() for name, weight in net.named_parameters()}]
    velocity = {name: torch.zeros_like(weight) for name, weight in versions[0].items()}
    losses, used_before = [], dict.fromkeys(names, 0)
    for t in range(1, num_updates + 1):
        total = {name: torch.zeros_like(weight) for name, weight in versions[0].items()}
        for n in range((t - 1) * accumulation + 1, t * accumulation + 1 - (t in short)):
            weights = {}
            for name in names:
                tau = taus[stage[name]] if tau_at is None else tau_at(stage[name], n)
                used_before[name] = max(used_before[name], (n - 1 - tau) // accumulation)
                weights[name] = versions[used_before[name]][name].clone().requires_grad_()
            loss = functional_call(net, weights, (data(n),))
            losses.append(loss.item())
            for name, gradient in zip(
                names, torch.autograd.grad(loss, list(weights.values())), strict=True
            ):
                total[name] += gradient / accumulation
        for name in names:
            velocity[name] = 0.9 * velocity[name] + total[name]
        versions.append({name: versions[-1][name] - 0.1 * velocity[name] for name in names})
    return losses, versions[-1]


def loop(net, optimizer, first, last, accumulation=1, short=()):
    """An ordinary loop; losses of micro-batches."""
    losses = []
    for t in range(first, last + 1):
        for n in range((t - 1) * accumulation + 1, t * accumulation + 1 - (t in short)):
            loss = net(data(n))
            (loss / accumulation).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def step(loss, *optimizers):
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def assert_is(net, losses, expected, tolerance=1e-12):
    assert losses == pytest.approx(expected[0], rel=tolerance)
    for name, weight in net.named_parameters():
        torch.testing.assert_close(weight.detach(), expected[1][name], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("accumulation", "delay", "taus", "recompute", "short"),
    [
        (1, "pipeline", [3, 2, 1, 0], None, ()),
        (2, "pipeline", [3, 2, 1, 0], True, ()),
        (1, [5, 0, 2, 3], [5, 0, 2, 3], True, ()),
        (2, [5, 0, 2, 3], [5, 0, 2, 3], False, (5, 9)),  # as at the end of an epoch
        (1, 2, [2] * 4, False, ()),
        (2, 2, [2] * 4, None, (3, 4)),
    ],
)
def test_is_the_naive_simulation(accumulation, delay, taus, recompute, short):
    net, optimizer, _ = start(make_net(recompute=recompute), 4, delay, accumulation=accumulation)
    assert_is(
        net,
        loop(net, optimizer, 1, 12, accumulation, short),
        naive(taus, 12, accumulation, short=short),
    )


def outages(stage, num_stages, micro_batch, seed):
    return (7 * micro_batch + stage + seed) % 5


outages.most = 4


def test_a_delay_function_never_runs_backwards():
    net, optimizer, pipeline = start(delay=outages, seed=3)
    assert_is(
        net,
        loop(net, optimizer, 1, 20),
        naive([4] * 4, 20, tau_at=lambda stage, n: outages(stage, 4, n, 3)),
    )
    # The oldest asked for is 4 old; that never comes to pass where a newer version has been used
    # before.
    assert all(0 < delay.tau_updates < 4 for delay in pipeline.delays())


def test_stages_by_name_or_by_function():
    def stage_of(name):
        return (
            int(name.split(".")[1]) if name.startswith("blocks") else 3 * name.startswith("leave")
        )

    for stages in (stage_of, {"enter": 0, "leave": 3, **{f"blocks.{k}": k for k in range(4)}}):
        net, optimizer, _ = start(stages=stages)
        assert_is(net, loop(net, optimizer, 1, 9), naive([3, 2, 1, 0], 9))


@pytest.mark.parametrize(
    "settings", [{}, {"rings": "host"}, {"stash": "predict"}, {"forecast": "average-update"}]
)
def test_resumes_bit_for_bit(settings):
    net, optimizer, _ = parts = start(accumulation=2, **settings)
    fresh = copy.deepcopy([part.state_dict() for part in parts])
    begun = loop(net, optimizer, 1, 7, 2)
    saved = copy.deepcopy([part.state_dict() for part in parts])
    expected = loop(net, optimizer, 8, 14, 2)
    net, optimizer, _ = parts = start(accumulation=2, **settings)
    for state, first, last, losses in (
        (saved, 8, 14, expected),
        (fresh, 1, 7, begun),
    ):  # and anew, as after a search
        for part, kept in zip(parts, state, strict=True):
            part.load_state_dict(kept)
        assert loop(net, optimizer, first, last, 2) == losses
    with pytest.raises(ValueError, match="4 stages, not 2"):
        start(stages=2, accumulation=2, **settings)[2].load_state_dict(saved[2])


def test_two_optimizers_equal_one():
    net = make_net()
    first = torch.optim.SGD(net.blocks.parameters(), 0.1, 0.9)
    second = torch.optim.SGD([*net.enter.parameters(), *net.leave.parameters()], 0.1, 0.9)
    delayed(net, (first, second), 4)
    losses = [step(net(data(t)), first, second) for t in range(1, 9)]
    assert_is(net, losses, naive([3, 2, 1, 0], 8))


def test_closure_that_clips():
    net, optimizer, _ = start()

    def closure(t):
        optimizer.zero_grad()
        loss = net(data(t))
        loss.backward()
        # Finds the gradients, and changes nothing.
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1e6)
        return loss

    losses = [optimizer.step(partial(closure, t)).item() for t in range(1, 9)]
    assert_is(net, losses, naive([3, 2, 1, 0], 8))


def test_compiled_models_are_not_compiled_anew_per_version():
    from torch._dynamo.testing import CompileCounter

    expected = naive([3, 2, 1, 0], 10)
    for order in ("compiled first", "compiled last"):
        torch._dynamo.reset()
        counter, net = CompileCounter(), make_net()
        compiled = torch.compile(net, backend=counter) if order == "compiled first" else net
        _, optimizer, _ = start(compiled)
        if order == "compiled last":
            compiled = torch.compile(net, backend=counter)
        losses = loop(compiled, optimizer, 1, 4)
        once = counter.frame_count
        losses += loop(compiled, optimizer, 5, 10)
        assert once > 0
        assert counter.frame_count == once
        assert_is(net, losses, expected)


def test_recurrent_layers_compute_with_their_version():
    torch.manual_seed(0)
    net = nn.ModuleDict({"rnn": nn.LSTM(3, 4, batch_first=True), "head": nn.Linear(4, 1)}).double()
    net.forward = lambda x: net["head"](net["rnn"](x)[0]).square().mean()
    _, optimizer, _ = start(net, {"rnn": 0, "head": 0}, 2)
    xs = torch.randn(5, 2, 6, 3, dtype=torch.float64)
    versions, losses = [copy.deepcopy(net.state_dict())], []
    for x in xs:
        losses.append(step(net(x), optimizer))
        versions.append(copy.deepcopy(net.state_dict()))
    net.eval()
    for t, x in enumerate(xs):
        net.load_state_dict(versions[max(0, t - 2)])
        assert net(x).item() == pytest.approx(losses[t], rel=1e-12)


def train_under_ddp(rank, folder):
    """Train with every second batch, as one of two processes; leaves the weights in the folder."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    net, optimizer, _ = start()
    ddp = DistributedDataParallel(net)
    for t in range(1, 9):
        step(ddp(data(2 * t - 1 + rank)), optimizer)
    torch.save(net.state_dict(), folder / f"{rank}.pt")
    # A reducer that outlives its group may wait for good (pytorch/pytorch#56297).
    del ddp
    dist.destroy_process_group()


def test_two_ddp_processes_equal_one_with_both_batches(tmp_path):
    ranks = [processes.start(train_under_ddp, rank, tmp_path) for rank in range(2)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    net, optimizer, _ = start()
    for t in range(1, 9):
        step(net(torch.stack([data(2 * t - 1), data(2 * t)])), optimizer)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(found[0], dict(net.state_dict()), rtol=0, atol=1e-12)


BATCHES = [{"x": data(n)} for n in range(1, 17)]  # of 8 updates of two micro-batches each


def accelerated(accelerate, folder, is_early=True):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net, optimizer, pipeline = start(accumulation=2)
    if not is_early:
        pipeline.remove()
    net, optimizer = accelerator.prepare(net, optimizer)
    pipeline = pipeline if is_early else delayed(net, optimizer, 4, accumulation=2)
    for batch in BATCHES:
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(net), pipeline


def hugging_face(transformers, folder):
    net, optimizer, pipeline = start(accumulation=2)
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=8,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=1,
        max_grad_norm=0,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model, inputs, **kwargs):
            return model(**inputs)

    optimizers = (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0))
    InOrder(
        net, arguments, lambda found: found[0], train_dataset=BATCHES, optimizers=optimizers
    ).train()
    return net, pipeline


def under_lightning(lightning, folder):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.own, self.pipeline = start(accumulation=2)

        def training_step(self, batch):
            return self.net(**batch)

        def configure_optimizers(self):
            return self.own

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, torch.utils.data.DataLoader(BATCHES, batch_size=None))
    return module.net, module.pipeline


@pytest.mark.parametrize(
    ("library", "train"),
    [
        ("accelerate", accelerated),
        ("accelerate", partial(accelerated, is_early=False)),
        ("transformers", hugging_face),
        ("lightning", under_lightning),
    ],
)
def test_trainers_of_others_are_the_naive_simulation(library, train, tmp_path):
    net, pipeline = train(pytest.importorskip(library), tmp_path)
    assert pipeline.updates == 8
    for name, expected in naive([3, 2, 1, 0], 8, 2)[1].items():
        torch.testing.assert_close(net.state_dict()[name], expected, rtol=0, atol=1e-12)


def test_whole_numbers_of_numpy():
    pipeline = start(stages=np.int64(4), accumulation=np.int64(2))[2]
    assert pipeline.settings()["accumulation"] == 2
    start(stages=lambda name: np.int64(name.startswith("leave")))


@pytest.mark.parametrize(
    "delay", [np.array([3, 2, 1, 0]), torch.tensor([3, 2, 1, 0]), [3, 2, 1, 0]]
)
def test_delays_in_an_array(delay):
    pipeline = start(delay=delay)[2]
    assert [each.tau for each in pipeline.delays()] == [3, 2, 1, 0]
    assert pipeline.settings()["delay"] == [3, 2, 1, 0]


@pytest.mark.parametrize("delay", [np.int64(2), np.array(2), torch.tensor(2)])
def test_one_delay_in_an_array(delay):
    pipeline = start(delay=delay)[2]
    assert pipeline.settings()["delay"] == 2


def test_print_shows_the_cut():
    assert "enter.weight ... blocks.0.0.bias" in str(start(example=data(1))[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net, optimizer: net.blocks.append(nn.Linear(2, 2)), "parameters has changed"),
        (lambda net, optimizer: net.float(), "went from torch.float64 to torch.float32; convert"),
        (
            lambda net, optimizer: net.blocks[0].float(),
            r"blocks.0.* went from torch.float64 to torch.float32; convert",
        ),
        (
            lambda net, optimizer: setattr(net.enter.weight, "data", torch.zeros(1, 1).double()),
            r"enter.weight went from \(.*\) to \(1, 1\); convert",
        ),
        (lambda net, optimizer: delayed(net, optimizer, 2), "under delay already"),
        (lambda net, optimizer: delayed(make_net(), optimizer, 4), "no parameter of the model"),
        (lambda net, optimizer: delayed(net.enter, optimizer, 1), "not the model's"),
        (
            lambda net, optimizer: optimizer.add_param_group({"params": [torch.zeros(1)]}),
            "given parameters later",
        ),
        (
            lambda net, optimizer: optimizer.param_groups[0]["params"].__setitem__(
                0, nn.Parameter(torch.zeros(1))
            ),
            "given parameters later",
        ),
        (
            lambda net, optimizer: setattr(net, "leave", nn.Linear(6, 5, bias=False)),
            r"parameters has changed \(a module was replaced",
        ),
        (
            lambda net, optimizer: setattr(net.leave, "weight", nn.Parameter(torch.zeros(5, 6))),
            "has been replaced",
        ),
        (lambda net, optimizer: net(data(1)) and optimizer.step(), "without a backward pass"),
        (
            lambda net, optimizer: net.enter(data(1)).sum().backward() or optimizer.step(),
            "by a pass outside",
        ),
        (
            lambda net, sgd: [(x := net(data(1))).backward(None, True), sgd.step(), x.backward()],
            "after the optimizer's step",
        ),
    ],
)
def test_misuse_on_the_way_is_one_clear_error(change, message):
    net, optimizer, _ = start(accumulation=2)
    loop(net, optimizer, 1, 2, accumulation=2)
    with pytest.raises(UserError, match=message):  # noqa: PT012
        change(net, optimizer)
        net(data(1))


@pytest.mark.parametrize(
    ("stages", "settings", "message"),
    [
        (3.5, {}, "stages must be a number, a mapping or a function"),
        ({"": 0, "entre": 0}, {}, "no parameter's name is or begins with .*entre"),
        (7, {}, "stages must be from 1 to 6"),
        ({"blocks": 0}, {}, "enter.weight and 2 more are assigned to no stage"),
        (4, {"delay": "pipelines"}, "delayed: delay must be pipeline, 2bw"),
        (4, {"delay": [3, 2, 1]}, r"a list of 4, .* got \[3, 2, 1\]"),
        (4, {"delay": 1.5}, "got 1.5"),
        (4, {"delay": np.array([[3, 2], [1, 0]])}, r"a list of 4, .* got \[\[3, 2\], \[1, 0\]\]"),
        (4, {"delay": np.array([3.0, 2.0, 1.0, 0.0])}, "a list of 4"),
        (4, {"accumulation": 1.5}, "accumulation must be a whole number from 1, got 1.5"),
        (4, {"stash": "exakt"}, "stash must be one of exact, none, predict"),
        (4, {"stash": "none", "forecast": "last-update"}, "forecast needs stash exact"),
    ],
)
def test_wrong_settings_are_one_clear_error(stages, settings, message):
    with pytest.raises(UserError, match=message) as told:
        start(stages=stages, **settings)
    assert "\n" not in str(told.value)
