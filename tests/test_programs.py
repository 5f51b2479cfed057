"""Compiled programs are forgotten before a process runs out of memory maps, and said to be."""

import sys

import numpy as np
import pytest
from zoo import tiny_target

import specjax
from specjax import programs
from specjax.decoding import decode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts maps")


def test_a_crowded_process_forgets_its_programs(monkeypatch, tmp_path):
    granted = tmp_path / "max_map_count"
    granted.write_text("10\n")
    target = tiny_target()

    def run() -> np.ndarray:
        return specjax.generate(target, [[1, 2, 3]], max_new_tokens=4).tokens[0]

    expected = run()
    compiled = decode._cache_size()
    assert compiled >= 1
    monkeypatch.setattr(programs, "GRANTED", granted)
    monkeypatch.setattr(programs, "_counted", -np.inf)
    monkeypatch.setattr(programs, "INTERVAL", 3600.0)
    with pytest.warns(UserWarning, match="memory maps"):
        found = run()
    np.testing.assert_array_equal(found, expected)
    assert decode._cache_size() == 1  # it alone was compiled since
    run()  # counted within the interval: nothing is forgotten, and nothing said


def test_programs_stay_where_there_is_room(monkeypatch, tmp_path):
    run = specjax.generate(tiny_target(), [[1, 2, 3]], max_new_tokens=4)
    assert run.tokens[0].size == 4
    compiled = decode._cache_size()
    monkeypatch.setattr(programs, "MAPS", tmp_path / "maps")
    assert not programs.forget_programs(0.5)  # no such file: not Linux
    (tmp_path / "maps").write_text("a\n" * 40)
    (tmp_path / "granted").write_text("80\n")
    monkeypatch.setattr(programs, "GRANTED", tmp_path / "granted")
    assert not programs.forget_programs(0.5)
    assert decode._cache_size() == compiled
    assert programs.forget_programs(0.49)
    assert decode._cache_size() == 0
