"""A linear classifier in the pipeline: string labels in, string labels out."""

from __future__ import annotations

from typing import Any

from torch import nn

from ilse_embed.modules import HeadModule


class LinearHead(HeadModule):
    """Logits from the embedding; the embedding itself passes through unchanged and stays usable without the head.

    It has no ``get_embedding_dimension``, so that sentence-transformers reports the encoder's width and not C.

    Shapes:
        features["sentence_embedding"]: (B, m) -> features["logits"]: (B, C)
    """

    __module__ = "ilse_embed"
    config_keys = ["in_features", "labels"]  # noqa: RUF012

    def __init__(self, in_features: int, labels: list[str]) -> None:
        """Set the classes.

        Args:
            in_features: Embedding width m.
            labels: The C class names, in the order of the logits.

        Raises:
            ValueError: If there are fewer than two labels or one occurs twice.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_features = in_features
        self.labels = [str(label) for label in labels]
        if len(labels) < 2 or len(set(self.labels)) != len(labels):
            raise ValueError(f"a classifier needs at least two distinct labels; got {labels}")
        self.linear = nn.Linear(in_features, len(labels))

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add ``logits``."""
        features["logits"] = self.linear(features["sentence_embedding"])
        return features
