"""The folder of a saved model: replaced whole, and nothing in it touched that somebody else wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

INDEX = "modules.json"
"""What makes a folder a model: it loads with it and not without."""

RECORD = "ilse.json"
"""The provenance of a model and, as "files", the names in its folder that saving wrote."""

USUAL = (INDEX, RECORD, "README.md", "config_sentence_transformers.json", "sentence_bert_config.json")
"""Files that every model has."""

STAGING = ".ilse-saving"


def check_target(folder: Path, names: Iterable[str] = USUAL) -> None:
    """Refuse a folder where saving would overwrite what no earlier save wrote.

    Args:
        folder: Where a model is to be saved.
        names: What is to be written there.

    Raises:
        ValueError: If some of the names are there and not from a save.
    """
    present = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if foreign := sorted(present & set(names) - _written(folder)):
        raise ValueError(
            f"{folder} holds {', '.join(foreign)}, which saving would overwrite and ilse_embed did not write; allowed "
            "are a folder without them and one that ilse_embed saved a model to. Take another one or move them away"
        )


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A folder to write a model to; in the end it takes the place of the one that an earlier save wrote.

    After a failure the earlier one is as it was. The index goes first and comes last, so that at no moment a folder
    with parts of two models loads; what a save that was killed left there goes with the next one.

    Args:
        folder: Where the model is to be; other files there stay.

    Raises:
        ValueError: As `check_target`; nothing is written then.
    """
    is_new = not folder.exists()
    staging = folder / STAGING
    shutil.rmtree(staging, ignore_errors=True)  # of a save that was killed
    staging.mkdir(parents=True)
    try:
        yield staging
        _replace(folder, staging)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


def _replace(folder: Path, staging: Path) -> None:
    new = {path.name for path in staging.iterdir()}
    check_target(folder, new)
    old = _written(folder)
    record = json.loads((staging / RECORD).read_text(encoding="utf-8"))
    (staging / RECORD).write_text(json.dumps(record | {"files": sorted(new)}, indent=2), encoding="utf-8")
    both = staging / "both"
    both.write_text(json.dumps({"files": sorted(old | new)}), encoding="utf-8")
    (folder / INDEX).unlink(missing_ok=True)
    both.replace(folder / RECORD)  # now it tells all that may be there when this is killed
    for path in list(folder.iterdir()):
        if path.is_dir() and path.name in old:
            shutil.rmtree(path)
        elif path.name in old - {RECORD}:
            path.unlink()
    for name in [*sorted(new - {INDEX}), INDEX]:
        (staging / name).replace(folder / name)


def _written(folder: Path) -> set[str]:
    """Names that saving wrote into a folder, to its end or until it was killed."""
    try:
        return set(json.loads((folder / RECORD).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()
