"""Recipes: everything that decides how a head is trained, as data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from ilse_embed.files import write_atomically

MAY_BE_ZERO = ("pre", "post", "steps", "graph_seed")
"""Whole-number options that are allowed to be 0."""

EPOCHS, LEAST_STEPS = 8, 300
"""How long a recipe trains that does not say how many epochs."""


@dataclass(frozen=True)
class Recipe:
    """Options of features, encoder and training. The defaults are the recipe ``default``.

    An encoder takes the options that it knows: ``pre`` and ``post`` are for DeepSets, ``steps`` to ``graph_seed`` for
    graphs, ``positional`` for both.
    """

    name: str = "default"
    """Name in result tables."""
    pooling: Literal["sink_aware", "mean", "mean_without_first", "mean_after_bos"] = "mean"
    """Token pooling of the backbone. Layers that are standardised need no guard against attention sinks."""
    scaling: bool = True
    """Standardise each dimension of each layer over the training texts."""
    hidden: int = 256
    """Embedding width m."""
    dropout: float = 0.4
    """Dropout of the encoder."""
    pool: Literal["weighted", "mean", "sum"] = "weighted"
    """Pool over the layers: a mean with trained weights, a plain one, or a sum."""
    pre: int = 1
    """Depth of phi in DeepSets."""
    post: int = 0
    """Depth of rho in DeepSets."""
    steps: int = 1
    """Message-passing steps K. On validation a second one brought nothing for half as much time again."""
    operator: Literal["gin", "gcn"] = "gin"
    """Message-passing operator."""
    gin_depth: int = 1
    """Depth of the MLP in a GIN step."""
    residual: bool = True
    """A path past each message-passing step."""
    positional: bool = False
    """A trained vector for each layer, added to its projection."""
    output_norm: bool = True
    """A layer norm at the end of every encoder with a trained map."""
    multiplicity: int = 1
    """How often each edge of the graph counts."""
    graph_seed: int = 0
    """Draws the node of each layer."""
    sts_loss: Literal["pearson", "cosent", "angle", "mse", "mse_score_range"] = "pearson"
    """1 - Pearson's correlation of cosines and scores in a batch; CoSENT; AnglE; MSE of the cosine against the score
    scaled to 0..1; MSE of the cosine mapped to the score range."""
    optimizer: Literal["adamw", "adam"] = "adamw"
    """Decoupled weight decay, or Adam with weight decay in the gradient."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Weight decay."""
    schedule: Literal["linear", "cosine", "constant", "reduce_lr_on_plateau"] = "linear"
    """Learning rate over the training steps."""
    batch_size: int = 64
    """Pairs or texts in a step."""
    epochs: int | None = None
    """Most passes over the training split. None: 8, or as many as make 300 steps, and patience grows with them."""
    patience: int = 3
    """Stop after as many epochs without a better validation score."""

    def __post_init__(self) -> None:
        """Check each value against its type.

        Raises:
            ValueError: With what came and what is allowed.
        """
        _check(self)

    def epochs_and_patience(self, rows: int) -> tuple[int, int]:
        """``epochs`` and ``patience`` for a training split of so many rows."""
        if self.epochs is not None:
            return self.epochs, self.patience
        epochs = max(EPOCHS, math.ceil(LEAST_STEPS / math.ceil(rows / self.batch_size)))
        return epochs, math.ceil(self.patience * epochs / EPOCHS)

    @property
    def digest(self) -> str:
        """Tells recipes apart by all that they say but their name; 16 hexadecimal digits."""
        content = {option: value for option, value in dataclasses.asdict(self).items() if option != "name"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def replace(self, **changes: Any) -> Recipe:
        """This recipe with some options changed; the name then tells in what it differs from the recipe it began as.

        Raises:
            ValueError: If there is no such option, or a value is not allowed.
        """
        options = [option.name for option in dataclasses.fields(self)]
        if unknown := sorted(set(changes) - set(options)):
            raise ValueError(f"a recipe has no option {unknown}; it has {options}")
        changed = dataclasses.replace(self, **changes)
        if "name" in changes:
            return changed
        base = RECIPES.get(self.name.partition(",")[0], self)
        differs = {key: getattr(changed, key) for key in sorted(options) if getattr(changed, key) != getattr(base, key)}
        differs.pop("name", None)
        return dataclasses.replace(changed, name=base.name + "".join(f",{k}={v}" for k, v in differs.items()))

    def save(self, path: Path) -> None:
        """Write all options as JSON."""
        write_atomically(path, (json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """Read what `save` wrote; an option that is not there is that of the recipe ``default``.

        A file without a name gets one that tells in what it differs from ``default``.

        Raises:
            ValueError: If it is no JSON, there is no such option, or a value is not allowed.
            OSError: If the file cannot be read.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # not UTF-8, not JSON
            raise ValueError(f"{path} is no recipe: {error}; it must be JSON, as a search writes it") from None
        options = [option.name for option in dataclasses.fields(cls)]
        if not isinstance(content, dict) or (unknown := sorted(set(content) - set(options))):
            what = f"the options {unknown}" if isinstance(content, dict) else "no options"
            raise ValueError(f"{path} is no recipe: it has {what}; allowed are {options}")
        try:
            return cls().replace(**content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


@dataclass(frozen=True)
class LoraOptions:
    """Options of the adapter and of its training. They stand above those of a recipe, which are for heads."""

    rank: int = 16
    """Rank r of each update; a map from d to k dimensions gets r * (d + k) parameters."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank."""
    dropout: float = 0.05
    """Dropout before each update; the backbone itself stays in eval mode."""
    targets: tuple[str, ...] | None = None
    """Names of the linear maps that are adapted, or ("all-linear",); None is PEFT's choice for the architecture."""
    learning_rate: float = 2e-4
    """Peak learning rate."""
    epochs: int = 3
    """Most passes over the training texts."""
    patience: int = 3
    """Stop after as many epochs without a better validation score."""
    batch_size: int = 16
    """Pairs or texts in a step."""
    max_rows: int | None = None
    """At most so many training rows, drawn by seed: a budget for machines without a GPU. None takes all."""

    def __post_init__(self) -> None:
        """Check each value against its type.

        Raises:
            ValueError: With what came and what is allowed.
        """
        _check(self)
        if not self.alpha > 0:
            raise ValueError(f"alpha is {self.alpha}; it must be above 0")

    @property
    def adapter(self) -> dict[str, Any]:
        """What `LoraTransformer` takes."""
        return {"rank": self.rank, "alpha": self.alpha, "dropout": self.dropout, "targets": self.targets}

    def applied(self, recipe: Recipe) -> Recipe:
        """A recipe with the options of this training; loss, optimizer, schedule and token pooling are the recipe's."""
        mine = ("dropout", "learning_rate", "epochs", "patience", "batch_size")
        return recipe.replace(scaling=False, **{name: getattr(self, name) for name in mine})


def _check(options: Recipe | LoraOptions) -> None:
    """Check each value against its type.

    Raises:
        ValueError: With what came and what is allowed.
    """
    for option, hint in get_type_hints(type(options)).items():
        value = getattr(options, option)
        if value is None and hint == int | None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if hint is bool:
            fits, allowed = isinstance(value, bool), "true and false"
        elif hint is str:
            fits, allowed = isinstance(value, str), "strings"
        elif hint in (int, int | None):
            lowest = 0 if option in MAY_BE_ZERO else 1
            fits, allowed = number and isinstance(value, int) and value >= lowest, f"whole numbers from {lowest}"
        elif hint is float:
            limit = 1.0 if option == "dropout" else math.inf
            fits, allowed = number and 0 <= value < limit, f"numbers from 0 to below {limit:g}"
        elif hint == tuple[str, ...] | None:
            fits = value is None or (isinstance(value, tuple) and value != () and all(value))
            allowed = 'names of linear maps, or "all-linear"'
        else:
            fits, allowed = value in get_args(hint), json.dumps(get_args(hint))
        if not fits:
            raise ValueError(f"{option} is {value!r}; allowed are {allowed}")


PAPER = Recipe(
    name="paper",
    pooling="mean",
    scaling=False,
    dropout=0.1,
    pool="mean",
    post=1,
    steps=2,
    residual=False,
    output_norm=False,
    sts_loss="mse_score_range",
    optimizer="adam",
    weight_decay=1e-4,
    schedule="reduce_lr_on_plateau",
    epochs=50,
    patience=15,
)
"""The paper's method (arXiv 2603.22665): plain mean over tokens, raw layers, GIN with K = 2, MSE on the cosine mapped
to the score range, Adam; values inside its search space. Stops early, where the authors train 50 epochs and keep the
best."""

RECIPES = {recipe.name: recipe for recipe in (Recipe(), PAPER)}
"""Recipes by name."""
