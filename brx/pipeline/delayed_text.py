"""The text of a pipeline that `print` shows: a row per stage, and what is not obvious. Needs torch
alone."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from brx.pipeline.cut import stage_map_in_order, tied_places
from brx.pipeline.delay import StageDelay
from brx.pipeline.history import contents


def overview(
    model: nn.Module,
    trained: Mapping[str, Tensor],
    delays: Sequence[StageDelay],
    by_stage: Sequence[Sequence[str]] | None,
    remarks_on_loop: Sequence[str],
) -> str:
    """The delays of all stages, their parameters and the memory of their rings.

    Args:
        model: the model.
        trained: the parameters that train, by name.
        delays: the delay of each stage.
        by_stage: the names of each stage's parameters; None while they are not known.
        remarks_on_loop: further lines.
    """
    lines = ["stage  tau  updates  parameters  ring"]
    for stage, delay in enumerate(delays):
        row = "         ?  ?"
        if by_stage is not None:
            row = _row({name: trained[name] for name in by_stage[stage]}, delay)
        lines.append(f"{stage:>5}  {delay.tau:>3}  {delay.tau_updates:>7.4g}  {row}")
    if by_stage is None:
        lines.append("(the first forward pass shows which parameters are in which stage)")
    else:
        lines += _unexpected_stages(model, trained, by_stage)
        lines += remarks_on_loop
    return "\n".join(lines)


def _row(parameters: Mapping[str, Tensor], delay: StageDelay) -> str:
    """The parameters of a stage, and its ring's memory."""
    weights = [contents(parameter) for parameter in parameters.values()]
    count = sum(weight.numel() for weight in weights)
    ring = 0
    if delay.tau:
        ring = delay.num_slots * sum(weight.nbytes for weight in weights)
    names = list(parameters)
    shown = f"{names[0]} ... {names[-1]}" if names else "nothing that trains"
    return f"{count:>10,}  {ring / 2**20:.1f} MiB  {shown}"


def _unexpected_stages(
    model: nn.Module, trained: Mapping[str, Tensor], by_stage: Sequence[Sequence[str]]
) -> list[str]:
    """A line for each parameter whose stage is not obvious: the tied ones, and those defined among
    the parameters of another stage."""
    stage_of: dict[str, int] = {}
    for stage, names in enumerate(by_stage):
        stage_of |= dict.fromkeys(names, stage)
    lines = []
    latest = 0
    for name, stage in stage_map_in_order(by_stage, list(trained)):
        if stage < latest:
            lines.append(f"{name} is in stage {stage}, by the order of its use")
        latest = max(latest, stage)
    for name, places in tied_places(model).items():
        if name in stage_of:
            others = ", ".join(place for place in places if place != name)
            lines.append(f"{others} is {name}, of the stage of its first use: {stage_of[name]}")
    return lines
