"""Whether the first token of a text is an attention sink.

Letters: ``B`` texts, ``T`` tokens, ``L`` layers, ``d`` backbone width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SINK_SHARE = 0.5
"""A first token with more than this share of the summed token norms, in any layer, is an attention sink."""

PROBE_TEXTS = (
    "The ferry leaves the harbour every morning at seven.",
    "Please send me the invoice for last month.",
    "My sister plays the cello in a small orchestra.",
    "How long does it take to grow tomatoes from seed?",
    "Prices rose by three percent during the winter.",
    "He could not find his keys, so he climbed through the window.",
    "Water boils at a lower temperature in the mountains.",
    "Is there a train to the coast after midnight?",
)
"""Plain sentences on which the share of the first token is measured."""


def first_token_share(backbone: Any, skip: int = 0) -> Tensor:
    """Share of the summed token norms that the first pooled token makes up: the measure of an attention sink.

    1 / T if all tokens weigh the same; near 1 if the first token drowns the others.

    Args:
        backbone: The `LayerTransformer` to measure, on `PROBE_TEXTS`.
        skip: Leading tokens that do not count, for a BOS that is left out already.

    Returns:
        The share for each layer, mean over the texts, shape (L,).
    """
    flattens, backbone.can_flatten_inputs = backbone.can_flatten_inputs, False
    try:
        features = backbone.preprocess(list(PROBE_TEXTS))
    finally:
        backbone.can_flatten_inputs = flattens
    features = {k: v.to(backbone.model.device) if isinstance(v, Tensor) else v for k, v in features.items()}
    mask = features["attention_mask"].bool()
    rank = mask.cumsum(1)
    first, counted = mask & (rank == skip + 1), mask & (rank > skip)

    def share(hidden: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(hidden.float(), dim=-1)
        share_of_texts: Tensor = (norms * first).sum(1) / (norms * counted).sum(1)
        return share_of_texts.mean()

    return torch.stack(backbone.reduce_layers(features, share))
