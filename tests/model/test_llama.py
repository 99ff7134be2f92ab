"""Llama against Hugging Face's, which shares no code with it: counts, logits, frequencies."""

import math

import pytest
import torch

from brx.config.schema import GPTConfig, LlamaConfig, MoEConfig, RopeScalingConfig
from brx.model.llama import rotary_frequencies
from brx.model.mixture import GatedMixture
from brx.model.sizes import count_parameters
from brx.model.stage import make_stage, partition, whole_model

SMALL = {"blocks": 2, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 48, "sequence_length": 40}
SCALING = RopeScalingConfig(factor=8.0, original_sequence_length=16)
THEIR_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VOCABULARY = 97
THEIR_NAMES = {
    "embedding.tokens": "model.embed_tokens",
    "head.norm": "model.norm",
    "head.linear": "lm_head",
}
THEIR_NAMES_IN_BLOCKS = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.projection": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def llama(**settings):
    return LlamaConfig(**{"class": "llama"}, **settings)


def their_name(name):
    name = name.removesuffix(".weight")
    if name.startswith("blocks."):
        _, block, inside = name.split(".", 2)
        return f"model.layers.{block}.{THEIR_NAMES_IN_BLOCKS[inside]}.weight"
    return f"{THEIR_NAMES[name]}.weight"


def theirs(config, vocabulary_size, rope):
    import transformers  # takes a second, which only these tests need

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary_size,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.blocks,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.sequence_length,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_theta": config.rope_theta, **rope},
            tie_word_embeddings=config.tied,
        )
    )


@pytest.mark.parametrize(
    ("tied", "scaling", "rope"),
    [(False, None, {"rope_type": "default"}), (True, SCALING, THEIR_SCALING)],
)
def test_logits_are_transformers(tied, scaling, rope):
    config = llama(**SMALL, tied=tied, rope_scaling=scaling, rope_theta=500.0)
    ours, other = whole_model(config, VOCABULARY, seed=0), theirs(config, VOCABULARY, rope)
    weights = dict(other.named_parameters())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
            weights[their_name(name)].copy_(weight)
    tokens = torch.randint(VOCABULARY, (2, config.sequence_length), generator=generator)
    stream = ours.embedding(tokens)
    for block in ours.blocks.values():
        stream = block(stream)
    torch.testing.assert_close(ours.head(stream), other(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"blocks": 16, "width": 2048, "hidden": 8192, "tied": True}, 1_235_814_400),
        ({"blocks": 32, "width": 4096, "hidden": 14336}, 8_030_261_248),
    ],
    ids=["1B", "8B"],
)
def test_parameter_counts_are_transformers(settings, expected):
    config = llama(heads=32, kv_heads=8, sequence_length=8192, **settings)
    with torch.device("meta"):
        other = theirs(config, 128_256, {"rope_type": "default"})
    num_parameters, _ = count_parameters(config, 128_256)
    assert num_parameters == expected == other.num_parameters()


def test_frequencies_follow_llama_3s_formula():
    slow = rotary_frequencies(16, 500.0, SCALING).tolist()
    for index, found in enumerate(slow):
        frequency = 500.0 ** (-2 * index / 16)
        wavelength = 2 * math.pi / frequency
        if wavelength < 16 / 4.0:
            expected = frequency
        elif wavelength > 16 / 1.0:
            expected = frequency / 8.0
        else:
            smooth = (16 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * frequency / 8.0 + smooth * frequency
        assert found == pytest.approx(expected, rel=1e-5)


def test_stages_in_a_row_are_the_model():
    config = llama(**SMALL)
    tokens = torch.randint(VOCABULARY, (2, 41), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    stream = inputs
    for blocks in partition(config.blocks, 2):
        stream, loss, _ = make_stage(config, VOCABULARY, blocks, seed=0)(stream, targets)
    assert torch.equal(loss, whole_model(config, VOCABULARY, seed=0)(inputs, targets).loss)


def test_hidden_width_defaults_to_gpts_number_of_weights():
    ours, _ = count_parameters(llama(blocks=1, width=96, heads=2, sequence_length=8), 10)
    gpt, _ = count_parameters(GPTConfig(blocks=1, width=96, heads=2, sequence_length=8), 10)
    vectors = 12 * 96 + 10  # GPT's vectors: three norms, the block's biases, the head's bias
    positions, norms = 8 * 96, 3 * 96  # GPT's and Llama's
    assert ours - norms == gpt - positions - vectors


def test_gated_mixture_equals_dense_computation():
    mixture = GatedMixture(6, 10, MoEConfig(experts=5, top_k=2)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in mixture.parameters():
        parameter.data.normal_(0.0, 0.5, generator=generator)
    x = torch.randn(3, 7, 6, generator=generator, dtype=torch.float64)
    expected = []
    for token in x.flatten(0, 1):
        logits = mixture.router.weight @ token
        chosen = logits.argsort(descending=True)[:2]
        share = torch.exp(logits[chosen]) / torch.exp(logits[chosen]).sum()
        total = torch.zeros(6, dtype=torch.float64)
        for part, expert in zip(share, chosen, strict=True):
            gate = mixture.gate.weight[expert] @ token
            hidden = gate / (1 + torch.exp(-gate)) * (mixture.up.weight[expert] @ token)
            total += part * (mixture.down.weight[expert] @ hidden)
        expected.append(total)
    torch.testing.assert_close(mixture(x)[0], torch.stack(expected).view_as(x))


def test_experts_matrices_are_matrices():
    config = llama(**SMALL, moe=MoEConfig(experts=4))
    stage = whole_model(config, VOCABULARY, seed=0)
    assert {f"blocks.1.mlp.{name}.weight" for name in ("gate", "up", "down")} <= stage.matrices
    assert "blocks.1.mlp.router.weight" not in stage.matrices
