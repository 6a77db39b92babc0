"""What a measurement notes of itself names no folder of the machine."""

import pytest

from ilse_embed.environment import environment


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["run", "grid.toml", "--data-dir", "/some/where/mteb"], "ilse run grid.toml --data-dir mteb"),
        (["--backbone", "small=/models/small"], "ilse --backbone small=small"),
        (["--encoder", "cayley,steps=2"], "ilse --encoder cayley,steps=2"),
    ],
)
def test_command_without_folders(arguments: list[str], shown: str) -> None:
    assert environment("ilse", arguments)["command"] == shown
