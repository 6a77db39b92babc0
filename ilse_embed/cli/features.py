"""Layer features of a task, for the commands that learn from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ilse_embed.cli.options import STORE_DTYPE, backbone_path
from ilse_embed.cli.screen import TokenProgress, console, plain

if TYPE_CHECKING:
    from ilse_embed.backbone import LayerTransformer
    from ilse_embed.features import LayerTable
    from ilse_embed.tasks import Task


def features_of(
    task: Task,
    backbone: str,
    pooling: str,
    *,
    prompt: str | None,
    store: Path | None,
    dtype: str | None,
    compress: int | None,
    check: Callable[[tuple[int, int]], object],
) -> tuple[LayerTransformer, LayerTable]:
    """Load a backbone, and extract what the store does not have of a task's texts.

    Args:
        task: The task.
        backbone: As the option ``--backbone``.
        pooling: Of the recipe.
        prompt: As ``--prompt``.
        store: As ``--store``.
        dtype: As ``--dtype``.
        compress: As ``--compress``.
        check: Called with (layers L, width) before anything is written; what it raises ends all.
    """
    path = backbone_path(backbone)
    from ilse_embed.extraction import BackboneSource, extract, fill
    from ilse_embed.store import FeatureStore
    from ilse_embed.weights import cache_dir

    model = BackboneSource(path, pooling).load()
    check((model.num_layers, compress or model.get_embedding_dimension()))
    root = store or cache_dir() / "features"
    features = FeatureStore.for_backbone(root, model, dtype=dtype or STORE_DTYPE, prompt=prompt, compress=compress)
    console.print(f"Backbone {plain(model.backbone)}: {model.num_layers} layers, pooling {model.pooling}")
    with TokenProgress("Extracting", "texts") as update:
        if compress is not None:  # fitted on training texts alone
            fill(features, model, task.texts("train"), progress=update)
        return model, extract(model, task.texts(), features, progress=update)
