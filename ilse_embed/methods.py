"""Methods: an encoder with its options in one spelling, for the command line, for grids and for tables of results.

``"cayley"``, ``"cayley,operator=gcn,steps=2"``, ``"gnn,topology=path"``, ``"layer,layer=12"``, ``"layer,layer=best"``;
``"lora,rank=16,targets=q_proj+v_proj"``, which trains an adapter of the backbone itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ilse_embed.encoders import ENCODERS, encoder_options, options_of_others
from ilse_embed.features import LayerTable, fit_scaling
from ilse_embed.recipes import LoraOptions, Recipe
from ilse_embed.scoring import layer_scores
from ilse_embed.tasks import Task
from ilse_embed.training import new_encoder

BEST = "best"
"""In place of the number of a layer: the one that scores best on the validation split, untrained."""


LORA = "lora"
"""The method that trains the backbone."""

LORA_HEEDS = ("pooling", "sts_loss", "optimizer", "weight_decay", "schedule")
"""Options of a recipe that it heeds; it has others of its own, `LoraOptions`, and no encoder."""


@dataclass(frozen=True)
class Method:
    """An encoder and what is special about it.

    Attributes:
        encoder: One of `ENCODERS`, or "lora".
        options: Options of the encoder or of the recipe, sorted by name.
    """

    encoder: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, spelling: str) -> Method:
        """A method by its spelling, ``ENCODER[,OPTION=VALUE...]``.

        Raises:
            ValueError: If the encoder or an option is unknown, or an option has no value or two.
        """
        encoder, *parts = (part.strip() for part in spelling.split(","))
        if encoder not in (*ENCODERS, LORA):
            raise ValueError(f"encoder is {encoder!r}; allowed are {json.dumps(sorted((*ENCODERS, LORA)))}")
        options: dict[str, Any] = {}
        for part in parts:
            option, equals, value = part.partition("=")
            if not equals or option in options:
                raise ValueError(f"{spelling!r}: {part!r} must be OPTION=VALUE, each option once")
            options[option] = _value(value)
        return cls(encoder).changed(options)

    def changed(self, options: Mapping[str, Any]) -> Method:
        """This method with some options set.

        Raises:
            ValueError: If there is no such option.
        """
        own = self._own_options()
        heeded = {*LORA_HEEDS} if self.trains_backbone else _recipe_options() - options_of_others(self.encoder)
        for option in options:
            if option not in (*own, *heeded):
                others = sorted(heeded - {*own})
                raise ValueError(
                    f"encoder {self.encoder!r} has no option {option!r}; it takes {own}, and of the recipe {others}"
                )
        return dataclasses.replace(self, options=tuple(sorted({**dict(self.options), **options}.items())))

    def __str__(self) -> str:
        """The spelling."""
        words = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in self.options)
        return ",".join([self.encoder, *(f"{key}={value}" for key, value in words)])

    def recipe(self, base: Recipe) -> Recipe:
        """The recipe with those options that are its own.

        Raises:
            ValueError: If a value is not allowed.
        """
        return base.replace(**{key: value for key, value in self.options if not self._is_own(key)})

    @property
    def encoder_args(self) -> dict[str, Any]:
        """The options that are the encoder's alone, as `train` takes them."""
        return {key: value for key, value in self.options if self._is_own(key)}

    @property
    def trains_backbone(self) -> bool:
        """Whether it trains the backbone, by `train_lora`, and no head on layer features."""
        return self.encoder == LORA

    @property
    def adapter(self) -> LoraOptions:
        """The options of an adapter and its training.

        Raises:
            ValueError: If a value is not allowed.
        """
        options = self.encoder_args
        if isinstance(targets := options.get("targets"), str):
            options["targets"] = tuple(targets.split("+"))
        return LoraOptions(**options)

    def check(self, base: Recipe) -> None:
        """Refuse what no backbone would allow.

        Raises:
            ValueError: If a value of an option is not allowed.
        """
        recipe = self.recipe(base)
        if self.trains_backbone:
            _ = self.adapter
            return
        options = self.with_layer(0).encoder_args
        if isinstance(options.get("layer"), int):  # how many there are is not known
            options["layer"] = 0
        new_encoder(self.encoder, (8, 8), recipe, options)

    def _own_options(self) -> list[str]:
        if self.trains_backbone:
            return [option.name for option in dataclasses.fields(LoraOptions)]
        return encoder_options(self.encoder)

    def _is_own(self, option: str) -> bool:
        """Whether an option is the encoder's alone, or LoRA's in place of the recipe's."""
        return option in self._own_options() if self.trains_backbone else option not in _recipe_options()

    @property
    def asks_for_best(self) -> bool:
        """Whether the best layer is still to be put in."""
        return BEST in dict(self.options).values()

    def with_layer(self, layer: int) -> Method:
        """This method with a layer put in where it asks for the best one."""
        options = tuple((key, layer if value == BEST else value) for key, value in self.options)
        return dataclasses.replace(self, options=options)


def best_layer(task: Task, table: LayerTable, recipe: Recipe) -> int:
    """The layer that scores best on the validation split, untrained, pooled and scaled as the recipe says.

    Raises:
        ValueError: If the task has no training or validation split.
    """
    if missing := {"train", "validation"} - set(task.splits):
        raise ValueError(f"{task.name} has no {' and no '.join(sorted(missing))} split to choose the best layer by")
    standardise = recipe.scaling and table.basis is None
    scaling = fit_scaling(table, task.texts("train")) if standardise else None
    scores = layer_scores(task, table, "validation", scaling)
    return max(range(len(scores)), key=scores.__getitem__)


def _recipe_options() -> set[str]:
    return {option.name for option in dataclasses.fields(Recipe)} - {"name"}


def _value(word: str) -> Any:
    """A number, true or false as such, anything else as it is."""
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        return word
