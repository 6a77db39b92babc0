"""Where measurements go."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ilse_embed.environment import environment
from ilse_embed.files import write_atomically

RESULTS = Path(__file__).parent / "results"


def read_result(name: str) -> dict[str, Any]:
    """What ``results/<name>.json`` holds; empty if there is none."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def this_run() -> dict[str, Any]:
    """Command, date, machine and versions."""
    return environment(f"python -m benchmarks.{Path(sys.argv[0]).stem}")


def write_result(name: str, content: dict[str, Any]) -> Path:
    """Write ``results/<name>.json``; the content names the run of each figure."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    return path
