"""Train a head on cached layer features with the stock trainer of sentence-transformers. No language model in memory.

Letters: ``B`` texts, ``L`` layers, ``d`` backbone width, ``m`` embedding width, ``C`` classes.
"""

from __future__ import annotations

import hashlib
import math
import random
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.modules import Module, Normalize
from torch import nn
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from transformers.trainer_callback import TrainerState

from ilse_embed.checkpoints import ended, last_checkpoint
from ilse_embed.compression import LayerBasis
from ilse_embed.encoders import ENCODERS, LayerEncoder, build_encoder, encoder_options
from ilse_embed.features import CachedLayers, LayerTable, fit_scaling
from ilse_embed.files import claim
from ilse_embed.heads import LinearHead
from ilse_embed.objectives import objective
from ilse_embed.recipes import Recipe
from ilse_embed.scaling import LayerScaling
from ilse_embed.tasks import Task
from ilse_embed.tokens import valid_unicode

Progress = Callable[[int, int, float], None]
"""Called after each epoch with (epochs done, most epochs, validation score)."""


@dataclass(frozen=True)
class TrainedHead:
    """The trained parts and how training went.

    Attributes:
        scaling: Fitted scaling, or None.
        encoder: The encoder, for layers as the table has them.
        head: Linear classifier, for classification.
        validation: Best validation score x 100: Spearman or accuracy.
        epochs: Epochs run.
        seconds: Wall time of training, scaling included.
        parameters: Number of trained parameters.
        provenance: What an artifact records.
        basis: The compression of the table, if there was one.
    """

    scaling: LayerScaling | None
    encoder: LayerEncoder
    head: LinearHead | None
    validation: float
    epochs: int
    seconds: float
    parameters: int
    provenance: dict[str, Any]
    basis: LayerBasis | None = None

    @property
    def parts(self) -> dict[str, Any]:
        """What `ilse_embed.build` takes beside the backbone: for raw layers, without any compression."""
        encoder, scaling = self.encoder, self.scaling
        if self.basis is not None:
            encoder, scaling = encoder.widened(self.basis.directions), self.basis.scaling
        parts = {"encoder": encoder, "scaling": scaling, "head": self.head}
        return {**parts, "prompt": self.provenance["prompt"], "provenance": self.provenance}


class _HeadTrainer(SentenceTransformerTrainer):
    """Save and reload only what is trained.

    The stock trainer builds the whole model a second time to reload it, and takes longer for the model card of each
    checkpoint than for an epoch on a small training split.
    """

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        pass

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.model.save_pretrained(str(output_dir or self.args.output_dir), create_model_card=False)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        for position, module in enumerate(self.model.children()):
            if isinstance(module, Module) and any(p.requires_grad for p in module.parameters()):
                subfolder = "" if module.save_in_root else f"{position}_{type(module).__name__}"
                module.load_torch_weights(resume_from_checkpoint, subfolder=subfolder, model=module)


class _Report(TrainerCallback):
    def __init__(self, metric: str, progress: Progress | None) -> None:
        self.metric, self.progress = metric, progress

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.progress is not None:
            self.progress(round(state.epoch), int(args.num_train_epochs), 100 * kwargs["metrics"][self.metric])


