"""Options that commands share; those of a recipe are made from its fields: one spelling and one text for each."""

import ast
import inspect
import json
import textwrap
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ilse_embed.cli.screen import say
from ilse_embed.recipes import RECIPES, Recipe
from ilse_embed.weights import smollm2

if TYPE_CHECKING:
    from ilse_embed.distributed import Cluster

BACKBONE_ALIASES = {"smollm2": smollm2}
"""Backbones that install from the package index, by the name that the CLI takes."""

BACKBONE_HELP = 'Name on the hub, local folder, or "smollm2" from the package index.'

TaskOption = Annotated[
    str, typer.Option(help="An mteb task (STS or classification), or quickstart-sts, quickstart-intents.")
]
EncoderOption = Annotated[
    str,
    typer.Option(
        help="cayley, fc, gnn, set, dwatt, concat, mlp, scalar_mix, mean or layer, with options: "
        '"gnn,topology=path", "layer,layer=12" (or "best"); or "lora,rank=16", an adapter of the backbone itself.'
    ),
]
SeedOption = Annotated[int, typer.Option(help="Draws initial weights and batches.")]
RECIPE_HELP = f"{' or '.join(RECIPES)}, or a JSON file as ilse search writes it"
BackboneOption = Annotated[str, typer.Option(help=BACKBONE_HELP)]
MovedBackboneOption = Annotated[str | None, typer.Option(help="Where the backbone is, if not where the artifact says.")]
DataDirOption = Annotated[
    Path | None, typer.Option(help="Mirror of the data, DIR/TASK/SPLIT.parquet; by default the hub.", exists=True)
]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write what was measured as JSON.")]
StoreOption = Annotated[Path | None, typer.Option(help="Folder of feature stores; by default in the cache.")]
STORE_DTYPE = "float32"
StoreDtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype", help=f"In what features are stored: bfloat16 or float16 (half as large); by default {STORE_DTYPE}."
    ),
]
CompressOption = Annotated[
    int | None, typer.Option(help="Store layers in so many dimensions (PCA); undone in the trained encoder.", min=1)
]
BackboneDtypeOption = Annotated[
    str | None, typer.Option(help="Of the backbone; by default float32 without a GPU, else the checkpoint's.")
]
PromptOption = Annotated[str | None, typer.Option(help="Goes in front of each text.")]
BatchTokensOption = Annotated[
    int | None, typer.Option(help="Padded tokens in a batch; by default 1024 on a CPU, 16384 on a GPU.", min=1)
]
EngineOption = Annotated[str, typer.Option(help='"local", or "ray" for a Ray cluster.', rich_help_panel="Cluster")]
AddressOption = Annotated[
    str | None, typer.Option(help="Of the Ray cluster; by default one on this machine.", rich_help_panel="Cluster")
]
WorkersOption = Annotated[
    int | None, typer.Option(help="Models on the cluster; by default one a GPU.", rich_help_panel="Cluster", min=1)
]


def backbone_path(name: str) -> str:
    """The folder of an alias, fetched if need be; any other name as it is."""
    return str(BACKBONE_ALIASES[name](progress=say)) if name in BACKBONE_ALIASES else name


def recipe_of(name: str) -> Recipe:
    """A recipe by its name, or from a JSON file.

    Raises:
        ValueError: If there is no such recipe, or the file is none.
    """
    if name in RECIPES:
        return RECIPES[name]
    if not name.endswith(".json"):
        raise ValueError(f"recipe is {name!r}; allowed are {json.dumps(sorted(RECIPES))} and files that end in .json")
    return Recipe.load(Path(name))


def check_output(output: Path) -> None:
    """Refuse what cannot be a folder to write to.

    Raises:
        ValueError: If it is the root of the file system, a file, or below one.
    """
    if not output.resolve().name:
        raise ValueError(f"--output is {output}, the root of the file system; it must be a folder below")
    for place in (output, *output.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"--output is {output}, but {place} is a file; it must be a folder, new or there already")


def cluster_of(engine: str, address: str | None, workers: int | None) -> "Cluster | None":
    """The cluster that the options name; None for the local engine.

    Raises:
        ValueError: If there is no such engine.
    """
    if engine not in ("local", "ray"):
        raise ValueError(f'engine is {engine!r}; allowed are "local" and "ray"')
    if engine == "local":
        return None
    from ilse_embed.distributed import Cluster

    return Cluster(address, workers)


def recipe_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of `Recipe`; it gets those that were set as ``overrides``."""
    docs = _field_docs(Recipe)
    options = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                inspect.get_annotations(Recipe, eval_str=True)[option.name] | None,
                typer.Option(help=f"{docs[option.name]} [default: the recipe's]", rich_help_panel="Recipe"),
            ],
        )
        for option in fields(Recipe)
        if option.name != "name"
    ]
    own = inspect.signature(command).parameters.values()

    def run(**given: Any) -> None:
        overrides = {option.name: given.pop(option.name) for option in options}
        command(**given, overrides={name: value for name, value in overrides.items() if value is not None})

    signature = inspect.Signature([*(p for p in own if p.name != "overrides"), *options])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _field_docs(options: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(options))).body[0].body  # type: ignore[attr-defined]
    return {
        ast.unparse(field.target): inspect.cleandoc(str(doc.value.value)).removesuffix(".")
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }
