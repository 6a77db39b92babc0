"""A grid of experiments as data: which methods are trained on what, which results are there, which are missing.

A TOML file of blocks; each stands for all combinations of its lists::

    [[block]]
    backbones = ["smollm2"]
    methods = ["layer,layer=best", "set", "cayley,operator=gcn"]
    recipes = ["default", "paper"]
    tasks = ["STSBenchmark", "STS12", "Banking77Classification"]
    seeds = [0, 1, 2]

A task without a training split (STS12 and the like) is scored with what was trained on STSBenchmark, once for all such
tasks. Results are files of mteb in its own layout, ``results/<model>/<revision>/<task>.json``; beside them in
``ilse/<run>.json`` is what made them.
"""

from __future__ import annotations

import hashlib
import io
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ilse_embed.files import write_atomically
from ilse_embed.methods import Method
from ilse_embed.recipes import RECIPES, Recipe

TRANSFER = "STSBenchmark"
"""What is trained on to be scored on an STS task without a training split."""

SUFFIXES = {"sts": ("", "-leakfree"), "classification": ("", "-full-probe", "-head")}
"""What the evaluation appends to the name of a task for each protocol that it is scored by."""

LISTS = ("backbones", "methods", "recipes", "tasks", "seeds")

Kind = Literal["sts", "classification"]


@dataclass(frozen=True)
class Run:
    """One training and the tasks that its result is scored on.

    Attributes:
        backbone: As the grid names it.
        method: Spelling of a `Method`.
        recipe: The recipe that the method's options change.
        trained_on: Name of the training task.
        kind: Of that task.
        seed: Of the training.
        tasks: Names of the tasks to score on.
    """

    backbone: str
    method: str
    recipe: Recipe
    trained_on: str
    kind: Kind
    seed: int
    tasks: tuple[str, ...] = field(compare=False)

    @property
    def id(self) -> str:
        """A hash of all that decides the result, 12 hexadecimal digits."""
        facts = {key: value for key, value in asdict(self).items() if key not in ("tasks", "kind")}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def task_of_result(self) -> dict[str, str]:
        """The task of each result, by the result's name: task and protocol in one, as the evaluation gives it."""
        named = {f"{task}{suffix}": task for task in self.tasks for suffix in SUFFIXES[self.kind]}
        return {name: task for name, task in named.items() if name != f"{TRANSFER}-leakfree"}

    @property
    def result_names(self) -> list[str]:
        """Names of the results."""
        return list(self.task_of_result)

    def __str__(self) -> str:
        return f"{self.backbone} {self.method} {self.recipe.name} {self.trained_on} seed {self.seed}"


def read_grid(path: Path, kinds: Mapping[str, tuple[Kind, bool]]) -> list[Run]:
    """The runs of a grid, in an order that reads each table of features once.

    Args:
        path: The TOML file.
        kinds: For each task its kind, and whether it has a training split.

    Raises:
        ValueError: With the block, what came and what is allowed.
        KeyError: If ``kinds`` lacks a task.
    """
    runs: dict[Run, dict[str, None]] = {}
    for number, block in enumerate(_blocks(path), 1):
        for option in LISTS:
            if not isinstance(block.get(option), list) or not block[option]:
                raise ValueError(f"{path}, block {number}: {option} must be a list of at least one value")
        if unknown := sorted(set(block) - set(LISTS)):
            raise ValueError(f"{path}, block {number}: unknown are {unknown}; allowed are {json.dumps(LISTS)}")
        if any(isinstance(seed, bool) or not isinstance(seed, int) or seed < 0 for seed in block["seeds"]):
            raise ValueError(f"{path}, block {number}: seeds are {block['seeds']}; allowed are whole numbers from 0")
        recipes = [_recipe(name, path) for name in block["recipes"]]
        methods = [str(Method.parse(spelling)) for spelling in block["methods"]]
        for spelling, recipe in product(methods, recipes):
            Method.parse(spelling).check(recipe)  # before anything runs
        for backbone, task, recipe, method, seed in product(
            block["backbones"], block["tasks"], recipes, methods, block["seeds"]
        ):
            kind, trainable = kinds[task]
            run = Run(backbone, method, recipe, task if trainable else TRANSFER, kind, seed, ())
            runs.setdefault(run, {})[task] = None
    complete = [replace(run, tasks=tuple(tasks)) for run, tasks in runs.items()]
    pooled = [Method.parse(run.method).recipe(run.recipe).pooling for run in complete]
    order = sorted(range(len(complete)), key=lambda row: (complete[row].backbone, complete[row].seed, row))
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for row in order:
        run = complete[row]
        groups.setdefault((run.backbone, run.seed, pooled[row], run.trained_on), []).append(run)
    return [run for group in groups.values() for run in group]


