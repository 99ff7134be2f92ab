"""A stand-in for a CUDA graph on the CPU: it holds operations and addresses, but nothing that the
host does in between.

Recording notes every operation with its tensors and numbers, and leaves the contents of all tensors
unchanged. A replay runs the same operations on the same tensors: results go where they went before,
and numbers that the host chose stay what they were. As on CUDA, operations that ask the device for
a number cannot be recorded.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

ASKS_THE_DEVICE = ("aten::_local_scalar_dense", "aten::nonzero", "aten::bincount")


class OperationsGraph(TorchDispatchMode):
    """The operations that are computed inside the mode."""

    def __init__(self):
        super().__init__()
        self._operations = []
        self._overwritten = []  # tensors that an operation changes, with their contents before
        self.num_replays = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name().startswith(ASKS_THE_DEVICE):
            raise RuntimeError("operation not permitted when stream is capturing")
        # Detached: only a tensor's memory counts, whatever happens to the Python object.
        args_now, kwargs_now = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}))
        for tensor in _written(function, args_now, kwargs_now):
            self._overwritten.append((tensor, tensor.clone()))
        result = function(*args, **(kwargs or {}))
        kept = tree_map_only(Tensor, Tensor.detach, result)
        self._operations.append((function, args_now, kwargs_now, kept))
        return result

    def undo(self):
        for tensor, before in reversed(self._overwritten):
            tensor.copy_(before)
        self._overwritten = []

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, result in self._operations:
            found = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(found), strict=True):
                # Views and in-place operations return the same memory as before.
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        self.num_replays += 1

    def __len__(self):
        return len(self._operations)


def _written(function, args, kwargs):
    """The tensors among the arguments that an operation changes."""
    found = []
    for place, argument in enumerate(function._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


class OperationsGraphMaker:
    """Records graphs, in place of brx's `CudaGraphMaker`, and keeps them in `graphs`."""

    def __init__(self):
        self.graphs = []

    def __call__(self, work):
        graph = OperationsGraph()
        with graph:
            work()
        graph.undo()
        self.graphs.append(graph)
        return graph

    @property
    def num_replays(self):
        return sum(graph.num_replays for graph in self.graphs)
