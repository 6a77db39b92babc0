"""``ilse evaluate``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ilse_embed.cli.options import DataDirOption, JsonOption, MovedBackboneOption, backbone_path
from ilse_embed.cli.screen import console, plain, quiet, write_report


def evaluate(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a saved model.")],
    tasks: Annotated[str, typer.Option(help="Names of mteb tasks, separated by commas.")],
    data_dir: DataDirOption = None,
    protocol: Annotated[str, typer.Option(help="Classification: probe (mteb's own), full-probe, or head.")] = "probe",
    leak_free: Annotated[bool, typer.Option(help="STS without pairs that STSBenchmark trains on.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for the results, in mteb's layout.")] = Path("results"),
    overwrite: Annotated[
        str, typer.Option(help="mteb's strategy: only-missing, always, never, only-cache.")
    ] = "only-missing",
    backbone: MovedBackboneOption = None,
    batch_size: Annotated[int, typer.Option(help="Texts in a batch.", min=1)] = 32,
    json_file: JsonOption = None,
) -> None:
    """Score a model with the real mteb, under its true identity."""
    quiet()
    names = tasks.replace(",", " ").split()
    if not names:
        raise ValueError(f"--tasks is {tasks!r}; give names of mteb tasks, separated by commas")
    from ilse_embed.evaluation import evaluate as run
    from ilse_embed.evaluation import model_meta
    from ilse_embed.model import load

    loaded = load(model, None if backbone is None else backbone_path(backbone))
    meta = model_meta(loaded)
    console.print(f"{meta.name} @ {meta.revision}", highlight=False)
    with console.status("mteb is running"):
        results = run(
            loaded,
            names,
            data_dir,
            protocol=protocol,
            leak_free=leak_free,
            output=output,
            overwrite=overwrite,
            encode_kwargs={"batch_size": batch_size},
        )
    scores = {result.task_name: 100 * result.get_score() for result in results}
    table = Table("task", "protocol", "score x 100")
    for name, score in scores.items():
        table.add_row(name, protocol, f"{score:.2f}")
    console.print(table)
    console.print(f"Results: {plain(str(output))}", highlight=False, soft_wrap=True)
    write_report(json_file, {"model": meta.name, "revision": meta.revision, "protocol": protocol, "scores": scores})