def tasks_of(path: Path) -> list[str]:
    """The distinct tasks that a grid names."""
    return list(dict.fromkeys(task for block in _blocks(path) for task in block.get("tasks", [])))


def _blocks(path: Path) -> list[dict[str, Any]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from None
    blocks = content.pop("block", None)
    if content or not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise ValueError(f"{path} must have [[block]] tables and nothing else; it has {sorted(content) or 'none'}")
    return blocks


def _recipe(name: str, path: Path) -> Recipe:
    if name not in RECIPES:
        raise ValueError(f"{path}: recipe is {name!r}; allowed are {json.dumps(sorted(RECIPES))}")
    return RECIPES[name]


@dataclass
class Results:
    """The results below a folder, found by run.

    Attributes:
        folder: Holds ``results/<model>/<revision>/``.
        notes: What made them, by the id of the run.
    """

    folder: Path
    notes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def refresh(self) -> Results:
        """Read the notes of all runs; those that other processes added too. Of two of one run the later counts."""
        self.notes = {}
        for path in sorted(self.folder.glob("results/*/*/ilse/*.json"), key=lambda path: path.stat().st_mtime):
            note = json.loads(path.read_text(encoding="utf-8"))
            self.notes[path.stem] = note | {"folder": path.parent.parent}
        return self

    def add(self, note: Mapping[str, Any], outcomes: Mapping[str, NDArray[Any]]) -> None:
        """Keep what a run has found; beside what it found before, if its model is still the same, else in its place.

        Args:
            note: What made the results, of which mteb has written the files.
            outcomes: Of each task what the run said of each test example: cosines as float32, or whole numbers.
        """
        folder = self.folder / "results" / str(note["model"]).replace("/", "__") / str(note["revision"])
        before, arrays = self.notes.get(note["run"]), dict[str, Any](outcomes)
        if before is not None and before["folder"] == folder:
            arrays = _outcomes(before) | arrays
            note = {**note, "results": list(dict.fromkeys([*before["results"], *note["results"]]))}
        path = folder / "ilse" / f"{note['run']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        packed = io.BytesIO()
        np.savez_compressed(packed, **arrays)
        write_atomically(path.with_suffix(".npz"), packed.getvalue())
        write_atomically(path, (json.dumps(note, indent=1) + "\n").encode())
        if before is not None and before["folder"] != folder:
            for suffix in (".json", ".npz"):
                (before["folder"] / "ilse" / f"{note['run']}{suffix}").unlink(missing_ok=True)
        self.notes[note["run"]] = {**note, "folder": folder}

    def missing(self, run: Run) -> list[str]:
        """Names of the results that a run lacks."""
        return [name for name in run.result_names if self._file(run, name) is None]

    def score(self, run: Run, name: str) -> float | None:
        """Main score x 100, by the name of the result; None if it is not there."""
        path = self._file(run, name)
        if path is None:
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        return 100 * float(content["scores"]["test"][0]["main_score"])

    def _file(self, run: Run, name: str) -> Path | None:
        """The file of a result, if the run's note vouches for it and it is there."""
        note = self.notes.get(run.id)
        if note is None or name not in note["results"]:
            return None
        path: Path = note["folder"] / f"{name}.json"
        return path if path.is_file() else None

    def outcomes(self, run: Run, task: str) -> NDArray[Any]:
        """What a run said of each test example of a task.

        Shapes:
            -> (n,) cosines as float32, or positions of predicted labels
        """
        return _outcomes(self.notes[run.id])[task]

    def seconds_left(self, runs: Iterable[Run]) -> float | None:
        """How long the runs that lack results may take, by those that are there; None if nothing was run yet.

        By the mean of runs of the same encoder on the same task, else on the same task, else of all.
        """
        known: dict[tuple[str, ...], list[float]] = {}
        for note in self.notes.values():
            encoder, task = note["method"].partition(",")[0], note["trained_on"]
            for key in ((encoder, task), (task,), ()):
                known.setdefault(key, []).append(sum(note["seconds"].values()))
        if not known:
            return None
        total = 0.0
        for run in runs:
            if self.missing(run):
                keys: Sequence[tuple[str, ...]] = (
                    (run.method.partition(",")[0], run.trained_on),
                    (run.trained_on,),
                    (),
                )
                times = next(known[key] for key in keys if key in known)
                total += sum(times) / len(times)
        return total


def _outcomes(note: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    with np.load(note["folder"] / "ilse" / f"{note['run']}.npz") as packed:
        return {task: said.astype(np.float32) if said.dtype.kind == "f" else said for task, said in packed.items()}
