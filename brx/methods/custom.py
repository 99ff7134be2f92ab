"""Methods that are not in the table: a user's own `Method`, or any torch optimizer, by file or
import path."""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from torch.optim import Optimizer

from brx.config.schema import CustomConfig, MethodFacts, RunConfig
from brx.config.user_code import RUN_CODE, check_unchanged, fault, is_allowed, load_attribute
from brx.errors import RunError, UserError
from brx.methods.groups import stage_groups
from brx.methods.method import Method, Stages


class AnyOptimizer(Method):
    summary = "a Method of your own, or any torch.optim.Optimizer, by file or import path"
    source = "the file or package that it is from"
    gets: ClassVar = {"the class": "what a Method says; an optimizer gets all parameters"}
    why = "brx cannot know which parameters an optimizer is meant for"
    update_copies = 2  # as in torch's optimizers over lists of tensors

    def optimizers(self, stages: Stages) -> list[Optimizer]:
        settings = self.config.optimizer
        assert isinstance(settings, CustomConfig)
        chosen = load_method_class(settings.method)
        with _refused_in_one_line(settings, chosen):
            return [chosen(stage_groups(stages), lr=settings.lr, **settings.arguments)]  # type: ignore[call-arg,list-item]


class MethodFromFacts(Method):
    """A user's own method in an analysis, which runs no user's code: what the training run has
    written about it into its config.yaml (`brx.config.schema.MethodFacts`).

    A plan can be made with it, but no optimizer."""

    def __init__(self, name: str, facts: MethodFacts) -> None:
        self.name, self.facts = name, facts
        self.summary = facts.summary

    @property
    def corrects_gradients(self) -> bool:
        return self.facts.corrects_gradients

    @property
    def forecasts(self) -> bool:
        return self.facts.forecasts

    def optimizers(self, stages: Stages) -> list[Optimizer]:
        raise UserError(
            f"optimizer.method {self.name}: to go on from a checkpoint, brx needs the code that "
            f"came with the run, and an analysis executes none; brx {RUN_CODE} COMMAND ... "
            f"executes it"
        )


def load_method(settings: CustomConfig) -> Method:
    """The method that `optimizer.method` names.

    It is imported only where user code may run, as in training. Elsewhere the facts in the run's
    configuration stand for it (`MethodFromFacts`).

    Raises:
        UserError: it cannot be loaded, or its file has changed since. Or it must not be imported
            (`brx.config.user_code`), and the configuration has no facts of it.
    """
    if settings.facts is not None and not is_allowed():
        return MethodFromFacts(settings.method, settings.facts)
    check_unchanged(settings.method, settings.code_sha256, f"optimizer.method {settings.method}")
    chosen = load_method_class(settings.method)
    if issubclass(chosen, Optimizer):
        return AnyOptimizer()
    with _refused_in_one_line(settings, chosen):
        return chosen(**settings.arguments)


def load_method_class(name: str) -> type[Method] | type[Optimizer]:
    """The class that FILE.py:NAME or package.module:NAME names.

    Raises:
        UserError: it cannot be loaded, is neither a `Method` nor an optimizer, or its step needs a
            closure.
    """

    def fits(value: Any) -> bool:
        return (
            isinstance(value, type)
            and issubclass(value, Method | Optimizer)
            and value is not Method
        )

    where = f"optimizer.method {name}"
    chosen: type[Method] | type[Optimizer] = load_attribute(
        name, where, "Method and no torch.optim.Optimizer", fits
    )
    if issubclass(chosen, Optimizer):
        closure = inspect.signature(chosen.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UserError(
                f"{where}: its step needs a closure that computes the loss again, which a pipeline "
                f"cannot do"
            )
    return chosen


# The members of a user's method or optimizer that brx calls. Messages name them.
CalledMember = Literal[
    "optimizers",
    "lr_divisor",
    "correct_gradients",
    "forecast",
    "step",
    "eval",
    "train",
    "load_state_dict",
]


@contextlib.contextmanager
def user_code(
    config: RunConfig,
    member: CalledMember,
    kind: type[UserError | RunError],
    iteration: int | None = None,
) -> Iterator[None]:
    """A context in which a member of the configured method runs: an exception of a user's own
    method becomes an error of this kind, one line with file and line number. Exceptions of built-in
    methods pass unchanged."""
    try:
        yield
    except (UserError, RunError):
        raise
    except (Exception, SystemExit) as error:  # sys.exit() would end the run as if it were done
        if not isinstance(config.optimizer, CustomConfig):
            raise
        name = config.optimizer.method
        when = "" if iteration is None else f"iteration {iteration}: "
        raise kind(f"optimizer.method {name}: {when}its {member}: {fault(error, name)}") from error


def moves_weights(optimizer: Optimizer) -> bool:
    """Whether an optimizer has weights of its own for evaluation (schedule-free ones). It moves
    between them and those that train by `eval` and `train`."""
    return all(callable(getattr(optimizer, name, None)) for name in ("eval", "train"))


def begin_training(optimizers: Sequence[Optimizer], config: RunConfig) -> None:
    """Do what a loop does before its first step: some optimizers refuse a step before `train`."""
    with user_code(config, "train", UserError):
        for optimizer in optimizers:
            if moves_weights(optimizer):
                optimizer.train()  # type: ignore[attr-defined]


@contextlib.contextmanager
def _refused_in_one_line(settings: CustomConfig, chosen: type[Any]) -> Iterator[None]:
    """Check the arguments of a constructor, which runs in this context, and turn its exceptions
    into a UserError of one line."""
    _check_arguments(settings, chosen)
    name = settings.method
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # libraries raise what they like
        if settings.arguments:
            where = f"optimizer.arguments: {name} refuses them"
        else:
            where = f"optimizer.method {name}: its constructor"
        raise UserError(f"{where}: {fault(error, name)}") from None


def _check_arguments(settings: CustomConfig, chosen: type[Any]) -> None:
    """UserError for an argument that the constructor does not take."""
    accepted = inspect.signature(chosen).parameters
    kinds = {parameter.kind for parameter in accepted.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    given = list(settings.arguments)
    if issubclass(chosen, Optimizer):
        given.insert(0, "lr")
    for key in given:
        if key not in accepted:
            known = [other for other in accepted if other not in ("params", "lr")]
            raise UserError(
                f"optimizer.method {settings.method}: takes no argument '{key}' (known:"
                f" {', '.join(known) or 'none'})"
            )
