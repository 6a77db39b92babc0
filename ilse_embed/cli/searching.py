"""``ilse search``."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

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
    check_output,
    recipe_of,
)
from ilse_embed.cli.screen import Progress, console, quiet, say, write_report


def search(
    task: TaskOption,
    output: Annotated[Path, typer.Option(help="Folder for the study, checkpoints and the best recipe.")],
    backbone: BackboneOption = "smollm2",
    encoder: EncoderOption = "cayley",
    recipe: Annotated[str, typer.Option(help=f"{RECIPE_HELP}; has what the space does not.")] = "default",
    space: Annotated[
        str, typer.Option(help="default or paper, or a TOML file; the encoder's own options stay.")
    ] = "default",
    trials: Annotated[int, typer.Option(help="Finished trials that the study is to have.", min=1)] = 50,
    pruner: Annotated[str, typer.Option(help="median (of the trials before) or none.")] = "median",
    storage: Annotated[
        str | None,
        typer.Option(help="Database URL, as postgresql://..., for workers on many machines; by default SQLite."),
    ] = None,
    study: Annotated[str, typer.Option(help="Name of the study in the storage.")] = "search",
    data_dir: DataDirOption = None,
    prompt: PromptOption = None,
    store: StoreOption = None,
    store_dtype: StoreDtypeOption = None,
    compress: CompressOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Find a recipe for a task by its validation score; run again or several times at once, the trials add up."""
    quiet()
    from ilse_embed.methods import Method, best_layer

    method = Method.parse(encoder)
    if method.trains_backbone:
        raise ValueError(f"a search is over heads; encoder {method.encoder!r} trains the backbone")
    base = method.recipe(recipe_of(recipe))
    check_output(output)
    from ilse_embed.search import search as run
    from ilse_embed.spaces import Space, read_space
    from ilse_embed.tasks import load_task

    content = {option: values for option, values in read_space(space).items() if option not in dict(method.options)}
    data = load_task(task, data_dir)
    searched = Space.of(content, base, method.encoder, data.kind)
    draft, compressed = method.with_layer(0).encoder_args, compress is not None

    def check(shape: tuple[int, int]) -> None:
        searched.check(data, shape, method.encoder, encoder_args=draft, compressed=compressed)

    _, table = features_of(
        data,
        backbone,
        base.pooling,
        prompt=prompt,
        store=store,
        dtype=store_dtype,
        compress=compress,
        check=check,
    )
    if method.asks_for_best:
        method = method.with_layer(best_layer(data, table, base))
    say(f"Space: {searched}")
    if searched.left_out:
        say(f"Without effect on {method.encoder} here, left out: {', '.join(searched.left_out)}")
    with Progress("Searching", "trials") as update:
        result = run(
            data,
            table,
            method.encoder,
            searched,
            output,
            trials=trials,
            storage=storage,
            name=study,
            seed=seed,
            encoder_args=method.encoder_args,
            pruner=pruner,
            progress=lambda done, most, best: update(done, most, "" if math.isnan(best) else f"best {best:.2f}"),
        )
    if result.exhausted:
        say(f"All {result.size:.0f} configurations of the space are tried; that is fewer than {trials} trials.")
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("best validation", "trials", "pruned", "duplicates avoided", "seconds"):
        shown.add_column(column, justify="right")
    numbers = (result.trials, result.pruned, result.repeated)
    shown.add_row(f"{result.validation:.2f}", *map(str, numbers), f"{result.seconds:.1f}")
    console.print(shown)
    say(f"Best recipe: {result.recipe.name}")
    path = output / "recipe.json"
    say(f'Saved: {path}; to train with it: ilse train --encoder "{method}" --recipe {path}')
    report = asdict(result) | {"size": None if math.isinf(result.size) else result.size}
    write_report(json_file, report | {"task": data.name, "encoder": str(method), "seed": seed, "space": str(searched)})
