"""The command ``ilse``."""

import logging
import os
import sys

# Threads that spin while others compute cost more than they give; it must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer
from rich.logging import RichHandler
from safetensors import SafetensorError

from ilse_embed.cli.demonstration import demo
from ilse_embed.cli.encoding import encode
from ilse_embed.cli.evaluation import evaluate
from ilse_embed.cli.extraction import extract
from ilse_embed.cli.grids import grids
from ilse_embed.cli.options import recipe_options
from ilse_embed.cli.screen import errors, plain
from ilse_embed.cli.searching import search
from ilse_embed.cli.stores import stores
from ilse_embed.cli.training import train
from ilse_embed.weights import DownloadError

app = typer.Typer(
    help="Embeddings from frozen language models: a small graph encoder over all layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(extract)
app.command()(recipe_options(train))
app.command()(search)
app.command()(evaluate)
app.command()(encode)
app.add_typer(stores, name="store")
app.add_typer(grids, name="grid")

USER_ERRORS = (
    *(ValueError, OSError, KeyError, ImportError, FloatingPointError, MemoryError),
    *(DownloadError, SafetensorError),
)
"""What a user can mend: shown as one message, without a traceback unless ILSE_DEBUG is set."""


def main() -> None:
    """Run the command line; errors that a user can mend are one message and not a traceback."""
    logging.basicConfig(level="WARNING", format="%(message)s", handlers=[RichHandler(console=errors, show_path=False)])
    try:
        app()
    except USER_ERRORS as error:
        if os.environ.get("ILSE_DEBUG"):
            raise
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        errors.print(f"[bold red]error:[/] {plain(str(message))}", highlight=False, soft_wrap=True)
        sys.exit(1)
