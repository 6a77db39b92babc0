"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a mapping as readable JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_atomically(path: Path, content: bytes) -> None:
    """Write under another name, flush to the disk, rename: a crash leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        fsync(temporary)
        temporary.replace(path)
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
