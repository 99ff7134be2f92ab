"""Adam in the Hessian's Kronecker eigenbasis (the paper's algorithms 1 and 2)."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import groupby, repeat
from typing import Any, Literal

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from brx.optim import sharded
from brx.optim.eigenbasis import (
    covariance_product,
    exact_eigenbasis,
    exact_factor_eigenbasis,
    factor_product,
    power_iteration,
    resolution,
)
from brx.optim.matrix_batch import (
    Layout,
    MatrixBatch,
    Member,
    State,
    for_each,
    rotate,
    seen_from,
    unless_bad,
)
from brx.optim.parameter_state import (
    Group,
    Summary,
    arithmetic,
    check_options,
    check_state,
    is_rotated,
    shared_options,
    state_dtype,
    state_from,
    state_shapes,
    step_options,
)
from brx.optim.products import Precision, fp32_products
from brx.optim.published import published_update
from brx.optim.sharded import Sharding, is_sharded, local

ASYNCHRONOUS = (
    "cuda",
)  # devices on which a step waits for nothing: a flag there tells it to change nothing
LONGEST_WAIT = (
    100  # steps after which the host looks at these flags, if no refresh has made it wait before
)

LARGEST_STEP = 1.8
"""How far an update moves an entry at most, in steps of the largest size that AdamW could take
then.