def train(
    task: Task,
    table: LayerTable,
    encoder: str = "cayley",
    recipe: Recipe | None = None,
    *,
    seed: int = 0,
    encoder_args: dict[str, Any] | None = None,
    checkpoints: Path | None = None,
    progress: Progress | None = None,
) -> TrainedHead:
    """Train an encoder, and for classification a linear head with it.

    An encoder without parameters on a task without a linear head is only scaled and scored.

    Args:
        task: Training and validation split; the test split is not read.
        table: Layer features of their texts, pooled as the recipe says.
        encoder: Name of the encoder.
        recipe: All options; the recipe "default" if None.
        seed: Draws initial weights, dropout and batches.
        encoder_args: Options of the encoder beyond the recipe's, for example ``{"layer": 12}``.
        checkpoints: Folder for a checkpoint after each epoch; training goes on from the last one there, and ends with
            the same weights as a run that nothing disturbed; after the last epoch it returns them at once. Remove it
            when the model is saved. None: a temporary folder.
        progress: Called after each epoch. What it raises ends the training and is raised here, as a search does to
            prune; with ``checkpoints`` a later call goes on from the epoch before.

    Raises:
        ValueError: As `initial_parts`, or if ``checkpoints`` holds something else than checkpoints of this run.
        FloatingPointError: If no epoch has a finite validation score.
    """
    recipe = recipe or Recipe()
    started = time.perf_counter()
    fusion, head = initial_parts(
        task,
        table.layers.shape[1:],
        encoder,
        recipe,
        seed=seed,
        encoder_args=encoder_args,
        compressed=table.basis is not None,
    )
    texts = task.texts("train", "validation")
    scaling = fit_scaling(table, task.texts("train")) if recipe.scaling and table.basis is None else None
    layers = table.select(texts)
    if scaling is not None:
        layers = scaling.scale_layers(layers)
    rows = {name: row for row, text in enumerate(texts) for name in (text, valid_unicode(text))}  # datasets are UTF-8
    cached = CachedLayers(LayerTable(rows, layers))

    modules = {"cached": cached, "encoder": fusion, "head": head, "normalize": Normalize()}
    present = OrderedDict((name, module) for name, module in modules.items() if module is not None)
    model = SentenceTransformer(modules=present)  # type: ignore[arg-type]
    settings = {"task": task.name, "encoder": encoder, "encoder_args": encoder_args or {}, "seed": seed}
    settings |= {f"recipe.{key}": value for key, value in asdict(recipe).items()}
    settings |= {"features": [*layers.shape, table.source]}
    validation, epochs = fit(model, task, recipe, settings, seed=seed, checkpoints=checkpoints, progress=progress)
    model.cpu()
    provenance = {
        "task": task.name,
        "training_datasets": [task.name],
        "dataset_revision": task.revision,
        "encoder": encoder,
        "encoder_args": encoder_args or {},
        "recipe": asdict(recipe),
        "seed": seed,
        "shots": task.shots,
        "rows": {split: len(task.splits[split]) for split in ("train", "validation")},
        "validation": round(validation, 4),
        "prompt": table.prompt,
        "compressed": None if table.basis is None else layers.shape[2],
        "labels": task.labels if head is not None else None,
    }
    return TrainedHead(
        scaling,
        fusion,
        head,
        validation=validation,
        epochs=epochs,
        seconds=time.perf_counter() - started,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        provenance=provenance,
        basis=table.basis,
    )


def initial_parts(
    task: Task,
    shape: Sequence[int],
    encoder: str,
    recipe: Recipe,
    *,
    seed: int = 0,
    encoder_args: dict[str, Any] | None = None,
    compressed: bool = False,
) -> tuple[LayerEncoder, LinearHead | None]:
    """The encoder, and for classification the linear head, as training starts with them.

    What cannot be trained is refused here; call it before the extraction to know early.

    Args:
        task: As in `train`.
        shape: Layers L and backbone width d.
        encoder: As in `train`.
        recipe: As in `train`.
        seed: As in `train`.
        encoder_args: As in `train`.
        compressed: Whether the layers are compressed, and so standardised.

    Raises:
        ValueError: If the task has no training split or all its scores are equal, the encoder or an option of it is
            unknown, or encoder or recipe cannot do with compressed layers.
    """
    check_trainable(task)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fusion = new_encoder(encoder, shape, recipe, encoder_args)
        head = LinearHead(fusion.get_embedding_dimension(), task.labels) if task.kind == "classification" else None
    if compressed and not (recipe.scaling and fusion.input_weight):
        what = f"encoder {encoder!r} has no linear map of the layers" if recipe.scaling else "the recipe wants raw ones"
        raise ValueError(
            f"compressed layers are standardised and mapped linearly, but {what}; extract without compress"
        )
    return fusion, head


def new_encoder(
    encoder: str, shape: Sequence[int], recipe: Recipe, encoder_args: dict[str, Any] | None = None
) -> LayerEncoder:
    """An encoder with new weights, with those options of a recipe that it knows.

    Args:
        encoder: As in `train`.
        shape: Layers L and backbone width d.
        recipe: As in `train`.
        encoder_args: As in `train`.

    Raises:
        ValueError: If the encoder or an option of it is unknown, or a value is not allowed.
    """
    known = encoder_options(encoder) if encoder in ENCODERS else []
    options = {key: value for key, value in asdict(recipe).items() if key in known}
    return build_encoder(encoder, *shape, **options | (encoder_args or {}))


def check_trainable(task: Task) -> None:
    """Refuse a task that nothing can be trained on.

    Raises:
        ValueError: If it has no training or validation split, or all its scores are equal.
    """
    for split in ("train", "validation"):
        if split not in task.splits:
            raise ValueError(f"{task.name} has no {split} split; it can be evaluated but not trained on")
    if task.score_range is not None and not task.score_range[0] < task.score_range[1]:
        raise ValueError(f"{task.name} has the score range {task.score_range}; its ends must differ")


