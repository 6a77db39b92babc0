"""Which model it is: a hash of all that its embeddings depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import nn

LOCATION = ("backbone", "backbone_revision", "backbone_facts", "save_backbone", "unpad_inputs")
"""Configuration of a backbone that tells where it is or how fast it runs, not what it computes."""


def model_revision(model: SentenceTransformer) -> str:
    """A hash of all that the embeddings depend on, 12 hexadecimal digits.

    Tensors and configuration of every module behind the backbone, the backbone's pooling, depth, width, weights,
    tokenizer, commit and dtype, and the prompts. It does not depend on a folder or a device.

    Raises:
        ValueError: If the model has cached layers that do not know their backbone.
    """
    backbone, heads = parts_of(model)
    identity = {
        "backbone": [type(backbone).__name__, getattr(backbone, "backbone_facts", None)],
        "commit": getattr(backbone, "backbone_revision", None),
        "dtype": str(getattr(getattr(backbone, "model", None), "dtype", None)),
        "pooling": {key: value for key, value in _config(backbone).items() if key not in LOCATION},
        "prompts": {key: prompt for key, prompt in model.prompts.items() if prompt},
        "encode": [model.default_prompt_name, model.truncate_dim, model.similarity_fn_name],
        "heads": [[type(head).__name__, _config(head), list(_digests(head))] for head in heads],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:12]


def parts_of(model: SentenceTransformer) -> tuple[Any, list[nn.Module]]:
    """The backbone, or whoever stands for it, and the modules whose tensors are hashed.

    Raises:
        ValueError: If the model has cached layers that do not know their backbone.
    """
    first, *heads = model
    backbone = getattr(model, "backbone_module", getattr(first, "backbone_module", first))
    if backbone is None:
        raise ValueError(
            "these cached layers do not know which backbone made them; give CachedLayers a backbone_module"
        )
    return backbone, heads if hasattr(backbone, "backbone_facts") else [first, *heads]


def _config(module: Any) -> dict[str, Any]:
    return dict(module.get_config_dict()) if hasattr(module, "get_config_dict") else {}


def _digests(module: nn.Module) -> Iterator[list[Any]]:
    for key, tensor in module.state_dict().items():
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield [key, str(tensor.dtype), list(tensor.shape), hashlib.sha256(raw.tobytes()).hexdigest()]
