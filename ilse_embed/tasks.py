"""Texts and labels to train on and to test with: tasks of mteb, two built-in ones, own files. Arrays only, no model."""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ilse_embed.tables import as_labels, as_scores, as_texts, few, pick_column, read_table, separated

logger = logging.getLogger(__name__)

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")

QUICKSTART = {"quickstart-sts": "pairs.tsv", "quickstart-intents": "requests.tsv"}
"""Tasks that come with the package; they need no network."""

HELD_OUT = {"classification": 0.15, "sts": 0.10}
"""Share of the training split that becomes the validation split where a task has none."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Sentence pairs and their gold similarity, on the task's own scale."""

    sentence1: list[str]
    sentence2: list[str]
    scores: NDArray[np.float64]

    def __post_init__(self) -> None:
        if not len(self.sentence1) == len(self.sentence2) == len(self.scores):
            raise ValueError(f"{len(self.sentence1)} and {len(self.sentence2)} sentences, {len(self.scores)} scores")

    def __len__(self) -> int:
        return len(self.scores)

    def select(self, rows: Sequence[int]) -> Pairs:
        """Some rows, in the order given."""
        return Pairs([self.sentence1[i] for i in rows], [self.sentence2[i] for i in rows], self.scores[list(rows)])


@dataclass(frozen=True, eq=False)
class Labelled:
    """Texts and their class names."""

    texts: list[str]
    labels: list[str]

    def __post_init__(self) -> None:
        if len(self.texts) != len(self.labels):
            raise ValueError(f"{len(self.texts)} texts but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, rows: Sequence[int]) -> Labelled:
        """Some rows, in the order given."""
        return Labelled([self.texts[i] for i in rows], [self.labels[i] for i in rows])


Splits = dict[Split, Pairs | Labelled]


@dataclass(frozen=True, eq=False)
class Task:
    """What a model is trained on, chosen by and tested with.

    Attributes:
        name: mteb's name, or that of a file or a built-in task.
        kind: "sts" (splits are `Pairs`) or "classification" (splits are `Labelled`).
        splits: Some of "train", "validation", "test".
        score_range: Lowest and highest possible gold score; None for classification.
        source: Where the data come from.
        revision: Commit of the dataset, where there is one.
        shots: What `few_shot` cut it to.
    """

    name: str
    kind: Literal["sts", "classification"]
    splits: Mapping[Split, Pairs | Labelled]
    score_range: tuple[float, float] | None
    source: str
    revision: str | None = None
    shots: int | None = None

    @property
    def labels(self) -> list[str]:
        """The class names over all splits, sorted.

        Raises:
            ValueError: If this is no classification task, or training lacks a label of another split.
        """
        found = {name: set(split.labels) for name, split in self.splits.items() if isinstance(split, Labelled)}
        if not found:
            raise ValueError(f"{self.name!r} is a task of kind {self.kind!r}; only classification has labels")
        for name, labels in found.items():
            if unseen := sorted(labels - found.get("train", labels)):
                raise ValueError(
                    f"{self.name!r}: split {name!r} has labels that no training text has: {few(unseen)}; "
                    "add training texts for them, or remove these rows"
                )
        return sorted(set().union(*found.values()))

    def numbers(self, labels: Iterable[str]) -> NDArray[np.int64]:
        """The place of each label among `labels`; -1 of one that is not there.

        Shapes:
            n labels -> (n,)

        Raises:
            ValueError: As `labels`.
        """
        place = {label: number for number, label in enumerate(self.labels)}
        return np.array([place.get(label, -1) for label in labels], dtype=np.int64)

    def texts(self, *splits: Split) -> list[str]:
        """The distinct texts of some splits (all, if none is named), in the order of their first occurrence."""
        distinct: dict[str, None] = {}
        for split in (self.splits[name] for name in splits or self.splits):
            columns = [split.texts] if isinstance(split, Labelled) else [split.sentence1, split.sentence2]
            distinct |= dict.fromkeys(text for row in zip(*columns, strict=True) for text in row)
        return list(distinct)


def load_task(name: str, data_dir: str | Path | None = None, *, seed: int = 42) -> Task:
    """Load an STS or classification task.

    Without a validation split one is held out of train: 15 % of the texts of each class, or 10 % of the pairs; equal
    texts (pairs) stay on one side. Tasks without a training split (STS12 and the like) have a test split only.

    Args:
        name: A name of mteb, for example "STSBenchmark" (the English part is taken), or one of `QUICKSTART`.
        data_dir: Mirror with ``<data_dir>/<name>/<split>.parquet``; by default the data come from the hub.
        seed: Chooses the validation rows where the task has none.

    Raises:
        ValueError: If mteb has no such task, or it is neither STS nor classification of texts.
        FileNotFoundError: If the mirror lacks it.
    """
    if name in QUICKSTART:
        return _quickstart(name)
    task = mteb_task(name, data_dir)
    if not task.data_loaded:
        task.load_data()
    data = {split: rows for split, rows in task_data(task).items() if split in SPLITS}
    splits: Splits = {}
    if task.metadata.type == "STS":
        for split, rows in data.items():
            first, second = (list(rows[column]) for column in task.column_names)
            splits[split] = Pairs(first, second, np.array(rows["score"], dtype=np.float64))
    else:
        names = label_names(task, data_dir)
        for split, rows in data.items():
            labels = [names[value] for value in rows[task.label_column_name]]
            splits[split] = Labelled(list(rows[task.input_column_name]), labels)
    source = task.metadata.dataset["path"] + ("" if data_dir is None else " (mirror)")
    score_range = (float(task.min_score), float(task.max_score)) if task.metadata.type == "STS" else None
    return _task(name, splits, score_range, source, task.metadata.dataset["revision"], seed=seed)


def mteb_task(name: str, data_dir: str | Path | None = None) -> Any:
    """The English part of an mteb task (an AbsTask); with a mirror its data are loaded, else mteb does it when needed.

    A mirror's files are read into memory and not through the cache of `datasets`: nothing is written, no network is
    asked, and the official revision stays in the results.

    Raises:
        ValueError: If mteb has no such task, or it is neither STS nor classification of texts.
        FileNotFoundError: If the mirror lacks it.
    """
    import mteb
    from datasets.arrow_dataset import Dataset
    from datasets.dataset_dict import DatasetDict
    from pyarrow import parquet

    try:
        task: Any = mteb.get_task(name, languages=["eng"], exclusive_language_filter=True)
    except (KeyError, ValueError) as error:
        raise ValueError(f"mteb has no English task {name!r} ({error}); built in are {sorted(QUICKSTART)}") from None
    if task.metadata.type not in ("STS", "Classification") or task.modalities != ["text"]:
        raise ValueError(f"{name!r} is a task of type {task.metadata.type}; allowed are STS, Classification, of texts")
    task.hf_subsets = sorted(task.hf_subsets, key=lambda subset: subset not in ("en", "en-en"))[:1]
    if data_dir is None:
        return task
    mirrored = {path.stem: path for path in (Path(data_dir) / name).glob("*.parquet")}
    if not mirrored:
        there = sorted(path.name for path in Path(data_dir).glob("*") if path.is_dir())
        raise FileNotFoundError(
            f"there is no {Path(data_dir) / name}/<split>.parquet; that mirror has {few(there, 20)}"
        )
    data = DatasetDict({s: Dataset(parquet.read_table(mirrored[s])) for s in SPLITS if s in mirrored})
    task.dataset = {task.hf_subsets[0]: data} if task.metadata.is_multilingual else data
    task.dataset_transform()
    task.data_loaded = True
    return task


def task_data(task: Any) -> Any:
    """The splits of a loaded mteb task, whether it keeps them by language or not."""
    return task.dataset[task.hf_subsets[0]] if task.metadata.is_multilingual else task.dataset


def label_names(task: Any, data_dir: str | Path | None = None) -> dict[Any, str]:
    """The name of each value in the label column of a loaded mteb task, one mapping for all splits.

    From the column ``label_text`` where the data have it, else from ``label_names`` in the mirror's ``manifest.json``
    (in ``data_dir`` or beside it), else the value itself as a string.
    """
    splits = [rows for split, rows in task_data(task).items() if split in SPLITS]
    names = {value: str(value) for rows in splits for value in rows[task.label_column_name]}
    for folder in [] if data_dir is None else [Path(data_dir).absolute().parent, Path(data_dir)]:
        if (folder / "manifest.json").is_file():
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            listed = manifest.get(task.metadata.name, {}).get("label_names") or []
            names |= {value: label for value, label in enumerate(listed) if value in names}
    for rows in splits:
        if "label_text" in rows.column_names:
            names |= dict(zip(rows[task.label_column_name], rows["label_text"], strict=True))
    return names


def few_shot(task: Task, shots: int, seed: int, *, whole_validation: bool = False) -> Task:
    """The same task with at most ``shots`` texts of each class to train on, and as many to choose by.

    The validation split is cut too, for whoever has a few texts of each class has no thousands to stop by; texts for
    validation come on top of those for training. With one seed fewer shots are a part of more.

    Args:
        task: A classification task.
        shots: Texts of each class; of a class with fewer all are taken.
        seed: Draws them.
        whole_validation: Leave the validation split as it is. Scores then show the method without the chance of a small
            validation split, and more than few-shot training can know.

    Raises:
        ValueError: If ``shots`` is not positive, or the task is no classification task with a training split.
    """
    if shots < 1 or not isinstance(task.splits.get("train"), Labelled):
        raise ValueError(
            f"shots are texts of each class, at least 1, of a classification task with a training split; got {shots} "
            f"for {task.name!r}, of kind {task.kind!r} with {sorted(task.splits)}"
        )
    cut: tuple[Split, ...] = ("train",) if whole_validation else ("train", "validation")
    splits: Splits = dict(task.splits)
    for split in cut:
        if isinstance(rows := splits.get(split), Labelled):
            splits[split] = rows.select(sorted(row for row, rank in _drawn(rows.labels, seed) if rank < shots))
    return replace(task, splits=splits, shots=shots)


def at_most(task: Task, rows: int, seed: int) -> Task:
    """The same task with at most so many training rows, drawn by seed; of each class at least one.

    Raises:
        ValueError: If there is no training split, or fewer rows than classes are asked for.
    """
    if "train" not in task.splits:
        raise ValueError(f"{task.name} has no train split; it can be evaluated but not trained on")
    train = task.splits["train"]
    strata = train.labels if isinstance(train, Labelled) else [""] * len(train)
    if rows < len(set(strata)):
        raise ValueError(f"{rows} training rows are asked for; {task.name} needs one of each class: {len(set(strata))}")
    if rows >= len(train):
        return task
    first_of_class = sorted(_drawn(strata, seed), key=lambda drawn: drawn[1] > 0)
    return replace(task, splits={**task.splits, "train": train.select(sorted(r for r, _ in first_of_class[:rows]))})


def _drawn(strata: Sequence[str], seed: int) -> list[tuple[int, int]]:
    """The rows in an order drawn by seed, each with the number of rows of its class before it."""
    seen = dict.fromkeys(strata, 0)
    drawn = []
    for row in np.random.default_rng(seed).permutation(len(strata)).tolist():
        drawn.append((row, seen[strata[row]]))
        seen[strata[row]] += 1
    return drawn


def load_files(
    train: str | Path,
    validation: str | Path | None = None,
    test: str | Path | None = None,
    *,
    text: str | None = None,
    label: str | None = None,
    sentence1: str | None = None,
    sentence2: str | None = None,
    score: str | None = None,
    score_range: tuple[float, float] | None = None,
    name: str | None = None,
    seed: int = 42,
) -> Task:
    """A task from own files: jsonl, csv, tsv (no quoting) or parquet, in UTF-8, with named columns.

    Columns ``text`` and ``label`` make a classification task, ``sentence1``, ``sentence2`` and ``score`` an STS task.

    Args:
        train: File to train on.
        validation: File to choose by; by default it is held out of train as in `load_task`.
        test: File to test with.
        text: Column with the text, if it has another name.
        label: Column with the class.
        sentence1: Column with the first sentence.
        sentence2: Column with the second sentence.
        score: Column with the gold similarity.
        score_range: Lowest and highest possible score; by default those that occur.
        name: Name of the task; by default that of the training file.
        seed: Chooses the validation rows where there is no file.

    Raises:
        FileNotFoundError: If a file is not there.
        ValueError: With what came, what is allowed and what to do: unknown suffix, missing column, empty file, wrong
            encoding, missing values, scores that are no numbers.
    """
    given: dict[Split, Path] = {"train": Path(train)}
    given |= {split: Path(path) for split, path in zip(SPLITS[1:], (validation, test), strict=True) if path is not None}
    tables = {split: read_table(path) for split, path in given.items()}
    classes = {"text": text, "label": label}
    pairs = {"sentence1": sentence1, "sentence2": sentence2, "score": score}
    fits = {"text", "label"} <= set(tables["train"]) and not any(pairs.values())
    roles = classes if fits or any(classes.values()) else pairs
    splits: Splits = {}
    for split, table in tables.items():
        path = given[split]
        columns = [pick_column(path, table, column or role) for role, column in roles.items()]
        if roles is classes:
            splits[split] = Labelled(as_texts(path, columns[0]), as_labels(path, columns[1]))
        else:
            first, second = (as_texts(path, column) for column in columns[:2])
            splits[split] = Pairs(first, second, as_scores(path, columns[2], score_range))
    scores = [rows.scores for rows in splits.values() if isinstance(rows, Pairs)]
    if scores and score_range is None:
        score_range = (float(np.concatenate(scores).min()), float(np.concatenate(scores).max()))
    return _task(name or Path(train).stem, splits, score_range if scores else None, str(train), seed=seed)


def _quickstart(name: str) -> Task:
    content = (files("ilse_embed") / "quickstart" / QUICKSTART[name]).read_text(encoding="utf-8")
    rows = list(separated(content.splitlines(), tab=True))
    splits: Splits = {}
    for split in SPLITS:
        table = {column: [row[column] for row in rows if row["split"] == split] for column in rows[0]}
        if "intent" in table:
            splits[split] = Labelled(table["text"], table["intent"])
        else:
            splits[split] = Pairs(table["sentence1"], table["sentence2"], np.array(table["score"], dtype=np.float64))
    return _task(name, splits, None if "intent" in rows[0] else (0.0, 5.0), "ilse_embed", seed=0)


def _task(
    name: str,
    splits: Splits,
    score_range: tuple[float, float] | None,
    source: str,
    revision: str | None = None,
    *,
    seed: int,
) -> Task:
    """Put a task together: report training rows that occur in test, hold out a validation split if there is none."""
    train, kind = splits.get("train"), "classification" if score_range is None else "sts"
    if train is not None:
        tested = set(_keys(splits["test"])) if "test" in splits else set()
        both = sum(key in tested for key in _keys(train))
        logger.info("%s: %d of %d training rows occur in the test split too; they are left in", name, both, len(train))
        if "validation" not in splits:
            held = _held_out(train, HELD_OUT[kind], seed)
            if not held:
                raise ValueError(f"{name}: {len(train)} rows are too few to hold some out; give a validation split too")
            splits = splits | {"validation": train.select(sorted(held))}
            splits["train"] = train.select([row for row in range(len(train)) if row not in held])
    ordered = {split: splits[split] for split in SPLITS if split in splits}
    return Task(name, kind, ordered, score_range, source, revision)  # type: ignore[arg-type]


def _keys(rows: Pairs | Labelled) -> Iterable[Hashable]:
    """What makes two rows the same: the text, or the two sentences whatever their order."""
    if isinstance(rows, Labelled):
        return rows.texts
    return map(frozenset, zip(rows.sentence1, rows.sentence2, strict=True))


def _held_out(rows: Pairs | Labelled, share: float, seed: int) -> set[int]:
    """Rows for validation: a share of each class, or of all pairs; equal rows go together, in the first one's class."""
    strata = rows.labels if isinstance(rows, Labelled) else [""] * len(rows)
    alike: dict[Hashable, list[int]] = {}
    for row, key in enumerate(_keys(rows)):
        alike.setdefault(key, []).append(row)
    groups: dict[str, list[list[int]]] = {stratum: [] for stratum in sorted(set(strata))}
    for members in alike.values():
        groups[strata[members[0]]].append(members)
    rng = np.random.default_rng(seed)
    chosen = [(group, rng.permutation(len(group))[: round(share * len(group))].tolist()) for group in groups.values()]
    return {row for group, places in chosen for place in places for row in group[place]}
