"""The study's arms and delays: their names, and the settings that tell to which of them a run
belongs."""

from __future__ import annotations

from brx.config.loading import Settings
from brx.config.schema import PipelineConfig, RunConfig
from brx.sweep.conditions import first_match

# Delays, as section 12 names them.
NONE = "none"
ONE_UPDATE = "one update"
EIGHT = "8 stages"
DEEPEST = "32 stages"
DELAYED = (ONE_UPDATE, EIGHT, DEEPEST)

THETAS = (0.0, 0.1, 0.3, 1.0, "random")  # angles by which the bases are turned, in radians
MOMENTA = (0.9, 0.95, 0.99)
# For each method: the key of its momentum, and the momentum of its arm in all other comparisons.
MOMENTUM_KEYS = {
    "pipedream": ("optimizer.beta1", 0.9),
    "basis-rotation": ("optimizer.beta1", 0.9),
    "muon": ("optimizer.momentum", 0.95),
}
NAMES = {"pipedream": "AdamW", "basis-rotation": "basis rotation", "muon": "Muon"}


def turned(theta: float | str) -> str:
    """The arm of basis rotation in bases turned by an angle."""
    return f"turned, theta = {theta:g}" if isinstance(theta, float) else "turned, random"


def with_momentum(method: str, value: float) -> str:
    """The arm of a method with a momentum."""
    return f"{NAMES[method]}, momentum {value:g}"


# Arms.
ADAMW = with_momentum("pipedream", MOMENTUM_KEYS["pipedream"][1])
MUON = with_momentum("muon", MOMENTUM_KEYS["muon"][1])
EIGENBASIS = turned(THETAS[0])
RANDOM = turned(THETAS[-1])
LITTLE_MOMENTUM = 0.2  # beta1 in the arms of section 21
EIGENBASIS_LITTLE = with_momentum("basis-rotation", LITTLE_MOMENTUM)
RANDOM_LITTLE = f"{RANDOM}, momentum {LITTLE_MOMENTUM:g}"
ADAMW_LITTLE = with_momentum("pipedream", LITTLE_MOMENTUM)
LION = "Lion"
ROTATED_LION = "Lion in the eigenbasis"
SCION = "Scion"
ADAN = "Adan"
PACI = "PACI"
ACCUMULATED = "AdamW, accumulated"
ADAMW_FEEDBACK = "AdamW, error feedback"
MUON_FEEDBACK = "Muon, error feedback"
WITH_FEEDBACK = {ADAMW_FEEDBACK: ADAMW, MUON_FEEDBACK: MUON}
"""Each arm with error feedback, and the same arm without it."""
EQUAL_WITHOUT_DELAY = {**WITH_FEEDBACK, PACI: ACCUMULATED}
"""Each arm that has no runs of its own without delay, and the arm whose runs serve for it. Without
delay, error feedback has nothing to correct, and a stash has no older weights to give."""
# Shorter names of some arms, for axes and statements.
LABELS = {ADAMW: "AdamW", EIGENBASIS: "Basis rotation", MUON: "Muon"}
BASES = tuple(turned(theta) for theta in THETAS)
SAME = (EIGENBASIS, with_momentum("basis-rotation", MOMENTUM_KEYS["basis-rotation"][1]))
"""Two arms whose runs are equal, bit for bit: bases turned by an angle of 0 are basis rotation's
own. Runs of either arm serve for both."""


def _arms() -> dict[str, Settings]:
    """For each arm, the settings by which `arm_of` recognizes its runs."""
    study = "brx.methods.causes:"
    usual: Settings = {
        "pipeline.accumulation": 1,
        "pipeline.stash": "exact",
        "pipeline.error_feedback": 0.0,
    }
    corrected: Settings = {"pipeline.error_feedback": 1.0}
    accumulated: Settings = {"optimizer.method": "pipedream", "pipeline.accumulation": 4}
    arms: dict[str, Settings] = {}
    bases: dict[str, Settings] = {}
    for theta in THETAS:
        bases[turned(theta)] = {
            "optimizer.method": f"{study}TurnedRotation",
            "optimizer.arguments.theta": theta,
        }
    # `arm_of` takes the first arm that fits, and runs with little momentum fit `RANDOM`, too.
    arms[RANDOM_LITTLE] = {**bases[RANDOM], "optimizer.arguments.beta1": LITTLE_MOMENTUM}
    arms.update(bases)
    for method, (key, _) in MOMENTUM_KEYS.items():
        for value in MOMENTA:
            arms[with_momentum(method, value)] = {"optimizer.method": method, key: value, **usual}
    for method in ("pipedream", "basis-rotation"):
        arm = with_momentum(method, LITTLE_MOMENTUM)
        arms[arm] = {"optimizer.method": method, "optimizer.beta1": LITTLE_MOMENTUM, **usual}
    arms[LION] = {"optimizer.method": "lion"}
    arms[ROTATED_LION] = {"optimizer.method": f"{study}RotatedLion"}
    arms[SCION] = {"optimizer.method": "scion"}
    arms[ADAN] = {"optimizer.method": "adan"}
    arms[PACI] = {**accumulated, "pipeline.stash": "none"}
    arms[ACCUMULATED] = {**accumulated, "pipeline.stash": "exact"}
    for arm, without in WITH_FEEDBACK.items():
        arms[arm] = {**arms[without], **corrected}
    return arms


ARMS = _arms()


def arm_of(config: RunConfig) -> str | None:
    """The arm of a run; None if the run does not belong to the study."""
    return first_match(config, ARMS)


def delay_of(pipeline: PipelineConfig) -> str | None:
    """The study's name for a run's delay; None for a delay that is not in the study."""
    if pipeline.stages == 1:
        return NONE
    if pipeline.delay == "2bw":
        return ONE_UPDATE
    if getattr(pipeline.delay, "like", None) == 32:
        return DEEPEST
    if pipeline.stages == 8 and pipeline.delay == "pipeline":
        return EIGHT
    return None
