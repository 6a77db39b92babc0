"""Training on layer tables with a planted signal: it learns, repeats, goes on after a kill, and says what is wrong."""

import logging
import math
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from ilse_embed import CayleyGNN, LinearHead, build, objectives, training
from ilse_embed.features import CachedLayers, LayerTable
from ilse_embed.objectives import CosineToScore
from ilse_embed.recipes import Recipe
from ilse_embed.scoring import trained_score
from ilse_embed.tasks import Labelled, Pairs, Task
from ilse_embed.training import TrainedHead, initial_parts, train

LAYERS, WIDTH, LABELS = 4, 8, ["grün", "no way", "rot\n", "😀 blau"]
SMALL = Recipe(
    hidden=16, epochs=6, batch_size=16, learning_rate=1e-2, dropout=0.1, pool="mean", output_norm=False, patience=6
)


def planted(latent: torch.Tensor, seed: int) -> torch.Tensor:
    """The latent vector, turned and with noise, in layers of very different size: (n, 4) -> (n, L, d)."""
    draw = torch.Generator().manual_seed(seed)
    turned = latent @ torch.randn(latent.shape[1], WIDTH, generator=draw)
    noise = 0.3 * torch.randn(len(latent), LAYERS, WIDTH, generator=draw)
    return (turned[:, None] + noise) * torch.tensor([0.1, 1, 30, 3])[:, None]


pytestmark = pytest.mark.usefixtures("short_collections")


def table_of(texts: list[str], latent: torch.Tensor, seed: int = 0) -> LayerTable:
    return LayerTable({text: row for row, text in enumerate(texts)}, planted(latent, seed))


@pytest.fixture(scope="module")
def sts() -> tuple[Task, LayerTable]:
    draw = torch.Generator().manual_seed(5)
    one, two = torch.randn(2, 400, 4, generator=draw)  # the score tells of the first two dimensions only
    scores = (1 + 4 * (functional.cosine_similarity(one[:, :2], two[:, :2]) + 1) / 2).double().numpy()
    texts = [f"text {i}" for i in range(800)]
    splits = {"train": range(240), "validation": range(240, 300), "test": range(300, 400)}
    pairs = Pairs(texts[:400], texts[400:], scores)
    task = Task("toy-sts", "sts", {name: pairs.select(rows) for name, rows in splits.items()}, (1.0, 5.0), "made up")
    return task, table_of(texts, torch.cat([one, two]))


@pytest.fixture(scope="module")
def intents() -> tuple[Task, LayerTable]:
    draw = torch.Generator().manual_seed(6)
    classes = torch.arange(240) % 4
    latent = 1.2 * torch.eye(4)[classes] + 0.5 * torch.randn(240, 4, generator=draw)
    texts = [f"text {i} \u0000 {'🙃' * (i % 3)}" for i in range(240)]
    data = Labelled(texts, [LABELS[number] for number in classes])
    splits = {"train": range(140), "validation": range(140, 180), "test": range(180, 240)}
    task = Task("toy", "classification", {name: data.select(rows) for name, rows in splits.items()}, None, "made up")
    return task, table_of(texts, latent)


@pytest.fixture(params=["sts", "classification"])
def either(request: pytest.FixtureRequest, sts: Any, intents: Any) -> tuple[Task, LayerTable]:
    return sts if request.param == "sts" else intents


def weights(trained: TrainedHead) -> dict[str, torch.Tensor]:
    parts = {"encoder": trained.encoder, "scaling": trained.scaling, "head": trained.head}
    return {f"{p}.{k}": v for p, m in parts.items() if m is not None for k, v in m.state_dict().items()}


def same(one: TrainedHead, other: TrainedHead) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


# ------------------------------------------------------------------------------------------------------------ it learns