Rotated entries of which nothing has been seen take full steps together, which in one entry of the
original space add up to many. With the usual betas the limit is 1.8 learning rates at update 2, 2.9
at 50, 13 in the end. """

NO_OPTIONS = (
    "self",
    "__class__",
    "params",
    "rest_lr",
)  # names in the constructor that are no options of a group
NO_MATRIX = "no matrix to rotate"  # why a parameter of a group to be rotated is not
BAD = "NaN, infinity, or entries too large to be squared"


class BadGradientError(ValueError):
    """A gradient cannot be used; no parameter was updated by it."""


class BasisRotation(Optimizer):
    """Adam that takes its steps in an estimate of the Hessian's eigenbasis (algorithm 1).

    For a weight matrix W (m, n) with gradient G, and orthogonal bases U (m, m) and V (n, n)::

        M <- beta1 M + (1 - beta1) G
        if due: U, V <- eigenbasis estimation (algorithm 2)
        v <- beta2 v + (1 - beta2) (U^T G V)^2
        W <- (1 - lr weight_decay) W - lr U [ m^ / (sqrt(v^) + eps) ] V^T

    with m^ = U^T M V / (1 - beta1^t) and v^ = v / (1 - beta2^t). A parameter of more than two
    dimensions is a batch of matrices in its last two, each with its own bases (the experts of a
    mixture). The arithmetic is float64 for float64 parameters, else float32. docs/methods.md: how
    it starts, what noise may decide; docs/optimizer.md: all options.

    Args: params: tensors, named tensors or groups; of a whole model best
        `brx.optim.param_groups(model)`. What is no
            matrix in a group to be rotated goes into one of its own that is not, with one warning.
        lr, weight_decay, maximize: as AdamW's; the decay is decoupled. betas: decay of the
        momentum; decay of the second moment and the covariances. eps: added to the root of the
        second moment; at least 1e-19 (float64: 1e-154), where squares become zero. source: "2nd":
        eigenvectors of the averages of G G^T and G^T G; "1st": of M M^T and M^T M (no extra
        moments). geometry: "bilateral" rotates both sides, "unilateral" only the smaller one (m <
        n: U, else V). frequency: refreshes fall on its multiples; 9.5 for 9 and 10 updates in turn;
        None for never after the first. first_refresh: the update at which a matrix gets its first
        basis, exactly; until then AdamW's steps, but for
            entries below the noise floor. At least 2: off the diagonal of a single gradient in its
            own eigenbasis there is only rounding.
        covariance: whether G G^T enters its average at every "step"; at every "refresh" (algorithm
            2 as printed); or there for the whole "interval", as beta2^n L + (1 - beta2^n) G G^T
            after n updates.
        staggered: spreads the refreshes of a group's parameters over the interval.
        rotation_precision: of the two rotations of a step (`brx.optim.products`); refreshes and
            states keep theirs.
        rotate: False for AdamW. max_dim, max_aspect: a side longer than this, or than this times
        the other side, is not rotated; None: no limit. flatten: take a convolution kernel (out, in,
        h, w) as one matrix (out, in h w), not as a stack of (h, w). split: (parts, dim): take a
        fused projection as so many matrices along its rows (-2) or columns (-1). rest_lr: learning
        rate of groups that are not rotated and have none of their own; None: `lr`. as_published:
        compute what the authors' implementation computes, where it is not this (docs/methods.md).

    Options may differ by group. `state` and `param_groups` are the truth: what is replaced, cleared
    or written there (but for `parameter_state.FORM` once there is state) counts from the next step
    on. A state has `step`, `exp_avg` and `exp_avg_sq` (both in the rotated space), and what
    `parameter_state.state_shapes` adds for its options."""

    _rest_lr: float | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        source: Literal["2nd", "1st"] = "2nd",
        geometry: Literal["bilateral", "unilateral"] = "bilateral",
        frequency: float | None = 10,
        first_refresh: int = 2,
        covariance: Literal["step", "refresh", "interval"] = "step",
        staggered: bool = False,
        rotation_precision: Precision = "highest",
        maximize: bool = False,
        rotate: bool = True,
        max_dim: int | None = 16_384,
        max_aspect: float | None = 10,
        flatten: bool = False,
        split: tuple[int, int] | None = None,
        rest_lr: float | None = None,
        as_published: bool = False,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in NO_OPTIONS}
        self._rest_lr = rest_lr
        super().__init__(params, defaults)
        self._forget()
        self._warn_of_rest(0)

    def _forget(self) -> None:
        self._layout = Layout([], {})
        self._sharding = (
            self.__dict__.get("_sharding") or Sharding()
        )  # who updates which matrix stays
        self._unseen: list[
            Tensor
        ] = []  # flags of steps since the host has last looked at the device's findings

    @property
    def num_failed_refreshes(self) -> int:
        """How often a matrix kept its old basis because its decomposition failed."""
        name = "num_failed_refreshes"
        return int(sum(state[name].sum() for state in self.state.values() if name in state))

    # torch.compiler.disable without its import: a compiled train step leaves this one out
    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure`, if given, computes the loss and
        the gradients anew.

        BadGradientError for a gradient that is not finite or too large to be squared, ValueError
        for a sparse one, with nothing changed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = self._members_with_gradients()
        try:
            with (
                ExitStack() as stack
            ):  # our own arithmetic, whatever autocast and TF32 the program uses for its model
                for device_type in {member.parameter.device.type for member in members}:
                    stack.enter_context(torch.autocast(device_type, enabled=False))
                stack.enter_context(fp32_products("ieee"))
                self._update_all(members, self._check_gradients(members))
        finally:
            for member in members:
                member.gradient = member.update = None
        return loss

    def _members_with_gradients(self) -> list[Member]:
        """The parameters with a gradient, which each gets; in a new layout if the present one does
        not fit."""
        options = [step_options(group) for group in self.param_groups]
        with_gradient = [
            (parameter, group, of_group)
            for group, of_group in zip(self.param_groups, options, strict=True)
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not all(self._layout.fits(p, group, self.state.get(p)) for p, group, _ in with_gradient):
            self._make_layout()
        for batch in self._layout.batches:
            batch.take_counts()
        members = [self._layout.members[parameter] for parameter, _, _ in with_gradient]
        for member, (parameter, _, of_group) in zip(members, with_gradient, strict=True):
            member.options, member.gradient = (
                of_group,
                sharded.like_parameter(parameter.grad, parameter),
            )
        return members

    def _make_layout(self) -> None:
        """A new layout of all parameters with a state or a gradient; ValueError where a state does
        not fit."""
        self._share_matrices()
        members = []
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                own = self.state.get(parameter)
                if parameter.grad is None and not own:
                    continue
                member = Member(parameter, group, (index, len(group["params"])))
                if member.is_rotated and is_sharded(parameter):
                    member.shards = self._sharding.of[parameter]
                if own:
                    if member.is_stacked or not member.is_rotated:
                        check_state(own, parameter, group, self._describe(parameter))
                    member.state = {
                        name: torch.as_tensor(own[name])
                        for name in member.state_shapes
                        if name in own
                    }
                    member.num_updates = int(own["step"])
                members.append(member)
        for parameter in self._layout.members.keys() - {member.parameter for member in members}:
            own = self.state.get(
                parameter, {}
            )  # of views, which would keep their whole batch in memory
            own.update(
                {name: value.clone() for name, value in own.items() if isinstance(value, Tensor)}
            )
        self._layout = Layout([], {})  # so that the old batches go as the new ones come
        self._layout = Layout(members, self.state)

    def _share_matrices(self) -> None:
        self._sharding.add(
            p for _, p, group in self._named() if is_sharded(p) and is_rotated(p, group)
        )

    def _update_all(self, members: list[Member], bad: Tensor | None) -> None:
        """Rotated parameters batch by batch, those on the CPU side by side; then the others."""
        exchanged = [member for member in members if member.shards is not None]
        sharded.gather_gradients(exchanged)
        batches = self._batches_with_gradients(bad)
        # The most expensive first, so that no thread begins with it when the others are done.
        for_each(
            self._update,
            sorted(batches, key=lambda b: sharded.rotation_cost(b.state["exp_avg"]), reverse=True),
        )
        sharded.apply_updates(
            exchanged, lambda m: unless_bad(m.decay, arithmetic(m.parameter), bad)
        )
        update_elementwise([m for m in members if not m.is_rotated and m.is_updated_here], bad)
        for member in members:
            member.num_updates += 1
            if not member.is_updated_here:
                member.state["step"] += 1 if bad is None else ~bad
        for batch in self._layout.batches:
            batch.seen_version = batch.state["step"]._version

    def _batches_with_gradients(self, bad: Tensor | None) -> Iterator[MatrixBatch]:
        for batch in self._layout.batches:
            batch.bad = bad
            for key, run in batch.runs(
                lambda m: m.gradient is not None and (m.num_updates, shared_options(m.options))
            ):
                if key:
                    yield batch[run]

    def _update(self, batch: MatrixBatch) -> None:
        gradient = batch.gradients()  # (b, m, n)
        if batch.options["as_published"]:
            parts = [
                (batch[run], batch.part(gradient, run), is_due)
                for is_due, run in batch.runs(Member.is_due)
            ]
            batch.update_weights(torch.cat([published_update(*part) for part in parts]))
            return
        for (refresh, num_gradients), run in batch.runs(Member.next_refresh):
            part, part_gradient = batch[run], batch.part(gradient, run)
            if num_gradients and batch.options["source"] == "2nd":
                self._accumulate_covariances(part, part_gradient, num_gradients)
            if refresh:
                self._estimate_eigenbasis(part, part_gradient, exact=refresh == "exact")
        precision = batch.options["rotation_precision"]
        rotated_update = self._rotated_adam(
            batch, rotate(batch, gradient, precision)
        )  # from U^T G V
        largest = largest_adam_step(batch.members[0].num_updates + 1, batch.options["betas"])
        update = rotate(batch, rotated_update, precision, back=True)
        if largest < math.inf:
            limit = batch.options["lr"] * LARGEST_STEP * largest
            update.clamp_(-limit, limit)
        batch.update_weights(update)

    def _accumulate_covariances(self, batch: MatrixBatch, gradient: Tensor, num: int) -> None:
        """L <- beta2^num L + (1 - beta2^num) G G^T and R likewise, for a gradient that stands for
        `num`."""
        decay = beta2 = batch.options["betas"][1] ** num
        for side in batch.sides:
            factor, covariance = seen_from(side, gradient), batch.matrices(f"{side}_covariance")
            if batch.bad is not None:  # which only the device knows
                covariance.mul_(unless_bad(beta2, covariance.dtype, batch.bad))
                decay = 1.0
            covariance.baddbmm_(factor, factor.mT, beta=decay, alpha=1 - beta2)

    def _estimate_eigenbasis(self, batch: MatrixBatch, gradient: Tensor, exact: bool) -> None:
        """Algorithm 2, for matrices that are all due and their gradient (b, m, n); carries the
        moments over."""
        momentum = rotate(
            batch, batch.matrices("exp_avg"), back=True
        )  # M = U (U^T M V) V^T, in the old bases
        for side in batch.sides:
            basis = batch.matrices(f"{side}_basis")
            if batch.options["source"] == "2nd":
                C = batch.matrices(f"{side}_covariance")
                refreshed = (
                    exact_eigenbasis(C)
                    if exact
                    else power_iteration(covariance_product(C, basis), basis)
                )
            else:  # of M_t, one ahead of `momentum`
                M = seen_from(side, momentum.lerp(gradient, 1 - batch.options["betas"][0]))
                refreshed = (
                    exact_factor_eigenbasis(M)
                    if exact
                    else power_iteration(factor_product(M, basis), basis)
                )
            basis.copy_(refreshed.basis)
            batch.state["num_failed_refreshes"] += (~refreshed.valid).view_as(
                batch.state["num_failed_refreshes"]
            )
        if exact:
            self._share_out_second_moment(batch)
        batch.matrices("exp_avg").copy_(rotate(batch, momentum))
        self._raise_second_moment(batch)

    def _share_out_second_moment(self, batch: MatrixBatch) -> None:
        """v_ij <- (share of row i) (share of column j) sum(v) in the first basis, of which v has
        seen nothing.

        A rotated side's shares are what v's would be if entries were uncorrelated; where a
        covariance tells more than rounding its eigenvalues, which are the second moment's own sums
        over the other side."""
        second_moment = batch.matrices("exp_avg_sq")
        shares = []
        for side, of in (("left", -1), ("right", -2)):
            energies = second_moment.sum(dim=of)  # (b, m) or (b, n)
            if side in batch.sides:
                basis = batch.matrices(f"{side}_basis")
                energies = (energies[:, None, :] @ basis.square())[:, 0]
                if batch.options["source"] == "2nd":
                    known = (
                        basis * covariance_product(batch.matrices(f"{side}_covariance"), basis)
                    ).sum(dim=-2)
                    floor = resolution(known.dtype) * known.amax(dim=-1, keepdim=True)
                    energies = energies.where(known <= floor, known)
            total = energies.sum(dim=-1, keepdim=True)
            shares.append(
                energies / total.clamp(min=torch.finfo(total.dtype).tiny)
            )  # (b, m), then (b, n)
        total = second_moment.sum(dim=(-2, -1), keepdim=True)
        torch.mul(shares[0][:, :, None] * total, shares[1][:, None, :], out=second_moment)

    def _raise_second_moment(self, batch: MatrixBatch) -> None:
        """v^ <- max(v^, m^2) in new bases.

        A mean square is never below the square of the mean (Jensen). The momentum has been rotated,
        the second moment stays with its columns: where it has seen nothing of what now enters its
        entry, the quotient would be a step of any size."""
        beta1, beta2 = batch.options["betas"]
        momentum, second_moment = batch.state["exp_avg"], batch.state["exp_avg_sq"]
        steps = (
            batch.state["step"].view(-1, *[1] * (momentum.ndim - 1)).to(momentum.dtype)
        )  # (b, 1, 1)
        ratio = (1 - beta2**steps) / (
            1 - beta1**steps
        ).square()  # of the bias corrections of v and m^2
        torch.maximum(second_moment, momentum.square().mul_(ratio), out=second_moment)

    def _rotated_adam(self, batch: MatrixBatch, rotated_gradient: Tensor) -> Tensor:
        """The moments' recursions in the rotated space, and the update -lr m^ / (sqrt(v^) + eps)
        there (b, m, n).

        Between refreshes U^T M V obeys M's own recursion: M needs no rotation then. AdamW's kernel,
        on weights of zero."""
        gradient, update = (
            rotated_gradient.view_as(batch.state["exp_avg"]),
            torch.zeros_like(batch.state["exp_avg"]),
        )
        steps, options = (
            batch.state["step"],
            {**batch.options, "weight_decay": 0.0, "maximize": False},
        )
        fused_adamw([update], [gradient], [{**batch.state, "step": steps[0]}], options, batch.bad)
        steps[1:] += (
            1 if batch.bad is None else ~batch.bad
        )  # the kernel counts one step for the whole batch
        return update.mul_(above_noise(batch.state["exp_avg_sq"])).flatten(0, -3)

    def _check_gradients(self, members: list[Member]) -> Tensor | None:
        """One look at all gradients together: their norms also find entries whose squares overflow.

        On a GPU an ordinary step does not wait for the answer: the flag () that is returned makes
        it change nothing."""
        for member in members:
            if member.gradient is not None and member.gradient.layout is not torch.strided:
                who = self._describe(member.parameter)
                raise ValueError(f"{who}: its gradient is sparse; give a dense one (sparse=False)")
        norms: dict[Tensor, Tensor] = {}
        by_device: dict[torch.device, list[Tensor]] = {}
        for (device, dtype), alike in groupby(
            members, lambda m: (m.parameter.device, arithmetic(m.parameter))
        ):
            gradients = {m.parameter: local(m.gradient) for m in alike if m.gradient is not None}
            norms |= zip(
                gradients, torch._foreach_norm(list(gradients.values()), dtype=dtype), strict=True
            )
            by_device.setdefault(device, []).extend(map(norms.__getitem__, gradients))
        bad = {
            device: ~torch.stack(of_device).isfinite().all()
            for device, of_device in by_device.items()
        }
        self._sharding.agree(filter(is_sharded, norms), bad)
        can_wait = (
            len(bad) == 1
            and next(iter(bad)).type in ASYNCHRONOUS
            and len(self._unseen) < LONGEST_WAIT
        )
        if can_wait and not any(
            member.is_rotated and member.next_refresh()[0] for member in members
        ):
            self._unseen += bad.values()
            return self._unseen[-1]
        num_bad = sum(int(flag) for flag in self._unseen)  # now the host waits for the device
        self._unseen.clear()
        if num_bad:
            for member in self._layout.members.values():
                member.num_updates = int(member.state["step"])
        if any(bad.values()):
            found = (
                self._describe(parameter)
                for parameter, norm in norms.items()
                if not norm.isfinite()
            )
            who = next(found, "a parameter whose shard lies on another rank")
            before = f", as in {num_bad} steps before" if num_bad else ""
            raise BadGradientError(
                f"{who}: its gradient has {BAD}; no parameter was updated{before}"
            )
        if num_bad:
            raise BadGradientError(
                f"{num_bad} of the last updates met gradients with {BAD} and changed no parameter"
            )
        return None

    def _describe(self, parameter: Tensor) -> str:
        name = next(name for name, candidate, _ in self._named() if candidate is parameter)
        return f"parameter {name} of shape {tuple(parameter.shape)}"

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters with its options; what is no matrix to rotate goes into a
        second group.

        ValueError where an option is out of range, or a parameter does not fit; nothing has changed
        then."""
        num_before = len(self.param_groups)
        try:
            for divided in self._divided(param_group):
                super().add_param_group(divided)
                group = self.param_groups[-1]
                check_options(group)
                for parameter in group["params"]:
                    if problem := _problem(parameter, group):
                        raise ValueError(
                            f"{self._describe(parameter)}, {parameter.dtype}: {problem}"
                        )
        except ValueError:
            del self.param_groups[num_before:]
            raise
        if "_layout" in self.__dict__:  # the constructor, which adds all groups, warns once
            self._warn_of_rest(num_before)

    def _divided(self, group: Group) -> list[Group]:
        """A group; or, of one to be rotated, the matrices and the rest, which is not."""
        options = {**self.defaults, **group}
        of_rest = {} if "lr" in group or self._rest_lr is None else {"lr": self._rest_lr}
        if not options["rotate"]:
            return [{**of_rest, **group}]
        check_options(options)
        params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        if isinstance(params, set):  # torch says what it thinks of it, and of what is no tensor
            return [group]
        matrices: list[Any] = []
        others: list[Any] = []
        for entry in params:
            tensor = entry[1] if isinstance(entry, tuple) else entry
            is_other = isinstance(tensor, Tensor) and not is_rotated(tensor, options)
            (others if is_other else matrices).append(entry)
        rest = {**group, **of_rest, "params": others, "rotate": False, "why": NO_MATRIX}
        return ([{**group, "params": matrices}] if matrices or not others else []) + (
            [rest] if others else []
        )

    def _warn_of_rest(self, first_group: int) -> None:
        rest = [group for group in self.param_groups[first_group:] if group.get("why") == NO_MATRIX]
        if num := sum(len(group["params"]) for group in rest):
            warnings.warn(
                f"{num} parameters have no side to rotate and get AdamW. Give "
                f"model.named_parameters(), and "
                "optimizer.summary() names them; or brx.optim.param_groups(model), which knows "
                "embeddings and head",
                stacklevel=3,
            )

    def _named(self) -> Iterator[tuple[str, Tensor, Group]]:
        """All parameters, in order, with their names and groups."""
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [
                f"{index} of group {number}" for index in range(len(group["params"]))
            ]
            yield from zip(names, group["params"], repeat(group))

    def summary(self) -> Summary:
        """What becomes of each parameter: which sides are rotated, how much state it has, and why;
        print it."""
        return Summary.of(self._named())

    def take_over(self, other: Optimizer) -> None:
        """Continue from AdamW, or pytorch-optimizer's SOAP (with its bases), over the same
        parameters.

        From AdamW the bases begin as the identity, and the first exact one comes `first_refresh`
        updates later: the group's `first_refresh` becomes that update of the matrix that has made
        most (a warning, where they differ). ValueError where a state is missing or does not fit;
        nothing has changed then."""
        states = {
            parameter: (state_from(other, parameter, group, self._describe(parameter)), group)
            for _, parameter, group in self._named()
            if other.state.get(parameter)
        }
        if not states:
            raise ValueError(f"{type(other).__name__} has no state of any of these parameters")
        for parameter, (state, group) in states.items():
            check_state(state, parameter, group, self._describe(parameter))
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.requires_grad and is_rotated(p, group)]
            without_bases = [p for p in trained if not other.state.get(p, {}).get("Q")]
            counts = {int(states[p][0]["step"]) if p in states else 0 for p in without_bases}
            if (most := max(counts, default=0)) >= group["first_refresh"]:
                if len(counts) > 1:
                    told = ", ".join(map(str, sorted(counts)))
                    why = (
                        f"matrices with {told} updates in one group: those with fewer get a "
                        f"basis so much later"
                    )
                    warnings.warn(why, stacklevel=2)
                group["first_refresh"] += most
        self._share_matrices()
        for parameter, (state, group) in states.items():
            self.state[parameter] = self._as_kept(state, parameter, group)
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """State and options, in torch's form; only the bases, which lie column by column here, are
        copied, row by row.

        The state of sharded matrices becomes DTensors, sharded by rows, for which all ranks have to
        ask together."""

        def convert(_: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
            return {**packed, "state": self._as_saved(packed["state"])}

        with self.register_state_dict_post_hook(convert, prepend=True):  # before the caller's
            return super().state_dict()

    def _as_saved(self, packed: dict[Any, Any]) -> dict[Any, Any]:
        states = {}
        # All ranks need one order, of the state dict, too: who reads it may communicate entry by
        #     entry.
        for number, (_, parameter, group) in enumerate(self._named()):
            if not (own := packed.get(number)):
                continue
            if is_sharded(parameter) and is_rotated(parameter, group):
                shards, shapes = self._sharding.of[parameter], state_shapes(parameter, group)
                own = {"step": own["step"]} | {
                    name: sharded.as_rows(
                        parameter, shards, own[name], shapes[name], state_dtype(name, parameter)
                    )
                    for name in shapes
                    if name != "step"
                }
            states[number] = {
                n: value.contiguous() if n.endswith("_basis") else value for n, value in own.items()
            }
        return states | {key: own for key, own in packed.items() if key not in states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the saved optimizer stood, to the last bit, with its options (those it
        lacks: the defaults).

        Sharded parameters take state of any number of ranks, or whole one; all ranks load together.
        ValueError where groups, an option or a state do not fit; nothing has changed then."""
        loaded: dict[Tensor, dict[str, Any]] = {}

        def prepare(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            prepared, states = self._fitting(given)
            loaded.update(states)
            return prepared

        # The caller's hooks come before the first of these and after the second.
        first = self.register_load_state_dict_pre_hook(prepare)
        with (
            first,
            self.register_load_state_dict_post_hook(
                lambda _: self.state.update(loaded), prepend=True
            ),
        ):
            super().load_state_dict(state_dict)

    def _fitting(
        self, given: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[Tensor, dict[str, Any]]]:
        """A state dict with options of all groups, and its states by parameter as they are kept
        here."""
        # torch's own loading casts states to the parameter's precision, which loses half of it for
        # bfloat16.
        groups = [{**self.defaults, **group} for group in given["param_groups"]]
        saved, own = ([len(group["params"]) for group in of] for of in (groups, self.param_groups))
        if saved != own:
            raise ValueError(f"the saved groups have {saved} parameters, this optimizer's {own}")
        for group in groups:
            check_options(group)
        numbers = [(number, group) for group in groups for number in group["params"]]
        states = {}
        for (_, parameter, _), (number, group) in zip(self._named(), numbers, strict=True):
            if state := given["state"].get(number):
                check_state(state, parameter, group, self._describe(parameter))
                states[parameter] = state, group
        self._share_matrices()
        kept = {
            parameter: self._as_kept(state, parameter, group)
            for parameter, (state, group) in states.items()
        }
        return {**given, "param_groups": groups}, kept

    def _as_kept(self, state: dict[str, Any], parameter: Tensor, group: Group) -> dict[str, Any]:
        """A copy of a saved state, in the dtypes and on the device that it has here."""
        shapes = state_shapes(parameter, group)
        kept = {name: value for name, value in state.items() if name not in shapes}
        is_shared = is_sharded(parameter) and is_rotated(parameter, group)
        for name, shape in shapes.items():  # in an order that is the same on all ranks
            value = state[name]
            if is_shared:
                value = sharded.whole(value)
                if name != "step" and not self._sharding.of[parameter].is_owner:
                    value = torch.empty(0)
            elif shape:
                value = sharded.like_parameter(value, parameter)
            kept[name] = (
                torch.as_tensor(value)
                .detach()
                .to(parameter.device, state_dtype(name, parameter), copy=True)
            )
        return kept

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rest_lr": self._rest_lr}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()


def update_elementwise(members: list[Member], bad: Tensor | None) -> None:
    """One step of AdamW; of sharded parameters, of the part that lies here."""
    for _, of_one_call in groupby(
        members, lambda m: (id(m.group), m.parameter.dtype, m.parameter.device)
    ):
        alike = list(of_one_call)
        parameters = [local(member.parameter) for member in alike]
        dtype = arithmetic(parameters[0])
        # Half-precision weights are rounded once, after the update. The kernel goes through memory
        # from end to end.
        weights = [parameter.to(dtype).contiguous() for parameter in parameters]
        gradients = [
            local(member.gradient).to(dtype).contiguous()
            for member in alike
            if member.gradient is not None
        ]
        fused_adamw(weights, gradients, [member.state for member in alike], alike[0].options, bad)
        for parameter, weight in zip(parameters, weights, strict=True):
            if weight is not parameter:
                parameter.copy_(weight)


def fused_adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    states: list[State],
    options: Group,
    bad: Tensor | None,
) -> None:
    """One AdamW step with torch's kernel, which counts it, too; if the flag `bad` is set, it
    changes nothing."""
    beta1, beta2 = options["betas"]
    momenta, second_moments, steps = (
        [local(of[name]) for of in states] for name in ("exp_avg", "exp_avg_sq", "step")
    )
    # Below this, squares of gradients are zero, and a zero over a zero would be NaN.
    smallest_eps = math.sqrt(torch.finfo(weights[0].dtype).tiny)
    adamw(
        weights,
        gradients,
        momenta,
        second_moments,
        [],  # of AMSGrad
        steps,
        fused=True,
        found_inf=None if bad is None else bad.float(),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        eps=max(options["eps"], smallest_eps),
        maximize=options["maximize"],
    )


def above_noise(second_moment: Tensor) -> Tensor:
    """A factor (*, m, n) from 0, for entries of rotated gradients that are rounding noise, to 1.

    Adam would scale noise to full steps. Rounding of the basis leaves up to 4 eps of the matrix in
    a whole row or column that should be zero; their floor is 16 eps. What is 4 times below a floor
    moves by 1.5e-5 of its step."""
    of_row, of_column = (second_moment.mean(dim=dim, keepdim=True) for dim in (-1, -2))
    m, n, number = of_row.shape[-2], of_column.shape[-1], torch.finfo(second_moment.dtype)
    tilt = of_row.mean(dim=-2, keepdim=True) * (16 * number.eps) ** 2 + number.tiny
    # In place: one array of the matrices' size, as the memory of a second would cost the CPU more
    #     than the arithmetic.
    damping = _fourth_power(noise_floor(of_row, of_column).div_(second_moment)).add_(1)
    return (
        damping.add_(_fourth_power(m * tilt / of_row))
        .add_(_fourth_power(n * tilt / of_column))
        .reciprocal_()
    )


def _fourth_power(ratio: Tensor) -> Tensor:
    """In place, of ratios that one is added to: what is below 1e-5 counts as that, as subnormal
    numbers are slow."""
    return ratio.clamp_(min=1e-5).square_().square_()


def noise_floor(of_row: Tensor, of_column: Tensor) -> Tensor:
    """The square of what counts as rounding noise in each entry of a rotated gradient (*, m, n),
    from the mean squares of its rows (*, m, 1) and columns (*, 1, n). Measured
    (`benchmarks/first_steps`), rounding leaves 0.2 to 0.4, not 7."""
    m, n, number = of_row.shape[-2], of_column.shape[-1], torch.finfo(of_row.dtype)
    mean_squares = (of_row + of_column).add_(of_row.mean(dim=-2, keepdim=True))
    return mean_squares.mul_(math.sqrt(m + n) * (7 * number.eps) ** 2).add_(number.tiny)


def largest_adam_step(update: int, betas: tuple[float, float]) -> float:
    """The largest |m^| / sqrt(v^) of any gradients up to that update, by Cauchy-Schwarz; inf where
    beta1^2 >= beta2."""
    beta1, beta2 = betas
    if beta1**2 >= beta2:
        return math.inf
    ratio = beta1**2 / beta2
    of_sums = (1 - beta2**update) / (1 - beta2) * ((1 - beta1) / (1 - beta1**update)) ** 2
    return math.sqrt(of_sums * (1 - ratio**update) / (1 - ratio))


def _problem(parameter: Tensor, group: Group) -> str | None:
    if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
        return sharded.FSDP1
    if parameter.requires_grad and not parameter.is_floating_point():
        return "BasisRotation takes real floating-point parameters"
    if (
        group["rotate"]
        and group["split"]
        and parameter.shape[group["split"][1]] % group["split"][0]
    ):
        return f"split={group['split']} does not divide it into equal matrices"
    if group["rotate"] and group["split"] and group["flatten"] and parameter.ndim > 2:
        return "split and flatten: give one of the two"
    return None
