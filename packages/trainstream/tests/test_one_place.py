"""RAM is read in one place: whoever asks elsewhere gets the machine's figures where a container's hold."""

import importlib
import re
from pathlib import Path

import pytest

PACKAGES = ("trainstream", "ts_core", "ts_fused", "ts_hf", "ts_optim", "ts_paging", "ts_quant")
READERS = {"ts_core/memory.py", "ts_core/_cgroup.py"}
ASKS = re.compile(
    r"virtual_memory|MemTotal|MemAvailable|SC_PHYS_PAGES|proc/meminfo|memory\.max|memory\.limit_in_bytes"
    r"|memory\.current|host_budget\([^)]*\)\.total_bytes|LOCAL_WORLD_SIZE|SLURM_NTASKS"
)


def sources():
    for name in PACKAGES:
        folder = Path(importlib.import_module(name).__file__).parent
        for file in sorted(folder.rglob("*.py")):
            yield f"{name}/{file.relative_to(folder)}", file.read_text(encoding="utf-8")


def test_nobody_else_asks_how_much_ram_there_is():
    found = {
        (name, match.group())
        for name, text in sources()
        if name not in READERS
        for line in text.splitlines()
        if (match := ASKS.search(line)) and not line.lstrip().startswith(("#", '"', "*"))
    }
    assert not found, found


@pytest.mark.parametrize("name", sorted(READERS))
def test_those_who_do_are_there(name):
    assert any(ASKS.search(text) for file, text in sources() if file == name)
