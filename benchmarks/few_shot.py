"""A few texts of each class: accuracy on test and seconds of training, by method and number of texts.

    OMP_NUM_THREADS=1 python -m benchmarks.few_shot smollm2 --task Banking77Classification --data-dir DIR
    OMP_NUM_THREADS=1 python -m benchmarks.few_shot MODEL --task Banking77Classification --data-dir DIR --methods setfit

Everything is chosen on as many validation texts of each class as there are for training. `seconds` is what training
takes: for heads and probes on layer features, whose extraction `extraction_seconds` tells for the training and
validation texts (from the rate over a sample of them); for `setfit` and `lora` every step runs the backbone.
Standardised layers are standardised over the training texts. Rows that are there already are not measured again.

SetFit (Tunstall et al., arXiv 2209.11055) trains a sentence-transformers model, MODEL, by contrast and puts a logistic
regression on it; as in the paper 20 pairs of each kind for each text, one epoch, batches of 16, but at most --max-steps
steps, which each row tells. It needs ``pip install "setfit>=1.1"``, beside this package.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import read_result, this_run, write_result
from ilse_embed.backbone import LayerTransformer
from ilse_embed.extraction import BackboneSource, LayerExtractor, extract
from ilse_embed.features import LayerTable, fit_scaling
from ilse_embed.methods import best_layer
from ilse_embed.recipes import RECIPES, LoraOptions
from ilse_embed.scoring import layer_features, probe_accuracy, trained_score
from ilse_embed.store import FeatureStore
from ilse_embed.tasks import Labelled, Split, Task, few_shot, load_task
from ilse_embed.training import TrainedHead, train
from ilse_embed.weights import cache_dir, smollm2

SHOTS = (1, 2, 4, 8, 16, 32, 64, 128)
RECIPE = RECIPES["default"]
SAMPLE_TEXTS = 128
"""Texts over which the rate of extraction is measured."""


class Bench:
    """One backbone and one task; its layer features, where a method needs them."""

    def __init__(self, folder: str, task: Task, store: Path, max_steps: int) -> None:
        self.folder, self.task, self.store, self.max_steps = folder, task, store, max_steps

    @cached_property
    def backbone(self) -> LayerTransformer:
        """The backbone."""
        return BackboneSource(self.folder, RECIPE.pooling).load()

    @cached_property
    def table(self) -> LayerTable:
        """Layer features of all texts."""
        return extract(self.backbone, self.task.texts(), FeatureStore.for_backbone(self.store, self.backbone))

    @cached_property
    def seconds_per_text(self) -> float:
        """What the extraction of a training text takes, without a store."""
        texts = self.task.texts("train")[:SAMPLE_TEXTS]
        extractor = LayerExtractor(self.backbone)
        extractor(texts[:8])
        started = time.perf_counter()
        extractor(texts)
        return (time.perf_counter() - started) / len(texts)

    def head(self, task: Task, seed: int) -> dict[str, Any]:
        """The Cayley-Encoder and its linear head, trained together."""
        trained = train(task, self.table, "cayley", RECIPE, seed=seed)
        return _told(trained, task, self.table)

    def probe(self, task: Task, layers: str, standardised: bool) -> dict[str, Any]:
        """Logistic regression on the last layer, the best one on validation, or the mean of all layers."""
        started = time.perf_counter()
        scaling = fit_scaling(self.table, task.texts("train")) if standardised else None
        told: dict[str, Any] = {}
        if layers == "best":
            told["layer"] = best_layer(task, self.table, RECIPE.replace(scaling=standardised))

        def pick(split: Split) -> torch.Tensor:
            (features,) = layer_features(task, self.table, split, scaling)
            return features.mean(1) if layers == "mean" else features[:, told.get("layer", -1)]

        labelled, tested = task.splits["train"], task.splits["test"]
        assert isinstance(labelled, Labelled) and isinstance(tested, Labelled)
        known = pick("train")
        prepared = time.perf_counter() - started
        asked = pick("test")  # no part of the training
        started = time.perf_counter()
        accuracy = probe_accuracy(known, labelled.labels, asked, tested.labels)
        return {"test": accuracy, "seconds": prepared + time.perf_counter() - started} | told

    def lora(self, task: Task, seed: int) -> dict[str, Any]:
        """An adapter of the backbone, with a linear head."""
        from ilse_embed.lora import LoraTransformer, train_lora

        options = LoraOptions()
        backbone = LoraTransformer(self.folder, pooling=RECIPE.pooling, adapter=options.adapter)
        trained = train_lora(task, backbone, options, RECIPE, seed=seed)
        return _told(trained, task, extract(backbone, task.texts("test")))

    def setfit(self, task: Task, seed: int) -> dict[str, Any]:
        """SetFit on the backbone as a sentence-transformers model."""
        from datasets.arrow_dataset import Dataset
        from setfit import SetFitModel, Trainer, TrainingArguments

        labelled, tested = task.splits["train"], task.splits["test"]
        assert isinstance(labelled, Labelled) and isinstance(tested, Labelled)
        columns = {"text": labelled.texts, "label": task.numbers(labelled.labels).tolist()}
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (SetFit shuffles its pairs with it)
        model = SetFitModel.from_pretrained(self.folder)
        started = time.perf_counter()
        steps = min(-(-2 * 20 * len(labelled) // 16), self.max_steps)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                batch_size=16,
                num_epochs=1,
                num_iterations=20,
                max_steps=steps,
                seed=seed,
                save_strategy="no",
                report_to="none",
                show_progress_bar=False,
            )
            Trainer(model=model, args=arguments, train_dataset=Dataset.from_dict(columns)).train()
        seconds = time.perf_counter() - started
        predicted = model.predict(tested.texts, as_numpy=True)
        accuracy = 100 * float(np.mean(np.asarray(predicted) == task.numbers(tested.labels)))
        return {"test": accuracy, "seconds": seconds, "steps": steps}


def _told(trained: TrainedHead, task: Task, table: LayerTable) -> dict[str, Any]:
    told = {"validation": round(trained.validation, 2), "epochs": trained.epochs, "parameters": trained.parameters}
    return {"test": trained_score(trained, task, table, "test"), "seconds": trained.seconds} | told


METHODS: dict[str, Callable[[Bench, Task, int], dict[str, Any]]] = {
    "cayley": Bench.head,
    "last layer": lambda bench, task, seed: bench.probe(task, "last", standardised=False),
    "last layer, standardised": lambda bench, task, seed: bench.probe(task, "last", standardised=True),
    "best layer, standardised": lambda bench, task, seed: bench.probe(task, "best", standardised=True),
    "mean of standardised layers": lambda bench, task, seed: bench.probe(task, "mean", standardised=True),
    "lora": Bench.lora,
    "setfit": Bench.setfit,
}
RUN_THE_BACKBONE = ("lora", "setfit")
"""Methods without layer features; measured only if they are named."""


def main() -> None:
    """Measure the curve of one task, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbone", help='folder or hub name, or "smollm2"')
    parser.add_argument("--task", required=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--store", type=Path, default=cache_dir() / "features")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: those on layer features")
    parser.add_argument("--shots", nargs="+", type=int, default=list(SHOTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=2000, help="most steps of SetFit")
    parser.add_argument("--test-texts", type=int, help="only so many test texts, for a trial")
    arguments = parser.parse_args()
    folder = str(smollm2()) if arguments.backbone == "smollm2" else arguments.backbone
    torch.set_num_threads(1)
    task = load_task(arguments.task, arguments.data_dir)
    tested = task.splits["test"]
    if arguments.test_texts is not None:
        rows = np.random.default_rng(0).permutation(len(tested))[: arguments.test_texts]
        task = Task(**{**vars(task), "splits": {**task.splits, "test": tested.select(sorted(rows.tolist()))}})
    bench = Bench(folder, task, arguments.store, arguments.max_steps)
    name = f"few-shot-{Path(folder).name}-{task.name}"
    rows = read_result(name).get("rows", [])
    for shots in arguments.shots:
        for method in arguments.methods or [method for method in METHODS if method not in RUN_THE_BACKBONE]:
            for seed in range(arguments.seeds):
                key = {"method": method, "shots": shots, "seed": seed, "test_texts": len(task.splits["test"])}
                if method == "setfit":
                    key["max_steps"] = arguments.max_steps
                elif method in ("cayley", "lora"):
                    key["recipe"] = RECIPE.digest
                if any(key.items() <= row.items() for row in rows):
                    continue
                few = few_shot(task, shots, seed)
                texts = {f"{split}_texts": len(few.splits[split]) for split in ("train", "validation")}
                measured = METHODS[method](bench, few, seed)
                if method not in RUN_THE_BACKBONE:
                    measured["extraction_seconds"] = bench.seconds_per_text * sum(texts.values())
                rounded = {k: round(value, 2) if isinstance(value, float) else value for k, value in measured.items()}
                rows.append(key | texts | rounded | {"run": this_run()})
                print({k: value for k, value in rows[-1].items() if k != "run"}, flush=True)
                content = {"backbone": Path(folder).name, "task": task.name, "recipe": RECIPE.name, "rows": rows}
                write_result(name, content)
    print_curve(rows)


def print_curve(rows: list[dict[str, Any]]) -> None:
    """Mean and standard deviation of the accuracy, and mean seconds, by method and shots."""
    for method, tested in sorted({(row["method"], row["test_texts"]) for row in rows}):
        print(f"{method}, {tested} test texts")
        mine = [row for row in rows if (row["method"], row["test_texts"]) == (method, tested)]
        for shots in sorted({row["shots"] for row in mine}):
            runs = [row for row in mine if row["shots"] == shots]
            accuracy, seconds = [row["test"] for row in runs], statistics.mean(row["seconds"] for row in runs)
            spread = f" ± {statistics.stdev(accuracy):.2f}" if len(runs) > 1 else ""
            print(f"  {shots:4} of each class: {statistics.mean(accuracy):6.2f}{spread}, {seconds:.1f} s")


if __name__ == "__main__":
    main()
