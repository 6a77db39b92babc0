"""A task and its layer features, for the commands that learn from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ilse_embed.cli.options import backbone_path
from ilse_embed.cli.screen import TokenProgress, console, plain

if TYPE_CHECKING:
    from ilse_embed.backbone import LayerTransformer
    from ilse_embed.features import LayerTable
    from ilse_embed.tasks import Task


def task_and_features(
    task: str,
    backbone: str,
    pooling: str,
    *,
    data_dir: Path | None,
    prompt: str | None,
    store: Path | None,
    dtype: str,
    compress: int | None,
    check: Callable[[Task, tuple[int, int]], object],
) -> tuple[Task, LayerTransformer, LayerTable]:
    """Load a task and a backbone, and extract what the store does not have.

    Args:
        task: As the option ``--task``.
        backbone: As ``--backbone``.
        pooling: Of the recipe.
        data_dir: As ``--data-dir``.
        prompt: As ``--prompt``.
        store: As ``--store``.
        dtype: As ``--dtype``.
        compress: As ``--compress``.
        check: Called with the task and (layers L, width) before anything is written; what it raises ends all.
    """
    path = backbone_path(backbone)
    from ilse_embed.extraction import BackboneSource, extract, fill
    from ilse_embed.store import FeatureStore
    from ilse_embed.tasks import load_task
    from ilse_embed.weights import cache_dir

    data = load_task(task, data_dir)
    model = BackboneSource(path, pooling).load()
    check(data, (model.num_layers, compress or model.get_embedding_dimension()))
    root = store or cache_dir() / "features"
    features = FeatureStore.for_backbone(root, model, dtype=dtype, prompt=prompt, compress=compress)
    console.print(f"Backbone {plain(model.backbone)}: {model.num_layers} layers, pooling {model.pooling}")
    with TokenProgress("Extracting", "texts") as update:
        if compress is not None:  # fitted on training texts alone
            fill(features, model, data.texts("train"), progress=update)
        return data, model, extract(model, data.texts(), features, progress=update)
