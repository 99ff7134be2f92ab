"""Slots of a stage's weights: which version arrives where, in how many operations, at fixed
addresses."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from brx.pipeline.delay import StageDelay
from brx.pipeline.slots import (
    ALIGNMENT,
    MOST_ROWS,
    FlatLayout,
    FlatTensors,
    Slots,
    copy_tensors,
)


class Copies(TorchDispatchMode):
    """Records each copy with the data types of its targets and sources."""

    def __enter__(self):
        self.single, self.lists = [], []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            self.single.append((args[0].dtype, args[1].dtype))
        if function is torch.ops.aten._foreach_copy_.default:
            self.lists.append([{tensor.dtype for tensor in side} for side in args[:2]])
        return function(*args, **(kwargs or {}))


def weights():
    """Of two data types, and of sizes that need gaps between them."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(shape, generator=generator) for shape in ((3, 5), (7,), (), (2, 2, 2))]
    return [*draw, torch.randn(4, generator=generator).double()]


MIXED = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.float64]


def version(number):
    return [torch.full((3,), float(number)), torch.full((2,), -float(number))]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize(("tau", "ahead"), [(1, 0), (5, 0), (5, 2), (3, 3)])
def test_every_micro_batch_gets_its_version(tau, ahead, is_flat, on_host):
    """`ahead` forward passes run before the first update, as on rank R - 1 - ahead of R."""
    layout = FlatLayout(version(0))
    slots = Slots(layout, StageDelay(tau), version(0), on_host=on_host, num_in_flight=ahead + 1)
    targets = layout.like_slot() if is_flat else version(99)
    views = targets.views if is_flat else targets

    def loaded(micro_batch):
        slots.load(micro_batch, targets)
        slots.prefetch(micro_batch + 1)
        return [view[0].item() for view in views]

    for t in range(1, 20 + ahead):
        expected = max(0, t - 1 - tau)
        assert loaded(t) == [expected, -expected]
        update = t - ahead
        if update >= 1:
            expected = max(0, update - 1 - tau)
            assert loaded(update) == [expected, -expected]  # again, before its backward pass
            slots.store(update, version(update))


@pytest.mark.parametrize(("tau", "ahead"), [(1, 0), (5, 0), (5, 2), (3, 3)])
def test_each_version_is_fetched_once(tau, ahead):
    slots = Slots(
        FlatLayout(version(0)), StageDelay(tau), version(0), on_host=True, num_in_flight=ahead + 1
    )
    fetches, fetch = [], slots._fetch
    slots._fetch = lambda micro_batch: (fetches.append(micro_batch), fetch(micro_batch))
    for t in range(1, 20):
        slots.load(t, version(99))
        slots.prefetch(t + 1)
        if t > ahead:
            if ahead:
                slots.load(t - ahead, version(99))
            slots.store(t - ahead, version(t - ahead))
    assert len(fetches) == len(set(fetches))


def test_next_version_is_fetched_ahead():
    slots = Slots(FlatLayout(version(0)), StageDelay(2), version(0), on_host=True)
    for t in range(1, 10):
        slots.load(t, version(99))
        slots.prefetch(t + 1)
        assert slots._held == [t + 1]
        slots.store(t, version(t))


def test_version_is_loaded_by_its_number():
    slots = Slots(FlatLayout(version(0)), StageDelay(2), version(0))
    for t in range(1, 6):
        slots.store(t, version(t))
    targets = version(99)
    slots.load_version(4, targets)
    assert targets[0][0] == 4


def test_slots_round_to_their_dtype():
    layout = FlatLayout(weights(), MIXED)
    slots = Slots(layout, StageDelay(1), weights())
    targets = [torch.empty_like(weight) for weight in weights()]
    slots.load(1, targets)
    for target, weight, dtype in zip(targets, weights(), MIXED, strict=True):
        assert torch.equal(target, weight.to(dtype).to(weight.dtype))


def test_flat_copy_is_one_operation_per_dtype():
    layout = FlatLayout(weights(), MIXED)
    newest = layout.like_weights()
    copy_tensors(newest, weights())
    slots = Slots(layout, StageDelay(1), newest)
    with Copies() as copies:
        slots.store(1, newest)
    assert len(copies.single) == len(set(zip([w.dtype for w in weights()], MIXED, strict=True)))
    assert not copies.lists


@pytest.mark.parametrize("on_host", [True, False])
def test_no_list_mixes_dtypes(on_host):
    slots = Slots(FlatLayout(weights(), MIXED), StageDelay(1), weights(), on_host=on_host)
    with Copies() as copies:
        slots.store(1, weights())
        slots.load(1, weights())
    assert copies.lists
    assert all(len(dtypes) == 1 for sides in copies.lists for dtypes in sides)


