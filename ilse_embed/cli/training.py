"""``ilse train``."""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

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
from ilse_embed.recipes import RECIPES


def train(
    task: Annotated[
        str, typer.Option(help="An mteb task (STS or classification), or quickstart-sts, quickstart-intents.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for the model.")],
    backbone: BackboneOption = "smollm2",
    encoder: Annotated[
        str,
        typer.Option(
            help="cayley, fc, gnn, set, dwatt, concat, mlp, scalar_mix, mean or layer, with options: "
            '"gnn,topology=path", "layer,layer=12" (or "best").'
        ),
    ] = "cayley",
    recipe: Annotated[str, typer.Option(help=f"{' or '.join(RECIPES)}; the options below change it.")] = "default",
    data_dir: DataDirOption = None,
    prompt: PromptOption = None,
    store: StoreOption = None,
    store_dtype: StoreDtypeOption = "float32",
    compress: CompressOption = None,
    seed: Annotated[int, typer.Option(help="Draws initial weights and batches.")] = 0,
    json_file: JsonOption = None,
    overrides: dict[str, Any] | None = None,
) -> None:
    """Train a head on a task; run again after a crash, it goes on where it was."""
    quiet()
    if recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}; allowed are {json.dumps(sorted(RECIPES))}")
    from ilse_embed.methods import Method, best_layer

    method = Method.parse(encoder)
    chosen = method.recipe(RECIPES[recipe].replace(**overrides or {}))
    if not output.resolve().name:
        raise ValueError(f"--output is {output}, the root of the file system; it must be a folder below")
    if (output / INDEX).is_file():
        raise ValueError(f"{output} holds a finished model already; take another --output or remove it")
    for place in (output, *output.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"--output is {output}, but {place} is a file; it must be a folder, new or there already")
    check_target(output)
    path = backbone_path(backbone)
    from ilse_embed.extraction import BackboneSource, extract, fill
    from ilse_embed.model import build
    from ilse_embed.scoring import trained_score
    from ilse_embed.store import FeatureStore
    from ilse_embed.tasks import load_task
    from ilse_embed.training import initial_parts
    from ilse_embed.training import train as train_head
    from ilse_embed.weights import cache_dir

    data = load_task(task, data_dir)
    model = BackboneSource(path, chosen.pooling).load()
    shape = (model.num_layers, compress or model.get_embedding_dimension())
    # What cannot be trained ends here, before anything is written.
    draft = method.with_layer(0).encoder_args
    initial_parts(data, shape, method.encoder, chosen, encoder_args=draft, compressed=compress is not None)
    root = store or cache_dir() / "features"
    features = FeatureStore.for_backbone(root, model, dtype=store_dtype, prompt=prompt, compress=compress)
    console.print(f"Backbone {plain(model.backbone)}: {model.num_layers} layers, pooling {model.pooling}")
    with TokenProgress("Extracting", "texts") as update:
        if compress is not None:  # fitted on training texts alone
            fill(features, model, data.texts("train"), progress=update)
        table = extract(model, data.texts(), features, progress=update)
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
