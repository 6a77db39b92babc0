"""Encoders: ``(B, L, d)`` layer features -> ``(B, m)`` embeddings. Importing this package fills the registry."""

from ilse_embed.encoders.base import ENCODERS, LayerEncoder, build_encoder, encoder_options
from ilse_embed.encoders.graph import CayleyGNN, LayerGNN
from ilse_embed.encoders.mixing import MeanOfLayers, SingleLayer
from ilse_embed.encoders.sets import DeepSets

__all__ = [
    "ENCODERS",
    "CayleyGNN",
    "DeepSets",
    "LayerEncoder",
    "LayerGNN",
    "MeanOfLayers",
    "SingleLayer",
    "build_encoder",
    "encoder_options",
]
