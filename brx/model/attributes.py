"""Finds attributes through which a module carries something from one forward pass to the next, such
as a count of the passes or the memory of a batch."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def plain_attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """The dotted names and the values of what a part's modules have in `__dict__`: not their
    parameters, buffers and submodules, which are in dictionaries of their own there."""
    for path, module in part.named_modules():
        for key, value in vars(module).items():
            yield (f"{path}.{key}" if path else key), value


def carried_attribute(part: nn.Module, run: Callable[[], object]) -> str | None:
    """The dotted name of an attribute that each forward pass changes and the next one reads; None
    if there is none, as far as can be seen.

    A pass may keep what it likes for those who look at it afterwards.

    Args:
        part: a module that has run before: its first pass may fill a cache.
        run: makes a forward pass.
    """
    before = _attributes(part)
    run()
    for name, value in _attributes(part).items():
        was = before.get(name)
        is_changed = was is None or value.differs_from(was)
        if is_changed and _is_read_first(part, run, name):
            return name
    return None


@dataclass(frozen=True)
class _Attribute:
    """What is seen of an attribute of a module."""

    value: Any  # a number, a text, a tensor, or a collection
    size: int  # of a collection

    def differs_from(self, before: "_Attribute") -> bool:
        """Whether a pass has changed the attribute. What it put into a collection that is still the
        same one, of the same size, is not seen."""
        if self.value is before.value:
            return self.size != before.size
        if isinstance(self.value, Tensor) or isinstance(before.value, Tensor):
            return True
        if isinstance(self.value, str) or not isinstance(self.value, Collection):
            return bool(self.value != before.value)
        has_tensors = any(isinstance(one, Tensor) for one in tree_leaves(self.value))
        return has_tensors or self.size != before.size


def _attributes(part: nn.Module) -> dict[str, _Attribute]:
    """What is seen of the attributes of a part's modules, by dotted name."""
    attributes = {}
    for name, value in plain_attributes(part):
        if value is None or isinstance(value, int | float | str | Tensor):
            attributes[name] = _Attribute(value, 0)
        elif isinstance(value, list | tuple | dict | set):
            attributes[name] = _Attribute(value, len(value))
    return attributes


def _is_read_first(part: nn.Module, run: Callable[[], object], name: str) -> bool:
    """Whether another forward pass reads an attribute before it sets it, as far as can be seen."""
    path, _, key = name.rpartition(".")
    module = part.get_submodule(path)
    kind: Any = type(module)
    accesses: list[str] = []

    def read(self: Any, accessed: str) -> Any:
        if accessed == key:
            accesses.append("read")
        return kind.__getattribute__(self, accessed)

    def write(self: Any, accessed: str, value: Any) -> None:
        if accessed == key:
            accesses.append("written")
        kind.__setattr__(self, accessed, value)

    try:
        watched = type(kind.__name__, (kind,), {"__getattribute__": read, "__setattr__": write})
        module.__class__ = watched
    except Exception:  # a class that allows no other in its place (a scripted module's)
        return True
    try:
        run()
    finally:
        module.__class__ = kind
    return accesses[:1] != ["written"]
