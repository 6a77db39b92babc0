"""Search on tiny layer tables: what it draws, prunes, repeats and refuses; after a kill; with two processes at once."""

import dataclasses
import json
import logging
import math
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from conftest import Ilse, assert_refused

from ilse_embed import search as search_room
from ilse_embed import studies
from ilse_embed.features import LayerTable
from ilse_embed.recipes import PAPER, RECIPES, Recipe
from ilse_embed.search import SearchResult, search
from ilse_embed.spaces import SPACES, Range, Space, read_space
from ilse_embed.tasks import Labelled, Pairs, Task
from ilse_embed.training import train

SMALL = Recipe(hidden=4, pool="mean", output_norm=False, epochs=3, batch_size=32, learning_rate=1e-2)
FOUR: dict[str, Any] = {"pre": [1, 2], "pool": ["mean", "sum"]}
OPEN: dict[str, Any] = {"learning_rate": {"low": 1e-3, "high": 1e-1, "log": True}, **FOUR}


pytestmark = pytest.mark.usefixtures("short_collections")


@pytest.fixture(scope="module")
def toy() -> tuple[Task, LayerTable]:
    draw = torch.Generator().manual_seed(6)
    classes = torch.arange(60) % 2
    layers = torch.randn(60, 3, 4, generator=draw)
    layers[:, 1, 0] += 3.0 * classes
    texts = [f"text {i}" for i in range(60)]
    data = Labelled(texts, [("no", "yes")[number] for number in classes])
    splits = {"train": data.select(range(40)), "validation": data.select(range(40, 60))}
    task = Task("toy", "classification", splits, None, "made up")
    return task, LayerTable({text: row for row, text in enumerate(texts)}, layers)


@pytest.fixture(scope="module")
def toy_sts() -> tuple[Task, LayerTable]:
    texts = [f"text {i}" for i in range(40)]
    pairs = Pairs(texts[:20], texts[20:], torch.linspace(0, 5, 20).double().numpy())
    task = Task("toy-sts", "sts", {"train": pairs, "validation": pairs}, (0.0, 5.0), "made up")
    layers = torch.randn(40, 3, 4, generator=torch.Generator().manual_seed(3))
    return task, LayerTable({text: row for row, text in enumerate(texts)}, layers)


@pytest.fixture
def run(toy: tuple[Task, LayerTable], tmp_path: Path) -> Callable[..., SearchResult]:
    """A search with the set encoder; the options of `search` may be changed."""

    def run(content: dict[str, Any], base: Recipe = SMALL, encoder: str = "set", **options: Any) -> SearchResult:
        task, table = options.pop("toy", toy)
        space = Space.of(content, base, encoder, task.kind)
        usual = {"output": tmp_path / "out", "pruner": "none", "heartbeat": 1}
        return search(task, table, encoder, space, **usual | options)

    return run


