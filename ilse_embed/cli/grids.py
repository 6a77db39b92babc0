"""``ilse grid``."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ilse_embed.cli.options import BACKBONE_ALIASES, DataDirOption, JsonOption, StoreOption, backbone_path
from ilse_embed.cli.screen import console, plain, quiet, say, write_report

if TYPE_CHECKING:
    from ilse_embed.experiments import Laboratory
    from ilse_embed.grid import Run

grids = typer.Typer(help="A grid of experiments as data: do what is missing, and show it.", no_args_is_help=True)

FileArgument = Annotated[Path, typer.Argument(help="TOML file of blocks; see ilse_embed.grid.", exists=True)]
ResultsOption = Annotated[Path, typer.Option(help="Folder whose results/ takes the results, in mteb's layout.")]
WorkOption = Annotated[Path | None, typer.Option(help="Folder for unfinished work; by default in the cache.")]
PlaceOption = Annotated[
    list[str] | None, typer.Option("--backbone", help="NAME=FOLDER: where a backbone of the file is; again for more.")
]


@grids.command("run")
def run_grid(
    file: FileArgument,
    output: ResultsOption = Path("leaderboard"),
    data_dir: DataDirOption = None,
    store: StoreOption = None,
    work: WorkOption = None,
    place: PlaceOption = None,
) -> None:
    """Train and score what is missing; run it again after a crash, and in as many processes as there are cores."""
    quiet()
    given = _places(place)
    laboratory, runs = _open(file, output, data_dir, store, work)
    _show(laboratory, runs)
    needed = {run.backbone for run in runs if laboratory.results.missing(run)} - set(given)
    laboratory.places = given | {name: backbone_path(name) for name in needed if name in BACKBONE_ALIASES}
    started = time.monotonic()

    def tell(run: "Run", what: str) -> None:
        left = laboratory.results.seconds_left(runs)
        rest = "" if left is None else f"; about {_duration(left)} of work left"
        say(f"[{_duration(time.monotonic() - started)}] {run}: {what}{rest}")

    done, failed = laboratory.perform(runs, tell)
    results = laboratory.results.refresh()
    left = sum(bool(results.missing(run)) for run in runs if run not in failed)
    say(f"{done} runs done here; " + (f"{left} are with other processes" if left else "nothing else is missing"))
    for run, error in failed.items():
        say(f"failed: {run}: {error} (see {laboratory.work / run.id}.txt)")
    if failed:
        raise typer.Exit(1)


@grids.command("status")
def grid_status(
    file: FileArgument, output: ResultsOption = Path("leaderboard"), data_dir: DataDirOption = None
) -> None:
    """Show what is there, what is left and how long that may take; runs nothing."""
    quiet()
    _show(*_open(file, output, data_dir, None, None))


@grids.command("table")
def grid_table(
    file: FileArgument,
    output: ResultsOption = Path("leaderboard"),
    data_dir: DataDirOption = None,
    reference: Annotated[str, typer.Option(help="Method that the others are compared with.")] = "cayley",
    output_file: Annotated[Path | None, typer.Option("--markdown", help="Write the tables here.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Mean and spread of every method, and whether it is better or worse than the reference, as Markdown."""
    quiet()
    from ilse_embed.comparison import compare
    from ilse_embed.files import write_atomically
    from ilse_embed.methods import Method
    from ilse_embed.report import markdown

    laboratory, runs = _open(file, output, data_dir, None, None)
    rows = compare(laboratory.results, runs, laboratory.task, str(Method.parse(reference)))
    text = markdown(rows, reference)
    if output_file is None:
        typer.echo(text)
    else:
        write_atomically(output_file, text.encode())
        say(f"Saved: {output_file}")
    write_report(json_file, {"reference": reference, "rows": rows})


def _places(pairs: list[str] | None) -> dict[str, str]:
    for pair in pairs or []:
        if "=" not in pair:
            raise ValueError(f"--backbone is {pair!r}; it must be NAME=FOLDER, NAME as the grid has it")
    return {pair.split("=", 1)[0]: pair.split("=", 1)[1] for pair in pairs or []}


def _open(
    file: Path, output: Path, data_dir: Path | None, store: Path | None, work: Path | None
) -> "tuple[Laboratory, list[Run]]":
    from ilse_embed.experiments import Laboratory
    from ilse_embed.grid import Results, read_grid, tasks_of
    from ilse_embed.weights import cache_dir

    laboratory = Laboratory(
        Results(output).refresh(), work or cache_dir() / "grid", store or cache_dir() / "features", data_dir
    )
    kinds = {name: (laboratory.task(name).kind, "train" in laboratory.task(name).splits) for name in tasks_of(file)}
    return laboratory, read_grid(file, kinds)


def _show(laboratory: "Laboratory", runs: "Sequence[Run]") -> None:
    results = laboratory.results
    table = Table("backbone", "recipe", "trained on", "runs done", "of")
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.backbone, run.recipe.name, run.trained_on), []).append(run)
    for group, members in groups.items():
        done = sum(not results.missing(run) for run in members)
        table.add_row(*map(plain, group), str(done), str(len(members)))
    console.print(table)
    left = results.seconds_left(runs)
    missing = sum(bool(results.missing(run)) for run in runs)
    estimate = "" if left is None or not missing else f", about {_duration(left)} on one process"
    say(f"{len(runs)} runs, {missing} are left{estimate}")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
