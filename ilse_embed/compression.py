"""Layer features in fewer dimensions: smaller on disk, faster to train on, and undone exactly in the trained encoder.

Letters: ``n`` texts, ``L`` layers, ``d`` backbone width, ``r`` compressed width.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from ilse_embed.scaling import LayerScaling


@dataclass(frozen=True)
class LayerBasis:
    """Each layer standardised, then turned onto r directions that all layers share: ``y = V^T ((x - mean) * scale)``.

    The directions are the principal components of the standardised features of all layers together, not whitened. They
    are shared because the encoders project all layers by one matrix: what that matrix learns on a compressed layer,
    ``W y``, is ``(W V^T)`` on a standardised one, so `ilse_embed.encoders.LayerEncoder.widened` undoes the compression
    without loss. With directions of its own for each layer that could not be, and the encoder learned much less.

    Attributes:
        mean: Of each layer and dimension, (L, d).
        scale: One over the spread, (L, d).
        directions: Orthonormal columns V, (d, r).
    """

    mean: Tensor
    scale: Tensor
    directions: Tensor

    @classmethod
    def fit(cls, layers: Tensor, width: int) -> LayerBasis:
        """Fit on a sample of texts; labels play no part.

        Args:
            layers: (n, L, d), n >= 2.
            width: r, from 1 to d.

        Raises:
            ValueError: If the sample has fewer than two texts or is not finite.
        """
        scaling = LayerScaling.fit(layers)
        moments = torch.zeros(layers.shape[2], layers.shape[2], dtype=torch.float64)
        for layer in range(layers.shape[1]):  # one layer at a time: the sample is in memory once only
            standardised = (layers[:, layer] - scaling.mean[layer]) * scaling.scale[layer]
            moments += (standardised.T @ standardised).double()
        _, vectors = torch.linalg.eigh(moments)  # ascending
        directions = vectors.flip(1)[:, :width]
        largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
        directions = directions * largest.sign()  # the sign of an eigenvector is anybody's choice
        return cls(scaling.mean, scaling.scale, directions.float().contiguous())

    @property
    def scaling(self) -> LayerScaling:
        """The standardisation, as a module for raw layers."""
        module = LayerScaling(*self.mean.shape)
        module.mean.copy_(self.mean)
        module.scale.copy_(self.scale)
        return module

    def compress(self, layers: Tensor) -> Tensor:
        """Standardise and turn.

        Shapes:
            layers: (n, L, d) -> (n, L, r)
        """
        return ((layers - self.mean) * self.scale) @ self.directions

    def to_bytes(self) -> bytes:
        """As safetensors, with the hash of the content in front of them in the metadata."""
        return save(self._tensors(), metadata={"sha256": self.digest})

    @classmethod
    def load(cls, path: Path) -> LayerBasis:
        """Read what `to_bytes` made.

        Raises:
            ValueError: If the file is damaged.
        """
        content = path.read_bytes()
        basis = cls(**load(content))
        if content != basis.to_bytes():
            raise ValueError("its content has another hash than it says")
        return basis

    @cached_property
    def digest(self) -> str:
        """Hash of the tensors."""
        return hashlib.sha256(save(self._tensors())).hexdigest()[:16]

    def _tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "scale": self.scale, "directions": self.directions}
