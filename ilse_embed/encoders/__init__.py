"""Encoders: ``(B, L, d)`` layer features -> ``(B, m)`` embeddings. Importing this package fills the registry."""

from ilse_embed.encoders.attention import DepthWiseAttention
from ilse_embed.encoders.base import ENCODERS, LayerEncoder, build_encoder, encoder_options, options_of_others
from ilse_embed.encoders.dense import LayerConcatenation, LayerMLP
from ilse_embed.encoders.graph import CayleyGNN, FullyConnectedGNN, LayerGNN
from ilse_embed.encoders.mixing import MeanOfLayers, ScalarMix, SingleLayer
from ilse_embed.encoders.sets import DeepSets

__all__ = [
    "ENCODERS",
    "CayleyGNN",
    "DeepSets",
    "DepthWiseAttention",
    "FullyConnectedGNN",
    "LayerConcatenation",
    "LayerEncoder",
    "LayerGNN",
    "LayerMLP",
    "MeanOfLayers",
    "ScalarMix",
    "SingleLayer",
    "build_encoder",
    "encoder_options",
    "options_of_others",
]
