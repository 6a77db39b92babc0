"""Recipes: valid as they are, refused when wrong, honest about what was changed."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from ilse_embed.encoders import ENCODERS, build_encoder, encoder_options
from ilse_embed.recipes import PAPER, RECIPES, Recipe

OPTIONS = {option.name: get_type_hints(Recipe)[option.name] for option in dataclasses.fields(Recipe)}
CHOICES = {name: get_args(kind) for name, kind in OPTIONS.items() if get_origin(kind) is Literal}
NUMBERS = [name for name, kind in OPTIONS.items() if kind in (int, float)]


def test_both_recipes() -> None:
    assert list(RECIPES) == ["default", "paper"] and RECIPES["default"] == Recipe() and RECIPES["paper"] is PAPER
    for recipe in RECIPES.values():
        assert dataclasses.replace(recipe) == recipe  # checked again
        for encoder in ENCODERS:
            options = {
                key: value for key, value in dataclasses.asdict(recipe).items() if key in encoder_options(encoder)
            }
            assert build_encoder(encoder, 5, 8, **options).get_embedding_dimension() in (8, recipe.hidden)
    wanted = {
        "pooling": "mean",
        "scaling": False,
        "sts_loss": "mse_score_range",
        "optimizer": "adam",
        "residual": False,
    }
    assert {key: getattr(PAPER, key) for key in wanted} == wanted  # what the paper does
    with pytest.raises(dataclasses.FrozenInstanceError):
        PAPER.epochs = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        *((name, value, "allowed are") for name in NUMBERS for value in (-1, "1", None, math.nan, math.inf, True, [1])),
        *((name, 1.5, "whole numbers") for name, kind in OPTIONS.items() if kind is int),
        *((name, 0, "whole numbers from 1") for name in ("hidden", "multiplicity", "batch_size", "epochs", "patience")),
        ("dropout", 1.0, "numbers from 0 to below 1"),
        *(
            (name, value, "true and false")
            for name in ("scaling", "residual", "positional", "output_norm")
            for value in (1, 0, "yes", None)
        ),
        *((name, v, '"') for name in CHOICES for v in ("", "Mean", None, 0, True, ["mean"])),
        ("name", None, "strings"),
    ],
)
def test_wrong_values(option: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"^{option} is ") as error:
        Recipe(**{option: value})
    assert repr(value) in str(error.value) and allowed in str(error.value)
    for one in CHOICES.get(option, ()):
        assert f'"{one}"' in str(error.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [("steps", 0), ("post", 0), ("graph_seed", 0), ("dropout", 0), ("dropout", 0.99), ("weight_decay", 0.0)]
    + [(name, one) for name, values in CHOICES.items() for one in values],
)
def test_right_values(option: str, value: Any) -> None:
    assert getattr(Recipe(**{option: value}), option) == value


@pytest.mark.parametrize(
    ("rows", "options", "wanted"),
    [
        (16_000, {}, (8, 3)),
        (2_400, {}, (8, 3)),  # 38 steps
        (640, {}, (30, 12)),
        (1, {}, (300, 113)),
        (640, {"batch_size": 32}, (15, 6)),
        (640, {"epochs": 4}, (4, 3)),
        (16_000, {"epochs": 50, "patience": 15}, (50, 15)),
    ],
)
def test_a_small_training_split_is_passed_over_more_often(
    rows: int, options: dict[str, Any], wanted: tuple[int, int]
) -> None:
    assert Recipe(**options).epochs_and_patience(rows) == wanted


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ([{}], "default"),
        ([{"epochs": None}], "default"),  # no change
        ([{"epochs": 3}], "default,epochs=3"),
        ([{"steps": 4, "epochs": 3, "residual": False}], "default,epochs=3,residual=False,steps=4"),
        ([{"epochs": 3}, {"steps": 4}], "default,epochs=3,steps=4"),
        ([{"epochs": 3}, {"epochs": 4}], "default,epochs=4"),
        ([{"epochs": 3}, {"epochs": None}], "default"),
        ([{"epochs": 3, "name": "mine"}], "mine"),
        ([{"name": "mine"}, {"steps": 4}], "mine,steps=4"),
    ],
)
def test_the_name_tells_what_was_changed(changes: list[dict[str, Any]], name: str) -> None:
    recipe = RECIPES["default"]
    for change in changes:
        recipe = recipe.replace(**change)
        assert all(getattr(recipe, key) == value for key, value in change.items())
    assert recipe.name == name
    assert RECIPES["default"] == Recipe()


def test_changes_of_the_paper_recipe() -> None:
    recipe = RECIPES["paper"].replace(scaling=True)
    assert recipe.name == "paper,scaling=True" and recipe.pooling == "mean"


def test_replace_refuses_what_the_constructor_refuses() -> None:
    with pytest.raises(ValueError, match=r"a recipe has no option \['lr'\]; it has \['name', .*'learning_rate'"):
        Recipe().replace(lr=1e-3, epochs=1)
    with pytest.raises(ValueError, match="epochs is 0"):
        Recipe().replace(epochs=0)


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for recipe in (*RECIPES.values(), Recipe(name="«é»", dropout=0, learning_rate=1 / 3)):
        recipe.save(path)
        assert Recipe.load(path) == recipe
    path.write_text('{"dropout": 0.1}')
    assert Recipe.load(path) == Recipe(name="default,dropout=0.1", dropout=0.1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "is no recipe: 'utf-8' codec"),
        (b"dropout = 0.1", "is no recipe: Expecting value"),
        (b"[0.1]", "it has no options; allowed are ['name', "),
        (b'{"lr": 0.1, "dropout": 0.1}', "it has the options ['lr']; allowed are ['name', "),
        (b'{"dropout": 1.0}', "r.json: dropout is 1.0; allowed are numbers from 0 to below 1"),
        (b'{"weight_decay": NaN}', "r.json: weight_decay is nan"),
        (b'{"steps": true}', "r.json: steps is True"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(ValueError) as error:
        Recipe.load(tmp_path / "r.json")
    assert message in str(error.value)
