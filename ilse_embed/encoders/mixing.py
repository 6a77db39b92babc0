"""Encoders that stay in the backbone's width: one layer, or a mean of all layers, plain or weighted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ilse_embed.encoders.base import LayerEncoder, register


@register("layer")
class SingleLayer(LayerEncoder):
    """The features of one layer; the last one by default. m = d, nothing is trained."""

    __module__ = "ilse_embed"
    config_keys = ["num_layers", "layer_width", "layer"]  # noqa: RUF012

    def __init__(self, num_layers: int, layer_width: int, layer: int = -1) -> None:
        """Choose the layer.

        Args:
            num_layers: Layers L.
            layer_width: Backbone width d.
            layer: Index, 0 = input of the first block, L - 1 or -1 = output after the final norm.

        Raises:
            ValueError: If there is no such layer.
        """
        super().__init__(num_layers, layer_width)
        if layer not in range(-num_layers, num_layers):
            raise ValueError(
                f"layer is {layer}; this backbone has layers 0 to {num_layers - 1} (or -{num_layers} to -1)"
            )
        self.layer = layer % num_layers

    def encode_layers(self, layers: Tensor) -> Tensor:
        """Pick the layer.

        Shapes:
            layers: (B, L, d) -> (B, d)
        """
        return layers[:, self.layer]

    def get_embedding_dimension(self) -> int:
        """Backbone width d."""
        return self.layer_width


@register("mean")
class MeanOfLayers(LayerEncoder):
    """The mean of all layers. m = d, nothing is trained."""

    __module__ = "ilse_embed"
    config_keys = ["num_layers", "layer_width"]  # noqa: RUF012

    def encode_layers(self, layers: Tensor) -> Tensor:
        """Average.

        Shapes:
            layers: (B, L, d) -> (B, d)
        """
        return layers.mean(1)

    def get_embedding_dimension(self) -> int:
        """Backbone width d."""
        return self.layer_width


@register("scalar_mix")
class ScalarMix(LayerEncoder):
    """``gamma`` times a mean of all layers with trained weights, the same for every text. m = d.

    The weights are a softmax and start equal, gamma at 1, so that it starts as `MeanOfLayers`.

    Source: Peters et al., "Deep contextualized word representations" (ELMo), arXiv 1802.05365, eq. 1.
    """

    __module__ = "ilse_embed"
    config_keys = ["num_layers", "layer_width"]  # noqa: RUF012

    def __init__(self, num_layers: int, layer_width: int) -> None:
        """Start with equal weights.

        Args:
            num_layers: Layers L.
            layer_width: Backbone width d.
        """
        super().__init__(num_layers, layer_width)
        self.logits = nn.Parameter(torch.zeros(num_layers))
        self.gamma = nn.Parameter(torch.ones(()))

    def encode_layers(self, layers: Tensor) -> Tensor:
        """Average.

        Shapes:
            layers: (B, L, d) -> (B, d)
        """
        return self.gamma * self.logits.softmax(0) @ layers

    def get_embedding_dimension(self) -> int:
        """Backbone width d."""
        return self.layer_width
