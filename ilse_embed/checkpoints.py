"""Checkpoints of a training: which is the last whole one, whether it is that of the last epoch."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState

logger = logging.getLogger(__name__)


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
