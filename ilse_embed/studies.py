"""Studies of Optuna: where they are kept, and of what search they are."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.exceptions import ExperimentalWarning, StorageInternalError

SETTINGS = "settings"
"""Attribute of a study: what search it is of."""


def sqlite_url(path: Path) -> str:
    """The URL of a file."""
    url = sqlalchemy.URL.create("sqlite", database=str(path.absolute())).render_as_string(hide_password=False)
    return url.replace("{", "{{").replace("}", "}}")  # Optuna fills templates


def shown(url: str) -> str:
    """The URL without its password."""
    try:
        return sqlalchemy.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        return repr(url)


def open_study(url: str, name: str, pruner: optuna.pruners.BasePruner, heartbeat: int, grace: int) -> optuna.Study:
    """The study, made if it is not there.

    Args:
        url: Where it is kept.
        name: Of the study.
        pruner: Decides which trials go on.
        heartbeat: Seconds between signs of life of a trial.
        grace: Seconds without one after which a trial is taken for dead.
    """
    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    for attempt in range(5):
        try:
            storage = optuna.storages.RDBStorage(
                url,
                engine_kwargs=options,
                heartbeat_interval=heartbeat,
                grace_period=grace,
            )
            return optuna.create_study(
                storage=storage, study_name=name, direction="maximize", pruner=pruner, load_if_exists=True
            )
        except (sqlalchemy.exc.DBAPIError, StorageInternalError):
            if attempt == 4:
                raise
            time.sleep(0.2 * (1 + attempt))  # another process makes the tables at this moment
    raise AssertionError


def check_settings(study: optuna.Study, settings: dict[str, Any], where: str) -> None:
    """Note what a study is of, and refuse to go on with that of another search."""
    settings = json.loads(json.dumps(settings))
    if SETTINGS not in study.user_attrs:
        study.set_user_attr(SETTINGS, settings)
    before = study.user_attrs[SETTINGS]  # perhaps of another process that was faster
    differs = [
        f"{key} is {before.get(key)!r} there and {settings.get(key)!r} here"
        for key in sorted(before | settings)
        if before.get(key) != settings.get(key)
    ]
    if differs:
        raise ValueError(
            f"{where} is of another search: {'; '.join(differs)}; take another output folder or study name"
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Trials that are given up are no failures; the experimental parts of Optuna are used on purpose."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
