"""One spelling for an encoder and its options."""

import pytest
from test_scoring import intents_task, sts_task

from ilse_embed.encoders import build_encoder
from ilse_embed.methods import Method, best_layer
from ilse_embed.recipes import RECIPES, Recipe


@pytest.mark.parametrize(
    ("spelling", "canonical", "recipe", "encoder_args"),
    [
        ("cayley", "cayley", {}, {}),
        (" cayley , steps=2,operator=gcn", "cayley,operator=gcn,steps=2", {"operator": "gcn", "steps": 2}, {}),
        (
            "gnn,topology=path,residual=false",
            "gnn,residual=false,topology=path",
            {"residual": False},
            {"topology": "path"},
        ),
        ("set,learning_rate=1e-4", "set,learning_rate=0.0001", {"learning_rate": 1e-4}, {}),
        ("layer,layer=-2", "layer,layer=-2", {}, {"layer": -2}),
        ("layer,layer=best", "layer,layer=best", {}, {"layer": "best"}),
    ],
)
def test_spelling(spelling: str, canonical: str, recipe: dict, encoder_args: dict) -> None:
    method = Method.parse(spelling)
    assert str(method) == canonical and Method.parse(canonical) == method
    for base in RECIPES.values():
        assert method.recipe(base) == base.replace(**recipe)
    assert method.encoder_args == encoder_args


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("caley", r"encoder is 'caley'; allowed are \[\"cayley\""),
        ("", "encoder is ''; allowed are"),
        ("cayley,heads=2", r"encoder 'cayley' has no option 'heads'; it takes \['topology'|\['hidden'"),
        ("cayley,name=mine", "encoder 'cayley' has no option 'name'"),
        (
            "set,steps=3",
            r"encoder 'set' has no option 'steps'; it takes \['hidden', .*, and of the recipe \['batch_size'",
        ),
        ("layer,hidden=3", "encoder 'layer' has no option 'hidden'"),
        ("lora,learning_rate=1e-3,steps=2", "encoder 'lora' has no option 'steps'"),
        ("cayley,steps", "'steps' must be OPTION=VALUE"),
        ("cayley,steps=1,steps=2", "'steps=2' must be OPTION=VALUE, each option once"),
    ],
)
def test_what_is_no_method(spelling: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Method.parse(spelling)


def test_values_are_checked_by_the_recipe() -> None:
    with pytest.raises(ValueError, match="steps is 'two'; allowed are whole numbers from 0"):
        Method.parse("cayley,steps=two").recipe(Recipe())


@pytest.mark.parametrize(("made", "best"), [(sts_task, 2), (intents_task, 3)])
def test_the_best_layer_is_chosen_on_validation(made, best: int) -> None:
    """On test another layer is better (see the tasks)."""
    task, table = made()
    asks = Method.parse("layer,layer=best")
    assert asks.asks_for_best
    method = asks.with_layer(best_layer(task, table, Recipe()))
    assert str(method) == f"layer,layer={best}" and not method.asks_for_best
    assert build_encoder(method.encoder, 4, table.layers.shape[2], **method.encoder_args).layer == best
    assert Method.parse("layer,layer=1").with_layer(3) == Method.parse("layer,layer=1")


def test_without_validation_there_is_no_best_layer() -> None:
    task, table = sts_task()
    alone = type(task)(task.name, task.kind, {"test": task.splits["test"]}, task.score_range, task.source)
    with pytest.raises(ValueError, match="toy-sts has no train and no validation split to choose the best layer by"):
        best_layer(alone, table, Recipe())