@pytest.mark.parametrize("encoder", ["cayley", "set"])
@pytest.mark.parametrize(
    "options",
    [
        {"sts_loss": "pearson"},
        {"sts_loss": "cosent", "output_norm": False},
        {"sts_loss": "mse", "optimizer": "adam", "schedule": "constant"},
        {"sts_loss": "mse_score_range", "schedule": "cosine", "residual": False},
        {"scaling": False, "schedule": "reduce_lr_on_plateau", "operator": "gcn"},
    ],
    ids=lambda options: ",".join(map(str, options.values())),
)
def test_sts_is_learnt(sts: tuple[Task, LayerTable], encoder: str, options: dict[str, Any]) -> None:
    task, table = sts
    told: list[tuple[int, int, float]] = []
    recipe = SMALL.replace(epochs=12, patience=20, **options)
    trained = train(task, table, encoder, recipe, progress=lambda *epoch: told.append(epoch))
    before, head = initial_parts(task, (LAYERS, WIDTH), encoder, recipe)
    untrained = trained_score(TrainedHead(trained.scaling, before, head, 0, 0, 0, 0, {}), task, table, "test")
    score = trained_score(trained, task, table, "test")
    assert score > 70 and score > untrained + 20, (score, untrained)
    assert trained.validation == pytest.approx(trained_score(trained, task, table, "validation"), abs=1e-3)
    assert trained.head is None and (trained.scaling is not None) == recipe.scaling
    assert [epoch[:2] for epoch in told] == [(done, 12) for done in range(1, trained.epochs + 1)]
    assert max(score for _, _, score in told) == pytest.approx(trained.validation)
    assert trained.parameters == sum(p.numel() for p in trained.encoder.parameters())
    assert not trained.encoder.training


@pytest.mark.parametrize("encoder", ["cayley", "set", "mean", "layer"])
def test_classification_is_learnt(intents: tuple[Task, LayerTable], encoder: str) -> None:
    task, table = intents
    options = {"layer": 1} if encoder == "layer" else {}
    trained = train(task, table, encoder, SMALL.replace(epochs=15, learning_rate=0.02), encoder_args=options)
    assert trained_score(trained, task, table, "test") > 70  # chance: 25
    assert trained.validation == pytest.approx(trained_score(trained, task, table, "validation"), abs=1e-3)
    assert trained.head is not None and trained.head.labels == sorted(LABELS)
    inputs = (trained.encoder.get_embedding_dimension() + 1) * 4
    assert trained.parameters == inputs + sum(p.numel() for p in trained.encoder.parameters())


@pytest.mark.parametrize(
    ("encoder", "options"),
    [
        ("fc", {}),
        ("scalar_mix", {}),
        ("dwatt", {}),
        ("mlp", {"layer": "mean", "depth": 2, "final_relu": False}),
        ("concat", {}),
    ],
)
def test_every_encoder_is_trained(either: tuple[Task, LayerTable], encoder: str, options: dict[str, Any]) -> None:
    task, table = either
    recipe = SMALL.replace(epochs=8, positional=True)
    before, head = initial_parts(task, (LAYERS, WIDTH), encoder, recipe, encoder_args=options)
    trained = train(task, table, encoder, recipe, encoder_args=options)
    untrained = trained_score(TrainedHead(trained.scaling, before, head, 0, 0, 0, 0, {}), task, table, "test")
    score = trained_score(trained, task, table, "test")
    # L weights alone cannot leave out the dimensions that the score does not tell of
    gain = 0 if (encoder, task.kind) == ("scalar_mix", "sts") else 10
    assert score > untrained + gain, (score, untrained)


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "set": [
        {"scaling": False},
        {"hidden": 15},
        {"dropout": 0.2},
        {"pool": "sum"},
        {"pool": "weighted"},
        {"pre": 2},
        {"post": 1},
        {"positional": True},
        {"output_norm": True},
        {"sts_loss": "cosent"},
        {"sts_loss": "mse"},
        {"sts_loss": "mse_score_range"},
        {"optimizer": "adam"},
        {"learning_rate": 2e-2},
        {"weight_decay": 0.5},
        {"schedule": "constant"},
        {"schedule": "cosine"},
        {"batch_size": 17},
        {"epochs": 1},
    ],
    "cayley": [
        {"steps": 2},
        {"operator": "gcn"},
        {"gin_depth": 2},
        {"residual": False},
        {"multiplicity": 2},
        {"graph_seed": 1},
    ],
}


