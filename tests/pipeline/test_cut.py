"""A number of stages cuts a model in the order in which its forward pass uses the parameters."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from brx import delayed
from brx.errors import UserError
from brx.pipeline.cut import parts_for, stage_map
from tests.pipeline.loops import sgd


def stages_of(model, num_stages, x, *, use=None, example=None):
    """The stage of each parameter by name, after one update."""
    optimizer = sgd(model.parameters(), 0.01)
    pipeline = delayed(model, optimizer, num_stages, example=example)
    if example is None:
        if use is None:
            model(x).square().mean().backward()
        else:
            use(model, pipeline)
        optimizer.step()
        optimizer.zero_grad()
        with torch.enable_grad():
            model(x)  # the first pass of the second update needs the stages
    return {name: k for k, names in enumerate(pipeline.by_stage) for name in names}


class OutOfOrder(nn.Module):
    """Defined in another order than used: head, a last scale, embedding; blocks last to first."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.gate = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.enter = nn.Linear(2, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.enter(x)
        for block in reversed(self.blocks):
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            if block is self.blocks[2]:
                x = x * self.gate
        return self.head(x) * self.scale


EXPECTED = {
    "enter": 0,
    "blocks.3": 0,
    "blocks.2": 1,
    "gate": 1,
    "blocks.1": 2,
    "blocks.0": 3,
    "head": 3,
    "scale": 3,
}


def check_out_of_order(found):
    for beginning, stage in EXPECTED.items():
        of_these = [found[name] for name in found if name.startswith(beginning)]
        assert of_these, beginning
        assert set(of_these) == {stage}, beginning


@pytest.mark.parametrize("use_reentrant", [None, True, False])
def test_order_is_of_execution(use_reentrant):
    x = torch.ones(2, 2, requires_grad=True)
    check_out_of_order(stages_of(OutOfOrder(use_reentrant), 4, x))


def test_order_on_the_meta_device():
    found = stages_of(OutOfOrder(), 4, None, example=torch.ones(2, 2))
    check_out_of_order(found)


def test_order_of_a_compiled_model():
    torch._dynamo.reset()
    compiled = torch.compile(OutOfOrder(), backend="eager")
    found = stages_of(compiled, 4, torch.ones(2, 2))
    check_out_of_order({name.removeprefix("_orig_mod."): k for name, k in found.items()})


def test_order_of_parts_in_the_explicit_form():
    def use(model, pipeline):
        with pipeline.micro_batch():
            model.forward(torch.ones(2, 2)).square().mean().backward()

    check_out_of_order(stages_of(OutOfOrder(), 4, torch.ones(2, 2), use=use))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 9, bias=False)  # defined first, used first as the embedding
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))
        self.embed = nn.Embedding(9, 4)
        self.embed.weight = self.head.weight

    def forward(self, i):
        x = self.embed(i)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_tied_weight_is_of_its_first_use():
    found = stages_of(Tied(), 3, torch.zeros(2, dtype=torch.long))
    assert found["head.weight"] == 0


class HeadLast(Tied):
    """The same model, with the embedding defined first."""

    def __init__(self):
        super().__init__()
        modules = self._modules
        modules["head"] = modules.pop("head")
        modules["blocks"] = modules.pop("blocks")


TIED_STAGES = {"head": 3, "embed": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 2}


@pytest.mark.parametrize("model_of", [Tied, HeadLast])
@pytest.mark.parametrize(
    "stages",
    [
        TIED_STAGES,
        lambda name: next(k for prefix, k in TIED_STAGES.items() if name.startswith(prefix)),
    ],
    ids=["mapping", "function"],
)
def test_stages_of_tied_weights_alone_count(model_of, stages):
    model, again = model_of(), model_of()
    pipeline = delayed(model, sgd(model.parameters()), stages)
    assert len(pipeline.delays()) == 4
    assert pipeline.delay_of(model.head.weight) == 3
    same = delayed(again, sgd(again.parameters()), pipeline.stage_map())
    assert same.by_stage == pipeline.by_stage


def test_tied_weight_without_a_stage_is_refused():
    model = Tied()
    stages = {name: TIED_STAGES[name] for name in TIED_STAGES if name != "head"}
    with pytest.raises(UserError, match=r"head.weight is assigned to no stage"):
        delayed(model, sgd(model.parameters()), stages)


