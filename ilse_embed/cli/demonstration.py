"""``ilse demo``."""

import textwrap
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from ilse_embed.cli.options import BackboneOption, JsonOption, backbone_path
from ilse_embed.cli.screen import console, plain, quiet, say, write_report


def demo(
    backbone: BackboneOption = "smollm2",
    output: Annotated[Path, typer.Option(help="Folder for the two models.")] = Path("ilse-demo"),
    json_file: JsonOption = None,
    seed: Annotated[int, typer.Option(help="Draws initial weights and batches.")] = 0,
) -> None:
    """The main job end to end on the built-in set: compare layer encoders, save one, reload it, use it."""
    quiet()
    path = backbone_path(backbone)
    from ilse_embed.demo import run_demo

    with console.status("") as status:
        result = run_demo(path, output, seed=seed, say=lambda line: say(line, status.update))
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
        console.print(f"[bold]{plain(entry['query'])}[/]  ({intent['label']}, p = {intent['probability']:.2f})")
        for text, cosine in entry["nearest"]:
            console.print(f"   {cosine:.2f}  {plain(text)}", highlight=False)
    sts, intents = (Path(folder).absolute() for folder in result.models.values())
    console.print(
        f"\nSaved: {sts} (sentences) and {intents} (with the classifier). To use it:\n", highlight=False, soft_wrap=True
    )
    usage = f'import ilse_embed\nmodel = ilse_embed.load("{sts}")\nmodel.encode(["A sentence.", "Another one."])'
    console.print(textwrap.indent(usage, "    "), highlight=False, soft_wrap=True, markup=False)
    console.print(f"\n{result.seconds['total']:.0f} s in all.")
    write_report(json_file, result.to_dict())
