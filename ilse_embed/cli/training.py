"""``ilse train``."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ilse_embed.artifact import INDEX, check_target
from ilse_embed.cli.features import features_of
from ilse_embed.cli.options import (
    RECIPE_HELP,
    BackboneOption,
    CompressOption,
    DataDirOption,
    EncoderOption,
    JsonOption,
    PromptOption,
    SeedOption,
    StoreDtypeOption,
    StoreOption,
    TaskOption,
    backbone_path,
    check_output,
    recipe_of,
)
from ilse_embed.cli.screen import Progress, TokenProgress, console, plain, quiet, write_report

if TYPE_CHECKING:
    from ilse_embed.backbone import LayerTransformer
    from ilse_embed.methods import Method
    from ilse_embed.recipes import Recipe
    from ilse_embed.tasks import Task
    from ilse_embed.training import TrainedHead


def train(
    task: TaskOption,
    output: Annotated[Path, typer.Option(help="Folder for the model.")],
    backbone: BackboneOption = "smollm2",
    encoder: EncoderOption = "cayley",
    recipe: Annotated[str, typer.Option(help=f"{RECIPE_HELP}; the options below change it.")] = "default",
    data_dir: DataDirOption = None,
    prompt: PromptOption = None,
    store: StoreOption = None,
    store_dtype: StoreDtypeOption = None,
    compress: CompressOption = None,
    seed: SeedOption = 0,
    shots: Annotated[
        int | None,
        typer.Option(help="Train on so many texts of each class, drawn by --seed, and choose by as many.", min=1),
    ] = None,
    whole_validation: Annotated[
        bool, typer.Option("--whole-validation", help="With --shots: choose by the whole validation split.")
    ] = False,
    json_file: JsonOption = None,
    overrides: dict[str, Any] | None = None,
) -> None:
    """Train a head on a task; run again after a crash, it goes on where it was."""
    quiet()
    from ilse_embed.methods import Method

    method = Method.parse(encoder).changed(overrides or {})
    if method.trains_backbone:
        unused = {"store": store, "dtype": store_dtype, "compress": compress}
        _refuse(unused, f"--encoder {method.encoder}, which uses no layer features")
    chosen = method.recipe(recipe_of(recipe))
    if whole_validation and shots is None:
        raise ValueError("--whole-validation goes with --shots; without it the whole split is taken anyway")
    check_output(output)
    if (output / INDEX).is_file():
        raise ValueError(f"{output} holds a finished model already; take another --output or remove it")
    check_target(output)
    from ilse_embed.model import build
    from ilse_embed.tasks import few_shot, load_task

    data = load_task(task, data_dir)
    if shots is not None:
        data = few_shot(data, shots, seed, whole_validation=whole_validation)
        rows = {split: f"{len(data.splits[split]):,}" for split in ("train", "validation")}
        console.print(f"{shots} of each class: {rows['train']} texts to train on, {rows['validation']} to choose by")
    checkpoints = output / ".ilse-checkpoints"
    common: dict[str, Any] = {"prompt": prompt, "seed": seed, "checkpoints": checkpoints}
    if method.trains_backbone:
        model, trained, test_score = _train_backbone(data, backbone, method, chosen, **common)
    else:
        stored = {"store": store, "dtype": store_dtype, "compress": compress}
        model, trained, test_score = _train_head(data, backbone, method, chosen, stored, **common)
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
    backbone: str,
    method: "Method",
    recipe: "Recipe",
    stored: dict[str, Any],
    *,
    prompt: str | None,
    seed: int,
    checkpoints: Path,
) -> Trained:
    """Extract the layers, or take them from the store, and train a head on them."""
    from ilse_embed.methods import best_layer
    from ilse_embed.scoring import trained_score
    from ilse_embed.training import initial_parts, train

    compressed = stored["compress"] is not None
    draft = method.with_layer(0).encoder_args

    def check(shape: tuple[int, int]) -> None:
        initial_parts(data, shape, method.encoder, recipe, encoder_args=draft, compressed=compressed)

    model, table = features_of(data, backbone, recipe.pooling, prompt=prompt, check=check, **stored)
    if method.asks_for_best:
        method = method.with_layer(best_layer(data, table, recipe))
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


def _train_backbone(
    data: "Task",
    backbone: str,
    method: "Method",
    recipe: "Recipe",
    *,
    prompt: str | None,
    seed: int,
    checkpoints: Path,
) -> Trained:
    """Train an adapter of the backbone; only then run it over the test split."""
    from ilse_embed.extraction import default_device, extract
    from ilse_embed.lora import LoraTransformer, train_lora
    from ilse_embed.scoring import trained_score

    path, options = backbone_path(backbone), method.adapter
    model = LoraTransformer(path, pooling=recipe.pooling, adapter=options.adapter).to(default_device())
    console.print(f"Backbone {plain(model.backbone)}: {model.num_layers} layers, pooling {model.pooling}")
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


def _refuse(options: dict[str, Any], why: str) -> None:
    """Refuse options that would do nothing.

    Raises:
        ValueError: If one of them was given.
    """
    if given := [f"--{option.replace('_', '-')}" for option, value in options.items() if value is not None]:
        raise ValueError(f"{' and '.join(given)} would do nothing with {why}")
