"""Numbers that the paper prints about its own experiments: ours stand beside them in tables, figures and claims."""

from __future__ import annotations

# By method, as printed in the tables of slowdown; PipeDream's from the introduction. The table of the estimation
# strategies has 4.24 for PipeDream-LR; the other table and the text give that number to Nesterov.
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

SAVED = {"main": 0.716, "smaller": 0.624, "larger": 0.768, "mixture of experts": 0.468}
"""The share of the best baseline's iterations that basis rotation saves, by model."""
