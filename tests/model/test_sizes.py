"""What is read off a model without numbers, against closed forms for GPT and against numbers."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from brx.config.schema import GPTConfig, LlamaConfig
from brx.errors import UserError
from brx.model import sizes
from brx.model.sizes import block_activation_bytes, stage_forward_flops, stage_sizes
from brx.model.stage import whole_model

GPT = GPTConfig(blocks=3, width=24, heads=3, sequence_length=10)
LLAMA = LlamaConfig(
    **{"class": "llama"}, blocks=2, width=24, heads=3, kv_heads=1, hidden=40, sequence_length=10
)
BATCH, FP32 = 4, 4


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_gpts_activations_are_the_closed_form(bf16, device_type):
    tokens, width, element = BATCH * 10, 24, 2 if bf16 else FP32
    # In units of tokens x width: the inputs of the two norms, of query, key and value, of attention
    # (three), of the projection, of the MLP, of its GELU (4) and of its second matrix (4).
    per_token = 16 * width * element
    if bf16 and device_type == "cuda":
        # Norms run in fp32, and keep such inputs; query, key and value a bf16 copy each.
        per_token += 2 * width * (FP32 - element) + 2 * width * element
    per_token += 4 * FP32 + 3 * FP32  # mean and deviation of two norms; log-sum-exp per head
    found = block_activation_bytes(GPT, 1, BATCH, bf16=bf16, device_type=device_type)
    assert found == tokens * per_token


def test_gpts_flops_are_the_closed_form():
    per_token = 3 * (2 * (4 * 24**2 + 8 * 24**2) + 4 * 10 * 24) + 2 * 97 * 24
    assert stage_forward_flops(GPT, 97, range(3), BATCH) == BATCH * 10 * per_token


def test_llamas_flops_are_the_closed_form():
    attention = 2 * 24**2 + 2 * 24 * 8  # query and projection, key and value of one head in three
    per_token = 2 * (2 * (attention + 3 * 24 * 40) + 4 * 10 * 24) + 2 * 97 * 24
    assert stage_forward_flops(LLAMA, 97, range(2), BATCH) == BATCH * 10 * per_token


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_activations_are_those_that_a_block_keeps(config):
    stage = whole_model(config, 97, seed=0)
    block = stage.blocks["0"]
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    weights |= {buffer.untyped_storage().data_ptr() for buffer in block.buffers()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    stream = torch.randn(BATCH, 10, 24, requires_grad=True)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = block(stream)
    assert output.shape == stream.shape
    planned = block_activation_bytes(config, 0, BATCH, bf16=False, device_type="cpu")
    assert planned == pytest.approx(sum(kept.values()), rel=0.1)


def test_planning_without_memory_does_not_blame_the_model_alone(monkeypatch):
    """Under a tight `ulimit -v`, even a small parameter gets no memory."""

    def full(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to take 8 bytes")

    monkeypatch.setattr(sizes, "make_model", full)
    model = GPTConfig(blocks=1, width=9, heads=1, sequence_length=2)  # no other test plans it
    expected = r"^model .* too large to plan in the memory that is free, with .* take 8 bytes$"
    with pytest.raises(UserError, match=expected):
        stage_sizes(model, 256, range(1))
