"""An independent, naive simulation of docs/semantics.md: every weight version of every stage is kept in a list.

It shares no code with the engine: the model is called through torch.func.functional_call, one stage at a time, and
the backward pass is written out with explicit vector-Jacobian products between stages.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch.func import functional_call


class OverwrittenWeights(torch.autograd.graph.saved_tensors_hooks):
    """Hands the backward pass `newest` wherever the forward pass saved one of `used`."""

    def __init__(self, used, newest):
        by_storage = {weight.untyped_storage().data_ptr(): name for name, weight in used.items()}

        def pack(saved):
            name = by_storage.get(saved.untyped_storage().data_ptr())
            return saved if name is None else (name, saved.size(), saved.stride(), saved.storage_offset())

        def unpack(packed):
            if isinstance(packed, torch.Tensor):
                return packed
            name, size, stride, offset = packed
            return newest[name].detach().as_strided(size, stride, offset)

        super().__init__(pack, unpack)


class NaivePipeline:
    """P stages; `versions[k][v]` are the weights of stage k after v updates."""

    def __init__(self, stages, stash, update, clip):
        self.modules = stages
        self.stash = stash
        self.update = update  # (stage index, newest weights, gradients, iteration) -> new weights; has .rule
        self.clip = clip
        self.versions = [[_clone(dict(stage.named_parameters()))] for stage in stages]
        self.losses = []
        self.norms = []

    def step(self, t, inputs, targets):
        num_stages = len(self.modules)
        x, records = inputs, []
        for k, module in enumerate(self.modules):
            tau = num_stages - 1 - k
            history = self.versions[k]
            used = {name: weight.clone().requires_grad_() for name, weight in history[max(0, t - 1 - tau)].items()}
            seen = used if self.stash == "stash" else self._seen_by_backward(history, tau)
            entered = x if k == 0 else x.detach().requires_grad_()
            with OverwrittenWeights(used, seen):
                x, loss, auxiliary_loss = functional_call(module, used, (entered, targets))
            output = x if loss is None else loss
            records.append((used, seen, entered, output, auxiliary_loss))
        self.losses.append(loss.item())
        gradient, norms, updates = None, [], []
        for k in reversed(range(num_stages)):
            used, seen, entered, output, auxiliary_loss = records[k]
            wanted = list(used.values()) + ([entered] if k > 0 else [])
            outputs, upstream = [output], [gradient]
            if auxiliary_loss is not None:
                outputs.append(auxiliary_loss)
                upstream.append(None)
            found = torch.autograd.grad(outputs, wanted, upstream)
            gradients = {name: g.clone() for name, g in zip(used, found, strict=False)}
            gradient = found[-1]
            updates.append((k, seen, gradients))
        for k, seen, gradients in reversed(updates):
            gradients = self.update.rule(self.versions[k][-1], gradients, seen)
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
            norms.append(norm)
            scale = min(1.0, self.clip / (norm + 1e-6))
            gradients = {name: g * scale for name, g in gradients.items()}
            self.versions[k].append(self.update(k, self.versions[k][-1], gradients, t))
        self.norms.append(norms)

    def _seen_by_backward(self, history, tau):
        newest = history[-1]
        if self.stash == "none" or tau == 0:
            return newest
        gamma = math.exp(-2.0) ** (1.0 / tau)
        average = {name: torch.zeros_like(weight) for name, weight in newest.items()}
        for before, after in pairwise(history):
            for name in average:
                average[name] = gamma * average[name] + (1 - gamma) * (after[name] - before[name])
        return {name: weight - tau * average[name] for name, weight in newest.items()}


def _clone(weights):
    return {name: weight.detach().clone() for name, weight in weights.items()}
