"""What the command line shows: messages, progress, reports as JSON."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

console = Console()
errors = Console(stderr=True)

LINE_SECONDS = 30.0
"""Where there is no terminal, progress is a line so often."""


def plain(text: str) -> str:
    """The text, with nothing in it taken as markup."""
    return escape(text)


def quiet() -> None:
    """Keep the progress bars and notes of libraries off the screen; warnings of ours stay."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for library in ("sentence_transformers", "mteb", "datasets", "httpx"):
        logging.getLogger(library).setLevel(logging.ERROR)


def say(line: str, update: Callable[[str], None] | None = None) -> None:
    """A line, or on a terminal what a spinner says."""
    if update is not None and console.is_terminal:
        update(line)
    else:
        console.print(plain(line), highlight=False, soft_wrap=True)


class Progress:
    """A progress bar on a terminal; elsewhere a line at the start and one now and then."""

    def __init__(self, what: str, unit: str) -> None:
        self.what, self.unit = what, unit

    def __enter__(self) -> Callable[..., None]:
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(self.unit)]
        columns += [TimeRemainingColumn(), TextColumn("{task.fields[note]}")]
        self.bar = Bar(*columns, console=console, disable=not console.is_terminal)
        self.bar.start()
        self.row = self.bar.add_task(self.what, total=None, note="")
        self.started = self.told = time.monotonic()
        if not console.is_terminal:
            console.print(f"{self.what} ...")
        return self.update

    def update(self, done: int, total: int | None, note: str = "") -> None:
        """Tell how far it is."""
        self.bar.update(self.row, completed=done, total=total, note=note)
        now = time.monotonic()
        if not console.is_terminal and now - self.told > LINE_SECONDS:
            self.told = now
            left = "" if not total or not done else f", {(now - self.started) * (total - done) / done:.0f} s left"
            of = "" if total is None else f" of {total:,}"
            say(f"{self.what}: {done:,}{of} {self.unit}{left}{'; ' if note else ''}{note}")

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()


class TokenProgress(Progress):
    """Progress that tells tokens a second."""

    def update(self, done: int, total: int | None, tokens: int | str = 0) -> None:
        """Tell how far it is, with the number of tokens so far."""
        rate = int(tokens) / max(1e-9, time.monotonic() - self.started)
        super().update(done, total, f"{rate:,.0f} tokens/s")


def write_report(path: Path | None, content: dict[str, Any]) -> None:
    """Write what a command measured as JSON, with command, machine and versions, if a path was given."""
    if path is not None:
        from ilse_embed.environment import environment
        from ilse_embed.files import write_atomically

        content = {"run": environment("ilse"), **content}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
