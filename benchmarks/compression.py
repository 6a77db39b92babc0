"""What it costs to store features in fewer bytes: dtypes, and compression to r directions.

    OMP_NUM_THREADS=1 python -m benchmarks.compression smollm2 --task STSBenchmark --data-dir DIR

Each encoder of the recipe `default` is trained on each form of the features, one seed; scores x 100 on validation and
test, as the training task measures them (Spearman of the cosine, or accuracy of the linear head). The forms are made
from one extraction in float32, by the code of the store.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import this_run, write_result
from ilse_embed.extraction import SAMPLE_SHARDS, SHARD_TEXTS, BackboneSource, extract
from ilse_embed.features import LayerTable
from ilse_embed.recipes import RECIPES
from ilse_embed.scoring import trained_score
from ilse_embed.store import FeatureStore
from ilse_embed.tasks import load_task
from ilse_embed.training import train
from ilse_embed.weights import cache_dir, smollm2

FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "r = 256": {"compress": 256},
    "r = 128": {"compress": 128},
    "r = 64": {"compress": 64},
}


def packed(whole: LayerTable, store: FeatureStore, texts: list[str]) -> LayerTable:
    """The features as this store keeps them, without running the backbone again."""
    layers = whole.select(texts)
    if store.facts["compress"] is not None and store.basis is None:
        store.fit_basis(layers[: SAMPLE_SHARDS * SHARD_TEXTS])
    rows = {text: row for row, text in enumerate(texts)}
    parts = [store.pack(part).float() for part in layers.split(SHARD_TEXTS)]
    return LayerTable(rows, torch.cat(parts), "made up", store.basis)


def main() -> None:
    """Train on each form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbone", help='folder or hub name, or "smollm2"')
    parser.add_argument("--task", default="STSBenchmark")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--store", type=Path, default=cache_dir() / "features")
    parser.add_argument("--encoders", nargs="+", default=["set", "cayley"])
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    arguments = parser.parse_args()
    folder = str(smollm2()) if arguments.backbone == "smollm2" else arguments.backbone
    task, recipe = load_task(arguments.task, arguments.data_dir), RECIPES["default"]
    backbone = BackboneSource(folder, pooling=recipe.pooling).load()
    texts = task.texts()
    whole = extract(backbone, texts, FeatureStore.for_backbone(arguments.store, backbone))
    rows: list[dict[str, Any]] = []
    for form in arguments.forms:
        with tempfile.TemporaryDirectory() as root:
            store = FeatureStore.for_backbone(Path(root), backbone, **FORMS[form])
            table = packed(whole, store, texts)
        for encoder in arguments.encoders:
            trained = train(task, table, encoder, recipe, seed=0)
            rows.append(
                {
                    "form": form,
                    "encoder": encoder,
                    "bytes_per_text": store.bytes_for(1),
                    "validation": round(trained.validation, 2),
                    "test": round(trained_score(trained, task, table, "test"), 2),
                    "training_seconds": round(trained.seconds, 1),
                    "epochs": trained.epochs,
                    "seconds_per_epoch": round(trained.seconds / trained.epochs, 2),
                    "seed": 0,
                }
            )
            print(rows[-1], flush=True)
            name = f"compression-{Path(folder).name}-{task.name}"
            path = write_result(name, {"run": this_run(), "task": task.name, "recipe": recipe.name, "rows": rows})
    print(path)


if __name__ == "__main__":
    main()
