"""DeepSets over the layers: no edges."""

from __future__ import annotations

from torch import Tensor

from ilse_embed.encoders.base import (
    LayerEncoder,
    LayerPool,
    LayerPositions,
    check_options,
    dense_blocks,
    last_norm,
    register,
)


@register("set")
class DeepSets(LayerEncoder):
    """Set-Encoder: rho(pool over layers of phi(layer)), phi and rho of Linear, ReLU, dropout.

    Source: Zaheer et al., "Deep Sets", arXiv 1703.06114, theorem 2; as "Set-Encoder" in arXiv 2603.22665.
    """

    __module__ = "ilse_embed"
    config_keys = [  # noqa: RUF012
        "num_layers",
        "layer_width",
        "hidden",
        "pre",
        "post",
        "pool",
        "dropout",
        "positional",
        "output_norm",
    ]

    def __init__(
        self,
        num_layers: int,
        layer_width: int,
        hidden: int = 256,
        pre: int = 1,
        post: int = 0,
        pool: str = "mean",
        dropout: float = 0.0,
        positional: bool = False,
        output_norm: bool = False,
    ) -> None:
        """Set the sizes.

        Args:
            num_layers: Layers L.
            layer_width: Backbone width d.
            hidden: Embedding width m.
            pre: Depth of phi, applied to each layer.
            post: Depth of rho, applied after the pool.
            pool: Over the layers; see `LayerPool`.
            dropout: Probability after each ReLU.
            positional: Whether phi tells the layers apart: by a trained vector for each, added before its first ReLU.
            output_norm: Whether a layer norm with trained scale and shift ends the encoder.

        Raises:
            ValueError: If ``pre`` and ``post`` are both 0, or ``pre`` is 0 with ``positional``, or ``pool`` is unknown.
        """
        super().__init__(num_layers, layer_width)
        check_options(pool=pool, pre=pre, post=post)
        if pre == post == 0:
            raise ValueError("pre and post are both 0; at least one must be positive")
        if positional and not pre:
            raise ValueError("positional needs phi, but pre is 0: a pool of raw layers cannot tell them apart")
        self.hidden, self.pre, self.post, self.pool, self.dropout = hidden, pre, post, pool, dropout
        self.positional, self.output_norm = positional, output_norm
        self.phi = dense_blocks(layer_width, hidden, pre, dropout)
        if positional:
            self.phi.insert(1, LayerPositions(num_layers, hidden))
        self.pool_layers = LayerPool(pool, num_layers)
        self.rho = dense_blocks(hidden if pre else layer_width, hidden, post, dropout)
        self.norm = last_norm(hidden, output_norm)

    @property
    def input_weight(self) -> str:
        """Name of the weight that reads the layers."""
        return "phi.0.weight" if self.pre else "rho.0.weight"

    def encode_layers(self, layers: Tensor) -> Tensor:
        """Fuse.

        Shapes:
            layers: (B, L, d) -> (B, m)
        """
        states = self.phi(layers).transpose(0, 1)
        fused: Tensor = self.norm(self.rho(self.pool_layers(states)))
        return fused

    def get_embedding_dimension(self) -> int:
        """Embedding width m."""
        return self.hidden