class TiedBlocks(nn.Module):
    """Four blocks, two of which share parameters; they are used in the given order."""

    def __init__(self, first, second, shared, order):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(4))
        for name in shared:
            setattr(self.blocks[second][0], name, getattr(self.blocks[first][0], name))
        self.order = order

    def forward(self, x):
        for index in self.order:
            x = self.blocks[index](x).tanh()
        return x


@pytest.mark.parametrize("shared", [["weight"], ["bias"], ["weight", "bias"]])
@pytest.mark.parametrize(("first", "second"), [(0, 2), (1, 3), (1, 2), (2, 3)])
def test_tied_blocks_are_of_their_first_use(first, second, shared):
    model = TiedBlocks(first, second, shared, order=range(4))
    found = stages_of(model, 4, torch.ones(2, 4))
    for index in range(4):
        for name in ("weight", "bias"):
            if f"blocks.{index}.0.{name}" in found:
                assert found[f"blocks.{index}.0.{name}"] == index


@pytest.mark.parametrize("shared", ["weight", "bias"])
def test_tied_block_that_is_used_before_the_one_that_is_defined_first(shared):
    model = TiedBlocks(1, 3, [shared], order=[0, 3, 2, 1])
    found = stages_of(model, 4, torch.ones(2, 4))
    assert found.pop(f"blocks.1.0.{shared}") == 1  # of blocks.3
    stages = {0: 0, 3: 1, 2: 2, 1: 3}
    assert {name: stages[int(name.split(".")[1])] for name in found} == found


def test_tied_layers_out_of_order_are_of_their_first_use():
    model = nn.Sequential()
    model.late, model.early, model.between = (nn.Linear(4, 4) for _ in range(3))
    model.early.weight = model.late.weight
    model.forward = lambda x: model.late(model.between(model.early(x)))
    found = stages_of(model, 3, torch.ones(2, 4))
    assert found["late.weight"] == found["early.bias"] == 0
    assert found["late.bias"] == 2


class UNet(nn.Module):
    """Three levels down and up, with skip connections; no list of blocks."""

    def __init__(self):
        super().__init__()
        self.up = nn.ModuleDict({str(k): nn.Conv2d(8, 4, 3, padding=1) for k in range(2)})
        self.out = nn.Conv2d(4, 1, 1)
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        a = self.down1(x).relu()
        b = self.down2(a).relu()
        x = self.up["1"](torch.cat([b, b], 1)).relu()
        x = self.up["0"](torch.cat([x, a], 1)).relu()
        return self.out(x)


def test_unet_is_cut_by_layers():
    found = stages_of(UNet(), 5, torch.ones(1, 1, 4, 4))
    order = ["down1", "down2", "up.1", "up.0", "out"]
    assert [found[f"{name}.weight"] for name in order] == [0, 1, 2, 3, 4]


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic, self.actor = nn.Linear(4, 1), nn.Linear(4, 2)
        self.memory = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x):
        x, _ = self.memory(x)
        return torch.cat([self.actor(x), self.critic(x)], -1)


def test_actor_critic_with_a_memory():
    found = stages_of(ActorCritic(), 3, torch.ones(2, 5, 3))
    assert {found[name] for name in found if name.startswith("memory")} == {0}
    assert (found["actor.weight"], found["critic.weight"]) == (1, 2)


def test_encoder_then_decoder():
    def blocks():
        return nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder, self.encoder = blocks(), blocks()

        def forward(self, x):
            for block in (*self.encoder, *self.decoder):
                x = block(x)
            return x

    found = stages_of(Both(), 3, torch.ones(2, 3))
    assert [found[f"encoder.{k}.0.bias"] for k in range(3)] == [0, 0, 1]
    assert [found[f"decoder.{k}.0.bias"] for k in range(3)] == [1, 2, 2]


def test_frozen_blocks_keep_their_places():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3)) for _ in range(4)])
    model[:2].requires_grad_(False)
    optimizer = sgd(model[2:].parameters())
    pipeline = delayed(model, optimizer, 4, example=torch.ones(1, 3))
    assert [len(names) for names in pipeline.by_stage] == [0, 0, 2, 2]


def by_mapping(names):
    return {str(k): k for k in range(4)}


def by_function(names):
    return {name: int(name[0]) for name in names}.get


def by_function_of_what_trains(names):
    return {name: int(name[0]) for name in names if name[0] != "0"}.__getitem__


