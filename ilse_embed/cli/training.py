"""``ilse train``."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ilse_embed.artifact import INDEX, check_target
from ilse_embed.cli.options import (
    BackboneOption,
    CompressOption,
    DataDirOption,
    JsonOption,
    PromptOption,
    StoreDtypeOption,
    StoreOption,
    backbone_path,
)
from ilse_embed.cli.screen import Progress, TokenProgress, console, plain, quiet, write_report
from ilse_embed.recipes import RECIPES, Recipe

if TYPE_CHECKING:
    from ilse_embed.backbone import LayerTransformer
    from ilse_embed.methods import Method
    from ilse_embed.tasks import Task
    from ilse_embed.training import TrainedHead


ShotsOption = Annotated[
    int | None,
    typer.Option(help="Train on so many texts of each class, drawn by --seed, and choose by as many.", min=1),
]
LORA = "lora"
LORA_SETS = ("learning_rate", "epochs", "patience", "batch_size", "dropout")
LORA_HEEDS = ("pooling", "sts_loss", "optimizer", "weight_decay", "schedule", *LORA_SETS)
"""Options of a recipe that LoRA has a value of its own for, and those that it heeds; the others are of encoders."""


def train(
    task: Annotated[
        str, typer.Option(help="An mteb task (STS or classification), or quickstart-sts, quickstart-intents.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for the model.")],
    backbone: BackboneOption = "smollm2",
    encoder: Annotated[
        str,
        typer.Option(
            help='cayley, set, ..., with options: "gnn,topology=path", "layer,layer=12" (or "best"); or "lora", which '
            "trains an adapter of the backbone itself."
        ),
    ] = "cayley",
    recipe: Annotated[str, typer.Option(help=f"{' or '.join(RECIPES)}; the options below change it.")] = "default",
    data_dir: DataDirOption = None,
    prompt: PromptOption = None,
    store: StoreOption = None,
    store_dtype: StoreDtypeOption = "float32",
    compress: CompressOption = None,
    seed: Annotated[int, typer.Option(help="Draws initial weights and batches.")] = 0,
    shots: ShotsOption = None,
    whole_validation: Annotated[
        bool, typer.Option("--whole-validation", help="With --shots: choose by the whole validation split.")
    ] = False,
    rank: Annotated[int | None, typer.Option(help="Of the adapter.", rich_help_panel="LoRA", min=1)] = None,
    alpha: Annotated[float | None, typer.Option(help="The update counts alpha / rank.", rich_help_panel="LoRA")] = None,
    targets: Annotated[
        str | None,
        typer.Option(
            help='Linear maps to adapt, "q_proj,v_proj" or "all-linear"; by default PEFT\'s.', rich_help_panel="LoRA"
        ),
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(help="Train on so many rows, drawn by --seed.", rich_help_panel="LoRA", min=1)
    ] = None,
    json_file: JsonOption = None,
    overrides: dict[str, Any] | None = None,
) -> None:
    """Train a head on a task; run again after a crash, it goes on where it was."""
    quiet()
    if recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}; allowed are {json.dumps(sorted(RECIPES))}")
    from ilse_embed.methods import Method

    chosen = RECIPES[recipe].replace(**overrides or {})
    adapter = {"rank": rank, "alpha": alpha, "targets": targets, "max_rows": max_rows}
    if encoder == LORA:
        _refuse({"store": store, "compress": compress}, "--encoder lora, which uses no layer features")
        _refuse(
            {option: value for option, value in (overrides or {}).items() if option not in LORA_HEEDS},
            "--encoder lora, which has no such part",
        )
        method = None
        adapter |= {option: value for option, value in (overrides or {}).items() if option in LORA_SETS}
    else:
        _refuse(adapter, f"--encoder {encoder}; it is for lora")
        method = Method.parse(encoder)
        chosen = method.recipe(chosen)
    if whole_validation and shots is None:
        raise ValueError("--whole-validation goes with --shots; without it the whole split is taken anyway")
    if not output.resolve().name:
        raise ValueError(f"--output is {output}, the root of the file system; it must be a folder below")
    if (output / INDEX).is_file():
        raise ValueError(f"{output} holds a finished model already; take another --output or remove it")
    for place in (output, *output.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"--output is {output}, but {place} is a file; it must be a folder, new or there already")
    check_target(output)
    path = backbone_path(backbone)
    from ilse_embed.model import build
    from ilse_embed.tasks import few_shot, load_task

    data = load_task(task, data_dir)
    if shots is not None:
        data = few_shot(data, shots, seed, whole_validation=whole_validation)
        rows = {split: f"{len(data.splits[split]):,}" for split in ("train", "validation")}
        console.print(f"{shots} of each class: {rows['train']} texts to train on, {rows['validation']} to choose by")
    checkpoints = output / ".ilse-checkpoints"
    common: dict[str, Any] = {"prompt": prompt, "seed": seed, "checkpoints": checkpoints}
    if method is None:
        model, trained, test_score = _train_lora(data, path, adapter, chosen, **common)
    else:
        stored = {"store": store, "dtype": store_dtype, "compress": compress}
        model, trained, test_score = _train_head(data, path, method, chosen, stored, **common)
    build(model, **trained.parts).save(str(output))
    shutil.rmtree(checkpoints)  # not before: a crash up to here must not lose the training
    measured: dict[str, Any] = {"validation": trained.validation, "epochs": trained.epochs, "seconds": trained.seconds}
    measured |= {"parameters": trained.parameters, "model": str(output)}
    if test_score is not None:
        measured["test"] = test_score
    name = "Spearman x 100" if data.kind == "sts" else "accuracy, %"
    console.print(
        f"{name}: validation {trained.validation:.2f}, test {measured.get('test', float('nan')):.2f}; "
        f"{trained.parameters:,} trained parameters, {trained.epochs} epochs, {trained.seconds:.1f} s"
    )
    console.print(f"Saved: {plain(str(output))}", highlight=False, soft_wrap=True)
    write_report(json_file, measured | trained.provenance)


Trained = tuple["LayerTransformer", "TrainedHead", float | None]
"""The backbone, what was trained, and the score x 100 on the test split, where there is one."""


def _train_head(
    data: "Task",
    path: str,
    method: "Method",
    recipe: Recipe,
    stored: dict[str, Any],
    *,
    prompt: str | None,
    seed: int,
    checkpoints: Path,
) -> Trained:
    """Extract the layers, or take them from the store, and train a head on them."""
    from ilse_embed.extraction import BackboneSource, extract, fill
    from ilse_embed.scoring import trained_score
    from ilse_embed.store import FeatureStore
    from ilse_embed.training import initial_parts, train
    from ilse_embed.weights import cache_dir

    store, compress = stored.pop("store"), stored["compress"]
    model = BackboneSource(path, recipe.pooling).load()
    shape = (model.num_layers, compress or model.get_embedding_dimension())
    # What cannot be trained ends here, before anything is written.
    draft = method.with_layer(0).encoder_args
    initial_parts(data, shape, method.encoder, recipe, encoder_args=draft, compressed=compress is not None)
    features = FeatureStore.for_backbone(store or cache_dir() / "features", model, prompt=prompt, **stored)
    _tell_backbone(model)
    with TokenProgress("Extracting", "texts") as update:
        if compress is not None:  # fitted on training texts alone
            fill(features, model, data.texts("train"), progress=update)
        table = extract(model, data.texts(), features, progress=update)
    method = method.resolve(data, table, recipe)
    with Progress("Training", "epochs") as update:
        trained = train(
            data,
            table,
            method.encoder,
            recipe,
            seed=seed,
            encoder_args=method.encoder_args,
            checkpoints=checkpoints,
            progress=lambda done, most, score: update(done, most, f"validation {score:.2f}"),
        )
    # Before the parts join the backbone: that moves them to its device, and the features are on the CPU.
    return model, trained, trained_score(trained, data, table, "test") if "test" in data.splits else None


def _train_lora(
    data: "Task",
    path: str,
    adapter: dict[str, Any],
    recipe: Recipe,
    *,
    prompt: str | None,
    seed: int,
    checkpoints: Path,
) -> Trained:
    """Train an adapter of the backbone; only then run it over the test split."""
    from ilse_embed.extraction import default_device, extract
    from ilse_embed.lora import LoraOptions, LoraTransformer, train_lora
    from ilse_embed.scoring import trained_score

    given = {option: value for option, value in adapter.items() if value is not None}
    if "targets" in given:
        given["targets"] = tuple(given["targets"].replace(",", " ").split())
    options = LoraOptions(**given)
    model = LoraTransformer(path, pooling=recipe.pooling, adapter=options.adapter).to(default_device())
    _tell_backbone(model)
    with Progress("Training", "epochs") as update:
        trained = train_lora(
            data,
            model,
            options,
            recipe,
            seed=seed,
            prompt=prompt,
            checkpoints=checkpoints,
            progress=lambda done, most, score: update(done, most, f"validation {score:.2f}"),
        )
    if "test" not in data.splits:
        return model, trained, None
    with TokenProgress("Testing", "texts") as update:
        table = extract(model, data.texts("test"), prompt=prompt, progress=update)
    return model, trained, trained_score(trained, data, table, "test")


def _tell_backbone(model: "LayerTransformer") -> None:
    console.print(f"Backbone {plain(model.backbone)}: {model.num_layers} layers, pooling {model.pooling}")


def _refuse(options: dict[str, Any], why: str) -> None:
    """Refuse options that would do nothing.

    Raises:
        ValueError: If one of them was given.
    """
    if given := [f"--{option.replace('_', '-')}" for option, value in options.items() if value is not None]:
        raise ValueError(f"{' and '.join(given)} would do nothing with {why}")