@pytest.mark.parametrize("encoder", OPTIONS)
def test_every_option_has_an_effect(sts: tuple[Task, LayerTable], encoder: str) -> None:
    task, table = sts
    recipe = SMALL.replace(epochs=2)
    usual = train(task, table, encoder, recipe)
    for option in OPTIONS[encoder]:
        trained = train(task, table, encoder, recipe.replace(**option))
        layers = table.layers if trained.scaling is None else trained.scaling.scale_layers(table.layers)
        before = table.layers if usual.scaling is None else usual.scaling.scale_layers(table.layers)
        with torch.inference_mode():
            one, other = trained.encoder.encode_layers(layers), usual.encoder.encode_layers(before)
        assert one.shape != other.shape or not torch.allclose(one, other, atol=1e-6), option


def test_every_option_is_tried() -> None:
    tried = {key for options in OPTIONS.values() for option in options for key in option}
    assert tried | {"name", "pooling", "patience"} == set(asdict(SMALL))


@pytest.mark.parametrize(("encoder", "options"), [("mean", {}), ("layer", {"layer": 1})])
def test_nothing_to_train(sts: tuple[Task, LayerTable], encoder: str, options: dict[str, Any]) -> None:
    """An encoder without parameters is scaled on the training split, scored on validation and ready for use."""
    task, table = sts
    head = train(task, table, encoder, SMALL, encoder_args=options)
    assert (head.parameters, head.epochs, head.head) == (0, 0, None)
    assert head.validation == pytest.approx(trained_score(head, task, table, "validation"), abs=1e-4)
    assert head.validation > 50 and head.provenance["validation"] == round(head.validation, 4)
    assert head.scaling is not None


def test_what_is_recorded(intents: tuple[Task, LayerTable]) -> None:
    task, table = intents
    recipe = SMALL.replace(epochs=1)
    trained = train(task, table, "layer", recipe, seed=3, encoder_args={"layer": 2})
    record = trained.provenance
    assert record["recipe"]["name"] == recipe.name and record["recipe"]["epochs"] == 1
    wanted = {"task": "toy", "training_datasets": ["toy"], "encoder": "layer", "encoder_args": {"layer": 2}, "seed": 3}
    assert record | wanted | {"labels": sorted(LABELS)} == record
    assert record["validation"] == pytest.approx(trained.validation, abs=1e-4)
    assert trained.epochs == 1 and trained.seconds > 0


def test_training_reads_no_test_split_and_no_backbone(sts: tuple[Task, LayerTable]) -> None:
    task, table = sts
    known = task.texts("train", "validation")
    only = LayerTable({text: row for row, text in enumerate(known)}, table.select(known))
    without = Task(task.name, task.kind, {s: task.splits[s] for s in ("train", "validation")}, task.score_range, "")
    recipe = SMALL.replace(epochs=2)
    assert same(train(without, only, recipe=recipe), train(task, table, recipe=recipe))


# ---------------------------------------------------------------------------------------------------------------- seeds


def test_seeds(either: tuple[Task, LayerTable]) -> None:
    task, table = either
    recipe = SMALL.replace(epochs=2)
    torch.manual_seed(1)
    first = train(task, table, recipe=recipe, seed=4)
    torch.manual_seed(2)
    random.seed(2)
    again = train(task, table, recipe=recipe, seed=4)
    assert same(first, again) and first.validation == again.validation
    assert not same(first, train(task, table, recipe=recipe, seed=5))


