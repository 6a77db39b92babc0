"""STSBenchmark and Banking77 with one backbone: every method in both recipes, and what each part of the recipe brings.

    python -m benchmarks.quality smollm2 --task STSBenchmark --data-dir DIR

Layers are extracted once for each token pooling. Scores are mteb's, on test; everything is chosen on validation.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import read_result, this_run, write_result
from ilse_embed.backbone import LayerTransformer
from ilse_embed.encoders import LayerEncoder, build_encoder
from ilse_embed.evaluation import evaluate, local_tasks
from ilse_embed.extraction import BackboneSource, extract
from ilse_embed.features import CachedLayers, LayerTable, fit_scaling
from ilse_embed.heads import LinearHead
from ilse_embed.model import build
from ilse_embed.recipes import RECIPES, Recipe
from ilse_embed.scaling import LayerScaling
from ilse_embed.scoring import layer_scores
from ilse_embed.store import FeatureStore
from ilse_embed.tasks import Task, load_task
from ilse_embed.training import train
from ilse_embed.weights import cache_dir, smollm2

PARTS: dict[str, dict[str, Any]] = {
    "sink-aware pooling": {"pooling": "sink_aware"},
    "standardised layers": {"scaling": True},
    "path past the message passing, no rho": {"residual": True, "post": 0},
    "dropout 0.4, AdamW, linear schedule": {
        "dropout": 0.4,
        "optimizer": "adamw",
        "weight_decay": 0.01,
        "schedule": "linear",
        "epochs": 30,
        "patience": 6,
    },
    "CoSENT": {"sts_loss": "cosent"},
}
"""What turns the recipe ``paper`` into ``default``, in this order."""

UNTRAINED = {"last layer": "layer", "best layer": "layer", "mean of layers": "mean"}
"""Methods without training and their encoders."""


class Bench:
    """One backbone and one task: tables of layer features by pooling, and scores."""

    def __init__(self, folder: str, task: Task, data_dir: Path | None, store: Path) -> None:
        self.folder, self.task, self.data_dir, self.store = folder, task, data_dir, store
        self.tables: dict[str, tuple[LayerTransformer, LayerTable]] = {}
        self.name = f"quality-{Path(folder).name}-{task.name}"
        earlier = read_result(self.name)
        inherited = {"run": earlier["run"]} if "run" in earlier else {}  # once told for all rows of a file
        self.rows: list[dict[str, Any]] = [inherited | row for row in earlier.get("rows", [])]
        self.mteb_task = local_tasks([task.name], data_dir)[0]

    def table(self, pooling: str) -> tuple[LayerTransformer, LayerTable]:
        """Backbone and layer features; one at a time in memory."""
        if pooling not in self.tables:
            backbone = BackboneSource(self.folder, pooling).load()
            features = extract(backbone, self.task.texts(), FeatureStore.for_backbone(self.store, backbone))
            self.tables = {pooling: (backbone, features)}
        return self.tables[pooling]

    def score(
        self, pooling: str, encoder: LayerEncoder, scaling: LayerScaling | None, head: LinearHead | None
    ) -> dict[str, float]:
        """Score x 100 by protocol."""
        backbone, table = self.table(pooling)
        model = build(CachedLayers(table, backbone), encoder, scaling, head)
        protocols = ["probe"] if head is None else ["probe", "head"]
        return {
            protocol: round(
                float(100 * evaluate(model, [self.mteb_task], self.data_dir, protocol=protocol)[0].get_score()), 2
            )
            for protocol in protocols
        }

    def known(self, group: str, recipe: Recipe, method: str) -> dict[str, Any] | None:
        """The row, if an earlier run measured it."""
        key = (group, recipe.name, method)
        return next((row for row in self.rows if (row["group"], row["recipe"], row["method"]) == key), None)

    def note(self, earlier: dict[str, Any] | None = None, **row: Any) -> None:
        """Keep a row, in place of an earlier one, and write all of them, so that nothing is lost."""
        if earlier is None:
            self.rows.append(row | {"run": this_run()})
        else:
            earlier |= row
        print(row, flush=True)
        write_result(self.name, {"backbone": Path(self.folder).name, "task": self.task.name, "rows": self.rows})

    def trained(self, encoder: str, recipe: Recipe, seeds: int, group: str, name: str = "", **arguments: Any) -> None:
        """Train with the seeds that an earlier run did not; after each, note all scores, mean and spread.

        A seed that was added to the row of an earlier run names its own.
        """
        method = name or encoder
        extended = self.known(group, recipe, method)
        for seed in range(seeds):
            row = self.known(group, recipe, method)
            runs = list(row["runs"]) if row else []
            if any(run["seed"] == seed for run in runs):
                continue
            _, table = self.table(recipe.pooling)
            trained = train(self.task, table, encoder, recipe, seed=seed, encoder_args=arguments)
            scores = self.score(recipe.pooling, trained.encoder, trained.scaling, trained.head)
            run = {"seed": seed, "validation": round(trained.validation, 2), "epochs": trained.epochs} | scores
            runs.append(run | {"seconds": round(trained.seconds, 1)} | ({"run": this_run()} if extended else {}))
            columns = {key: [one[key] for one in runs] for key in scores}
            self.note(
                row,
                group=group,
                recipe=recipe.name,
                method=method,
                **arguments,
                parameters=trained.parameters,
                mean={key: round(statistics.mean(column), 2) for key, column in columns.items()},
                spread={key: round(statistics.stdev(column), 2) for key, column in columns.items()}
                if len(runs) > 1
                else None,
                runs=runs,
            )

    def untrained(self, recipe: Recipe) -> None:
        """Last layer, best layer (chosen on validation) and mean of layers."""
        groups = ["methods"]
        if self.task.kind == "classification":
            groups.append("linear head on untrained features")
        if all(self.known(group, recipe, method) for group in groups for method in UNTRAINED):
            return
        _, table = self.table(recipe.pooling)
        shape = table.layers.shape[1:]
        scaling = fit_scaling(table, self.task.texts("train")) if recipe.scaling else None
        validation = layer_scores(self.task, table, "validation", scaling)
        best = max(range(len(validation)), key=validation.__getitem__)
        for method, encoder in UNTRAINED.items():
            arguments = {"layer": best} if method == "best layer" else {}
            if not self.known("methods", recipe, method):
                scores = self.score(recipe.pooling, build_encoder(encoder, *shape, **arguments), scaling, None)
                self.note(group="methods", recipe=recipe.name, method=method, **arguments, parameters=0, mean=scores)
            for group in groups[1:]:
                self.trained(encoder, recipe, 1, group, method, **arguments)


def main() -> None:
    """Measure one task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backbone", help='folder or hub name, or "smollm2"')
    parser.add_argument("--task", required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--store", type=Path, default=cache_dir() / "features")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    folder = str(smollm2()) if arguments.backbone == "smollm2" else arguments.backbone
    bench = Bench(folder, load_task(arguments.task, arguments.data_dir), arguments.data_dir, arguments.store)
    torch.set_num_threads(1)
    default, paper = RECIPES["default"], RECIPES["paper"]
    for recipe in (default, paper):
        bench.trained("set", recipe, arguments.seeds, "methods")
        bench.untrained(recipe)
        bench.trained("cayley", recipe, arguments.seeds, "methods")
    parts = {name: part for name, part in PARTS.items() if bench.task.kind == "sts" or name != "CoSENT"}
    # The Set-Encoder shows what features and training bring in a third of the Cayley-Encoder's time.
    for name, part in reversed(parts.items()):
        without = default.replace(**{key: getattr(paper, key) for key in part}, name=f"default - {name}")
        bench.trained("set", without, 1, "one part left out of default")
    for name, part in parts.items():
        bench.trained("set", paper.replace(**part, name=f"paper + {name}"), 1, "one part added to paper")


if __name__ == "__main__":
    main()
