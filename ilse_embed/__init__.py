"""Embeddings from frozen language models: a small graph encoder over all layers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ilse_embed.backbone import LayerTransformer
    from ilse_embed.encoders import (
        CayleyGNN,
        DeepSets,
        DepthWiseAttention,
        FullyConnectedGNN,
        LayerConcatenation,
        LayerGNN,
        LayerMLP,
        MeanOfLayers,
        ScalarMix,
        SingleLayer,
        build_encoder,
    )
    from ilse_embed.graphs import LayerGraph, build_graph, cayley_graph
    from ilse_embed.heads import LinearHead
    from ilse_embed.lora import LoraTransformer
    from ilse_embed.model import IlseSentenceTransformer, build, export_hub, load
    from ilse_embed.pooling import LayerPooling
    from ilse_embed.scaling import LayerScaling

__version__ = "0.1.0"

_HOMES = {
    "CayleyGNN": "encoders",
    "DeepSets": "encoders",
    "DepthWiseAttention": "encoders",
    "FullyConnectedGNN": "encoders",
    "IlseSentenceTransformer": "model",
    "LayerConcatenation": "encoders",
    "LayerGNN": "encoders",
    "LayerGraph": "graphs",
    "LayerMLP": "encoders",
    "LayerPooling": "pooling",
    "LayerScaling": "scaling",
    "LayerTransformer": "backbone",
    "LinearHead": "heads",
    "LoraTransformer": "lora",
    "MeanOfLayers": "encoders",
    "ScalarMix": "encoders",
    "SingleLayer": "encoders",
    "build": "model",
    "build_encoder": "encoders",
    "build_graph": "graphs",
    "cayley_graph": "graphs",
    "export_hub": "model",
    "load": "model",
}

__all__ = [
    "CayleyGNN",
    "DeepSets",
    "DepthWiseAttention",
    "FullyConnectedGNN",
    "IlseSentenceTransformer",
    "LayerConcatenation",
    "LayerGNN",
    "LayerGraph",
    "LayerMLP",
    "LayerPooling",
    "LayerScaling",
    "LayerTransformer",
    "LinearHead",
    "LoraTransformer",
    "MeanOfLayers",
    "ScalarMix",
    "SingleLayer",
    "__version__",
    "build",
    "build_encoder",
    "build_graph",
    "cayley_graph",
    "export_hub",
    "load",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``import ilse_embed`` alone loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ilse_embed' has no attribute {name!r}")
    return getattr(import_module(f"ilse_embed.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
