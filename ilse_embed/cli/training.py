"""``ilse train``."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from ilse_embed.artifact import INDEX, check_target
from ilse_embed.cli.features import task_and_features
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
    check_output,
    recipe_of,
)
from ilse_embed.cli.screen import Progress, console, plain, quiet, write_report


def train(
    task: TaskOption,
    output: Annotated[Path, typer.Option(help="Folder for the model.")],
    backbone: BackboneOption = "smollm2",
    encoder: EncoderOption = "cayley",
    recipe: Annotated[str, typer.Option(help=f"{RECIPE_HELP}; the options below change it.")] = "default",
    data_dir: DataDirOption = None,
    prompt: PromptOption = None,
    store: StoreOption = None,
    store_dtype: StoreDtypeOption = "float32",
    compress: CompressOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    overrides: dict[str, Any] | None = None,
) -> None:
    """Train a head on a task; run again after a crash, it goes on where it was."""
    quiet()
    from ilse_embed.methods import Method, best_layer

    method = Method.parse(encoder)
    chosen = method.recipe(recipe_of(recipe).replace(**overrides or {}))
    check_output(output)
    if (output / INDEX).is_file():
        raise ValueError(f"{output} holds a finished model already; take another --output or remove it")
    check_target(output)
    from ilse_embed.model import build
    from ilse_embed.scoring import trained_score
    from ilse_embed.training import initial_parts
    from ilse_embed.training import train as train_head

    data, model, table = task_and_features(
        task,
        backbone,
        chosen.pooling,
        data_dir=data_dir,
        prompt=prompt,
        store=store,
        dtype=store_dtype,
        compress=compress,
        check=lambda data, shape: initial_parts(
            data,
            shape,
            method.encoder,
            chosen,
            encoder_args=method.with_layer(0).encoder_args,
            compressed=compress is not None,
        ),
    )
    if method.asks_for_best:
        method = method.with_layer(best_layer(data, table, chosen))
    checkpoints = output / ".ilse-checkpoints"
    with Progress("Training", "epochs") as update:
        trained = train_head(
            data,
            table,
            method.encoder,
            chosen,
            seed=seed,
            encoder_args=method.encoder_args,
            checkpoints=checkpoints,
            progress=lambda done, most, score: update(done, most, f"validation {score:.2f}"),
        )
    # Before the parts join the backbone: that moves them to its device, and the features are on the CPU.
    test_score = trained_score(trained, data, table, "test") if "test" in data.splits else None
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
