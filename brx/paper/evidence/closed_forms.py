"""What follows from formulas: memory, numbers of stages and of parameters."""

from __future__ import annotations

from brx.config.loading import preset_with
from brx.model.sizes import num_elements, stage_shapes
from brx.paper.evidence.base import Evidence
from brx.paper.printed import DEVICES_GB, LLAMA_3_8B, LLAMAS, MEMORY_GIB, PARAMETERS, STAGE_COUNTS
from brx.paper.scales import Experiments
from brx.planning.memory_tables import overhead_texts
from brx.planning.optimizer_memory import overhead_elements
from brx.planning.stage_count import stage_count_table

APPROXIMATELY = 0.01


def memory_share(_: Experiments) -> Evidence:
    """1st/unilateral of an MLP matrix of Llama-3-8B, over what the paper counts for Adam, 4 m n.

    Adam's two moments are 2 m n elements, so that the share of what Adam really keeps is twice as large; our table of
    memory has one attention and one MLP matrix together (n^2 + n^2 over 2 (n^2 + m n)): 22.2 %.
    """
    m, n = LLAMA_3_8B["MLP"]
    overhead = overhead_elements((m, n), "1st", "unilateral")
    text = (
        f"of 4mn as the paper counts, {1 / 16:.2%} with its m = 4n; {overhead / (2 * m * n):.1%} of Adam's two moments"
    )
    return Evidence(overhead / (4 * m * n), text=text)


def memory_of_strategies(_: Experiments) -> Evidence:
    names = {shape: name for name, shape in LLAMA_3_8B.items()}
    table = overhead_texts(dict.fromkeys(names, 1), names)[1]
    sizes = table.iloc[:, 4:6].to_numpy().tolist()
    strategies = table["source"] + "/" + table["geometry"]
    text = ", ".join(f"{name} {' and '.join(both)}" for name, both in zip(strategies, sizes, strict=True))
    return Evidence(holds=sizes == MEMORY_GIB, text=f"attention and MLP: {text} GiB")


def parameter_counts(_: Experiments) -> Evidence:
    counts = {}
    for preset in PARAMETERS:
        config = preset_with(preset, {})
        shapes = stage_shapes(config.model, config.data.vocabulary_size, range(config.model.blocks))
        counts[preset] = num_elements(shapes)
    text = ", ".join(f"{preset} {count / 1e6:,.1f} M" for preset, count in counts.items())
    holds = all(abs(count / PARAMETERS[preset] - 1) < APPROXIMATELY for preset, count in counts.items())
    return Evidence(holds=holds, text=text)


def stage_counts(_: Experiments) -> Evidence:
    table = stage_count_table(LLAMAS, DEVICES_GB).set_index("model").filter(like=" GB")
    ours = {model: row.tolist() for model, row in table.iterrows()}
    differing = [model for model, counts in STAGE_COUNTS.items() if ours[model] != counts]
    text = f"{len(ours) - len(differing)} of {len(ours)} models as printed"
    if differing:
        text += f"; not {', '.join(differing)}: the paper's formula, P >= 2 L, gives {ours[differing[0]][0]}"
    return Evidence(holds=not differing, text=text)
