"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a mapping as readable JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def claim(folder: Path, settings: Mapping[str, Any], note: str, content: str) -> None:
    """Note in a folder which run its content is of, so that another run does not mix with it.

    Args:
        folder: Made if it is not there.
        settings: All that the content depends on, as JSON.
        note: Name of the file.
        content: What the folder is for, for the messages.

    Raises:
        ValueError: If it is of a run with other settings, or there is something else in it.
    """
    path = folder / note
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads(json.dumps(settings))
    if not path.is_file():
        if any(not other.name.endswith(".tmp") for other in folder.iterdir() if other.name != note):
            raise ValueError(f"{folder} is for {content}, but it has other files; take a new one")
        write_atomically(path, json.dumps(settings, indent=2).encode(), overwrite=False)
    before = json.loads(path.read_text(encoding="utf-8"))  # perhaps of another process that was faster
    if other := sorted(key for key in before | settings if before.get(key) != settings.get(key)):
        raise ValueError(
            f"{folder} has {content} of a run with other settings ({', '.join(other)}); take another folder, or "
            "remove it to start anew"
        )


def write_atomically(path: Path, content: bytes, *, overwrite: bool = True) -> None:
    """Write under another name, flush to the disk, rename: a crash leaves the old file or the new one.

    Args:
        path: The file.
        content: What it is to hold.
        overwrite: Whether a file that is there is replaced; else it stays, and of several writers the first one wins.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")  # other machines have pids too
    try:
        temporary.write_bytes(content)
        fsync(temporary)
        if overwrite:
            temporary.replace(path)
        else:
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(temporary)
    finally:
        temporary.unlink(missing_ok=True)  # a full disk, say


def fsync(path: Path) -> None:
    """Have a file, or the entries of a folder, on the disk before going on."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open a folder
        return
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
