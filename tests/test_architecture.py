"""Imports point one way only; parsed from the sources, lazy and type-only imports included."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import networkx as nx
import pytest
from sentence_transformers.base.modules import Module

import ilse_embed

PACKAGE = Path(ilse_embed.__file__).parent


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imported(tree: ast.AST, types_too: bool = True) -> Iterator[str]:
    """Full names of the modules that a source imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and not types_too:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported(node, types_too)


TREES = {room_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def rooms_imported(room: str, types_too: bool = True) -> set[str]:
    """Our rooms that a room imports; ``from ilse_embed import X`` counts as the room where X lives."""
    found = set()
    for name in imported(TREES[room], types_too):
        package, _, rest = name.partition(".")
        if package != "ilse_embed" or not rest:
            continue
        rest = ilse_embed._HOMES.get(rest, rest)
        found.add(max((r for r in TREES if f"{rest}.".startswith(f"{r}.")), key=len, default="__init__"))
    return found - {room, "__init__"}


def outside(room: str) -> set[str]:
    return {name.partition(".")[0] for name in imported(TREES[room])}


def top(rooms: set[str]) -> set[str]:
    return {room.partition(".")[0] for room in rooms}


def test_the_parser_sees_imports() -> None:
    assert rooms_imported("encoders.graph") == {"encoders.base", "graphs"}
    assert rooms_imported("backbone") == {"hidden_states", "pooling", "sinks", "tokens"}
    assert "networkx" in outside("graphs")
    lazy = ast.parse("if TYPE_CHECKING:\n import a.b\ndef f():\n  with g():\n   from c import d\n")
    assert set(imported(lazy)) == {"a.b", "c.d"}
    assert set(imported(lazy, types_too=False)) == {"c.d"}


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("graphs", set()),
        ("pooling", set()),
        ("modules", set()),
        ("tokens", set()),
        ("hidden_states", set()),
        ("sinks", set()),
        ("backbone", {"hidden_states", "pooling", "sinks", "tokens"}),
        ("scaling", {"modules"}),
        ("heads", {"modules"}),
        *((room, {"graphs", "modules", "encoders"}) for room in TREES if room.startswith("encoders")),
    ],
)
def test_lower_rooms(room: str, allowed: set[str]) -> None:
    assert top(rooms_imported(room)) <= allowed


def test_imports_have_no_circle() -> None:
    graph = nx.DiGraph([(room, other) for room in TREES if room != "__init__" for other in rooms_imported(room)])
    assert list(nx.simple_cycles(graph)) == []


def test_training_never_runs_a_language_model() -> None:
    reached, waiting = set(), {"training"}
    while waiting:
        room = waiting.pop()
        reached.add(room)
        waiting |= rooms_imported(room, types_too=False) - reached
    assert not top(rooms_imported("training")) & {"backbone", "pooling", "model", "evaluation", "weights", "cli"}
    assert not reached & {"backbone", "model", "evaluation"}


JOINS = {"model", "evaluation", "cli.training", "demo", "experiments", "distributed", "lora"}


def test_only_the_outer_skin_joins_the_halves() -> None:
    """The halves: what makes layer features, and what learns from them."""
    joining = {
        room
        for room in TREES
        if room != "__init__"
        and "backbone" in rooms_imported(room)
        and top(rooms_imported(room)) & {"encoders", "training"}
    }
    assert joining <= JOINS


@pytest.mark.parametrize(
    ("library", "rooms"),
    [
        ("torch_geometric", set()),
        ("mteb", {"evaluation", "tasks"}),
        ("gguf", {"gguf_llama"}),
        ("typer", {room for room in TREES if top({room}) == {"cli"}}),
        ("rich", {room for room in TREES if top({room}) == {"cli"}}),
        ("optuna", {"search", "studies"}),
        ("ray", {"distributed"}),
        ("peft", {"lora"}),
    ],
)
def test_a_library_has_one_room(library: str, rooms: set[str] | None) -> None:
    found = {room for room in TREES if library in outside(room)}
    assert found <= rooms if rooms is not None else len(found) <= 1


def test_graphs_need_no_torch() -> None:
    assert outside("graphs") <= {"__future__", "json", "collections", "dataclasses", "itertools", "networkx", "numpy"}


def test_importing_the_package_is_light() -> None:
    heavy = ["torch", "transformers", "sentence_transformers", "mteb", "datasets", "numpy"]
    code = f"import sys, ilse_embed; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_public_names() -> None:
    for name in ilse_embed.__all__:
        public = getattr(ilse_embed, name)
        if isinstance(public, type) and issubclass(public, Module):
            assert public.__module__ == "ilse_embed"  # what modules.json of an artifact says
    assert set(dir(ilse_embed)) == set(ilse_embed.__all__)
    with pytest.raises(AttributeError, match="no attribute 'CayleyGMM'"):
        _ = ilse_embed.CayleyGMM


def test_rooms_gathered_in_one_file_share_no_name() -> None:
    """`export_hub` writes them one after the other into one module, where a second definition would win in silence."""
    bound: dict[str, set[str]] = {}
    for room in import_module("ilse_embed.model").STANDALONE_ROOMS:
        for node in TREES[room].body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = {node.name: f"{room}.{node.name}"}
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {ast.unparse(target): f"{room}:{node.lineno}" for target in targets}
            elif isinstance(node, ast.Import):
                names = {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("ilse_embed"):
                names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            else:
                continue
            for name, source in names.items():
                bound.setdefault(name, set()).add(source)
    assert {name: sources for name, sources in bound.items() if len(sources) > 1 and name != "logger"} == {}
