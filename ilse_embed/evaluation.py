"""Scores by mteb: a model's true identity, named protocols, similarity tests without training pairs.

mteb finds cached results by model name and revision alone. Without an identity every local model has the same, and a
second model silently gets the scores of the first.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import mteb
import numpy as np
import torch
from datasets.arrow_dataset import Dataset
from datasets.dataset_dict import DatasetDict
from mteb.abstasks import AbsTaskClassification, AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.mocks.mock_run import MockRunResults
from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper
from mteb.models.model_meta import ScoringFunction
from mteb.results import TaskResult
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from ilse_embed.encoders import ENCODERS
from ilse_embed.heads import LinearHead
from ilse_embed.identity import model_revision, parts_of
from ilse_embed.model import load
from ilse_embed.tasks import QUICKSTART, Pairs, Task, label_names, load_task, mteb_task, task_data

logger = logging.getLogger(__name__)

PROTOCOLS = ("probe", "full-probe", "head")
"""How classification is scored: mteb's few-shot logistic regression on the embeddings; the same on the whole training
split; the linear head of the model itself, trained with it."""


def model_meta(model: SentenceTransformer, name: str | None = None) -> ModelMeta:
    """What mteb has to know of a model.

    The revision is that of `ilse_embed.identity.model_revision`.

    Args:
        model: The model; a `CachedLayers` in place of the backbone must know the backbone.
        name: "organisation/name"; by default "ilse/<encoder>-<backbone>".

    Raises:
        ValueError: If the name has another form, or the backbone is unknown.
    """
    backbone, heads = parts_of(model)
    provenance = getattr(model, "provenance", None) or {}
    reference = str(getattr(backbone, "backbone", None) or "unknown")
    local = Path(reference).is_absolute() or Path(reference).is_dir()
    if name is None:
        encoders = {encoder.__name__: known for known, encoder in ENCODERS.items()}
        known = [encoders[kind] for kind in (type(module).__name__ for module in heads) if kind in encoders]
        encoder = provenance.get("encoder") or next(iter(known), "model")
        name = "ilse/" + re.sub(r"[^A-Za-z0-9._-]+", "-", f"{encoder}-{Path(reference).name}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(f'name is {name!r}; mteb needs "organisation/name", of letters, digits, ".", "_" and "-"')
    llm = getattr(backbone, "model", None)
    llm = llm if isinstance(llm, nn.Module) else nn.Module()
    modules = nn.ModuleList([llm, *heads])  # counts a stock Transformer once, though it is among both
    trained_on = provenance.get("training_datasets")
    return ModelMeta(
        loader=SentenceTransformerEncoderWrapper,
        loader_kwargs={"trust_remote_code": True},
        name=name,
        revision=model_revision(model),
        release_date=None,
        languages=["eng-Latn"],
        n_parameters=sum(tensor.numel() for tensor in modules.parameters()),
        n_embedding_parameters=_embedding_parameters(llm),
        memory_usage_mb=sum(t.nbytes for t in (*modules.parameters(), *modules.buffers())) / 2**20,
        max_tokens=getattr(backbone, "max_seq_length", None),
        embed_dim=model.get_embedding_dimension(),
        license=None,
        open_weights=None,
        public_training_code=None,
        public_training_data=None,
        framework=["Sentence Transformers", "PyTorch", "Transformers", "safetensors"],
        similarity_fn_name=ScoringFunction.from_str(model.similarity_fn_name),
        use_instructions=any(model.prompts.values()),
        training_datasets=None if trained_on is None else set(trained_on),
        adapted_from=None if reference == "unknown" else Path(reference).name if local else reference,
    )


def mteb_model(model: SentenceTransformer | str | Path, name: str | None = None) -> SentenceTransformerEncoderWrapper:
    """The model as ``mteb.evaluate`` takes it, with the identity of `model_meta`.

    Args:
        model: A model, or the folder or hub name of one that this package saved.
        name: See `model_meta`.
    """
    return _encoder(SentenceTransformerEncoderWrapper, load(model) if isinstance(model, str | Path) else model, name)


def local_tasks(names: Iterable[str], data_dir: str | Path | None = None) -> list[Any]:
    """Tasks of mteb by name: English, scored on the test split, with data from a mirror, or else from the hub.

    The built-in tasks (`ilse_embed.tasks.QUICKSTART`) are among the names.

    Raises:
        ValueError: If mteb has no such task, or it is neither STS nor classification of texts.
        FileNotFoundError: If the mirror lacks it.
    """
    tasks = [own_task(load_task(name)) if name in QUICKSTART else mteb_task(name, data_dir) for name in names]
    for task in tasks:
        task.filter_eval_splits(["test"])
    return tasks


def own_task(task: Task) -> Any:
    """A task of `load_files` or `load_task` as one of mteb, scored on its test split; its revision hashes its content.

    Raises:
        ValueError: If it has no test split, or no training split to fit a classifier on.
    """
    sts = task.kind == "sts"
    if missing := ({"test"} if sts else {"train", "test"}) - set(task.splits):
        raise ValueError(f"{task.name!r} lacks {sorted(missing)}; to be scored it needs these splits")
    columns: dict[str, dict[str, list[Any]]] = {}
    for split, rows in task.splits.items():
        if isinstance(rows, Pairs):
            columns[split] = {"sentence1": rows.sentence1, "sentence2": rows.sentence2, "score": rows.scores.tolist()}
        else:
            numbers = task.numbers(rows.labels).tolist()
            columns[split] = {"text": rows.texts, "label": numbers, "label_text": rows.labels}
    low, high = task.score_range or (0, 1)
    digest = hashlib.sha256(json.dumps([columns, low, high]).encode()).hexdigest()[:12]
    metadata = TaskMetadata(
        name=re.sub(r"[^\w.-]+", "-", task.name),
        description=f"Data of {task.source}",
        dataset={"path": task.source, "revision": task.revision or digest},
        type="STS" if sts else "Classification",
        eval_langs=["eng-Latn"],
        main_score="cosine_spearman" if sts else "accuracy",
    )
    base = AbsTaskSTS if sts else AbsTaskClassification
    own: Any = type("OwnTask", (base,), {"metadata": metadata, "min_score": low, "max_score": high})()
    own.dataset = DatasetDict({split: Dataset.from_dict(table) for split, table in columns.items()})
    own.data_loaded = True
    return own


def evaluate(
    model: SentenceTransformer | str | Path,
    tasks: Iterable[str | Task | Any],
    data_dir: str | Path | None = None,
    *,
    protocol: str = "probe",
    leak_free: bool = False,
    output: str | Path | None = None,
    encode_kwargs: Mapping[str, Any] | None = None,
    overwrite: str = "only-missing",
    name: str | None = None,
) -> list[TaskResult]:
    """Score a model by ``mteb.evaluate``.

    Results of another protocol, or without leaked pairs, carry a task name of their own ("EmotionClassification-head",
    "STS12-leakfree"), so that they never mix with the standard ones.

    Args:
        model: A model, or the folder or hub name of one that this package saved.
        tasks: Names, own tasks, or tasks of mteb.
        data_dir: Mirror of the data (see `ilse_embed.tasks.load_task`); by default they come from the hub.
        protocol: One of `PROTOCOLS`; all but "probe" are for classification alone.
        leak_free: Leave out STS test pairs that are in STSBenchmark's training split; how many is logged.
        output: Folder for the results, in mteb's layout; by default they are not stored.
        encode_kwargs: For ``model.encode``, for example ``{"batch_size": 64}``.
        overwrite: mteb's strategy: "only-missing", "always", "never" or "only-cache".
        name: See `model_meta`.

    Raises:
        ValueError: If the protocol does not fit a task or the model.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol is {protocol!r}; allowed are {json.dumps(PROTOCOLS)}")
    model = load(model) if isinstance(model, str | Path) else model
    encoder = _encoder(_LogitsEncoder if protocol == "head" else SentenceTransformerEncoderWrapper, model, name)
    train = _whole_training_split("STSBenchmark", data_dir) if leak_free else None
    prepared = []
    for task in tasks:
        task = own_task(task) if isinstance(task, Task) else task
        standard = local_tasks([task], data_dir)[0] if isinstance(task, str) else task
        kind = standard.metadata.type
        if kind == "STS" and protocol != "probe":
            raise ValueError(
                f"protocol {protocol!r} is for classification; score {standard.metadata.name} with 'probe'"
            )
        if kind != "STS" and leak_free:
            raise ValueError(f"leak_free is for STS tasks; score {standard.metadata.name} ({kind}) without it")
        if train is not None:
            standard = without_training_pairs(standard, train)[0]
        elif protocol == "full-probe":
            standard = _renamed(standard, protocol, samples_per_label=10**9, n_experiments=1)
        elif protocol == "head":
            head = next((module for module in model if isinstance(module, LinearHead)), None)
            if head is None:
                raise ValueError(
                    f"protocol 'head' needs a LinearHead in the model; it has {[type(m).__name__ for m in model]}"
                )
            classifier = _Argmax(_values_of_labels(standard, head.labels, data_dir))
            standard = _renamed(standard, protocol, samples_per_label=1, n_experiments=1, evaluator_model=classifier)
        prepared.append(standard)
        _alias_prompts(encoder, standard.metadata.name)

    def run(task: Any, strategy: str) -> TaskResult:
        return mteb.evaluate(
            encoder,
            task,
            co2_tracker=False,
            encode_kwargs=cast("Any", {"show_progress_bar": False, **(encode_kwargs or {})}),
            cache=None if output is None else mteb.ResultCache(output),
            overwrite_strategy=strategy,
            show_progress_bar=False,
        ).task_results[0]

    results = []
    for task in prepared:
        result = run(task, overwrite)
        if overwrite == "only-missing" and result.dataset_revision != task.metadata.revision:
            result = run(task, "always")  # mteb takes a complete result from its cache whatever the data's revision
        results.append(result)
    return results


