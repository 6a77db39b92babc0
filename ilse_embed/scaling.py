"""Per-layer scaling: layer norms of LLMs span three orders of magnitude; a shared projection needs them alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ilse_embed.modules import HeadModule, check_layers


class LayerScaling(HeadModule):
    """Standardise each dimension of each layer: subtract the mean and divide by the spread, both over training texts.

    Shapes:
        features["layer_embeddings"]: (B, L, d) -> (B, L, d)
    """

    __module__ = "ilse_embed"
    config_keys = ["num_layers", "layer_width"]  # noqa: RUF012

    mean: Tensor
    scale: Tensor

    def __init__(self, num_layers: int, layer_width: int) -> None:
        """Start as the identity; `fit` or loading fills in the statistics.

        Args:
            num_layers: Layers L.
            layer_width: Backbone width d.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_layers = num_layers
        self.layer_width = layer_width
        self.register_buffer("mean", torch.zeros(num_layers, layer_width))
        self.register_buffer("scale", torch.ones(num_layers, layer_width))

    @classmethod
    def fit(cls, layers: Tensor) -> LayerScaling:
        """Take mean and spread from layer features of texts; labels play no part.

        A dimension that never varies keeps the scale 1, so that it becomes 0 and not infinite.

        Args:
            layers: (n, L, d), n >= 2.

        Raises:
            ValueError: If there are fewer than two texts or the features are not finite.
        """
        if layers.ndim != 3 or len(layers) < 2:
            raise ValueError(f"scaling is fitted on (n >= 2, L, d) layer features; got shape {tuple(layers.shape)}")
        module = cls(*layers.shape[1:])
        for layer in range(layers.shape[1]):  # one layer at a time: a whole float64 copy would be twice the table
            values = layers[:, layer].double()
            spread = values.std(0, unbiased=False)
            if not torch.isfinite(spread).all():
                raise ValueError(
                    f"layer {layer} of the training features is not finite; extract in float32 or bfloat16"
                )
            mean = values.mean(0)
            constant = spread <= 1e-6 * mean.abs().clamp(min=1e-6)
            module.mean[layer] = mean.float()
            module.scale[layer] = torch.where(constant, 1.0, 1 / spread).float()
        return module

    def scale_layers(self, layers: Tensor) -> Tensor:
        """Standardise.

        Shapes:
            layers: (B, L, d) -> (B, L, d)

        Raises:
            ValueError: If the layer features have another depth or width.
        """
        check_layers(layers, self.num_layers, self.layer_width)
        return (layers - self.mean) * self.scale

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Standardise ``layer_embeddings``."""
        features["layer_embeddings"] = self.scale_layers(features["layer_embeddings"])
        return features
