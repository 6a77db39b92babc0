"""Dense networks without structure over the layers: the baselines that a graph has to beat."""

from __future__ import annotations

from torch import Tensor, nn

from ilse_embed.encoders.base import FastDropout, LayerEncoder, dense_blocks, last_norm, register
from ilse_embed.encoders.mixing import MeanOfLayers, SingleLayer


@register("mlp")
class LayerMLP(LayerEncoder):
    """``depth`` times Linear, ReLU, dropout on one layer, or on the mean of all.

    Embeddings out of a ReLU have no negative entry, so no cosine below 0. A loss that asks for such cosines, as the MSE
    on STS scores does, learns far better with ``final_relu=False``. It is on by default all the same: that is the
    paper's encoder, and CoSENT, which only ranks cosines, did no worse with it on validation.

    Source: "MLP" in arXiv 2603.22665, on the last layer.
    """

    __module__ = "ilse_embed"
    config_keys = [  # noqa: RUF012
        "num_layers",
        "layer_width",
        "layer",
        "hidden",
        "depth",
        "dropout",
        "final_relu",
        "output_norm",
    ]

    def __init__(
        self,
        num_layers: int,
        layer_width: int,
        layer: int | str = -1,
        hidden: int = 256,
        depth: int = 1,
        dropout: float = 0.0,
        final_relu: bool = True,
        output_norm: bool = False,
    ) -> None:
        """Set input and sizes.

        Args:
            num_layers: Layers L.
            layer_width: Backbone width d.
            layer: Index as in `SingleLayer`, or "mean" of all layers.
            hidden: Embedding width m.
            depth: Number of blocks.
            dropout: Probability in each block.
            final_relu: Whether the last block has its ReLU; with depth 1 and without, the encoder is a linear map.
            output_norm: Whether a layer norm with trained scale and shift ends the encoder.

        Raises:
            ValueError: If there is no such layer, or ``depth`` is below 1.
        """
        super().__init__(num_layers, layer_width)
        if depth < 1:
            raise ValueError(f"depth is {depth}; it must be at least 1")
        if isinstance(layer, str) and layer != "mean":
            raise ValueError(f'layer is {layer!r}; allowed are the number of a layer and "mean"')
        self.hidden, self.depth, self.dropout, self.final_relu = hidden, depth, dropout, final_relu
        self.output_norm = output_norm
        if isinstance(layer, str):
            self.layer: int | str = layer
            self.source: LayerEncoder = MeanOfLayers(num_layers, layer_width)
        else:
            self.source = single = SingleLayer(num_layers, layer_width, layer)
            self.layer = single.layer
        self.blocks = dense_blocks(layer_width, hidden, depth, dropout)
        if not final_relu:
            self.blocks[-2] = nn.Identity()
        self.norm = last_norm(hidden, output_norm)

    @property
    def input_weight(self) -> str:
        """Name of the weight that reads the layer."""
        return "blocks.0.weight"

    def encode_layers(self, layers: Tensor) -> Tensor:
        """Pick or average, then map.

        Shapes:
            layers: (B, L, d) -> (B, m)
        """
        encoded: Tensor = self.norm(self.blocks(self.source.encode_layers(layers)))
        return encoded

    def get_embedding_dimension(self) -> int:
        """Embedding width m."""
        return self.hidden


@register("concat")
class LayerConcatenation(LayerEncoder):
    """One linear map of all layers side by side, with dropout on its input. Not in the paper.

    What a linear map of all that the backbone offers can do, at L times the weights of a projection that layers share.
    """

    __module__ = "ilse_embed"
    config_keys = ["num_layers", "layer_width", "hidden", "dropout", "output_norm"]  # noqa: RUF012

    def __init__(
        self,
        num_layers: int,
        layer_width: int,
        hidden: int = 256,
        dropout: float = 0.0,
        output_norm: bool = False,
    ) -> None:
        """Set the sizes.

        Args:
            num_layers: Layers L.
            layer_width: Backbone width d.
            hidden: Embedding width m.
            dropout: Probability of leaving out an input.
            output_norm: Whether a layer norm with trained scale and shift ends the encoder.
        """
        super().__init__(num_layers, layer_width)
        self.hidden, self.dropout, self.output_norm = hidden, dropout, output_norm
        self.drop = FastDropout(dropout)
        self.linear = nn.Linear(num_layers * layer_width, hidden)
        self.norm = last_norm(hidden, output_norm)

    @property
    def input_weight(self) -> str:
        """Name of the weight that reads the layers, (m, L d)."""
        return "linear.weight"

    def encode_layers(self, layers: Tensor) -> Tensor:
        """Concatenate and map.

        Shapes:
            layers: (B, L, d) -> (B, m)
        """
        encoded: Tensor = self.norm(self.linear(self.drop(layers.flatten(1))))
        return encoded

    def get_embedding_dimension(self) -> int:
        """Embedding width m."""
        return self.hidden
