"""Room for compiled programs.

On CPUs each of XLA's programs holds some hundreds of memory maps, of which Linux grants a process `vm.max_map_count`
(65,530 unless set otherwise). Past that compiling fails with "Cannot allocate memory" and the process dies: after a
hundred decoding programs of a small model, which a long session of many drafters and cache sizes does compile.
"""

import time
import warnings
from pathlib import Path

import jax

MAPS = Path("/proc/self/maps")
GRANTED = Path("/proc/sys/vm/max_map_count")
INTERVAL = 10.0  # seconds; counting takes up to some 30 ms, and few programs compile in that time


def forget_programs(share: float) -> bool:
    """Forgets every compiled program if this process holds more than a share of the maps it may; whether it did.

    A program is compiled again, or read from JAX's persistent cache, when it is next called.
    """
    if not (MAPS.exists() and GRANTED.exists()):  # not Linux
        return False
    if MAPS.read_bytes().count(b"\n") <= share * int(GRANTED.read_text()):
        return False
    jax.clear_caches()
    return True


_counted = 0.0  # when, by the monotonic clock


def keep_room() -> None:
    """To be called before work that may compile: warns when programs had to be forgotten."""
    global _counted
    now = time.monotonic()
    if now - _counted < INTERVAL or jax.default_backend() != "cpu":
        return
    _counted = now
    if forget_programs(0.7):
        warnings.warn(
            "this process nearly used up its memory maps (vm.max_map_count), which XLA's CPU programs take: those compiled so "
            "far were forgotten and will be compiled again; fewer shapes (generate's slots=) or a higher limit avoid that",
            stacklevel=4,  # whoever called `generate`
        )
