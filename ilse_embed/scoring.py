"""Scores of embeddings and of single layers without the harness: for choosing on validation and for quick tables."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import paired_cosine_distances
from threadpoolctl import threadpool_limits
from torch import Tensor

from ilse_embed.features import LayerTable
from ilse_embed.scaling import LayerScaling
from ilse_embed.tasks import Labelled, Pairs, Split, Task
from ilse_embed.training import TrainedHead

BATCH_TEXTS = 1024
"""Texts that an encoder takes at once; a graph's nodes take several times the memory of the layers."""


def cosines(left: Tensor, right: Tensor) -> NDArray[np.float32]:
    """Cosine of each pair as mteb takes it: 1 for two embeddings of zeros, 0.5 for one.

    Shapes:
        left, right: (n, m) -> (n,)
    """
    return 1 - np.asarray(paired_cosine_distances(left.numpy(), right.numpy()), dtype=np.float32)


def sts_score(left: Tensor, right: Tensor, scores: NDArray[np.float64]) -> float:
    """Spearman correlation x 100 of cosine and gold score.

    Shapes:
        left, right: (n, m), scores: (n,) -> scalar
    """
    return 100 * float(spearmanr(cosines(left, right), scores).statistic)


def probe_accuracy(train: Tensor, train_labels: Sequence[str], test: Tensor, test_labels: Sequence[str]) -> float:
    """Accuracy x 100 of logistic regression with mteb's settings, on all training texts.

    Shapes:
        train: (n, m), test: (k, m) -> scalar
    """
    probe: Any = LogisticRegression(max_iter=100, random_state=42)
    # The matrices are small: two threads of BLAS on a raw layer took 40 times as long as one.
    with warnings.catch_warnings(), threadpool_limits(1, user_api="blas"):
        warnings.simplefilter("ignore", ConvergenceWarning)  # mteb stops after 100 iterations too
        probe.fit(train.numpy(), np.array(train_labels))
    return 100 * float(np.mean(probe.predict(test.numpy()) == np.array(test_labels)))


def layer_features(task: Task, table: LayerTable, split: Split, scaling: LayerScaling | None) -> list[Tensor]:
    """Scaled layer features of a split: one (n, L, d) for texts, two for pairs.

    Shapes:
        -> (n, L, d), once or twice
    """
    data = task.splits[split]
    columns = [data.texts] if isinstance(data, Labelled) else [data.sentence1, data.sentence2]
    selected = [table.select(column) for column in columns]
    return [layers if scaling is None else scaling.scale_layers(layers) for layers in selected]


def probe_features(task: Task, table: LayerTable, scaling: LayerScaling | None) -> list[Tensor]:
    """What `untrained_score` fits a probe on: scaled layer features of the training texts, nothing for STS.

    Shapes:
        -> (k, L, d), once or not at all
    """
    return [] if task.kind == "sts" else layer_features(task, table, "train", scaling)


def untrained_score(task: Task, split: Split, evaluated: Sequence[Tensor], train: Sequence[Tensor]) -> float:
    """Score x 100 of embeddings that were not trained: cosine for STS, a probe on all training labels else.

    Shapes:
        evaluated: (n, m) once or twice, train: (k, m), not read for STS -> scalar
    """
    data = task.splits[split]
    if isinstance(data, Pairs):
        return sts_score(evaluated[0], evaluated[1], data.scores)
    train_data = task.splits["train"]
    assert isinstance(train_data, Labelled)
    return probe_accuracy(train[0], train_data.labels, evaluated[0], data.labels)


def layer_scores(task: Task, table: LayerTable, split: Split, scaling: LayerScaling | None) -> list[float]:
    """Score x 100 of each single layer, untrained; the best one is chosen on the validation split, never on test."""
    evaluated = layer_features(task, table, split, scaling)
    train = probe_features(task, table, scaling)
    return [
        untrained_score(task, split, [part[:, layer] for part in evaluated], [part[:, layer] for part in train])
        for layer in range(evaluated[0].shape[1])
    ]


def outcomes(trained: TrainedHead, task: Task, table: LayerTable, split: Split) -> NDArray[Any]:
    """What a trained head says of each example: the cosine of a pair, or the number of a text's predicted label.

    Labels are numbered as the task has them, whatever the head's order; one that the task does not have is -1.

    Shapes:
        -> (n,)
    """
    trained.encoder.eval()
    with torch.inference_mode():
        parts = [
            torch.cat([trained.encoder.encode_layers(some) for some in torch.split(layers, BATCH_TEXTS)])
            for layers in layer_features(task, table, split, trained.scaling)
        ]
        if trained.head is None:
            return cosines(parts[0], parts[1])
        return np.asarray(task.numbers(trained.head.labels)[trained.head.linear(parts[0]).argmax(-1).numpy()])


def outcome_score(said: NDArray[Any], task: Task, split: Split) -> float:
    """Score x 100 of what `outcomes` gives: Spearman correlation of cosine and gold score, or accuracy.

    Shapes:
        said: (n,) -> scalar
    """
    data = task.splits[split]
    if isinstance(data, Pairs):
        return 100 * float(spearmanr(said, data.scores).statistic)
    return 100 * float(np.mean(said == task.numbers(data.labels)))


def trained_score(trained: TrainedHead, task: Task, table: LayerTable, split: Split) -> float:
    """Score x 100 of a trained head: cosine for STS, accuracy of the linear head for classification."""
    return outcome_score(outcomes(trained, task, table, split), task, split)
