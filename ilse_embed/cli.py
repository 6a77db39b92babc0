"""The command ``ilse``."""

import json
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

# Threads that spin while others compute cost more than they give; it must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer
from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors import SafetensorError

from ilse_embed.artifact import INDEX, check_target
from ilse_embed.cli_options import recipe_options
from ilse_embed.recipes import RECIPES
from ilse_embed.weights import DownloadError, smollm2

app = typer.Typer(
    help="Embeddings from frozen language models: a small graph encoder over all layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()
errors = Console(stderr=True)

BACKBONE_ALIASES = {"smollm2": smollm2}
"""Backbones that install from the package index, by the name that the CLI takes."""

USER_ERRORS = (ValueError, OSError, KeyError, ImportError, FloatingPointError, DownloadError, SafetensorError)
"""What a user can mend: shown as one message, without a traceback unless ILSE_DEBUG is set."""

BackboneOption = Annotated[
    str, typer.Option(help='Name on the hub, local folder, or "smollm2" from the package index.')
]
DataDirOption = Annotated[
    Path | None, typer.Option(help="Mirror of the data, DIR/TASK/SPLIT.parquet; by default the hub.", exists=True)
]


def main() -> None:
    """Run the command line; errors that a user can mend are one message and not a traceback."""
    logging.basicConfig(level="WARNING", format="%(message)s", handlers=[RichHandler(console=errors, show_path=False)])
    try:
        app()
    except USER_ERRORS as error:
        if os.environ.get("ILSE_DEBUG"):
            raise
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        errors.print(f"[bold red]error:[/] {_plain(str(message))}", highlight=False, soft_wrap=True)
        sys.exit(1)


@app.command()
def demo(
    backbone: BackboneOption = "smollm2",
    output: Annotated[Path, typer.Option(help="Folder for the two models.")] = Path("ilse-demo"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the same as JSON.")] = None,
    seed: Annotated[int, typer.Option(help="Draws initial weights and batches.")] = 0,
) -> None:
    """The main job end to end on the built-in set: compare layer encoders, save one, reload it, use it."""
    _quiet()
    path = _backbone(backbone)
    from ilse_embed.demo import run_demo

    with console.status("") as status:
        result = run_demo(path, output, seed=seed, say=lambda line: _say(line, status.update))
    title = "Quickstart test splits: STS (Spearman x 100), 20 intents (accuracy, %)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("recipe", "method"):
        table.add_column(column, no_wrap=True)
    for column in ("STS", "trained\nparams", "intents", "trained\nparams", "seconds\nextract", "\ntrain"):
        table.add_column(column, justify="right")
    for number, row in enumerate(result.rows):
        layers = "/".join(str(layer) for layer in row.detail.values())
        table.add_row(
            row.recipe,
            row.method + (f" {layers}" if layers else ""),
            *(cell for name, score in row.scores.items() for cell in (f"{score:.1f}", f"{row.parameters[name]:,}")),
            f"{row.extraction_seconds:.1f}",
            f"{row.training_seconds:.1f}",
            end_section=number + 1 < len(result.rows) and result.rows[number + 1].recipe != row.recipe,
        )
    console.print(table)
    console.print(
        "Layers without an encoder: cosine of the features for STS, logistic regression on all training labels for "
        "intents; the best layer is chosen on the validation split. Encoders: the trained head."
    )
    mteb_scores = ", ".join(f"{name} {score:.1f}" for name, score in result.mteb.items())
    console.print(f"\nThe reloaded Cayley-Encoder (default recipe), scored by mteb: {mteb_scores}\n")
    for entry in result.neighbours:
        intent = entry["intent"]
        console.print(f"[bold]{_plain(entry['query'])}[/]  ({intent['label']}, p = {intent['probability']:.2f})")
        for text, cosine in entry["nearest"]:
            console.print(f"   {cosine:.2f}  {_plain(text)}", highlight=False)
    sts, intents = (Path(folder).absolute() for folder in result.models.values())
    console.print(
        f"\nSaved: {sts} (sentences) and {intents} (with the classifier). To use it:\n", highlight=False, soft_wrap=True
    )
    usage = f'import ilse_embed\nmodel = ilse_embed.load("{sts}")\nmodel.encode(["A sentence.", "Another one."])'
    console.print(textwrap.indent(usage, "    "), highlight=False, soft_wrap=True, markup=False)
    console.print(f"\n{result.seconds['total']:.0f} s in all.")
    _write_json(json_file, result.to_dict())


@app.command()
@recipe_options
def train(
    task: Annotated[
        str, typer.Option(help="An mteb task (STS or classification), or quickstart-sts, quickstart-intents.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for the model.")],
    backbone: BackboneOption = "smollm2",
    encoder: Annotated[str, typer.Option(help="cayley, set, mean or layer.")] = "cayley",
    recipe: Annotated[str, typer.Option(help=f"{' or '.join(RECIPES)}; the options below change it.")] = "default",
    data_dir: DataDirOption = None,
    store: Annotated[Path | None, typer.Option(help="Feature store; by default in the cache.")] = None,
    seed: Annotated[int, typer.Option(help="Draws initial weights and batches.")] = 0,
    layer: Annotated[int | None, typer.Option(help="Layer of the encoder 'layer'.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what was measured as JSON.")] = None,
    overrides: dict[str, Any] | None = None,
) -> None:
    """Train a head on a task; run again after a crash, it goes on where it was."""
    _quiet()
    if recipe not in RECIPES:
        raise ValueError(f"recipe is {recipe!r}; allowed are {json.dumps(sorted(RECIPES))}")
    chosen = RECIPES[recipe].replace(**overrides or {})
    if not output.resolve().name:
        raise ValueError(f"--output is {output}, the root of the file system; it must be a folder below")
    if (output / INDEX).is_file():
        raise ValueError(f"{output} holds a finished model already; take another --output or remove it")
    for place in (output, *output.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"--output is {output}, but {place} is a file; it must be a folder, new or there already")
    check_target(output)
    path = _backbone(backbone)
    from sentence_transformers.util import get_device_name

    from ilse_embed.backbone import LayerTransformer
    from ilse_embed.features import FeatureStore, extract
    from ilse_embed.model import build
    from ilse_embed.scoring import trained_score
    from ilse_embed.tasks import load_task
    from ilse_embed.training import initial_parts
    from ilse_embed.training import train as train_head
    from ilse_embed.weights import cache_dir

    data = load_task(task, data_dir)
    encoder_args = None if layer is None else {"layer": layer}
    model = LayerTransformer(path, pooling=chosen.pooling).to(get_device_name())
    shape = (model.num_layers, model.get_embedding_dimension())
    initial_parts(data, shape, encoder, chosen, encoder_args=encoder_args)  # what cannot be trained ends here
    console.print(f"Backbone {_plain(model.backbone)}: {model.num_layers} layers, pooling {model.pooling}")
    with _progress("Extracting", "texts") as update:
        features = FeatureStore.for_backbone(store or cache_dir() / "features", model)
        table = extract(model, data.texts(), features, progress=update)
    checkpoints = output / ".ilse-checkpoints"
    with _progress("Training", "epochs") as update:
        trained = train_head(
            data,
            table,
            encoder,
            chosen,
            seed=seed,
            encoder_args=encoder_args,
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
    console.print(f"Saved: {_plain(str(output))}", highlight=False, soft_wrap=True)
    _write_json(json_file, measured | trained.provenance)


@app.command()
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
    backbone: Annotated[str | None, typer.Option(help="Where the backbone is, if not where the artifact says.")] = None,
    batch_size: Annotated[int, typer.Option(help="Texts in a batch.", min=1)] = 32,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the scores as JSON.")] = None,
) -> None:
    """Score a model with the real mteb, under its true identity."""
    _quiet()
    names = tasks.replace(",", " ").split()
    if not names:
        raise ValueError(f"--tasks is {tasks!r}; give names of mteb tasks, separated by commas")
    from ilse_embed.evaluation import evaluate as run
    from ilse_embed.evaluation import model_meta
    from ilse_embed.model import load

    loaded = load(model, None if backbone is None else _backbone(backbone))
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
    console.print(f"Results: {_plain(str(output))}", highlight=False, soft_wrap=True)
    _write_json(json_file, {"model": meta.name, "revision": meta.revision, "protocol": protocol, "scores": scores})


@app.command()
def encode(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a saved model.")],
    file: Annotated[Path, typer.Argument(help="Texts: .txt (a text a line), .jsonl, .csv, .tsv or .parquet.")],
    output: Annotated[
        Path | None, typer.Option(help=".parquet (texts and embeddings) or .npy; beside FILE if not set.")
    ] = None,
    column: Annotated[str | None, typer.Option(help='Column of the texts; by default "text", or the only one.')] = None,
    backbone: Annotated[str | None, typer.Option(help="Where the backbone is, if not where the artifact says.")] = None,
    batch_size: Annotated[int, typer.Option(help="Texts in a batch.", min=1)] = 32,
) -> None:
    """Embed the texts of a file."""
    _quiet()
    target = output or file.with_suffix(".embeddings.parquet")
    if target.suffix not in (".parquet", ".npy"):
        raise ValueError(f"--output is {target}; allowed are names that end in .parquet or .npy")
    from ilse_embed.model import load
    from ilse_embed.tables import read_texts

    texts = read_texts(file, column)
    if target.exists() and target.samefile(file):
        raise ValueError(f"--output is {target}, the file of the texts itself; take another name")
    loaded = load(model, None if backbone is None else _backbone(backbone))
    embeddings = loaded.encode(texts, batch_size=batch_size, show_progress_bar=console.is_terminal)
    write_embeddings(target, texts, embeddings)
    console.print(
        f"{len(texts)} texts -> {_plain(str(target))} (width {embeddings.shape[1]})", highlight=False, soft_wrap=True
    )


def write_embeddings(path: Path, texts: list[str], embeddings: Any) -> None:
    """Write embeddings as .npy (n, m) float32, or as .parquet with the columns text and embedding; whole or not at all.

    Half a surrogate pair, which no file can hold as UTF-8, is written as U+FFFD, as which the model saw it.
    """
    import io

    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    from ilse_embed.files import write_atomically
    from ilse_embed.tokens import valid_unicode

    arrow: Any = pa

    buffer = io.BytesIO()
    if path.suffix == ".npy":
        np.save(buffer, embeddings)
    else:
        vectors = arrow.FixedSizeListArray.from_arrays(
            np.asarray(embeddings, np.float32).reshape(-1), embeddings.shape[1]
        )
        valid = [valid_unicode(text) for text in texts]
        parquet.write_table(arrow.table({"text": valid, "embedding": vectors}), buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, buffer.getvalue())


def _backbone(name: str) -> str:
    return str(BACKBONE_ALIASES[name](progress=_say)) if name in BACKBONE_ALIASES else name


def _quiet() -> None:
    """Keep the progress bars and notes of libraries off the screen; warnings of ours stay."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for library in ("sentence_transformers", "mteb", "datasets", "httpx"):
        logging.getLogger(library).setLevel(logging.ERROR)


def _say(line: str, update: Callable[[str], None] | None = None) -> None:
    if update is not None and console.is_terminal:
        update(line)
    else:
        console.print(_plain(line), highlight=False, soft_wrap=True)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


class _progress:
    """A progress bar on a terminal; elsewhere a line at the start."""

    def __init__(self, what: str, unit: str) -> None:
        self.what, self.unit = what, unit

    def __enter__(self) -> Callable[..., None]:
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(self.unit)]
        columns += [TimeRemainingColumn(), TextColumn("{task.fields[note]}")]
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.bar.start()
        self.row = self.bar.add_task(self.what, total=None, note="")
        if not console.is_terminal:
            console.print(f"{self.what} ...")

        def update(done: int, total: int, note: str = "") -> None:
            self.bar.update(self.row, completed=done, total=total, note=note)

        return update

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()


def _write_json(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        from ilse_embed.environment import environment
        from ilse_embed.files import write_atomically

        content = {"run": environment("ilse"), **content}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


if __name__ == "__main__":
    main()
