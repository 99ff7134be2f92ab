"""Writes a checkpoint's newest weights as a file for other programs: safetensors, with the settings
and the tokenizer next to it.

The format is https://github.com/huggingface/safetensors#format: the length of a JSON header, the
header, and the numbers one after the other.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from brx.config.schema import LlamaConfig, RunConfig
from brx.errors import UserError
from brx.files import make_folder, replacing, write_json
from brx.runs.checkpoint import check_stage_files, iteration_of, read_manifest, read_stage
from brx.runs.folder import name_of_run

# safetensors' names of number formats
_FORMATS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}

# The parts of a block: the name in brx's `llama`, and in Hugging Face's LlamaForCausalLM.
_LLAMA_PARTS = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.projection": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


def write_weights(run: Path, checkpoint: Path, config: RunConfig, to: Path) -> list[Path]:
    """Write a checkpoint's newest weights to a file, and files that describe them next to it.

    A `llama` without a mixture of experts gets the names and the `config.json` of Hugging Face's
    LlamaForCausalLM. Other models keep their own names.

    Args:
        run: the run's folder; brx.json names it.
        checkpoint: one of the run's checkpoints.
        config: the run's settings.
        to: NAME.safetensors; the other files go into its folder.

    Returns:
        The files.

    Raises:
        UserError: a file is there already, or the checkpoint is damaged.
        RunError: a file cannot be written.
    """
    if to.suffix != ".safetensors":
        raise UserError(f"--to {to}: must end with .safetensors")
    contents = {
        to.with_name(name): content
        for name, content in _descriptions(run, checkpoint, config).items()
    }
    for path in (to, *contents):
        if path.exists():
            raise UserError(f"{path}: is there already; choose another folder")
    weights = _newest_weights(checkpoint)
    if _plain_llama(config) is not None:
        weights = {_llama_name(name): weight for name, weight in weights.items()}
    make_folder(to.parent)
    _write_safetensors(to, weights)
    for path, content in contents.items():
        write_json(path, content)
    return [to, *contents]


def _descriptions(run: Path, checkpoint: Path, config: RunConfig) -> dict[str, Any]:
    """The JSON files next to the weights, by name."""
    about = {
        "run": name_of_run(run),
        "iteration": iteration_of(checkpoint),
        "model": config.model.model_dump(mode="json", by_alias=True),
        "tokenizer": config.data.tokenizer,
        "vocabulary_size": config.data.vocabulary_size,
        "data_fingerprint": read_manifest(checkpoint)["fingerprint"],
    }
    files: dict[str, Any] = {"brx.json": about}
    llama = _plain_llama(config)
    if llama is not None:
        files["config.json"] = _llama_config(llama, config.data.vocabulary_size)
    if config.data.tokenizer == "bytes":
        files["tokenizer.json"] = _byte_tokenizer()
        files["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    return files


def _plain_llama(config: RunConfig) -> LlamaConfig | None:
    """The settings of a model that LlamaForCausalLM can be: one without a mixture of experts."""
    model = config.model
    if isinstance(model, LlamaConfig) and model.moe is None:
        return model
    return None


def _newest_weights(checkpoint: Path) -> dict[str, Tensor]:
    """All stages' newest weights, by their names in the model's class, on the CPU."""
    weights: dict[str, Tensor] = {}
    num_stages = read_manifest(checkpoint)["num_stages"]
    check_stage_files(checkpoint, range(num_stages))
    for stage in range(num_stages):
        state = read_stage(checkpoint, stage, torch.device("cpu"), is_checked=True)
        for name, weight in state["versions"]["weights"].items():
            # `embedding` is a stage's name for its model's `embed`.
            weights[re.sub(r"^embedding\.", "embed.", name)] = weight
    return weights


def _write_safetensors(path: Path, weights: dict[str, Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    start = 0
    for name, weight in weights.items():
        end = start + weight.nbytes
        header[name] = {
            "dtype": _FORMATS[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the numbers
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for weight in weights.values():
            file.write(weight.contiguous().flatten().view(torch.uint8).numpy().data)


def _llama_name(name: str) -> str:
    """The name of a weight in LlamaForCausalLM."""
    whole = {
        "embed.tokens.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
        "head.linear.weight": "lm_head.weight",
    }
    if name in whole:
        return whole[name]
    _, block, part = name.removesuffix(".weight").split(".", 2)
    return f"model.layers.{block}.{_LLAMA_PARTS[part]}.weight"


def _llama_config(model: LlamaConfig, vocabulary_size: int) -> dict[str, Any]:
    """The config.json of LlamaForCausalLM."""
    options = model.options()
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        scaling = model.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency,
            "high_freq_factor": scaling.high_frequency,
            "original_max_position_embeddings": scaling.original_sequence_length,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary_size,
        "hidden_size": model.width,
        "intermediate_size": options["hidden"],
        "num_hidden_layers": model.blocks,
        "num_attention_heads": model.heads,
        "num_key_value_heads": options["kv_heads"],
        "max_position_embeddings": model.sequence_length,
        "rms_norm_eps": model.norm_eps,
        # Both spellings: older versions of transformers read the first two.
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_scaling is None else rope,
        "rope_parameters": rope,
        "tie_word_embeddings": model.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


def _byte_tokenizer() -> dict[str, Any]:
    """A tokenizer.json of Hugging Face's `tokenizers` in which token n is byte n."""
    by_byte = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **by_byte},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **by_byte},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {letter: byte for byte, letter in enumerate(_letters_of_bytes())},
            "merges": [],
        },
    }


def _letters_of_bytes() -> list[str]:
    """The letter that stands for each byte in GPT-2's vocabulary: a byte that can be printed stands
    for itself, and the others get the letters from U+0100 on, in turn."""
    printed = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    letters = []
    num_others = 0
    for byte in range(256):
        if byte in printed:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + num_others))
            num_others += 1
    return letters
