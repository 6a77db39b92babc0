"""The demo on a tiny backbone: its table, its models, and that mteb gives the reloaded ones the same scores."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ilse_embed import LayerTransformer, load
from ilse_embed.cli import demonstration
from ilse_embed.demo import QUERIES, DemoResult, run_demo
from ilse_embed.extraction import extract
from ilse_embed.features import fit_scaling
from ilse_embed.recipes import RECIPES
from ilse_embed.scoring import layer_scores, probe_accuracy, sts_score
from ilse_embed.tasks import load_task

TASKS = ("quickstart-sts", "quickstart-intents")
METHODS = ["last layer", "best layer", "mean of layers", "Set-Encoder", "Cayley-Encoder"]


pytestmark = pytest.mark.usefixtures("short_collections")


@pytest.fixture(scope="module")
def short() -> Iterator[None]:
    """The recipes with few epochs and a small width, under their own names."""
    with pytest.MonkeyPatch.context() as patch:
        for name, recipe in list(RECIPES.items()):
            patch.setitem(RECIPES, name, recipe.replace(epochs=2, hidden=24, learning_rate=5e-3, name=name))
        yield


@pytest.fixture(scope="module")
def ran(
    short: None, tiny_backbone: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[DemoResult, list[str], Path]:
    said: list[str] = []
    folder = tmp_path_factory.mktemp("demo") / "new"
    return run_demo(str(tiny_backbone()), folder, seed=1, say=said.append), said, folder


def test_the_table(ran: tuple[DemoResult, list[str], Path], tiny_backbone: Callable[..., Path]) -> None:
    result, said, _ = ran
    assert [(row.recipe, row.method) for row in result.rows] == [(r, m) for r in ("paper", "default") for m in METHODS]
    for row in result.rows:
        assert tuple(row.scores) == tuple(row.parameters) == TASKS
        assert all(-100 <= score <= 100 and np.isfinite(score) for score in row.scores.values())
        assert row.extraction_seconds > 0 and row.training_seconds > 0
        assert tuple(row.detail) == (TASKS if row.method == "best layer" else ())
        assert all(0 <= layer < 4 for layer in row.detail.values())
        untrained = row.method in METHODS[:3]
        assert (row.parameters["quickstart-sts"] == 0) == untrained
        assert row.parameters["quickstart-intents"] - row.parameters["quickstart-sts"] == 20 * (
            (32 if untrained else 24) + 1
        )
    assert len({(row.recipe, score) for row in result.rows for score in row.scores.values()}) > 12
    assert result.backbone == tiny_backbone().name
    assert set(result.seconds) == {"compare", "reload_mteb_neighbours", "total"}
    assert result.seconds["total"] == pytest.approx(sum(result.seconds.values()) / 2)
    assert len(said) == 4 and "Extracting 4 layers of" in said[0]


def test_rows_without_an_encoder_by_hand(
    ran: tuple[DemoResult, list[str], Path], tiny_backbone: Callable[..., Path]
) -> None:
    result, *_ = ran
    for recipe in ("paper", "default"):
        rows = {row.method: row for row in result.rows if row.recipe == recipe}
        backbone = LayerTransformer(str(tiny_backbone()), pooling=RECIPES[recipe].pooling)
        for name in TASKS:
            task = load_task(name)
            table = extract(backbone, task.texts())
            scaling = fit_scaling(table, task.texts("train")) if recipe == "default" else None
            layers = {text: table.layers[row] for text, row in table.rows.items()}

            def of(texts: list[str], layers: Any = layers, scaling: Any = scaling) -> torch.Tensor:
                stacked = torch.stack([layers[text] for text in texts])
                return stacked if scaling is None else (stacked - scaling.mean) * scaling.scale

            validation = layer_scores(task, table, "validation", scaling)
            assert rows["best layer"].detail[name] == int(np.argmax(validation))
            picks = {"last layer": [3], "best layer": [int(np.argmax(validation))], "mean of layers": [0, 1, 2, 3]}
            train, test = task.splits["train"], task.splits["test"]
            for method, chosen in picks.items():
                if task.kind == "sts":
                    pair = (of(column)[:, chosen].mean(1) for column in (test.sentence1, test.sentence2))
                    score = sts_score(*pair, test.scores)
                else:
                    parts = [of(split.texts)[:, chosen].mean(1) for split in (train, test)]
                    score = probe_accuracy(parts[0], train.labels, parts[1], test.labels)
                assert rows[method].scores[name] == pytest.approx(score, abs=0.01), (recipe, name, method)


@pytest.mark.parametrize("task", TASKS)
def test_mteb_gives_the_reloaded_model_the_same_score(ran: tuple[DemoResult, list[str], Path], task: str) -> None:
    result, *_ = ran
    (row,) = (row for row in result.rows if (row.recipe, row.method) == ("default", "Cayley-Encoder"))
    assert result.mteb[task] == pytest.approx(row.scores[task], abs=1e-3)


def test_the_saved_models(ran: tuple[DemoResult, list[str], Path]) -> None:
    result, _, folder = ran
    assert result.models == {"quickstart-sts": str(folder / "sts"), "quickstart-intents": str(folder / "intents")}
    models = {task: load(path) for task, path in result.models.items()}
    for task, model in models.items():
        facts = model.provenance
        assert (facts["task"], facts["encoder"], facts["seed"]) == (task, "cayley", 1)
        assert facts["recipe"]["name"] == "default" and facts["training_datasets"] == [task]
        assert model.get_embedding_dimension() == 24
    assert len(models["quickstart-intents"].labels) == 20
    with pytest.raises(ValueError, match="no linear head"):
        models["quickstart-sts"].labels  # noqa: B018

    assert [entry["query"] for entry in result.neighbours] == list(QUERIES)
    corpus = [text for task in TASKS for text in load_task(task).texts("test")]
    cosines = models["quickstart-sts"].encode(list(QUERIES)) @ models["quickstart-sts"].encode(corpus).T
    predicted = models["quickstart-intents"].predict(QUERIES)
    probabilities = models["quickstart-intents"].predict_proba(QUERIES).max(1)
    for entry, row, label, probability in zip(result.neighbours, cosines, predicted, probabilities, strict=True):
        assert [cosine for _, cosine in entry["nearest"]] == pytest.approx(np.sort(row)[:-4:-1], abs=2e-3)
        for text, cosine in entry["nearest"]:
            assert row[corpus.index(text)] == pytest.approx(cosine, abs=2e-3)
        assert entry["intent"] == {"label": label, "probability": pytest.approx(probability, abs=2e-3)}


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    """Refused before anything is loaded."""
    (tmp_path / "intents").mkdir()
    (tmp_path / "intents/README.md").write_text("mine")
    with pytest.raises(ValueError, match=r"intents holds README.md, which saving would overwrite"):
        run_demo("/no/such/backbone", tmp_path)


def test_as_json(ran: tuple[DemoResult, list[str], Path]) -> None:
    result, *_ = ran
    again = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert again["rows"][9]["method"] == "Cayley-Encoder" and again["mteb"] == result.mteb
    assert set(again) == {"backbone", "rows", "neighbours", "models", "mteb", "seconds"}


def test_the_command_again_in_the_same_folder(
    ran: tuple[DemoResult, list[str], Path],
    tiny_backbone: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same seed gives the same table, models of an earlier demo are replaced, and JSON says what is printed."""
    result, _, folder = ran
    monkeypatch.setattr(demonstration, "quiet", lambda: None)  # it changes what other tests log
    monkeypatch.setattr(sys, "argv", ["ilse", "demo"])
    monkeypatch.setattr(demonstration.console, "width", 200)
    demonstration.demo(backbone=str(tiny_backbone()), output=folder, json_file=tmp_path / "reports/demo.json", seed=1)
    shown = capsys.readouterr().out
    written = json.loads((tmp_path / "reports/demo.json").read_text(encoding="utf-8"))
    for row, other in zip(written["rows"], result.rows, strict=True):
        assert row["scores"] == other.scores and row["parameters"] == other.parameters
        assert row["method"] in shown and all(f"{score:.1f}" in shown for score in row["scores"].values())
    assert written["mteb"] == result.mteb and written["run"]["command"] == "ilse demo"
    assert written["neighbours"] == json.loads(json.dumps(result.neighbours))
    assert all(entry["query"] in shown and entry["nearest"][0][0] in shown for entry in written["neighbours"])
    assert f'ilse_embed.load("{folder}/sts")' in shown
