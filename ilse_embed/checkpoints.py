"""Checkpoints of a training: whose they are, which is the last whole one, whether it is that of the last epoch."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

from ilse_embed.files import write_atomically

logger = logging.getLogger(__name__)


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Note in a folder of checkpoints which run they are of.

    Raises:
        ValueError: If it is of a run with other settings, or there is something else in it.
    """
    note = folder / "settings.json"
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads(json.dumps(settings))
    if note.is_file():
        before = json.loads(note.read_text(encoding="utf-8"))
        if other := sorted(key for key in before | settings if before.get(key) != settings.get(key)):
            raise ValueError(
                f"{folder} has checkpoints of a run with other settings ({', '.join(other)}); remove it to start anew"
            )
    elif any(not path.name.endswith(".tmp") for path in folder.iterdir()):
        raise ValueError(f"{folder} is for checkpoints, but it has other files; take a new one")
    write_atomically(note, json.dumps(settings, indent=2).encode())


def last_checkpoint(folder: Path) -> tuple[Path, TrainerState] | None:
    """The last whole checkpoint and its state; the trainer writes the state last, so one without it is half of one."""
    whole: list[tuple[int, Path, TrainerState]] = []
    for path in folder.glob("checkpoint-*"):
        try:
            state = TrainerState.load_from_json(str(path / TRAINER_STATE_NAME))
            whole.append((state.global_step, path, state))
        except (OSError, ValueError, TypeError):
            logger.warning("%s is not whole and is removed", path)
            shutil.rmtree(path)
    return max(whole, key=lambda one: one[0])[1:] if whole else None


def ended(state: TrainerState, epochs: int) -> bool:
    """Whether a checkpoint is that of the last epoch, be it by patience."""
    callbacks: Any = state.stateful_callbacks or {}
    stopped = callbacks.get("TrainerControl", {}).get("args", {}).get("should_training_stop", False)
    return bool(stopped) or (state.epoch or 0) >= epochs
