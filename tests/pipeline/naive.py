"""An independent, naive simulation of docs/semantics.md: every weight version of every stage is
kept in a list.

It shares no code with the engine: the model is called through torch.func.functional_call, one stage
at a time, and the backward pass is written out with explicit vector-Jacobian products between
stages."""

import math
from itertools import pairwise

import torch
from torch.func import functional_call


class OverwrittenWeights(torch.autograd.graph.saved_tensors_hooks):
    """Hands `newest` to the backward pass wherever the forward pass saved one of `used`, as in a
    pipeline that overwrites its weights in between (`pipeline.stash: none`)."""

    def __init__(self, used, newest):
        by_storage = {weight.untyped_storage().data_ptr(): name for name, weight in used.items()}

        def pack(saved):
            name = by_storage.get(saved.untyped_storage().data_ptr())
            return (
                saved
                if name is None
                else (name, saved.size(), saved.stride(), saved.storage_offset())
            )

        def unpack(packed):
            if isinstance(packed, torch.Tensor):
                return packed
            name, size, stride, offset = packed
            return newest[name].detach().as_strided(size, stride, offset)

        super().__init__(pack, unpack)


class NaivePipeline:
    """P stages; `versions[k][v]` are the weights of stage k after v updates. Stage k runs
    micro-batch n of M per update with version max(0, floor((n - 1 - tau_k) / M))."""

    def __init__(
        self,
        stages,
        stash,
        update,
        clip,
        taus=None,
        accumulation=1,
        forecast=None,
        error_feedback=0.0,
    ):
        self.modules = stages
        self.stash = stash
        # (stage, newest weights, gradients, iteration) -> new weights. Its attribute `rule` is the
        # gradient rule: (newest weights, gradients, weights of the backward pass) -> gradients.
        self.update = update
        self.clip = clip
        self.taus = list(range(len(stages)))[::-1] if taus is None else taus
        self.accumulation = accumulation
        self.forecast = forecast
        self.error_feedback = error_feedback
        self.method_updates = [[] for _ in stages]  # u_k(t), before error feedback
        self.versions = [
            [{name: w.detach().clone() for name, w in stage.named_parameters()}] for stage in stages
        ]
        self.losses = []
        self.norms = []

    def step(self, t, micro_batches):
        """Update t, from its M micro-batches."""
        first = (t - 1) * self.accumulation + 1
        results = [self._gradients(n, *batch) for n, batch in enumerate(micro_batches, start=first)]
        self.losses.append(sum(loss for loss, _ in results) / self.accumulation)
        norms = []
        for k in range(len(self.modules)):
            each = [gradients[k] for _, gradients in results]
            mean = {name: sum(g[name] for g in each) / self.accumulation for name in each[0]}
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in mean.values()))
            norms.append(norm)
            scale = min(1.0, self.clip / (norm + 1e-6))
            clipped = {name: g * scale for name, g in mean.items()}
            newest = self.versions[k][-1]
            updated = self.update(k, newest, clipped, t)
            self.versions[k].append(self._with_error_feedback(k, newest, updated))
        self.norms.append(norms)

    def _with_error_feedback(self, k, newest, updated):
        """w(t) = w(t-1) + u(t) + c (u(t) - u(t-1)), where stage k has a delay."""
        if not self.error_feedback or not self.taus[k]:
            return updated
        updates = self.method_updates[k]
        updates.append({name: updated[name] - newest[name] for name in newest})
        if len(updates) == 1:
            return updated
        now, last = updates[-1], updates[-2]
        return {
            name: newest[name] + now[name] + self.error_feedback * (now[name] - last[name])
            for name in newest
        }

    def _gradients(self, n, inputs, targets):
        """The loss of micro-batch n, and its gradients by stage, after the gradient rule."""
        x, records = inputs, []
        for k, module in enumerate(self.modules):
            history = self.versions[k]
            version = max(0, math.floor((n - 1 - self.taus[k]) / self.accumulation))
            weights = self._forecast(k, history[: version + 1])
            used = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
            seen = used if self.stash == "exact" else self._seen_by_backward(history, self.taus[k])
            entered = x if k == 0 else x.detach().requires_grad_()
            with OverwrittenWeights(used, seen):
                x, loss, auxiliary_loss = functional_call(module, used, (entered, targets))
            output = x if loss is None else loss
            records.append((used, seen, entered, output, auxiliary_loss))
        gradient, by_stage = None, [None] * len(self.modules)
        for k in reversed(range(len(self.modules))):
            used, seen, entered, output, auxiliary_loss = records[k]
            wanted = list(used.values()) + ([entered] if k > 0 else [])
            outputs, upstream = [output], [gradient]
            if auxiliary_loss is not None:
                outputs.append(auxiliary_loss)
                upstream.append(None)
            found = torch.autograd.grad(outputs, wanted, upstream)
            gradients = {name: g.clone() for name, g in zip(used, found, strict=False)}
            gradient = found[-1]
            by_stage[k] = self.update.rule(self.versions[k][-1], gradients, seen)
        return loss.item(), by_stage

    def _forecast(self, k, history):
        """The newest weights of `history`, moved ahead by tau updates like the last one, by tau
        updates like the average one, or by what `forecast(stage, version, tau)` returns."""
        newest, tau = history[-1], self.taus[k] / self.accumulation
        if self.forecast is None or len(history) == 1:
            return newest
        if callable(self.forecast):
            ahead = self.forecast(k, len(history) - 1, tau)
            return {name: weight + ahead[name] for name, weight in newest.items()}
        steps = [
            {name: after[name] - before[name] for name in newest}
            for before, after in pairwise(history)
        ]
        direction = steps[-1]
        if self.forecast == "average-update":
            weights = [0.9**age for age in range(len(steps) - 1, -1, -1)]
            direction = {
                name: sum(w * step[name] for w, step in zip(weights, steps, strict=True))
                / sum(weights)
                for name in newest
            }
        return {name: weight + tau * direction[name] for name, weight in newest.items()}

    def _seen_by_backward(self, history, tau):
        """The weights of the backward pass if they are not stashed: the newest ones, or under
        `predict` w - tau delta, where delta averages the updates (PipeMare's T2)."""
        newest = history[-1]
        if self.stash == "none" or tau == 0:
            return newest
        assert self.stash == "predict"
        tau = tau / self.accumulation  # in updates
        gamma = math.exp(-2.0) ** (1.0 / tau)
        average = {name: torch.zeros_like(weight) for name, weight in newest.items()}
        for before, after in pairwise(history):
            for name in average:
                average[name] = gamma * average[name] + (1 - gamma) * (after[name] - before[name])
        return {name: weight - tau * average[name] for name, weight in newest.items()}