def test_the_seed_draws_the_batches_too(intents: tuple[Task, LayerTable], monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[str]] = []

    class Recorded(CachedLayers):
        def preprocess(self, inputs: Any, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
            orders[-1].extend(inputs)
            return super().preprocess(inputs, *args, **kwargs)

    monkeypatch.setattr(training, "CachedLayers", Recorded)
    for seed in (4, 4, 5):
        orders.append([])
        train(*intents, "set", SMALL.replace(epochs=1), seed=seed)
    train_texts = intents[0].splits["train"].texts
    drawn = [order[: len(train_texts)] for order in orders]
    assert all(sorted(order) == sorted(train_texts) != order for order in drawn)
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_callers_random_numbers_go_on(intents: tuple[Task, LayerTable]) -> None:
    task, table = intents

    def state() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    before = state()
    train(task, table, "set", SMALL.replace(epochs=1), seed=9)
    assert state() == before


# -------------------------------------------------------------------------------------------------- stopping and resume


def spoil_after(best: int) -> Callable[..., Any]:
    """An optimiser that stops learning well: after some epochs it pushes the weights away."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken > best * 9:  # 140 texts in batches of 16
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.add_(torch.randn(parameter.shape), alpha=3.0)
        return result

    real = torch.optim.AdamW.step
    return step


def test_early_stopping_keeps_the_best_epoch(intents: tuple[Task, LayerTable], monkeypatch: pytest.MonkeyPatch) -> None:
    task, table = intents
    monkeypatch.setattr(torch.optim.AdamW, "step", spoil_after(4))
    told: list[float] = []
    recipe = SMALL.replace(epochs=20, patience=3, learning_rate=0.02, schedule="constant")
    trained = train(task, table, "set", recipe, progress=lambda done, most, score: told.append(score))
    best = told.index(max(told)) + 1
    assert best <= 4 and trained.epochs == best + 3 == len(told) and told[-1] < max(told) - 10
    assert (
        trained.validation
        == pytest.approx(max(told))
        == pytest.approx(trained_score(trained, task, table, "validation"))
    )
    only_best = train(task, table, "set", recipe.replace(epochs=best, name=recipe.name))
    assert same(trained, only_best)


class Crash(Exception):
    pass


def crash(at: int, kill: bool) -> Callable[..., None]:
    def progress(done: int, most: int, score: float) -> None:
        if done == at:
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Crash

    return progress


def run_killed(*args: Any, **kwargs: Any) -> None:
    """Run a training in a process of its own that is killed."""
    child = multiprocessing.get_context("fork").Process(target=train, args=args, kwargs=kwargs)
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sts", {}),
        ("sts", {"scaling": False, "schedule": "cosine", "sts_loss": "mse_score_range"}),
        ("classification", {"optimizer": "adam", "schedule": "reduce_lr_on_plateau"}),
    ],
)
def test_resumed_is_bit_equal(sts: Any, intents: Any, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    task, table = sts if kind == "sts" else intents
    recipe, folder = SMALL.replace(**options), tmp_path / "deep" / "checkpoints"
    undisturbed = train(task, table, recipe=recipe, seed=1)
    run_killed(task, table, recipe=recipe, seed=1, checkpoints=folder, progress=crash(3, kill=True))
    with pytest.raises(Crash):
        train(task, table, recipe=recipe, seed=1, checkpoints=folder, progress=crash(5, kill=False))
    told: list[int] = []
    resumed = train(task, table, recipe=recipe, seed=1, checkpoints=folder, progress=lambda done, *_: told.append(done))
    assert told == [5, 6]  # the epoch whose validation crashed is run again, no other
    assert same(resumed, undisturbed) and resumed.validation == undisturbed.validation
    assert resumed.epochs == undisturbed.epochs and resumed.provenance == undisturbed.provenance
    again = train(task, table, recipe=recipe, seed=1, checkpoints=folder, progress=lambda *_: pytest.fail("trained"))
    assert same(again, undisturbed) and again.provenance == undisturbed.provenance  # kept, and nothing is left to do


def kill_at_removal_of(name: str) -> Callable[..., None]:
    def remove(path: Any, **kwargs: Any) -> None:
        if Path(path).name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, **kwargs)

    real = shutil.rmtree
    return remove


@pytest.mark.parametrize(
    ("killed", "run_again"),
    [
        (4, [4, 5]),  # in the third epoch of patience
        ("checkpoint-18", [4, 5]),  # when an old checkpoint is removed
        (None, []),  # when training has ended by patience
    ],
)
def test_a_resumed_run_stops_where_the_undisturbed_one_does(
    intents: tuple[Task, LayerTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: Any, run_again: list[int]
) -> None:
    """Patience is part of the state; so is that training had ended when the kill came."""
    task, table = intents
    recipe = SMALL.replace(epochs=9, patience=4, learning_rate=0.0)  # validation never gets better
    undisturbed = train(task, table, "set", recipe)
    assert undisturbed.epochs == 5
    if killed is None:
        train(task, table, "set", recipe, checkpoints=tmp_path / "c")
    elif isinstance(killed, str):
        monkeypatch.setattr(shutil, "rmtree", kill_at_removal_of(killed))
        run_killed(task, table, "set", recipe, checkpoints=tmp_path / "c")
        monkeypatch.undo()
    else:
        run_killed(task, table, "set", recipe, checkpoints=tmp_path / "c", progress=crash(killed, kill=True))
    told: list[int] = []
    resumed = train(task, table, "set", recipe, checkpoints=tmp_path / "c", progress=lambda done, *_: told.append(done))
    assert told == run_again
    assert same(resumed, undisturbed) and resumed.epochs == undisturbed.epochs
    assert resumed.validation == undisturbed.validation


@pytest.mark.parametrize("moved", [False, True])
def test_again_after_the_last_epoch(
    intents: tuple[Task, LayerTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    """Nothing is trained again, and the best epoch's weights are taken, which are neither the first nor the last."""
    task, table = intents
    recipe, folder = SMALL.replace(epochs=3, learning_rate=0.02, schedule="constant"), tmp_path / "c"
    monkeypatch.setattr(torch.optim.AdamW, "step", spoil_after(2))
    told: list[float] = []
    undisturbed = train(task, table, "set", recipe, progress=lambda done, most, score: told.append(score))
    assert told.index(max(told)) == 1
    train(task, table, "set", recipe, checkpoints=folder)
    if moved:
        folder = folder.rename(tmp_path / "elsewhere")
    again = train(task, table, "set", recipe, checkpoints=folder, progress=lambda *_: pytest.fail("trained again"))
    assert same(again, undisturbed) and again.epochs == 3 and again.validation == undisturbed.validation


@pytest.mark.parametrize("broken", ["no state", "half of a state", "an empty folder"])
def test_half_a_checkpoint_is_passed_over(
    intents: tuple[Task, LayerTable], tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    """Killed while a checkpoint was written: the one before it is taken."""
    task, table = intents
    folder = tmp_path / "c"
    undisturbed = train(task, table, "set", SMALL)
    with pytest.raises(Crash):
        train(task, table, "set", SMALL, checkpoints=folder, progress=crash(4, kill=False))
    (last,) = (path for path in folder.glob("checkpoint-*") if path.name.endswith("27"))
    if broken == "an empty folder":
        (folder / "checkpoint-36").mkdir()
    elif broken == "no state":
        last.rename(folder / "checkpoint-36").joinpath("trainer_state.json").unlink()
    else:
        state = last.rename(folder / "checkpoint-36") / "trainer_state.json"
        state.write_text(state.read_text()[:300])
    told: list[int] = []
    with caplog.at_level(logging.WARNING, logger="ilse_embed.checkpoints"):
        resumed = train(task, table, "set", SMALL, checkpoints=folder, progress=lambda done, *_: told.append(done))
    assert "checkpoint-36 is not whole" in caplog.text
    assert same(resumed, undisturbed)
    assert told[0] <= 4 and told[-1] == 6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"recipe": SMALL.replace(learning_rate=0.1)}, "recipe.learning_rate, recipe.name"),
        ({"seed": 8}, "(seed)"),
        ({"encoder": "cayley"}, "(encoder)"),
        ({"encoder": "layer", "encoder_args": {"layer": 1}}, "(encoder, encoder_args)"),
        ("task", "(data, task)"),
        ("data", "(data)"),
        ("features", "(features)"),
    ],
)
def test_checkpoints_of_another_run_are_refused(
    intents: tuple[Task, LayerTable], tmp_path: Path, change: Any, named: str
) -> None:
    task, table = intents
    usual: dict[str, Any] = {"encoder": "set", "recipe": SMALL, "seed": 7, "checkpoints": tmp_path / "c"}
    with pytest.raises(Crash):
        train(task, table, **usual, progress=crash(2, kill=False))
    before = sorted(tmp_path.rglob("*"))
    if change == "features":
        table = LayerTable(table.rows, table.layers, "another backbone")
    elif change in ("data", "task"):
        data = task.splits["train"]
        assert isinstance(data, Labelled)
        changed = Labelled(data.texts, data.labels[::-1])
        name = "other" if change == "task" else task.name
        task = Task(name, task.kind, {**task.splits, "train": changed}, None, "made up")
    else:
        usual |= change
    with pytest.raises(ValueError, match="checkpoints of a run with other settings") as error:
        train(task, table, **usual)
    assert named in str(error.value) and "remove it to start anew" in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_with_other_files_is_left_alone(intents: tuple[Task, LayerTable], tmp_path: Path) -> None:
    """Whoever trains removes it in the end."""
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="it has other files; take a new one"):
        train(*intents, "set", SMALL, checkpoints=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_relative_checkpoints(
    intents: tuple[Task, LayerTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, table = intents
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Crash):
        train(task, table, "set", SMALL, checkpoints=Path("c"), progress=crash(4, kill=False))
    (tmp_path / "moved").mkdir()
    Path("c").rename("moved/c")
    monkeypatch.chdir(tmp_path / "moved")
    assert same(train(task, table, "set", SMALL, checkpoints=Path("c")), train(task, table, "set", SMALL))


# ------------------------------------------------------------------------------------------------------------ objective


@pytest.mark.parametrize(
    ("low", "high", "cosine", "score"),
    [
        (0, 5, [-1, 0, 1], [0, 2.5, 5]),
        (1, 5, [-1, -0.5, 0, 1], [1, 2, 3, 5]),
        (0, 4, [0.5], [3]),
        (-1, 1, [0.3], [0.3]),
    ],
)
def test_cosine_to_score(low: float, high: float, cosine: list[float], score: list[float]) -> None:
    assert CosineToScore(low, high)(torch.tensor(cosine)).tolist() == pytest.approx(score)


@pytest.mark.parametrize("loss", ["mse", "mse_score_range", "cosent", "angle", "pearson"])
def test_the_objective_by_hand(sts: tuple[Task, LayerTable], loss: str) -> None:
    task, table = sts
    data = task.splits["train"]
    assert isinstance(data, Pairs)
    rows = list(range(24))
    recipe = SMALL.replace(sts_loss=loss)
    encoder, _ = initial_parts(task, (LAYERS, WIDTH), "set", recipe)
    model = build(CachedLayers(table), encoder).eval()
    dataset, objective, _, metric = objectives.objective(model, task, recipe)
    batch = dataset[:24]
    assert batch["sentence1"] == data.sentence1[:24] and metric == "eval_validation_spearman_cosine"
    features = [model.preprocess(batch[column]) for column in ("sentence1", "sentence2")]
    value = objective(features, torch.tensor(batch["score"])).item()

    one, two = (encoder.encode_layers(table.select(column)).detach().double() for column in batch_of(data, rows))
    cosine = ((one * two).sum(1) / one.norm(dim=1) / two.norm(dim=1)).tolist()
    gold = data.scores[:24]
    if loss == "mse_score_range":  # what the authors' code minimises
        wanted = np.mean([(1 + (c + 1) / 2 * 4 - s) ** 2 for c, s in zip(cosine, gold, strict=True)])
    elif loss == "mse":
        wanted = np.mean([(c - (s - 1) / 4) ** 2 for c, s in zip(cosine, gold, strict=True)])
    elif loss == "pearson":
        wanted = 1 - np.corrcoef(cosine, gold)[0, 1]
    else:  # CoSENT: log(1 + sum over pairs with gold_i < gold_j of exp(20 (cos_i - cos_j)))
        if loss == "angle":  # the same of |Re + Im| of the quotient, each embedding half real and half imaginary
            (a, b), (c, d) = (part.chunk(2, dim=1) for part in (one, two))
            parts = (a * c + b * d + b * c - a * d).sum(1) / one.norm(dim=1) / two.norm(dim=1)
            cosine = parts.abs().tolist()
        pairs = [(i, j) for i in rows for j in rows if gold[i] < gold[j]]
        wanted = math.log(1 + sum(math.exp(20 * (cosine[i] - cosine[j])) for i, j in pairs))
    assert value == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("size", [1, 4])
def test_a_batch_of_equal_scores_tells_nothing(sts: tuple[Task, LayerTable], size: int) -> None:
    task, table = sts
    encoder, _ = initial_parts(task, (LAYERS, WIDTH), "set", SMALL)
    model = build(CachedLayers(table), encoder)
    features = [model.preprocess(texts) for texts in batch_of(task.splits["train"], list(range(size)))]
    loss = objectives.CorrelationLoss(model)(features, torch.full((size,), 0.5))
    loss.backward()
    assert loss.item() == pytest.approx(1, abs=1e-6)
    assert all(torch.isfinite(p.grad).all() for p in encoder.parameters() if p.grad is not None)


def batch_of(data: Pairs, rows: list[int]) -> tuple[list[str], list[str]]:
    chosen = data.select(rows)
    return chosen.sentence1, chosen.sentence2


def test_the_classification_objective_by_hand(intents: tuple[Task, LayerTable]) -> None:
    """Cross-entropy of the logits, read from the embedding before it is normalised."""
    task, table = intents
    encoder, head = initial_parts(task, (LAYERS, WIDTH), "set", SMALL)
    assert isinstance(head, LinearHead)
    model = build(CachedLayers(table), encoder, head=head).eval()
    dataset, objective, evaluator, _ = objectives.objective(model, task, SMALL)
    batch = dataset[:32]
    value = objective([model.preprocess(batch["text"])], torch.tensor(batch["label"])).item()
    logits = head.linear(encoder.encode_layers(table.select(batch["text"]))).detach().double()
    probability = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    column = [sorted(LABELS).index(label) for label in task.splits["train"].labels[:32]]
    assert value == pytest.approx(
        float(np.mean([-math.log(probability[i, c]) for i, c in enumerate(column)])), rel=1e-5
    )
    accuracy = evaluator(model)["validation_accuracy"]
    validation = task.splits["validation"]
    predicted = model.predict(validation.texts)
    assert accuracy == np.mean([p == y for p, y in zip(predicted, validation.labels, strict=True)])


# --------------------------------------------------------------------------------------------------------------- errors


def split_of(task: Task, *names: str) -> Task:
    return Task(task.name, task.kind, {name: task.splits[name] for name in names}, task.score_range, "made up")


@pytest.mark.parametrize(
    ("which", "change", "options", "message"),
    [
        ("sts", ("test",), {}, "toy-sts has no train split; it can be evaluated but not trained on"),
        ("sts", ("train", "test"), {}, "toy-sts has no validation split"),
        ("sts", None, {"encoder": "caley"}, r"encoder is 'caley'; allowed are \[\"cayley\", "),
        (
            "sts",
            None,
            {"encoder_args": {"heads": 2}},
            r"encoder 'cayley' has no option \['heads'\]; it takes \['dropout', .*'topology'",
        ),
        (
            "intents",
            None,
            {"encoder": "layer", "encoder_args": {"layer": 4}},
            "layer is 4; this backbone has layers 0 to 3",
        ),
        ("intents", None, {"encoder": "set", "recipe": SMALL.replace(pre=0)}, "pre and post are both 0"),
        ("sts", (3.0, 3.0), {}, r"toy-sts has the score range \(3.0, 3.0\); its ends must differ"),
        ("intents", "one label", {}, "at least two distinct labels"),
    ],
)
def test_what_cannot_be_trained(
    sts: Any, intents: Any, which: str, change: Any, options: dict[str, Any], message: str
) -> None:
    task, table = {"sts": sts, "intents": intents}[which]
    if change == "one label":
        texts = task.texts()
        one = Labelled(texts, ["only"] * len(texts))
        task = Task("toy", "classification", {"train": one, "validation": one}, None, "made up")
    elif isinstance(change, tuple) and isinstance(change[0], float):
        task = Task(task.name, "sts", task.splits, change, "made up")
    elif change:
        task = split_of(task, *change)
    with pytest.raises(ValueError, match=message):
        train(task, table, **({"recipe": SMALL} | options))


@pytest.mark.parametrize("kind", ["sts", "classification"])
def test_hostile_texts(sts: Any, intents: Any, kind: str) -> None:
    """Texts are looked up, whatever they are; half a surrogate pair, which a dataset cannot hold, as well."""
    task, table = sts if kind == "sts" else intents
    hostile = {text: f"{text} \x00\ud83d\u202e" + "\n" * (row % 3) for row, text in enumerate(table.rows)}
    hostile |= {next(iter(table.rows)): ""}
    renamed = LayerTable({hostile[text]: row for text, row in table.rows.items()}, table.layers)
    splits: Any = {}
    for name, split in task.splits.items():
        if isinstance(split, Pairs):
            splits[name] = Pairs(*([hostile[t] for t in c] for c in (split.sentence1, split.sentence2)), split.scores)
        else:
            splits[name] = Labelled([hostile[text] for text in split.texts], split.labels)
    again = Task(task.name, task.kind, splits, task.score_range, "made up")
    recipe = SMALL.replace(epochs=2)
    assert same(train(again, renamed, "set", recipe), train(task, table, "set", recipe))


def test_texts_that_were_not_extracted(sts: tuple[Task, LayerTable]) -> None:
    task, table = sts
    missing = task.texts("validation")[3]
    known = LayerTable({text: row for text, row in table.rows.items() if text != missing}, table.layers)
    with pytest.raises(KeyError, match="no layer features of the text"):
        train(task, known, recipe=SMALL)


def test_training_that_diverges_is_an_error(sts: tuple[Task, LayerTable], tmp_path: Path) -> None:
    recipe = SMALL.replace(learning_rate=1e30, optimizer="adam", schedule="constant", scaling=False, epochs=2)
    with pytest.raises(
        FloatingPointError, match=r"no epoch .* finite validation score; lower the learning rate \(1e\+30\)"
    ):
        train(*sts, "set", recipe)


def test_the_head_is_saved_and_restored(
    intents: tuple[Task, LayerTable], tiny_backbone: Callable[..., Path], tmp_path: Path
) -> None:
    """Parameters of the classifier belong to the pipeline: what was trained is what an artifact has."""
    task, table = intents
    trained = train(task, table, "cayley", SMALL)
    assert isinstance(trained.encoder, CayleyGNN) and trained.head is not None
    for module in (trained.encoder, trained.scaling, trained.head):
        assert module is not None
        module.save(str(tmp_path / type(module).__name__)) if (
            tmp_path / type(module).__name__
        ).mkdir() is None else None
        again = type(module).load(str(tmp_path / type(module).__name__))
        assert all(torch.equal(value, again.state_dict()[key]) for key, value in module.state_dict().items())
    _, start = initial_parts(task, (LAYERS, WIDTH), "cayley", SMALL)
    assert not torch.equal(start.linear.weight, trained.head.linear.weight)
    assert LinearHead.load(str(tmp_path / "LinearHead")).labels == sorted(LABELS)
