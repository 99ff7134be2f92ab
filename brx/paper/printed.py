"""Numbers that the paper prints about its own experiments, for comparison with ours in tables,
figures and claims."""

from brx.planning.stage_count import ModelShape

# Slowdowns by method. PipeDream's is from the introduction, the others are from the two tables of
# slowdowns. The table of estimation strategies has 4.24 for PipeDream-LR; the other table and the
# text give that number to Nesterov.
SLOWDOWNS = {
    "pipedream": 5.81,
    "pipedream-lr": 5.43,
    "nesterov": 4.24,
    "basis-rotation 1st/unilateral": 2.55,
    "basis-rotation 1st/bilateral": 1.77,
    "basis-rotation 2nd/unilateral": 1.66,
    "basis-rotation": 1.27,
    "muon": 1.53,
    "scion": 2.10,
    "soap": 1.34,
}

# The share of the best baseline's iterations that basis rotation saves, by model.
SAVED = {"main": 0.716, "smaller": 0.624, "larger": 0.768, "mixture of experts": 0.468, "3B": 0.817}
# Number of parameters by preset; the paper says "approximately" about the first two.
PARAMETERS = {"paper-95m": 96e6, "paper-1b": 1.03e9, "paper-3b": 3047e6}
# The matrices (m, n) in the table of memory.
LLAMA_3_8B = {"attention": (4096, 4096), "MLP": (4096, 14336)}
# That table: rows 2nd/bilateral, 2nd/unilateral, 1st/bilateral, 1st/unilateral; columns attention,
# MLP.
MEMORY_GIB = [["0.25", "1.66"], ["0.13", "0.13"], ["0.13", "0.83"], ["0.06", "0.06"]]

LLAMAS = (
    ModelShape("Llama 3.2 1B", 2048, 32, 67e6, 16),
    ModelShape("Llama 3.2 3B", 3072, 24, 113e6, 28),
    ModelShape("LLaMA 1-7B", 4096, 32, 202e6, 32),
    ModelShape("LLaMA 1-13B", 5120, 40, 317e6, 40),
    ModelShape("LLaMA 1-33B", 6656, 52, 535e6, 60),
    ModelShape("LLaMA 1-65B", 8192, 64, 810e6, 80),
    ModelShape("Llama 3.1 405B", 16384, 128, 3.19e9, 126),
)
"""The models in the table of stages, with W as printed there."""

# Memory of the devices in that table: RTX3070, RTX3080, RTX3090, A6000, A100.
DEVICES_GB = (8.0, 16.0, 24.0, 48.0, 80.0)
STAGE_COUNTS = {
    "Llama 3.2 1B": ["16", "6", "4", "2", "1"],
    "Llama 3.2 3B": ["28", "10", "6", "3", "2"],
    "LLaMA 1-7B": ["32", "16", "11", "5", "3"],
    "LLaMA 1-13B": [">= 80", "40", "20", "8", "5"],
    "LLaMA 1-33B": [">= 120", "60", "60", "20", "12"],
    "LLaMA 1-65B": [">= 160", ">= 160", "80", "40", "20"],
    "Llama 3.1 405B": [">= 512", ">= 512", ">= 512", ">= 512", "126"],
}
"""That table: a row per model, a column per device in `DEVICES_GB`."""
