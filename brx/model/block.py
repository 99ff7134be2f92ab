"""A pre-norm Transformer block: attention and MLP each read the stream after a norm.

Shape legend: B examples, S positions, D width."""

from typing import Any

from torch import Tensor, nn

from brx.model.mixture import Mixture


class Block(nn.Module):
    """Maps the residual stream (B, S, D) to the residual stream. If `mlp` is a mixture of experts,
    it also returns the mixture's auxiliary loss, a scalar."""

    def __init__(
        self, attention_norm: nn.Module, attention: nn.Module, mlp_norm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        output = self.mlp(self.mlp_norm(x))
        if isinstance(self.mlp, Mixture):
            mixed, auxiliary_loss = output
            return x + mixed, auxiliary_loss
        return x + output  # type: ignore[no-any-return]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.mlp, Mixture):
            self.mlp.leave_experts_uncompiled()
        super().compile(*args, **kwargs)