def without_training_pairs(task: Any, train: Iterable[tuple[str, str]]) -> tuple[Any, int]:
    """An STS task without the test pairs that occur in ``train``, under its own name, and how many were left out.

    Pairs are compared without order, as lower-case words without white space and punctuation.

    Args:
        task: A task of mteb; it stays as it is.
        train: The two sentences of each training pair.
    """
    if not task.data_loaded:
        task.load_data()
    known = {_words_of_pair(pair) for pair in train}
    data = task_data(task)
    pairs = zip(*(data["test"][column] for column in task.column_names), strict=True)
    keep = [row for row, pair in enumerate(pairs) if _words_of_pair(pair) not in known]
    left_out = len(data["test"]) - len(keep)
    reduced = type(data)({**data, "test": data["test"].select(keep)})
    if task.metadata.is_multilingual:
        reduced = {task.hf_subsets[0]: reduced}
    free = _renamed(task, "leakfree", dataset=reduced)
    logger.info("%s: left out %d of %d test pairs", free.metadata.name, left_out, left_out + len(keep))
    return free, left_out


def mock_run(model: SentenceTransformer | str | Path) -> MockRunResults:
    """Run mteb's mock tasks, which need no data, on a model: does it work wherever mteb may call it?"""
    return mteb.mock_run(mteb_model(model))


