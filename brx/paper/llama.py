"""The models and devices of the paper's two tables of cost: memory of basis rotation, and number of stages."""

from __future__ import annotations

from brx.planning.stage_count import ModelShape

LLAMA_3_8B = {"attention": (4096, 4096), "MLP": (4096, 14336)}
"""Matrices (m, n) of the table of memory."""

LLAMAS = (
    ModelShape("Llama 3.2 1B", 2048, 32, 67e6, 16),
    ModelShape("Llama 3.2 3B", 3072, 24, 113e6, 28),
    ModelShape("LLaMA 1-7B", 4096, 32, 202e6, 32),
    ModelShape("LLaMA 1-13B", 5120, 40, 317e6, 40),
    ModelShape("LLaMA 1-33B", 6656, 52, 535e6, 60),
    ModelShape("LLaMA 1-65B", 8192, 64, 810e6, 80),
    ModelShape("Llama 3.1 405B", 16384, 128, 3.19e9, 126),
)
"""The models of the table of stages, with W as printed there."""

DEVICES_GB = (8.0, 16.0, 24.0, 48.0, 80.0)
"""Memory of its devices as printed there: RTX3070, RTX3080, RTX3090, A6000, A100."""