def test_views_begin_where_allocated_tensors_do():
    tensors = FlatLayout(weights(), MIXED).like_slot()
    assert [view.data_ptr() % ALIGNMENT for view in tensors.views] == [0] * len(MIXED)


def test_views_do_not_overlap():
    tensors = FlatLayout(weights()).like_weights()
    copy_tensors(tensors, weights())
    assert all(map(torch.equal, tensors.views, weights()))


def test_loading_keeps_addresses():
    layout = FlatLayout(weights())
    slots, targets = Slots(layout, StageDelay(2), weights()), layout.like_slot()

    def addresses():
        flat = (*slots.slots, targets)
        return [view.data_ptr() for tensors in flat for view in tensors.views]

    before = addresses()
    for t in range(1, 6):
        slots.load(t, targets)
        slots.store(t, weights())
    assert addresses() == before


@pytest.mark.parametrize("is_flat", [True, False])
def test_autograd_does_not_see_a_load(is_flat):
    layout = FlatLayout(weights())
    slots, targets = Slots(layout, StageDelay(1), weights()), layout.like_slot()
    parameters = targets.parameters()
    outputs = [(parameter**2).sum() for parameter in parameters]  # saves the parameters
    slots.load(1, targets if is_flat else parameters)
    for output in outputs:
        output.backward()
    assert all(
        torch.equal(parameter.grad, 2 * weight)
        for parameter, weight in zip(parameters, weights(), strict=True)
    )


def test_parameters_keep_their_strides():
    image = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    weight = image.weight.detach().clone(memory_format=torch.preserve_format)
    slots = Slots(FlatLayout([weight]), StageDelay(1), [weight])
    with torch.no_grad():
        image.weight.zero_()
    slots.load(1, [image.weight])
    assert torch.equal(image.weight, weight)
    assert image.weight.is_contiguous(memory_format=torch.channels_last)


def test_without_delay_there_are_no_slots():
    slots = Slots(FlatLayout(weights()), StageDelay(0), weights(), on_host=True)
    assert slots.nbytes == 0


def test_nbytes_are_those_of_all_buffers():
    layout = FlatLayout([torch.zeros(64, 64)])
    slots = Slots(layout, StageDelay(3), [torch.zeros(64, 64)], on_host=True, num_in_flight=2)
    assert slots.nbytes == (4 + 3) * 64 * 64 * 4


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA: pinned memory and a stream of its own"
)
def test_on_cuda_copies_neither_overtake_nor_are_overtaken():
    weight = torch.zeros(2**22, device="cuda")
    layout = FlatLayout([weight])
    slots = Slots(layout, StageDelay(2), [weight], on_host=True)
    targets: FlatTensors = layout.like_slot()
    assert slots.slots[0].buffers[0].is_pinned()
    for t in range(1, 30):
        slots.load(t, targets)
        assert (targets.views[0] == max(0, t - 3)).all()
        slots.prefetch(t + 1)
        slots.finish_store()
        weight.add_(1)
        slots.store(t, [weight])


def test_slots_make_no_views_unasked():
    layout = FlatLayout(weights())
    slots = Slots(layout, StageDelay(5), layout.like_slot())
    slots.store(1, layout.like_slot())
    slots.load(1, layout.like_slot())
    assert not any("views" in vars(slot) for slot in slots.slots)


def test_slots_of_a_group_lie_in_one_block():
    slots = Slots(FlatLayout(weights()), StageDelay(5), weights())
    assert len({slot.buffers[0].untyped_storage().data_ptr() for slot in slots.slots}) == 1


def test_every_slot_begins_with_version_zero():
    slots = Slots(FlatLayout(weights(), MIXED), StageDelay(3), weights())
    for slot in slots.slots:
        assert all(
            torch.equal(view, w.to(view.dtype))
            for view, w in zip(slot.views, weights(), strict=True)
        )


def test_few_of_many_slots_stay_objects():
    slots = Slots(FlatLayout(weights()), StageDelay(3 * MOST_ROWS), weights())
    assert len(list(slots.slots)) == 3 * MOST_ROWS + 1
    assert len(slots.slots._made) == MOST_ROWS


def test_slot_that_was_just_used_stays():
    slots = Slots(FlatLayout(weights()), StageDelay(3 * MOST_ROWS), weights())
    used = slots.slots[0]
    for index in range(1, MOST_ROWS):
        assert slots.slots[index] is not slots.slots[0]
    assert slots.slots[0] is used


def test_stacked_versions_equal_the_slots():
    slots = Slots(FlatLayout(weights(), MIXED), StageDelay(2), weights())
    for index, slot in enumerate(slots.slots):
        assert all(map(torch.equal, slot.views, [each[index] for each in slots.stacked()]))
