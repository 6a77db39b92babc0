"""Search spaces: which values of a recipe's options a search tries, as data."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_type_hints

from ilse_embed.encoders import ENCODERS, encoder_options, options_of_others
from ilse_embed.recipes import Recipe
from ilse_embed.tasks import Task
from ilse_embed.training import initial_parts

FOLDER = Path(__file__).parent / "search_spaces"

SPACES = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
"""Names of the spaces that come with the package."""


@dataclass(frozen=True)
class Range:
    """All numbers from ``low`` to ``high``, both included; ``whole`` ones only, or drawn on a logarithmic scale."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}{' (log)' if self.log else ''}"


Values = tuple[Any, ...] | Range

Pick = Callable[[str, Values], Any]
"""Draws one of the values of an option."""


@dataclass(frozen=True)
class Space:
    """The configurations of a search.

    Attributes:
        base: What has the options that are not searched.
        options: The values of each option; those that make others idle come first.
        left_out: Options of the file that have no effect on this encoder and kind of task.
    """

    base: Recipe
    options: dict[str, Values]
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, content: dict[str, Any], base: Recipe, encoder: str, kind: str) -> Space:
        """Check a space and keep what has an effect: another option would make equal configurations look different.

        Args:
            content: For each option a value, a list of values, or ``{"low": ..., "high": ..., "log": ...}``.
            base: Has the other options.
            encoder: Name of the encoder.
            kind: "sts" or "classification".

        Raises:
            ValueError: With the option, what came and what is allowed.
        """
        if encoder not in ENCODERS:
            raise ValueError(f"encoder is {encoder!r}; allowed are {json.dumps(sorted(ENCODERS))}")
        hints = get_type_hints(Recipe)
        fixed = {"name": "the search names its recipe", "pooling": "it decides about the features, which are read once"}
        if unknown := sorted(set(content) - set(hints)):
            raise ValueError(f"the space has {unknown}; allowed are {[name for name in hints if name not in fixed]}")
        for option in fixed.keys() & content.keys():
            raise ValueError(f"the space has {option!r}, which cannot be searched: {fixed[option]}")
        options = {option: _values(option, value, hints[option], base) for option, value in content.items()}
        idle = options.keys() & options_of_others(encoder)
        idle |= {"sts_loss"} & options.keys() if kind != "sts" else set()
        kept = [
            option for option in (*DECISIVE, *sorted(options.keys() - {*DECISIVE})) if option in options.keys() - idle
        ]
        if not kept:
            raise ValueError(f"the space has no option with an effect on encoder {encoder!r}; it has {sorted(content)}")
        return cls(base, {option: options[option] for option in kept}, tuple(sorted(idle)))

    def draw(self, pick: Pick) -> dict[str, Any]:
        """A configuration: a value for each option that is not idle beside the others."""
        chosen: dict[str, Any] = {}
        for option, values in self.options.items():
            if option not in _idle(self.base.replace(**chosen)):
                chosen[option] = pick(option, values)
        return chosen

    @property
    def size(self) -> float:
        """How many configurations there are; ``math.inf`` with a range of real numbers."""
        return self._size({}, list(self.options))

    def _size(self, chosen: dict[str, Any], options: list[str]) -> float:
        if not options:
            return 1
        option, *rest = options
        if option in _idle(self.base.replace(**chosen)):
            return self._size(chosen, rest)
        values = choices(self.options[option])
        if option not in DECISIVE:
            return (len(values) if values is not None else math.inf) * self._size(chosen, rest)
        return sum(self._size(chosen | {option: value}, rest) for value in values or ())

    def check(
        self,
        task: Task,
        shape: tuple[int, int],
        encoder: str,
        *,
        encoder_args: dict[str, Any] | None = None,
        compressed: bool = False,
    ) -> None:
        """Refuse what a training would refuse; call it before the extraction to know early.

        Args:
            task: As in `ilse_embed.training.train`.
            shape: Layers L and backbone width d.
            encoder: As in `ilse_embed.training.train`.
            encoder_args: As in `ilse_embed.training.train`.
            compressed: Whether the layers are compressed.

        Raises:
            ValueError: As `ilse_embed.training.initial_parts`, or if nothing would be trained.
        """
        # No encoder refuses some real numbers that a recipe allows; of a range the ends speak for all.
        ends = {
            option: (values.low, values.high) if isinstance(values, Range) else values
            for option, values in self.options.items()
            if option in (*encoder_options(encoder), "scaling") and get_type_hints(Recipe)[option] is not float
        }
        for combination in product(*ends.values()):
            recipe = self.base.replace(**dict(zip(ends, combination, strict=True)))
            try:
                parts = initial_parts(task, shape, encoder, recipe, encoder_args=encoder_args, compressed=compressed)
            except ValueError as error:
                raise ValueError(f"{error} (configuration {recipe.name} of the space)") from None
            if not any(weight.requires_grad for part in parts if part is not None for weight in part.parameters()):
                raise ValueError(f"encoder {encoder!r} has no parameters and the task no linear head: nothing to train")

    def __str__(self) -> str:
        shown = {
            option: str(values) if isinstance(values, Range) else "/".join(map(str, values))
            for option, values in self.options.items()
        }
        return ", ".join(f"{option} {values}" for option, values in shown.items())


DECISIVE = ("steps", "operator")
"""Options that make others idle."""


def _idle(recipe: Recipe) -> set[str]:
    """Options of graph encoders that have no effect beside the others."""
    if recipe.steps == 0:
        return {"operator", "gin_depth", "residual", "multiplicity", "graph_seed"}
    return {"gin_depth"} if recipe.operator == "gcn" else set()


def choices(values: Values) -> tuple[Any, ...] | range | None:
    """All values, where their number is finite."""
    if not isinstance(values, Range):
        return values
    return range(int(values.low), int(values.high) + 1) if values.whole else None


def read_space(name: str) -> dict[str, Any]:
    """The content of a space that comes with the package, or of a TOML file.

    Raises:
        ValueError: If there is no such space, or the file is no TOML.
        OSError: If the file cannot be read.
    """
    path = FOLDER / f"{name}.toml" if name in SPACES else Path(name)
    if path.suffix != ".toml":
        raise ValueError(f"space is {name!r}; allowed are {json.dumps(SPACES)} and files that end in .toml")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, not TOML
        raise ValueError(
            f"{path} is no search space: {error}; it must be TOML, as learning_rate = [1e-4, 1e-3]"
        ) from None


def _values(option: str, content: Any, hint: Any, base: Recipe) -> Values:
    """Values of one option, each of them allowed in a recipe."""
    whole = hint in (int, int | None)
    if isinstance(content, dict):
        if not whole and hint is not float:
            raise ValueError(f"the space has a range for {option!r}, which is no number; give a list of values")
        if not {"low", "high"} <= content.keys() <= {"low", "high", "log"}:
            raise ValueError(f"the space has {option} = {content}; a range has low, high and, if you like, log")
        low, high, log = content["low"], content["high"], content.get("log", False)
        base.replace(**{option: low})
        base.replace(**{option: high})
        if not low < high or not isinstance(log, bool) or (log and not low > 0):
            raise ValueError(
                f"the space has {option} = {content}; low must be below high, log true or false, and with log low "
                "above 0"
            )
        return Range(low, high, log, whole)
    listed = content if isinstance(content, list) else [content]
    values = tuple(getattr(base.replace(**{option: value}), option) for value in listed)
    if hint is float:
        values = tuple(map(float, values))  # 0 and 0.0 are one configuration
    if not values or len(set(values)) < len(values):
        raise ValueError(f"the space has {option} = {content}; give at least one value, and each once")
    return values
