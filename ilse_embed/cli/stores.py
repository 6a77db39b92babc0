"""``ilse store``: what was extracted."""

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from ilse_embed.cli.screen import console, plain, say

stores = typer.Typer(help="List, verify and remove stores of layer features.", no_args_is_help=True)

RootArgument = Annotated[Path, typer.Argument(help="A store, or a folder of stores.", exists=True, file_okay=False)]


@stores.command("ls")
def list_stores(root: RootArgument) -> None:
    """What stores there are: backbone and pooling, texts, layers x width, dtype, size."""
    from ilse_embed.store import FeatureStore

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("store", "texts", "layers x width", "dtype", "GB"):
        table.add_column(column, justify="left" if column == "store" else "right", overflow="fold")
    for folder in _found(root):
        size = f"{sum(path.stat().st_size for path in folder.iterdir()) / 1e9:.3f}"
        try:
            store = FeatureStore.open(folder)
            shape = " x ".join(map(str, store.shape)) + (" (compressed)" if store.facts["compress"] else "")
            table.add_row(plain(folder.name), f"{len(store):,}", shape, store.facts["dtype"], size)
        except OSError:
            table.add_row(plain(folder.name), "damaged", "", "", size)
    console.print(table)


@stores.command()
def verify(root: RootArgument) -> None:
    """Read every byte; name each file that is damaged or none of ours, and end with 1 if there is one."""
    from ilse_embed.store import FeatureStore

    found = 0
    for folder in _found(root):
        number = sum(1 for _ in folder.glob("*.safetensors"))
        before = found
        for path, reason in FeatureStore.problems(folder):
            found += 1
            say(f"damaged: {path} ({reason})")
        if found == before:
            say(f"sound: {folder} ({number} shards)")
    if found:
        say(f"{found} damaged files; delete them and run ilse extract again, which computes what is missing")
        raise typer.Exit(1)


@stores.command("rm")
def remove(
    folders: Annotated[list[Path], typer.Argument(help="Stores.", exists=True, file_okay=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete stores."""
    from ilse_embed.store import NOTE, remove_store

    for folder in folders:
        if not (folder / NOTE).is_file():
            raise FileNotFoundError(f"{folder} is no feature store (it has no {NOTE}); nothing was removed")
    for folder in folders:
        if yes or typer.confirm(f"Remove {folder}?"):
            remove_store(folder)
            say(f"removed: {folder}")


def _found(root: Path) -> list[Path]:
    from ilse_embed.store import stores_below

    if not (found := stores_below(root)):
        raise FileNotFoundError(f"there is no feature store in {root}")
    return found
