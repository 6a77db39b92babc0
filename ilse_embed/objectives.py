"""What a head is trained for: losses, and the score on the validation split.

Letters: ``B`` texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from datasets.arrow_dataset import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import BaseEvaluator, EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import AnglELoss, CoSENTLoss, CosineSimilarityLoss
from torch import Tensor, nn

from ilse_embed.heads import LinearHead
from ilse_embed.recipes import Recipe
from ilse_embed.tasks import Labelled, Pairs, Task
from ilse_embed.tokens import valid_unicode


def objective(model: SentenceTransformer, task: Task, recipe: Recipe) -> tuple[Dataset, nn.Module, BaseEvaluator, str]:
    """What a task trains on and is judged by: dataset, loss, evaluator and the name of its metric.

    Raises:
        ValueError: If the task is neither a classification task nor an STS task with a score range.
    """
    train_split, validation = task.splits["train"], task.splits["validation"]
    if isinstance(train_split, Labelled) and isinstance(validation, Labelled):
        numbers = task.numbers(train_split.labels).tolist()
        columns = {"text": list(map(valid_unicode, train_split.texts)), "label": numbers}
        accuracy = AccuracyEvaluator(validation, "validation", 4 * recipe.batch_size)
        return Dataset.from_dict(columns), ClassificationLoss(model), accuracy, "eval_validation_accuracy"
    if not (isinstance(train_split, Pairs) and isinstance(validation, Pairs) and task.score_range is not None):
        raise ValueError(f"{task.name} is neither a classification task nor an STS task with a score range")
    low, high = task.score_range
    scores = train_split.scores
    loss: nn.Module
    if recipe.sts_loss == "mse_score_range":
        loss = CosineSimilarityLoss(model, cos_score_transformation=CosineToScore(low, high))
    else:
        scores = (scores - low) / (high - low)
        loss = LOSSES[recipe.sts_loss](model)
    first, second = (list(map(valid_unicode, column)) for column in (train_split.sentence1, train_split.sentence2))
    columns = {"sentence1": first, "sentence2": second, "score": scores.tolist()}
    evaluator = EmbeddingSimilarityEvaluator(
        validation.sentence1,
        validation.sentence2,
        validation.scores.tolist(),
        batch_size=4 * recipe.batch_size,  # without gradients it takes less memory than a step of training
        name="validation",
        similarity_fn_names=["cosine"],
        write_csv=False,
    )
    return Dataset.from_dict(columns), loss, evaluator, "eval_validation_spearman_cosine"


class CosineToScore(nn.Module):
    """Map a cosine in [-1, 1] linearly to the score range, as the authors' objective does."""

    def __init__(self, low: float, high: float) -> None:
        """Set the score range."""
        super().__init__()
        self.low, self.high = low, high

    def forward(self, cosine: Tensor) -> Tensor:
        """Map.

        Shapes:
            cosine: (B,) -> (B,)
        """
        return self.low + (cosine + 1) / 2 * (self.high - self.low)


class CorrelationLoss(nn.Module):
    """1 - Pearson's correlation of the cosines of a batch with its scores: what STS asks for, but for the ranks.

    Unlike an MSE it leaves the mean and the spread of the cosines free.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        """Keep the model; the trainer optimises its parameters through the loss."""
        super().__init__()
        self.model = model

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        """Loss of a batch; 1 where all scores are equal.

        Shapes:
            labels: (B,) scores -> scalar
        """
        first, second = (self.model(features)["sentence_embedding"] for features in sentence_features)
        cosines = torch.cosine_similarity(first, second)
        return 1 - torch.cosine_similarity(cosines - cosines.mean(), labels - labels.mean(), dim=0)


LOSSES = {"pearson": CorrelationLoss, "cosent": CoSENTLoss, "angle": AnglELoss, "mse": CosineSimilarityLoss}
"""Losses on pairs whose scores are scaled to 0..1."""


class ClassificationLoss(nn.Module):
    """Cross-entropy on the logits of the pipeline's `LinearHead`.

    The classifier belongs to the model and not to the loss, for parameters of a loss are trained but never saved.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        """Keep the model; the trainer optimises its parameters through the loss."""
        super().__init__()
        self.model = model

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor) -> Tensor:
        """Loss of a batch.

        Shapes:
            labels: (B,) class numbers -> scalar
        """
        (features,) = sentence_features
        return nn.functional.cross_entropy(self.model(features)["logits"], labels)


class AccuracyEvaluator(BaseEvaluator):
    """Accuracy of the linear head on labelled texts."""

    def __init__(self, data: Labelled, name: str, batch_size: int = 256) -> None:
        """Keep the data.

        Args:
            data: Texts and their labels.
            name: Prefix of the metric.
            batch_size: Texts that are run at once.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.data, self.name, self.batch_size = data, name, batch_size
        self.primary_metric = f"{name}_accuracy"

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Predict and compare."""
        head = next(module for module in model if isinstance(module, LinearHead))
        logits = torch.stack(model.encode(self.data.texts, output_value="logits", batch_size=self.batch_size))
        predicted = [head.labels[column] for column in logits.argmax(-1)]
        right = [one == label for one, label in zip(predicted, self.data.labels, strict=True)]
        return {f"{self.name}_accuracy": float(np.mean(right))}
