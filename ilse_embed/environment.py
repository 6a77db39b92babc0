"""Where a figure was measured: machine, versions, command. Written beside every figure."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("ilse-embed", "torch", "transformers", "sentence-transformers", "mteb", "numpy")


def environment(program: str, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Command, date, machine and versions.

    Args:
        program: How the program is called, for example "ilse" or "python -m benchmarks.sinks".
        arguments: Its arguments, by default those of this process; of an absolute path, NAME=PATH too, only the last
            part is kept.
    """
    given = sys.argv[1:] if arguments is None else arguments
    shown = [_without_folders(argument) for argument in given]
    return {
        "command": f"{program} {shlex.join(shown)}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "system": platform.system(),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        },
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _without_folders(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    return f"{option}{equals}{Path(value).name}" if Path(value).is_absolute() else argument


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
