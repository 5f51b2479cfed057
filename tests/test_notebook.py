"""The notebook: its two files say the same, its first cell leaves JAX alone, and it runs to its end on the tiny model."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "tour.ipynb"
SCRIPT = NOTEBOOK.with_suffix(".py")


def test_both_files_say_the_same():
    """If not: jupytext --sync notebooks/tour.py"""
    jupytext = pytest.importorskip("jupytext")
    script, notebook = jupytext.read(SCRIPT), jupytext.read(NOTEBOOK)
    assert [(c.cell_type, c.source) for c in script.cells] == [
        (c.cell_type, c.source) for c in notebook.cells
    ]
    assert notebook.metadata.kernelspec == script.metadata.kernelspec
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert all(not c.outputs and c.execution_count is None for c in code)


def first_cell() -> str:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return "".join(next(c for c in cells if c["cell_type"] == "code")["source"])


@pytest.fixture
def no_specjax(monkeypatch, tmp_path):
    """As on a machine where it is not installed, in an empty folder."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "specjax" else find(name)
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_an_old_jax_is_refused(monkeypatch, no_specjax):
    monkeypatch.setattr(subprocess, "run", None)  # nothing is installed before that
    monkeypatch.setattr(jax, "__version_info__", (0, 7, 2))
    monkeypatch.setattr(jax, "__version__", "0.7.2")
    with pytest.raises(RuntimeError, match=r"0\.1[01]\.\d or newer on this Python, found 0\.7\.2"):
        exec(first_cell(), {})


def test_its_bound_is_the_projects(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *a, **_: subprocess.CompletedProcess(a, 0))
    monkeypatch.chdir(NOTEBOOK.parent)
    found = {}
    exec(first_cell(), found)
    bound = f"jax>={'.'.join(map(str, found['OLDEST']))}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    if sys.version_info >= (3, 12):  # there Flax is what asks for more
        assert bound in (metadata.requires("flax") or [])
    else:
        assert bound in project


def test_a_place_to_install_from_is_asked_for(no_specjax):
    with pytest.raises(RuntimeError, match="set SOURCE above"):
        exec(first_cell(), {})


def test_installing_keeps_jax(monkeypatch, no_specjax):
    seen = []

    def run(command, **_):
        constraints = Path(command[command.index("-c") + 1]).read_text()
        seen.append((command, constraints.splitlines()))
        return subprocess.CompletedProcess(command, code, "", "no network")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(NOTEBOOK.parent)
    code = 0
    exec(first_cell(), {})
    command, constraints = seen[0]
    assert constraints == [f"{n}=={metadata.version(n)}" for n in ("jax", "jaxlib", "numpy")]
    assert command[-1] == f"specjax[train,plot] @ {ROOT.as_uri()}"
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert not {"-U", "--upgrade", "--force-reinstall"} & set(command)
    code = 1
    with pytest.raises(RuntimeError, match="beside this JAX:\nno network"):
        exec(first_cell(), {})


RUN = """
import json, runpy, sys
found = runpy.run_path(sys.argv[1])
plt = found["plt"]
axes = [a for n in plt.get_fignums() for a in plt.figure(n).axes]
report = {name: found[name] for name in ("identical", "results", "evaluations")}
report |= {"labels": [a.get_xlabel() for a in axes], "figures": len(plt.get_fignums())}
report |= {"losses": found["losses"].tolist(), "length": found["result"].simulated_length}
print(json.dumps(report))
"""


@pytest.mark.thorough
def test_it_runs_to_its_end(tmp_path):
    for name in ("grain", "array_record", "matplotlib"):
        pytest.importorskip(name)
    changes = {
        "SPECJAX_NOTEBOOK_TARGET": "tiny",
        "MPLBACKEND": "Agg",
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path),
        "JAX_COMPILATION_CACHE_DIR": os.environ["SPECJAX_TEST_PROGRAMS"],
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, SCRIPT],
        capture_output=True,
        text=True,
        env=os.environ | changes,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["identical"]) == 9 and all(report["identical"].values())
    assert report["losses"][-1] < 0.7 * report["losses"][0]
    lengths = {name: row[0] for name, row in report["results"].items()}
    assert lengths["plain"] == 1.0 and lengths["NGram()"] > 1.1
    assert lengths["Eagle3, trained"] > 1.05 * lengths["Eagle3, untrained"]
    assert lengths["Eagle3, loaded"] == lengths["Eagle3, trained"]
    assert lengths["Hybrid(NGram, Eagle3)"] > lengths["Eagle3, trained"]
    first, last = report["evaluations"][0], report["evaluations"][-1]
    assert last["loss"] < 0.95 * first["loss"] and report["length"] > 1.1
    assert report["figures"] == 3 and all(report["labels"])
