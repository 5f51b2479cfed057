"""Shared pieces: where outside material lies, and small random models."""

import gc
import itertools
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

# Most of a test's time is XLA compiling programs that run for milliseconds. Must be set before jax is imported.
if "--xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_backend_optimization_level=0",
            # each of the workers has one core: splitting a program's code for others costs more than it gains
            "--xla_cpu_parallel_codegen_split_count=1",
            # fusions compile in two thirds of the time the old way, which later versions lack
            *(["--xla_cpu_use_fusion_emitters=false"] if version("jax") < "0.11" else []),
        ]
    ).strip()

import jax
import pytest

from specjax.programs import forget_programs

# Tracing makes objects by the million, which the collector would search for cycles a thousand at a time.
gc.set_threshold(100_000, 20, 100)

# Tests compare numbers: on every backend, products in full float32.
jax.config.update("jax_default_matmul_precision", "highest")

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared(*parts: str) -> Path:
    """A path in the folder of outside material beside the checkout; skips the test where it is absent."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"outside material {Path(*parts)} is not beside the checkout")
    return path


def pytest_configure(config):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    # Workers share what they compile, and find it again after the caches were cleared.
    if "SPECJAX_TEST_PROGRAMS" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="specjax-programs-")
        config.add_cleanup(folder.cleanup)
        os.environ["SPECJAX_TEST_PROGRAMS"] = folder.name
    jax.config.update("jax_compilation_cache_dir", os.environ["SPECJAX_TEST_PROGRAMS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


tests_done = itertools.count(1)


@pytest.fixture(autouse=True)
def forget_compiled_programs():
    """See `specjax.programs`; many tests compile without `generate`, which looks after that itself."""
    yield
    if next(tests_done) % 2 == 0:  # counting takes a while
        forget_programs(0.5)