class Watch:
    """Notes each epoch of each configuration, of all processes; and may stop a process before it notes one."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, 0
        self.stops: dict[int, Callable[[], None]] = {}
        path.touch()

    def train(self, *args: Any, progress: Any, **kwargs: Any) -> Any:
        (recipe,) = (argument for argument in args if isinstance(argument, Recipe))

        def note(done: int, most: int, score: float) -> None:
            self.number += 1
            if self.number in self.stops:
                self.stops[self.number]()
            with self.path.open("a") as file:
                file.write(json.dumps([recipe.name, done, os.getpid()]) + "\n")
            progress(done, most, score)

        return train(*args, progress=note, **kwargs)

    @property
    def epochs(self) -> Counter[tuple[str, int]]:
        return Counter((name, done) for name, done, _ in map(json.loads, self.path.read_text().splitlines()))

    @property
    def processes(self) -> set[int]:
        return {process for *_, process in map(json.loads, self.path.read_text().splitlines())}


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch(tmp_path / "epochs.jsonl")
    monkeypatch.setattr(search_room, "train", watch.train)
    return watch


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def study_of(tmp_path: Path) -> optuna.Study:
    return optuna.load_study(study_name="search", storage=f"sqlite:///{tmp_path / 'out/search.db'}")


def in_processes(number: int, call: Callable[[], Any]) -> list[int | None]:
    """Exit codes of processes that make a call at once."""
    children = [multiprocessing.get_context("fork").Process(target=call) for _ in range(number)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    return [child.exitcode for child in children]


def once_each(watch: Watch, result: SearchResult) -> None:
    """Each finished trial has a configuration of its own, and each epoch of it was trained once, in order."""
    options = [json.dumps(row["options"], sort_keys=True) for row in result.rows]
    assert len(set(options)) == len(options) == result.trials
    names = {SMALL.replace(**row["options"]).name: row["epochs"] for row in result.rows}
    assert watch.epochs == {(name, epoch): 1 for name, most in names.items() for epoch in range(1, most + 1)}


# --------------------------------------------------------------------------------------------------------------- search


def test_the_best_by_validation(run: Any, toy: Any, watch: Watch, tmp_path: Path) -> None:
    told: list[tuple[int, int, float]] = []
    result = run(OPEN, trials=5, progress=lambda *state: told.append(state))
    once_each(watch, result)
    assert [row["number"] for row in result.rows] == [0, 1, 2, 3, 4] and result.pruned == result.repeated == 0
    best = max(result.rows, key=lambda row: row["validation"])
    assert result.validation == best["validation"] and result.recipe == SMALL.replace(**best["options"])
    assert result.recipe.name.startswith("default,batch_size=32,") and "learning_rate=" in result.recipe.name
    assert Recipe.load(tmp_path / "out/recipe.json") == result.recipe
    assert train(*toy, "set", result.recipe, seed=0).validation == result.validation
    assert [done for done, *_ in told] == [0, 1, 2, 3, 4, 5] and math.isnan(told[0][2])
    assert told[-1] == (5, 5, result.validation) and result.size == math.inf and not result.exhausted
    assert not list((tmp_path / "out/checkpoints").iterdir())


def test_a_search_in_two_goes_is_one_search(run: Any, watch: Watch, tmp_path: Path) -> None:
    whole = run(OPEN, trials=4, output=tmp_path / "whole")
    watch.path.write_text("")
    assert run(OPEN, trials=2).trials == 2
    parts = run(OPEN, trials=4)
    once_each(watch, parts)
    assert parts.rows == whole.rows and parts.recipe == whole.recipe
    assert run(OPEN, trials=3).rows == whole.rows  # enough already
    assert run(OPEN, trials=4, seed=1, output=tmp_path / "other").rows != whole.rows


def test_a_finite_space_comes_to_its_end(run: Any, watch: Watch) -> None:
    """No configuration is trained twice, whatever the sampler draws."""
    result = run(FOUR, trials=10)
    once_each(watch, result)
    assert result.trials == result.size == 4 and result.exhausted and result.repeated > 0
    watch.path.write_text("")
    assert run(FOUR, trials=10).rows == result.rows and not watch.epochs


def test_gin_depth_counts_with_gin_alone(run: Any, watch: Watch) -> None:
    content = {"steps": [0, 1], "operator": ["gin", "gcn"], "gin_depth": [1, 2], "residual": [True, False]}
    result = run(content, SMALL.replace(epochs=1), "cayley", trials=99)
    assert result.trials == result.size == 1 + 2 * (2 + 1)
    assert len(watch.epochs) == 7 and set(watch.epochs.values()) == {1}
    assert sum("gin_depth" in row["options"] for row in result.rows) == 4


def test_pruned_trials_end_early(run: Any, watch: Watch) -> None:
    base = SMALL.replace(epochs=5, patience=5)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=0)
    rates = [0.1, 0.05, 0.02, 1e-9, 1e-8, 1e-7]
    result = run({"learning_rate": rates}, base, pruner=pruner, trials=6)
    pruned = [row for row in result.rows if row["state"] == "pruned"]
    assert 0 < len(pruned) == result.pruned < 6
    for row in result.rows:
        trained = [epoch for name, epoch in watch.epochs if name == base.replace(**row["options"]).name]
        assert trained == list(range(1, row["epochs"] + 1))
        assert (row["epochs"] < 5) == (row in pruned)


def test_trials_that_diverge(run: Any, toy_sts: Any) -> None:
    base = SMALL.replace(optimizer="adam", schedule="constant", scaling=False, sts_loss="mse", epochs=1)
    result = run({"learning_rate": [1e30, 1e-2]}, base, toy=toy_sts, trials=3)
    assert (result.trials, result.pruned, result.recipe.learning_rate) == (2, 1, 1e-2)
    with pytest.raises(FloatingPointError, match="none of 1 trials has a finite validation score; lower"):
        run({"learning_rate": 1e30}, base, toy=toy_sts, trials=1, name="other")


# ---------------------------------------------------------------------------------------------- killed, several at once


def test_killed_and_run_again(run: Any, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial of the killed process goes on at its last checkpoint; its first epochs are known to the pruner."""
    monkeypatch.setattr(search_room, "GRACE", 2)
    watch.stops = {6: kill}  # in the third epoch of the second trial
    assert in_processes(1, lambda: run(OPEN, trials=4)) == [-signal.SIGKILL]
    assert sum(watch.epochs.values()) == 5 and list((tmp_path / "out/checkpoints").glob("*/checkpoint-*"))
    watch.stops = {5: kill}
    assert in_processes(1, lambda: run(OPEN, trials=4)) == [-signal.SIGKILL]
    watch.stops = {}
    result = run(OPEN, trials=4)
    once_each(watch, result)
    assert result.trials == 4
    finished = study_of(tmp_path).get_trials(states=search_room.FINISHED)
    assert [sorted(trial.intermediate_values) for trial in finished] == [[1, 2, 3]] * 4


