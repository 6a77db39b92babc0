"""Scores without the harness, against scipy, scikit-learn and a pencil."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression

from ilse_embed import LayerScaling, LinearHead, build_encoder, scoring
from ilse_embed.features import LayerTable
from ilse_embed.scoring import (
    layer_features,
    layer_scores,
    probe_accuracy,
    probe_features,
    sts_score,
    trained_score,
    untrained_score,
)
from ilse_embed.tasks import Labelled, Pairs, Task
from ilse_embed.training import TrainedHead

LABELS = ["ja", "nein\n", "vielleicht 🤷"]


def sts_task() -> tuple[Task, LayerTable]:
    """Four layers; on validation layer 2 follows the score, on test layer 0 does."""
    draw = torch.Generator().manual_seed(0)
    angles = torch.rand(60, generator=draw) * torch.pi
    left = torch.tensor([1.0, 0.0]).expand(60, 4, 2).clone()
    right = torch.randn(60, 4, 2, generator=draw)
    for rows, layer in ((slice(0, 40), 2), (slice(40, 60), 0)):
        right[rows, layer] = torch.stack([angles[rows].cos(), angles[rows].sin()], -1)
    texts = [f"text {i}" for i in range(120)]
    pairs = Pairs(texts[:60], texts[60:], angles.cos().double().numpy())
    rows = {"train": range(20), "validation": range(20, 40), "test": range(40, 60)}
    splits = {name: pairs.select(chosen) for name, chosen in rows.items()}
    task = Task("toy-sts", "sts", splits, (-1.0, 1.0), "made up")
    return task, LayerTable({text: row for row, text in enumerate(texts)}, torch.cat([left, right]))


def intents_task() -> tuple[Task, LayerTable]:
    """Four layers; the class is in layer 3 of all splits, and on test in layer 1 even more clearly."""
    draw = torch.Generator().manual_seed(1)
    classes = torch.arange(90) % 3
    layers = torch.randn(90, 4, 5, generator=draw)
    layers[:, 3, :3] += 3 * torch.eye(3)[classes]
    layers[60:, 1, :3] += 9 * torch.eye(3)[classes[60:]]
    texts = [f"text {i}" for i in range(90)]
    data = Labelled(texts, [LABELS[number] for number in classes])
    rows = {"train": range(30), "validation": range(30, 60), "test": range(60, 90)}
    task = Task("toy", "classification", {name: data.select(chosen) for name, chosen in rows.items()}, None, "made up")
    return task, LayerTable({text: row for row, text in enumerate(texts)}, layers)


@pytest.mark.parametrize(
    ("left", "right", "gold", "score"),
    [
        ([[1, 0]] * 3, [[1, 0], [1, 1], [0, 1]], [5, 3, 0], 100),
        ([[1, 0]] * 3, [[1, 0], [1, 1], [0, 1]], [0, 3, 5], -100),
        ([[1, 0]] * 3, [[9, 0], [1, 1], [0, 0.1]], [5, 3, 0], 100),  # lengths do not matter
        ([[1, 0]] * 3, [[1, 0], [1, 1], [0, 1]], [3, 5, 0], 50),  # ranks 3 2 1 and 2 3 1: 1 - 6 * 2 / (3 * 8)
        ([[1, 0]] * 3, [[1, 0], [1, 1], [0, 1]], [1, 1, 0], 86.6025),  # ties
        ([[0, 0], [1, 0], [1, 0]], [[0, 0], [0, 0], [0, 1]], [5, 3, 0], 100),  # mteb's 1, 0.5 and 0, of zeros
    ],
)
def test_sts_score_by_hand(left: Any, right: Any, gold: Any, score: float) -> None:
    found = sts_score(torch.tensor(left).float(), torch.tensor(right).float(), np.array(gold, dtype=np.float64))
    assert found == pytest.approx(score, abs=1e-3)


def test_sts_score_is_scipys(rng: np.random.Generator) -> None:
    left, right, gold = rng.normal(size=(50, 7)), rng.normal(size=(50, 7)), rng.integers(0, 6, 50).astype(np.float64)
    cosine = (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
    wanted = 100 * spearmanr(cosine, gold).statistic
    assert sts_score(*(torch.tensor(x).float() for x in (left, right)), gold) == pytest.approx(wanted, abs=1e-3)


def test_probe_is_scikit_learns(rng: np.random.Generator) -> None:
    features, labels = rng.normal(size=(120, 6)).astype(np.float32), [LABELS[i] for i in rng.integers(0, 3, 120)]
    features[:, 0] += np.array([LABELS.index(label) for label in labels])
    probe = LogisticRegression(max_iter=100, random_state=42).fit(features[:80], labels[:80])
    wanted = 100 * probe.score(features[80:], labels[80:])
    found = probe_accuracy(
        *(x for part in (slice(80), slice(80, 120)) for x in (torch.tensor(features[part]), labels[part]))
    )
    assert found == pytest.approx(wanted) and 40 < found < 100
    assert probe_accuracy(torch.eye(3), LABELS, torch.eye(3)[[1, 1, 0]], [LABELS[1], LABELS[0], LABELS[0]]) == (
        pytest.approx(200 / 3)
    )


@pytest.mark.parametrize("scaled", [False, True])
def test_layer_features(scaled: bool) -> None:
    for (task, table), parts in ((sts_task(), 2), (intents_task(), 1)):
        scaling = LayerScaling.fit(table.layers) if scaled else None
        found = layer_features(task, table, "test", scaling)
        data = task.splits["test"]
        columns = [data.texts] if isinstance(data, Labelled) else [data.sentence1, data.sentence2]
        wanted = [table.select(column) for column in columns]
        if scaled:
            wanted = [
                (part - table.layers.mean(0)) / table.layers.std(0, unbiased=False).clamp(min=1e-9) for part in wanted
            ]
            constant = table.layers.std(0) == 0
            wanted = [part.masked_fill(constant, 0.0) for part in wanted]
        assert len(found) == parts
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("make", "on_validation", "on_test"), [(sts_task, 2, 0), (intents_task, 3, 1)])
def test_the_best_layer(make: Any, on_validation: int, on_test: int) -> None:
    """Each split has its own best layer; what is chosen on validation is not what test would choose."""
    task, table = make()
    validation, test = (layer_scores(task, table, split, None) for split in ("validation", "test"))
    assert len(validation) == len(test) == 4
    assert int(np.argmax(validation)) == on_validation and validation[on_validation] > 85
    if task.kind == "sts":
        assert int(np.argmax(test)) == on_test and validation[on_validation] == pytest.approx(100)
    (splits := dict(task.splits)).pop("test")
    assert (
        layer_scores(Task(task.name, task.kind, splits, task.score_range, ""), table, "validation", None) == validation
    )


@pytest.mark.parametrize("scaled", [False, True])
def test_sts_needs_no_training_split(scaled: bool) -> None:
    """Neither the split nor layer features of its texts."""
    task, table = sts_task()
    scaling = LayerScaling.fit(table.layers) if scaled else None
    texts = task.texts("test")
    alone = Task(task.name, "sts", {"test": task.splits["test"]}, task.score_range, "")
    only = LayerTable({text: row for row, text in enumerate(texts)}, table.select(texts))
    assert layer_scores(alone, only, "test", scaling) == layer_scores(task, table, "test", scaling)
    assert layer_scores(task, only, "test", scaling) == layer_scores(task, table, "test", scaling)
    assert probe_features(alone, only, scaling) == []
    task, table = intents_task()
    (found,), (wanted,) = probe_features(task, table, None), layer_features(task, table, "train", None)
    assert torch.equal(found, wanted)


def test_a_layers_score_by_hand() -> None:
    task, table = sts_task()
    data = task.splits["test"]
    assert isinstance(data, Pairs)
    one, two = (table.select(column).double().numpy()[:, 1] for column in (data.sentence1, data.sentence2))
    cosine = (one * two).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(two, axis=1)
    wanted = 100 * spearmanr(cosine, data.scores).statistic
    assert layer_scores(task, table, "test", None)[1] == pytest.approx(wanted, abs=0.2)

    task, table = intents_task()
    train, test = task.splits["train"], task.splits["test"]
    x, y = (table.select(split.texts).mean(1) for split in (train, test))
    probe = LogisticRegression(max_iter=100, random_state=42).fit(x.numpy(), train.labels)
    wanted = 100 * float(np.mean(probe.predict(y.numpy()) == np.array(test.labels)))
    assert untrained_score(task, "test", [y], [x]) == pytest.approx(wanted)
    x, y = (table.select(split.texts)[:, 2] for split in (train, test))
    probe = LogisticRegression(max_iter=100, random_state=42).fit(x.numpy(), train.labels)
    assert layer_scores(task, table, "test", None)[2] == pytest.approx(100 * probe.score(y.numpy(), test.labels))


@pytest.mark.parametrize("scaled", [False, True])
def test_trained_score_by_hand(monkeypatch: pytest.MonkeyPatch, scaled: bool) -> None:
    """In batches, with the scaling, without dropout, with the head's labels."""
    monkeypatch.setattr(scoring, "BATCH_TEXTS", 7)
    for task, table in (sts_task(), intents_task()):
        encoder = build_encoder("set", *table.layers.shape[1:], hidden=6, dropout=0.9).train()
        head = LinearHead(6, LABELS[::-1]) if task.kind == "classification" else None
        scaling = LayerScaling.fit(table.layers) if scaled else None
        score = trained_score(TrainedHead(scaling, encoder, head, 0, 0, 0, 0, {}), task, table, "test")
        encoder.eval()
        layers = table.layers if scaling is None else scaling.scale_layers(table.layers)
        embedding = encoder.encode_layers(layers).detach()
        data = task.splits["test"]
        if isinstance(data, Pairs):
            rows = [[table.rows[text] for text in column] for column in (data.sentence1, data.sentence2)]
            wanted = sts_score(embedding[rows[0]], embedding[rows[1]], data.scores)
        else:
            logits = head.linear(embedding[[table.rows[text] for text in data.texts]])
            wanted = 100 * np.mean([LABELS[::-1][c] == y for c, y in zip(logits.argmax(1), data.labels, strict=True)])
        assert score == pytest.approx(wanted, abs=1e-3)