def fit(
    model: SentenceTransformer,
    task: Task,
    recipe: Recipe,
    settings: dict[str, Any],
    *,
    seed: int = 0,
    checkpoints: Path | None = None,
    progress: Progress | None = None,
) -> tuple[float, int]:
    """Train whatever of a model wants gradients, in place; it ends in eval mode with the weights of the best epoch.

    A model without parameters that want gradients is only scored.

    Args:
        model: A pipeline that the stock losses take; for classification with a `LinearHead`.
        task: As in `train`.
        recipe: Loss, optimizer, schedule, batches, epochs and patience.
        settings: What makes this training another one than the rest, in JSON's types.
        seed: As in `train`.
        checkpoints: As in `train`.
        progress: As in `train`.

    Returns:
        The best validation score x 100, and the epochs run.

    Raises:
        ValueError: If ``checkpoints`` holds something else than checkpoints of this run.
        FloatingPointError: If no epoch has a finite validation score.
    """
    with tempfile.TemporaryDirectory() as temporary, _global_seeds_kept():
        folder = Path(temporary) if checkpoints is None else checkpoints
        claim(folder, settings | {"data": fingerprint(task)}, "settings.json", "checkpoints")
        if any(parameter.requires_grad for parameter in model.parameters()):
            state = _fit(model, task, recipe, seed, folder, progress)
            score, epochs = state.best_metric, round(state.epoch or 0)
        else:
            _, _, evaluator, metric = objective(model, task, recipe)
            scores: Any = evaluator(model)
            score, epochs = scores[metric.removeprefix("eval_")], 0
    model.eval()
    return 100 * float(score or 0.0), epochs


def _fit(
    model: SentenceTransformer, task: Task, recipe: Recipe, seed: int, folder: Path, progress: Progress | None
) -> TrainerState:
    """Train, or go on where the last checkpoint in the folder is; the model then has the best epoch's weights."""
    dataset, loss, evaluator, metric = objective(model, task, recipe)
    plateau = recipe.schedule == "reduce_lr_on_plateau"
    epochs, patience = recipe.epochs_and_patience(len(dataset))
    args = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        lr_scheduler_type=recipe.schedule,
        lr_scheduler_kwargs={"mode": "max", "patience": 3, "factor": 0.5} if plateau else {},
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,  # the best and the last; with 1 the trainer removes the last at the end
        load_best_model_at_end=True,
        restore_callback_states_from_checkpoint=True,  # else a resumed run forgets how long it has been patient
        metric_for_best_model=metric,
        greater_is_better=True,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        prompts=model.prompts.get(model.default_prompt_name or "") or None,
        seed=seed,
    )
    optimizer: Any = None
    if recipe.optimizer == "adam":
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    trainer = _HeadTrainer(
        model=model,
        args=args,
        train_dataset=dataset,
        loss=loss,
        evaluator=evaluator,
        optimizers=(optimizer, None),  # type: ignore[arg-type]
        callbacks=[EarlyStoppingCallback(patience), _Report(metric, progress)],
    )
    trainer.remove_callback(PrinterCallback)
    last, state = last_checkpoint(folder) or (None, None)
    if state is None or not ended(state, epochs):
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        state = trainer.state
    scored = state.best_metric is not None and math.isfinite(state.best_metric)
    if scored:
        trainer._load_from_checkpoint(str(folder / f"checkpoint-{state.best_global_step}"))
    # Accuracy is finite even where all logits are NaN.
    if not scored or not all(bool(p.isfinite().all()) for p in model.parameters() if p.requires_grad):
        raise FloatingPointError(
            f"no epoch of training on {task.name} has finite weights and a finite validation score; lower the learning "
            f"rate ({recipe.learning_rate:g}) or turn the scaling on"
        )
    return state


def fingerprint(task: Task) -> str:
    """Tells the training and validation data of a task from any other."""
    digest = hashlib.sha256(repr((task.revision, task.score_range)).encode())
    for rows in (task.splits["train"], task.splits["validation"]):
        columns = vars(rows)
        digest.update(repr({key: list(column) for key, column in columns.items()}).encode())
    return digest.hexdigest()[:16]


@contextmanager
def _global_seeds_kept() -> Iterator[None]:
    """The trainer seeds every global generator; the caller's go on as if it had not."""
    kept = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002
