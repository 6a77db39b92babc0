"""The linear classifier of the pipeline."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers.base.modules import Module

from ilse_embed.heads import LinearHead

LABELS = ["refund", "", "Überweisung 💶", "a,b\n"]


def test_logits_beside_the_embedding() -> None:
    head = LinearHead(5, LABELS)
    embedding = torch.randn(3, 5)
    features = head({"sentence_embedding": embedding.clone()})
    assert torch.equal(features["sentence_embedding"], embedding)
    expected = embedding @ head.linear.weight.T + head.linear.bias
    assert features["logits"].shape == (3, 4)
    assert torch.allclose(features["logits"], expected, atol=1e-6)


def test_has_no_embedding_width_of_its_own() -> None:
    """sentence-transformers reports the width of the last module that has one; it must not be the number of classes."""
    assert isinstance(LinearHead(5, LABELS), Module)
    assert not hasattr(LinearHead(5, LABELS), "get_embedding_dimension")


def test_save_and_load(tmp_path: Path) -> None:
    head = LinearHead(5, LABELS)
    head.save(str(tmp_path))
    loaded = LinearHead.load(str(tmp_path))
    assert loaded.labels == LABELS
    embedding = {"sentence_embedding": torch.randn(3, 5)}
    assert torch.equal(loaded(dict(embedding))["logits"], head(dict(embedding))["logits"])
    assert LinearHead.__module__ == "ilse_embed"


def test_labels_keep_their_order_and_become_strings(tmp_path: Path) -> None:
    numbers: list[Any] = [10, 2, 1]  # as a column of a data set may hold them
    head = LinearHead(5, numbers)
    head.save(str(tmp_path))
    assert head.labels == LinearHead.load(str(tmp_path)).labels == ["10", "2", "1"]


def test_stays_float32() -> None:
    assert LinearHead(5, LABELS).to(torch.bfloat16).linear.weight.dtype == torch.float32


@pytest.mark.parametrize("labels", [[], ["one"], ["a", "b", "a"], [1, "1"]])
def test_wrong_labels(labels: list) -> None:
    with pytest.raises(ValueError, match="two distinct labels") as raised:
        LinearHead(5, labels)
    assert str(labels) in str(raised.value)


def test_wrong_width() -> None:
    with pytest.raises(RuntimeError, match="3x6 and 5x4"):
        LinearHead(5, LABELS)({"sentence_embedding": torch.zeros(3, 6)})
