"""Writes into config.yaml, when a run trains, what later readers need to know of the user's code.

Reading a run runs nothing (`brx.config.user_code`), so whatever an analysis, a plan or a figure
asks of user code has to be known before. `with_facts` is called once, after the code is loaded and
before the first iteration. To add another kind of code:

1. In `brx/config/schema.py`, give the section that names the code a field `code_sha256` and a field
   `facts: MyFacts | None = None`, where `MyFacts` is a section of plain numbers and texts. List the
   section in `CODE_SECTIONS`: then `facts` is not a setting (it does not tell runs apart), and a
   new run of an old configuration drops it.
2. Here, compute the facts and add them to what `with_facts` returns.
3. Where the code is loaded (with `brx.config.user_code.load_attribute`, which names it on stderr
   and refuses to run it for a reader), answer from `facts` if `user_code.is_allowed()` is false:
   `brx.pipeline.delay.DelayFromFacts` and `brx.methods.custom.MethodFromFacts` are examples.
"""

from brx.config.schema import (
    CustomConfig,
    DelayCode,
    DelayFacts,
    MethodFacts,
    ModelFacts,
    OwnModelConfig,
    RunConfig,
    Section,
)
from brx.errors import counted
from brx.methods.custom import AnyOptimizer
from brx.methods.table import find_method
from brx.model.sizes import count_parameters
from brx.pipeline.delay import stage_delays
from brx.train.build import Assembly


def with_facts(config: RunConfig, assembly: Assembly) -> RunConfig:
    """The configuration, with what readers need to know of the user's own code.

    Args:
        config: the configuration of the run that is about to train.
        assembly: what this device trains with.

    Raises:
        UserError: the code fails when it is asked.
    """
    changed: dict[str, Section] = {}
    if isinstance(config.pipeline.delay, DelayCode):
        delay = config.pipeline.delay.model_copy(update={"facts": delay_facts(config)})
        changed["pipeline"] = config.pipeline.model_copy(update={"delay": delay})
    if isinstance(config.optimizer, CustomConfig):
        facts = method_facts(config, assembly)
        changed["optimizer"] = config.optimizer.model_copy(update={"facts": facts})
    if isinstance(config.model, OwnModelConfig):
        counts = model_facts(config.model, config.data.vocabulary_size)
        changed["model"] = config.model.model_copy(update={"facts": counts})
    return config.model_copy(update=changed)


def model_facts(model: OwnModelConfig, vocabulary_size: int) -> ModelFacts:
    """The number of the model's parameters."""
    num_parameters, num_in_blocks = count_parameters(model, vocabulary_size)
    return ModelFacts(num_parameters=num_parameters, num_in_blocks=num_in_blocks)


def delay_facts(config: RunConfig) -> DelayFacts:
    """The largest and mean delays of the run's delay function, by stage, in micro-batches."""
    delays = stage_delays(config.pipeline, config.training.seed)
    accumulation = config.pipeline.accumulation
    return DelayFacts(
        largest=[delay.tau for delay in delays],
        mean=[delay.tau_updates * accumulation for delay in delays],
    )


def method_facts(config: RunConfig, assembly: Assembly) -> MethodFacts:
    """What a user's own method is, and which optimizers it has made."""
    method = find_method(config)
    optimizers = [
        f"{type(optimizer).__name__} ({counted(len(optimizer.param_groups), 'group')})"
        for optimizer in assembly.updater.optimizers
    ]
    return MethodFacts(
        kind="optimizer" if isinstance(method, AnyOptimizer) else "method",
        summary=" ".join(str(method.summary).split()),
        corrects_gradients=method.corrects_gradients,
        forecasts=method.forecasts,
        optimizers=optimizers,
    )
