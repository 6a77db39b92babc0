"""The main job in one go, on a real language model and the built-in quickstart set: compare, save, reload, use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ilse_embed.artifact import check_target
from ilse_embed.backbone import LayerTransformer
from ilse_embed.evaluation import evaluate
from ilse_embed.extraction import BackboneSource, extract
from ilse_embed.features import LayerTable, fit_scaling
from ilse_embed.methods import best_layer
from ilse_embed.model import IlseSentenceTransformer, build, load
from ilse_embed.recipes import RECIPES, Recipe
from ilse_embed.scoring import layer_features, probe_features, trained_score, untrained_score
from ilse_embed.tasks import Task, load_task
from ilse_embed.training import TrainedHead, train

QUERIES = (
    "My parcel was supposed to be here by now.",
    "A musician gave a concert in the open air.",
    "I would like to stop paying for this every month.",
)
"""What the demo looks up in the end."""

Say = Callable[[str], None]


@dataclass
class Row:
    """A line of the demo's table.

    Attributes:
        recipe: Recipe of features and training.
        method: What turns the layers into an embedding.
        scores: Test score x 100 by task: Spearman of the cosine, or accuracy on the 20 intents.
        parameters: Trained parameters by task, a linear classifier included.
        training_seconds: Seconds of training, or of fitting the classifier, over both tasks.
        extraction_seconds: Seconds that the backbone took for all texts, with this recipe's pooling.
        detail: The layer chosen, for the best single layer.
    """

    recipe: str
    method: str
    extraction_seconds: float
    scores: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    training_seconds: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass
class DemoResult:
    """All that the demo shows.

    Attributes:
        backbone: Name of the backbone.
        rows: The table.
        neighbours: For each query its nearest texts with their cosine, and the predicted intent with its probability.
        models: Folder of each saved model.
        mteb: Test score x 100 that mteb gives the reloaded models.
        seconds: Wall time of each part.
    """

    backbone: str
    rows: list[Row]
    neighbours: list[dict[str, Any]]
    models: dict[str, str]
    mteb: dict[str, float]
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def run_demo(backbone_path: str, output: Path, *, seed: int = 0, say: Say = lambda line: None) -> DemoResult:
    """Extract, train, compare; then save, reload and use the Cayley-Encoder of the recipe ``default``.

    Args:
        backbone_path: Name or folder of the backbone.
        output: Folder for the two models.
        seed: Draws initial weights and batches.
        say: Told what is going on.

    Raises:
        ValueError: If saving would overwrite what is not a model of an earlier demo.
    """
    started = time.perf_counter()
    tasks = [load_task("quickstart-sts"), load_task("quickstart-intents")]
    folders = {task.name: output / task.name.removeprefix("quickstart-") for task in tasks}
    for folder in folders.values():
        check_target(folder)
    texts = [text for task in tasks for text in task.texts()]
    rows: list[Row] = []
    kept: dict[str, TrainedHead] = {}
    extracted: dict[str, tuple[LayerTransformer, LayerTable, float]] = {}
    for recipe in (RECIPES["paper"], RECIPES["default"]):
        if recipe.pooling not in extracted:
            backbone = BackboneSource(backbone_path, recipe.pooling).load()
            say(f"Extracting {backbone.num_layers} layers of {len(texts)} texts (token pooling: {backbone.pooling})")
            before = time.perf_counter()
            extracted[recipe.pooling] = backbone, extract(backbone, texts), time.perf_counter() - before
        backbone, table, seconds = extracted[recipe.pooling]
        say(f"Training on them ({recipe.name} recipe)")
        methods = {method: Row(recipe.name, method, seconds) for method in _METHODS}
        for task in tasks:
            _untrained_rows(methods, task, table, recipe)
            for encoder in ("set", "cayley"):
                trained = train(task, table, encoder, recipe, seed=seed)
                row = methods[f"{encoder.title()}-Encoder"]
                row.scores[task.name] = trained_score(trained, task, table, "test")
                row.parameters[task.name] = trained.parameters
                row.training_seconds += trained.seconds
                kept[task.name] = trained
        rows += methods.values()
    compared = time.perf_counter()

    say("Saving, reloading and using the Cayley-Encoder of the default recipe")
    for name, folder in folders.items():
        build(backbone, **kept[name].parts).cpu().save(str(folder))  # the features are on the CPU too
    models = {name: load(folder) for name, folder in folders.items()}
    scores = {name: 100 * evaluate(models[name], [name], protocol=_PROTOCOL[name])[0].get_score() for name in folders}
    neighbours = _neighbours(models, tasks, table, kept)
    ended = time.perf_counter()
    parts = {"compare": compared - started, "reload_mteb_neighbours": ended - compared, "total": ended - started}
    saved = {name: str(folder) for name, folder in folders.items()}
    return DemoResult(Path(backbone.backbone).name, rows, neighbours, saved, scores, parts)


_METHODS = ("last layer", "best layer", "mean of layers", "Set-Encoder", "Cayley-Encoder")
_PROTOCOL = {"quickstart-sts": "probe", "quickstart-intents": "head"}


def _untrained_rows(methods: dict[str, Row], task: Task, table: LayerTable, recipe: Recipe) -> None:
    """Rows without an encoder: cosine of the features for STS, logistic regression on all training labels else."""
    scaling = fit_scaling(table, task.texts("train")) if recipe.scaling else None
    test, fit = layer_features(task, table, "test", scaling), probe_features(task, table, scaling)
    best = best_layer(task, table, recipe)
    methods["best layer"].detail[task.name] = best
    classifier = 0 if task.kind == "sts" else len(task.labels) * (test[0].shape[-1] + 1)
    for method, pick in {"last layer": -1, "best layer": best, "mean of layers": None}.items():
        before = time.perf_counter()
        parts = [[p.mean(1) if pick is None else p[:, pick] for p in split] for split in (test, fit)]
        methods[method].scores[task.name] = untrained_score(task, "test", *parts)
        methods[method].parameters[task.name] = classifier
        methods[method].training_seconds += time.perf_counter() - before


def _neighbours(
    models: dict[str, IlseSentenceTransformer], tasks: list[Task], table: LayerTable, kept: dict[str, TrainedHead]
) -> list[dict[str, Any]]:
    """The three test texts nearest to each query, by the reloaded model; the texts' own layers are known already."""
    corpus = [text for task in tasks for text in task.texts("test")]
    trained = kept["quickstart-sts"]
    layers = table.select(corpus)
    with torch.inference_mode():
        scaled = layers if trained.scaling is None else trained.scaling.scale_layers(layers)
        embedded = torch.nn.functional.normalize(trained.encoder.encode_layers(scaled), dim=-1)
    queries = torch.from_numpy(models["quickstart-sts"].encode(list(QUERIES)))
    intents = models["quickstart-intents"]
    probabilities = intents.predict_proba(QUERIES)
    found = []
    for query, cosines, row in zip(QUERIES, queries @ embedded.T, probabilities, strict=True):
        nearest = [(corpus[int(place)], round(float(cosines[place]), 3)) for place in cosines.topk(3).indices]
        intent = {"label": intents.labels[row.argmax()], "probability": round(float(row.max()), 3)}
        found.append({"query": query, "nearest": nearest, "intent": intent})
    return found