class _LogitsEncoder(SentenceTransformerEncoderWrapper):
    """Hands mteb the logits of the linear head as features.

    The head reads the embedding before it is normalised, so its weights cannot be applied to what `encode` returns.
    """

    def encode(self, inputs: Any, **kwargs: Any) -> Tensor:
        """Shapes: n texts -> (n, C)."""
        options: dict[str, Any] = {**kwargs, "output_value": "logits"}
        return torch.stack(list(super().encode(inputs, **options))).float().cpu()


class _Argmax:
    """A classifier in scikit-learn's form that is trained already: the label of the largest logit."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = np.asarray(values)

    def get_params(self) -> dict[str, Any]:
        return {}

    def fit(self, features: Any, labels: Any) -> None:
        """Nothing to fit."""

    def predict(self, features: Any) -> NDArray[Any]:
        largest: NDArray[np.intp] = np.asarray(features).argmax(1)
        return self.values[largest]


Encoder = TypeVar("Encoder", bound=SentenceTransformerEncoderWrapper)


def _encoder(kind: type[Encoder], model: SentenceTransformer, name: str | None) -> Encoder:
    meta = model_meta(model, name)
    with warnings.catch_warnings():  # mteb builds an identity, which is replaced, and warns of its own calls
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        encoder = kind(model)
    encoder.mteb_model_meta = meta
    return encoder


def _embedding_parameters(llm: nn.Module) -> int | None:
    """Parameters of the token embeddings; mteb's own estimate takes the vocabulary times the embedding's width."""
    find: Any = getattr(llm, "get_input_embeddings", None)
    table = None if find is None else find()
    return None if table is None else sum(tensor.numel() for tensor in table.parameters())


def _renamed(task: Any, suffix: str, **attributes: Any) -> Any:
    """A copy of a task under a name of its own, with some attributes changed."""
    renamed = copy.copy(task)
    renamed.metadata = task.metadata.model_copy(update={"name": f"{task.metadata.name}-{suffix}"})
    for attribute, value in attributes.items():
        setattr(renamed, attribute, value)
    return renamed


def _alias_prompts(encoder: SentenceTransformerEncoderWrapper, task_name: str) -> None:
    """Let a renamed task use the prompt of its standard name."""
    prompts = encoder.model_prompts or {}
    standard = [key for key in prompts if task_name.startswith(f"{key}-")]
    if standard and task_name not in prompts:
        encoder.model_prompts = {**prompts, task_name: prompts[max(standard, key=len)]}


def _values_of_labels(task: Any, labels: Sequence[str], data_dir: str | Path | None) -> list[Any]:
    """The value in the task's label column for each label of a head, matched by name.

    Raises:
        ValueError: If the head and the task have different labels.
    """
    if not task.data_loaded:
        task.load_data()
    names = label_names(task, data_dir)
    for named in (names, {value: str(value) for value in names}):  # a head may have been trained without the manifest
        values = {label: value for value, label in named.items()}
        if set(values) == set(labels):
            return [values[label] for label in labels]
    raise ValueError(
        f"the head knows {len(labels)} labels ({', '.join(sorted(labels)[:5])}, ...), {task.metadata.name} has "
        f"{len(names)} ({', '.join(sorted(names.values())[:5])}, ...); evaluate it on the task that it was trained on"
    )


def _whole_training_split(name: str, data_dir: str | Path | None) -> list[tuple[str, str]]:
    """Training pairs of an STS task, with those that `load_task` may hold out for validation."""
    task = mteb_task(name, data_dir)
    if not task.data_loaded:
        task.load_data()
    rows = task_data(task)["train"]
    return list(zip(*(rows[column] for column in task.column_names), strict=True))


def _words_of_pair(pair: tuple[str, str]) -> frozenset[str]:
    return frozenset(" ".join(re.findall(r"\w+", text.lower())) for text in pair)