@pytest.mark.parametrize("form", [by_mapping, by_function, by_function_of_what_trains])
def test_frozen_stages_count(form):
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    names = [name for name, _ in model.named_parameters()]
    pipeline = delayed(model, sgd(model[1:3].parameters()), form(names))
    assert [delay.tau for delay in pipeline.delays()] == [3, 2, 1, 0]
    assert pipeline.delay_of(model[2].weight) == 1


@pytest.mark.parametrize("stages", [4, {str(k): k for k in range(4)}])
def test_stage_map_has_frozen_stages(stages):
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    model[3].requires_grad_(False)
    optimizer = sgd(model[:3].parameters())
    pipeline = delayed(model, optimizer, stages, example=torch.ones(1, 3))
    assert pipeline.stage_map() == {"0": 0, "1": 1, "2": 2, "3": 3}


def test_heads_within_a_block_are_not_divided():
    blocks = [
        nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])})
        for _ in range(3)
    ]

    class Net(nn.Sequential):
        def forward(self, x):
            for block in self:
                for head in block["heads"]:
                    x = head(x)
            return x

    found = stages_of(Net(*blocks), 3, torch.ones(1, 3))
    assert [found[f"{k}.heads.3.bias"] for k in range(3)] == [0, 1, 2]


def test_stage_map_is_as_short_as_can_be():
    by_stage = [["enter.w", "blocks.0.a.w", "blocks.0.b.w"], ["blocks.1.a.w"], [], ["leave.w"]]
    found = stage_map(by_stage)
    assert found == {"enter": 0, "blocks.0": 0, "blocks.1": 1, "leave": 3}


def test_stage_map_makes_the_same_stages():
    model = OutOfOrder()
    first = delayed(model, sgd(model.parameters()), 4, example=torch.ones(2, 2))
    first.remove()
    second = delayed(model, sgd(model.parameters()), first.stage_map())
    assert second.by_stage == first.by_stage


def test_stages_are_asked_for_too_early():
    model = OutOfOrder()
    pipeline = delayed(model, sgd(model.parameters()), 4)
    with pytest.raises(UserError, match="example="):
        pipeline.delay_of(model.scale)
    assert "the first forward pass shows" in str(pipeline)


def test_print_shows_places_that_are_not_obvious():
    model = OutOfOrder()
    shown = str(delayed(model, sgd(model.parameters()), 4, example=torch.ones(2, 2)))
    assert "enter is in stage 0, by the order of its use" in shown


def test_print_shows_tied_weights_once():
    tied = Tied()
    wrapper = nn.ModuleDict(
        {"inner": tied, "again": tied}
    )  # two names for one module, as in Fabric
    wrapper.forward = tied.forward
    example = torch.zeros(2, dtype=torch.long)
    shown = str(delayed(wrapper, sgd(wrapper.parameters()), 3, example=(example,)))
    assert shown.count(" is inner.head.weight, of the stage of its first use: 0") == 1
    assert "again" not in shown


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (40, "from 1 to 6, the model's layers, got 40; .* stages={'head': 0, 'blocks.2.0': 1"),
        ({"blocks": 0}, "scale and 5 more are assigned to no stage; .*stages={'head': 0"),
        ({"entre": 0}, "no parameter's name is or begins with entre; .*stages={'head': 0"),
    ],
)
def test_errors_offer_names(stages, message):
    model = OutOfOrder()
    with pytest.raises(UserError, match=message):
        delayed(model, sgd(model.parameters()), stages)


def test_list_of_one_module_is_no_run_of_blocks():
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))
    heads = nn.ModuleList([nn.Sequential(nn.Linear(3, 1), nn.Tanh())])
    model = nn.ModuleDict({"blocks": blocks, "heads": heads, "end": nn.Sequential(nn.Tanh())})
    assert [part.path for part in parts_for(model, 2)] == ["blocks.0", "blocks.1", "blocks.2"]


def test_error_offers_the_names_of_a_single_layer():
    layer = nn.Linear(3, 1)
    with pytest.raises(UserError, match=r"stages must be from 1 to 1, .*, as stages={'weight': 0"):
        delayed(layer, sgd(layer.parameters()), 2)


def test_example_that_fails_is_one_clear_error():
    model = OutOfOrder()
    with pytest.raises(UserError, match="does not run on the meta device"):
        delayed(model, sgd(model.parameters()), 4, example=torch.ones(2, 7))
