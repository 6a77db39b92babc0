"""Command-line options made from the fields of `Recipe`, so that an option has one spelling and one text."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from typing import Annotated, Any

import typer

from ilse_embed.recipes import Recipe


def recipe_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of `Recipe`; it gets those that were set as ``overrides``."""
    docs = _field_docs(Recipe)
    options = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                inspect.get_annotations(Recipe, eval_str=True)[option.name] | None,
                typer.Option(help=f"{docs[option.name]} [default: the recipe's]", rich_help_panel="Recipe"),
            ],
        )
        for option in fields(Recipe)
        if option.name != "name"
    ]
    own = inspect.signature(command).parameters.values()

    def run(**given: Any) -> None:
        overrides = {option.name: given.pop(option.name) for option in options}
        command(**given, overrides={name: value for name, value in overrides.items() if value is not None})

    signature = inspect.Signature([*(p for p in own if p.name != "overrides"), *options])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _field_docs(options: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(options))).body[0].body  # type: ignore[attr-defined]
    return {
        ast.unparse(field.target): inspect.cleandoc(str(doc.value.value)).removesuffix(".")
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }
