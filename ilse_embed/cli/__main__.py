"""``python -m ilse_embed.cli``."""

from ilse_embed.cli import main

main()