def test_interrupted_and_run_again(run: Any, watch: Watch) -> None:
    watch.stops = {5: interrupt}
    with pytest.raises(KeyboardInterrupt):
        run(OPEN, trials=3)
    result = run(OPEN, trials=3)
    once_each(watch, result)
    assert result.trials == 3


def test_a_trial_that_never_gave_a_sign_of_life(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(search_room, "GRACE", 1)
    run(FOUR, trials=1)
    study = study_of(tmp_path)
    study.ask()
    assert run(FOUR, trials=2).trials == 2


def test_a_trial_taken_for_dead(run: Any, watch: Watch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after the machine was asleep: what the others decided holds."""

    def declare_dead() -> None:
        study = study_of(tmp_path)
        study.tell(1, state=optuna.trial.TrialState.FAIL)

    watch.stops = {5: declare_dead}
    with caplog.at_level(logging.WARNING, logger="ilse_embed.search"):
        result = run(OPEN, trials=3)
    assert "took a trial of this one for dead" in caplog.text
    assert result.trials == 3 and len({json.dumps(row["options"]) for row in result.rows}) == 3


def test_two_processes_at_once(run: Any, watch: Watch) -> None:
    content = {**FOUR, "dropout": [0.0, 0.2]}
    assert in_processes(2, lambda: run(content, trials=7)) == [0, 0]
    assert len(watch.processes) == 2
    result = run(content, trials=7)
    once_each(watch, result)
    assert result.trials == 7


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here; take another output folder or study name"),
        ({"encoder": "cayley"}, "encoder is 'set' there and 'cayley' here"),
        ({"base": SMALL.replace(epochs=2)}, "recipe.epochs is 3 there and 2 here"),
        ({"content": {**FOUR, "post": 1}}, "space.post is None there and '(1,)' here"),
        ("task", "task is 'toy' there and 'other' here"),
        ("data", "data is "),
        ("features", "features is [3, 4, ''] there and [3, 4, 'other'] here"),
    ],
)
def test_a_study_of_another_search(run: Any, toy: Any, change: Any, message: str) -> None:
    base = SMALL.replace(epochs=3)
    run(FOUR, base, trials=1)
    task, table = toy
    changed = dataclasses.replace(task, name="other") if change == "task" else task
    if change == "data":
        train_split = Labelled(task.splits["train"].texts, task.splits["train"].labels[::-1])
        changed = Task(task.name, task.kind, {**task.splits, "train": train_split}, None, task.revision)
    if change == "features":
        table = dataclasses.replace(table, source="other")
    options = {"content": FOUR, "base": base, "toy": (changed, table), "trials": 2}
    with pytest.raises(ValueError, match=r"the study 'search' in sqlite:///\S+ is of another search: ") as error:
        run(**options | (change if isinstance(change, dict) else {}))
    assert message in str(error.value)
    assert run(FOUR, base, trials=1).trials == 1


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"trials": 0}, ValueError, "trials is 0; allowed are whole numbers from 1"),
        ({"pruner": "medium"}, ValueError, r"pruner is 'medium'; allowed are \[\"median\", \"none\"\]"),
        ({"encoder": "layer", "encoder_args": {"layer": 3}}, ValueError, "layer is 3; this backbone has layers 0 to 2"),
        ({"storage": "a file"}, OSError, "the storage 'a file' failed"),
        ({"storage": "sqlite:////no/such/folder/s.db"}, OSError, "the storage sqlite:////no/such/folder/s.db failed"),
    ],
)
def test_what_cannot_be_searched(run: Any, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        run({"learning_rate": [0.1, 0.2]}, **options)


def test_without_parameters_there_is_nothing_to_search(run: Any, toy_sts: Any) -> None:
    with pytest.raises(ValueError, match=r"encoder 'mean' has no parameters .* no linear head: nothing to train"):
        run({"learning_rate": [0.1, 0.2]}, encoder="mean", toy=toy_sts)


def test_without_optuna(ilse: Ilse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "ilse_embed.search")
    refused = ilse("search", "--task", "STSBenchmark", "--output", "out")
    assert_refused(refused, "a search needs an extra: pip install 'ilse-embed[search]'")


def test_passwords_stay_secret() -> None:
    assert studies.shown("postgresql://me:secret@host/db") == "postgresql://me:***@host/db"


def test_any_folder(run: Any, tmp_path: Path) -> None:
    output = tmp_path / "é {x} ?a=b #%41"
    assert run(FOUR, trials=1, output=output).trials == 1
    assert sorted(path.name for path in output.iterdir()) == ["checkpoints", "recipe.json", "search.db"]


# --------------------------------------------------------------------------------------------------------------- spaces


@pytest.mark.parametrize(
    ("name", "encoder", "kind", "size", "left_out"),
    [
        ("paper", "cayley", "sts", math.inf, ["post", "pre"]),
        ("paper", "set", "sts", math.inf, ["gin_depth", "operator", "steps"]),
        (
            "default",
            "mean",
            "classification",
            math.inf,
            ["dropout", "gin_depth", "operator", "pool", "post", "pre", "steps"],
        ),
    ],
)
def test_spaces_of_the_package(name: str, encoder: str, kind: str, size: float, left_out: list[str]) -> None:
    space = Space.of(read_space(name), RECIPES[name], encoder, kind)
    assert (space.size, [*space.left_out]) == (size, left_out + ["pool"] * ("dropout" in left_out and name == "paper"))
    assert sorted(SPACES) == ["default", "paper"]
    reals = {option: 1 for option, values in space.options.items() if isinstance(values, Range)}
    discrete = dataclasses.replace(space, options=space.options | dict.fromkeys(reals, (0.001,)))
    assert set(reals) == {"learning_rate", "weight_decay"}
    expected = {"paper": {"cayley": 4 * 2 * 2 * 3, "set": 4 * 2 * 3}, "default": {"mean": 3}}
    assert discrete.size == expected[name][encoder]


def test_the_space_of_the_paper() -> None:
    space = Space.of(read_space("paper"), PAPER, "cayley", "sts")
    rate = Range(1e-4, 1e-3, log=True)
    assert space.options == {
        "learning_rate": rate,
        "weight_decay": rate,
        "dropout": (0.0, 0.1, 0.2, 0.3),
        "batch_size": (64,),
        "epochs": (50,),
        "steps": (1, 2),
        "operator": ("gin", "gcn"),
        "gin_depth": (1, 2),
        "pool": ("mean", "sum"),
    }


def test_a_range_of_epochs() -> None:
    """An option that may be None in a recipe, too."""
    space = Space.of({"epochs": {"low": 2, "high": 9}}, Recipe(), "cayley", "sts")
    assert space.options == {"epochs": Range(2, 9, whole=True)} and space.size == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"lr": [1e-3]}, r"the space has \['lr'\]; allowed are \['scaling', "),
        ({"pooling": ["mean"]}, "'pooling', which cannot be searched: it decides about the features"),
        ({"name": ["a"]}, "'name', which cannot be searched: the search names its recipe"),
        ({"dropout": [0.1, 1.0]}, "dropout is 1.0; allowed are numbers from 0 to below 1"),
        ({"dropout": {"low": 0.0, "high": 2.0}}, "dropout is 2.0; allowed are"),
        ({"steps": [1, 1.5]}, "steps is 1.5; allowed are whole numbers"),
        ({"hidden": {"low": 8.5, "high": 9}}, "hidden is 8.5; allowed are whole numbers"),
        ({"operator": ["gin", "gat"]}, "operator is 'gat'; allowed are"),
        ({"operator": {"low": 1, "high": 2}}, "a range for 'operator', which is no number"),
        ({"residual": {"low": False, "high": True}}, "a range for 'residual', which is no number"),
        ({"dropout": {"low": 0.1}}, "a range has low, high and, if you like, log"),
        ({"dropout": {"low": 0.1, "high": 0.2, "step": 0.1}}, "a range has low, high and, if you like, log"),
        ({"dropout": {"low": 0.2, "high": 0.1}}, "low must be below high"),
        ({"dropout": {"low": 0.0, "high": 0.1, "log": True}}, "with log low above 0"),
        ({"dropout": {"low": 0.1, "high": 0.2, "log": "yes"}}, "log true or false"),
        ({"dropout": []}, "at least one value, and each once"),
        ({"dropout": [0, 0.0]}, "at least one value, and each once"),
        ({"dropout": [[0.1]]}, r"dropout is \[0.1\]"),
        ({"post": [1, 2]}, "no option with an effect on encoder 'cayley'; it has \\['post'\\]"),
        ({}, "no option with an effect"),
    ],
)
def test_spaces_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Space.of(content, SMALL, "cayley", "sts")


@pytest.mark.parametrize(
    ("content", "encoder", "size", "message"),
    [
        (
            {"pre": [0, 1], "post": [0, 1]},
            "set",
            4,
            r"pre and post are both 0; .* \(configuration .*,pre=0 of",
        ),
        ({"pre": {"low": 1, "high": 4}, "hidden": [4, 8]}, "set", 8, None),
        ({"steps": {"low": 0, "high": 3}, "operator": ["gin", "gcn"], "gin_depth": [1, 2, 3]}, "cayley", 13, None),
        ({"operator": "gcn", "gin_depth": [1, 2, 3]}, "cayley", 1, None),
    ],
)
def test_sizes_and_checks(toy: Any, content: dict[str, Any], encoder: str, size: int, message: str | None) -> None:
    task, table = toy
    space = Space.of(content, SMALL, encoder, task.kind)
    assert space.size == size
    if message is None:
        space.check(task, table.layers.shape[1:], encoder)
    else:
        with pytest.raises(ValueError, match=message):
            space.check(task, table.layers.shape[1:], encoder)


def test_space_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("dropout = {low = 0.1, high = 0.3}\nsteps = [1, 2]\n")
    assert str(Space.of(read_space(str(path)), SMALL, "cayley", "sts")) == "steps 1/2, dropout 0.1..0.3"
    path.write_text("dropout: 0.1")
    with pytest.raises(ValueError, match=r"mine\.toml is no search space: .* it must be TOML"):
        read_space(str(path))
    with pytest.raises(ValueError, match=r"space is 'papers'; allowed are \[.default., .paper.\] and files that end"):
        read_space("papers")
    with pytest.raises(OSError, match="absent"):
        read_space("absent.toml")


# --------------------------------------------------------------------------------------------------------- command line


def test_ilse_search(ilse: Ilse, tiny_backbone: Callable[..., Path], mirror: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("dropout = [0.0, 0.3]\nepochs = 1\nhidden = 8\npre = [1, 2]\n")
    usual = ("--backbone", tiny_backbone(), "--data-dir", mirror, "--task", "Banking77Classification")
    command = ("search", *usual, "--space", "mine.toml", "--output", "found")
    done = ilse(*command, "--trials", 1)
    assert done.code == 0, done.error
    assert "Space: dropout 0.0/0.3, epochs 1, hidden 8" in done.out and "left out: pre" in done.out
    assert "Saved: found/recipe.json" in done.out and "are tried" not in done.out
    done = ilse(*command, "--trials", 5, "--pruner", "none", "--json", "r.json")
    assert "All 2 configurations of the space are tried; that is fewer than 5 trials." in done.out
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["trials"], report["pruned"], report["size"], report["exhausted"]) == (2, 0, 2, True)
    assert Recipe(**report["recipe"]) == Recipe.load(tmp_path / "found/recipe.json")
    assert report["recipe"]["name"] in " ".join(done.out.split()) and f"{report['validation']:.2f}" in done.out

    trained = ilse("train", *usual, "--recipe", "found/recipe.json", "--output", "model", "--json", "t.json")
    assert trained.code == 0, trained.error
    training = json.loads((tmp_path / "t.json").read_text())
    assert training["recipe"] == report["recipe"] and training["validation"] == pytest.approx(report["validation"])

    assert_refused(ilse(*command, "--encoder", "set"), "encoder is 'cayley' there and 'set' here")
    assert_refused(ilse(*command, "--recipe", "fast"), "recipe is 'fast'; allowed are")
    (tmp_path / "mine.toml").write_text("droput = 0.1")
    assert_refused(ilse(*command[:-1], "other"), "the space has ['droput']; allowed are")
    assert not (tmp_path / "other").exists()
