"""Attention over the layers, with the last layer as the query."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ilse_embed.encoders.base import FastDropout, LayerEncoder, last_norm, register

POSITION_WIDTH = 24
"""Width of the position vectors that the keys are made of."""


class StackedLinear(nn.Module):
    """n linear maps, each for its own input, in one batched product; drawn as `torch.nn.Linear` draws them."""

    def __init__(self, count: int, width_in: int, width: int) -> None:
        """Draw the weights, (n, width_in, width), and the biases, (n, 1, width)."""
        super().__init__()
        bound = width_in**-0.5
        self.weight = nn.Parameter(torch.empty(count, width_in, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(count, 1, width).uniform_(-bound, bound))

    def forward(self, states: Tensor) -> Tensor:
        """Map.

        Shapes:
            states: (n, B, width_in) -> (n, B, width)
        """
        return torch.baddbmm(self.bias, states, self.weight)


class StackedNorm(nn.Module):
    """n layer norms, each with its own scale and shift."""

    def __init__(self, count: int, width: int) -> None:
        """Start as plain normalisation."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count, 1, width))
        self.bias = nn.Parameter(torch.zeros(count, 1, width))

    def forward(self, states: Tensor) -> Tensor:
        """Normalise.

        Shapes:
            states: (n, B, width) -> (n, B, width)
        """
        return torch.addcmul(self.bias, nn.functional.layer_norm(states, states.shape[-1:]), self.weight)


def bottlenecks(count: int, width: int) -> nn.Sequential:
    """Make n times Linear to half the width, GELU, layer norm, Linear back."""
    half = (width + 1) // 2
    return nn.Sequential(
        StackedLinear(count, width, half), nn.GELU(), StackedNorm(count, half), StackedLinear(count, half, width)
    )


@register("dwatt")
class DepthWiseAttention(LayerEncoder):
    """Depth-Wise Attention: the last layer plus what it attends to in all layers, itself included.

    ``q = 1 + ELU(z_L + f_Q(z_L))``, ``k_l = W_K p_l``, ``v_l = LN_l(f_V,l(z_l))``, out ``z_L + softmax(q k) v``. The
    ``p_l`` are trained position vectors: keys do not depend on the text. ``f`` is Linear(d, d/2), GELU, LN,
    Linear(d/2, d), one for the query and one for each layer; there is no 1/sqrt(d).

    In width d it has about ``(L + 1) d^2`` weights, far more than the other encoders; ``projection`` is for a
    comparison at like size.

    Source: ElNokrashy et al., "Depth-Wise Attention (DWAtt)", arXiv 2209.15168, eq. 4-11, as the code of
    arXiv 2603.22665 states and computes them, whose parameter counts a test holds this to. That code too drops out
    attention weights.
    """

    __module__ = "ilse_embed"
    config_keys = ["num_layers", "layer_width", "projection", "dropout", "output_norm"]  # noqa: RUF012

    def __init__(
        self,
        num_layers: int,
        layer_width: int,
        projection: int | None = None,
        dropout: float = 0.0,
        output_norm: bool = False,
    ) -> None:
        """Set the sizes.

        Args:
            num_layers: Layers L.
            layer_width: Backbone width d.
            projection: Width m of a linear map in front, the same for all layers; None, as in the paper: m = d.
            dropout: Probability of leaving a layer out of the attended sum.
            output_norm: Whether a layer norm with trained scale and shift ends the encoder.

        Raises:
            ValueError: If ``projection`` is below 1.
        """
        super().__init__(num_layers, layer_width)
        if projection is not None and projection < 1:
            raise ValueError(f"projection is {projection}; it must be at least 1, or None for the backbone's width")
        self.projection, self.dropout, self.output_norm = projection, dropout, output_norm
        width = self.get_embedding_dimension()
        self.project = None if projection is None else nn.Linear(layer_width, width)
        self.positions = nn.Parameter(torch.rand(num_layers, POSITION_WIDTH))
        self.key = nn.Linear(POSITION_WIDTH, width, bias=False)
        self.query = bottlenecks(1, width)
        self.value = bottlenecks(num_layers, width).append(StackedNorm(num_layers, width))
        self.drop = FastDropout(dropout)
        self.norm = last_norm(width, output_norm)

    @property
    def input_weight(self) -> str | None:
        """Name of the weight that reads the layers, if there is a projection."""
        return None if self.project is None else "project.weight"

    def encode_layers(self, layers: Tensor) -> Tensor:
        """Attend.

        Shapes:
            layers: (B, L, d) -> (B, m)
        """
        states = (layers if self.project is None else self.project(layers)).transpose(0, 1)  # (L, B, m)
        last = states[-1]
        query = 1 + nn.functional.elu(last + self.query(last[None])[0])  # (B, m)
        shares = self.drop(torch.softmax(query @ self.key(self.positions).T, dim=-1))  # (B, L)
        fused: Tensor = self.norm(last + torch.einsum("bl,lbm->bm", shares, self.value(states)))
        return fused

    def get_embedding_dimension(self) -> int:
        """The projection's width, or backbone width d."""
        return self.projection or self.layer_width
