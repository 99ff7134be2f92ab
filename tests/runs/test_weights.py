"""Weights that leave brx: the same model in plain PyTorch and in Transformers."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from brx.cli.main import main
from brx.model.stage import whole_model
from brx.train.loop import train
from tests.train.helpers import tiny_config

transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file

LLAMA = "model={class: llama, blocks: 4, width: 16, heads: 4, kv_heads: 2, sequence_length: 16}"
SCALED = LLAMA.replace("}", ", rope_scaling: {factor: 8.0, original_sequence_length: 8}}")


def exported(folder, *overrides):
    """A run of a few iterations, and the folder of its weights."""
    config = tiny_config(folder, *overrides, "training.iterations=4")
    train(config, folder / "run")
    target = folder / "exported" / "model.safetensors"
    assert main(["weights", str(folder / "run"), "--to", str(target)]) == 0
    return config, target


def logits_of(config, weights, tokens):
    """What brx's own model makes of tokens (B, S)."""
    model = whole_model(config.model, config.data.vocabulary_size, 0)
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict(dict(zip(names, weights, strict=True)), strict=False)
    x = model.embedding(tokens)
    for block in model.blocks.values():
        x = block(x)
    return model.head(x)


def plain_gpt(weights, tokens, heads, blocks):
    """nanoGPT's shape with the names of the file, and nothing of brx."""

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    positions = tokens.shape[1]
    x = weights["embed.tokens.weight"][tokens] + weights["embed.positions.weight"][:positions]
    for block in (f"blocks.{index}" for index in range(blocks)):
        h = norm(x, f"{block}.attention_norm")
        q, k, v = (
            linear(h, f"{block}.attention.{part}").unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        causal = torch.ones(positions, positions).tril().bool()
        mixed = scores.masked_fill(~causal, -math.inf).softmax(-1) @ v
        x = x + linear(mixed.transpose(1, 2).flatten(2), f"{block}.attention.projection")
        h = norm(x, f"{block}.mlp_norm")
        x = x + linear(F.gelu(linear(h, f"{block}.mlp.up")), f"{block}.mlp.down")
    return linear(norm(x, "head.norm"), "head.linear")


TOKENS = torch.tensor([list(b"the quick brown ")])


def test_weights_load_into_plain_pytorch(tmp_path):
    config, path = exported(tmp_path)
    weights = load_file(path)
    expected = logits_of(config, weights.values(), TOKENS)
    torch.testing.assert_close(plain_gpt(weights, TOKENS, heads=2, blocks=4), expected)


@pytest.mark.parametrize("model", [LLAMA, SCALED], ids=["llama", "scaled"])
def test_llama_loads_into_transformers(model, tmp_path):
    config, path = exported(tmp_path, model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent)
    ours = logits_of(config, load_file(path).values(), TOKENS)
    torch.testing.assert_close(theirs(TOKENS).logits, ours, rtol=1e-4, atol=1e-5)


def test_transformers_generates_text(tmp_path):
    _, path = exported(tmp_path, LLAMA)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent)
    prompt = tokenizer("the é", return_tensors="pt")
    assert prompt["input_ids"].tolist() == [list("the é".encode())]
    written = model.generate(**prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert len(written[0]) == len(prompt["input_ids"][0]) + 5
    assert tokenizer.decode(written[0]).startswith("the é")


def test_mixture_of_llama_keeps_its_own_names(tmp_path):
    config, path = exported(tmp_path, LLAMA.replace("}", ", moe: {experts: 4}}"))
    model = whole_model(config.model, config.data.vocabulary_size, 0)
    expected = {name.replace("embedding.", "embed.") for name, _ in model.named_parameters()}
    assert load_file(path).keys() == expected
    assert not path.with_name("config.json").exists()


def test_settings_are_next_to_the_weights(tmp_path):
    _, path = exported(tmp_path)
    about = json.loads(path.with_name("brx.json").read_text())
    assert (about["iteration"], about["tokenizer"], about["model"]["width"]) == (4, "bytes", 8)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("run", "model.bin", "must end with .safetensors"),
        ("run", "exported/model.safetensors", "is there already; choose another folder"),
        ("exported", "other/model.safetensors", "is neither a run's folder nor a checkpoint"),
        ("run/checkpoints/00000099", "other/model.safetensors", "has no complete checkpoint"),
    ],
)
def test_what_cannot_be_written_is_refused(source, target, expected, refused, exported_once):
    told = refused("weights", exported_once / source, "--to", exported_once / target)
    assert expected in told


@pytest.fixture(scope="module")
def exported_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    exported(folder)
    return folder
