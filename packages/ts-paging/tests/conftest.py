import subprocess
import sys

import pytest

from ts_paging import _C


@pytest.fixture(autouse=True)
def _hooks_off():
    yield
    _C.fail_pinned_after(-1)
    _C.fail_copy_after(-1)
    _C.fail_io_after(-1, 0)
    _C.simulate_pinning(False)


@pytest.fixture
def python():
    """Run code in a fresh interpreter; returns the completed process."""

    def run(code, *arguments, prefix=(), timeout=120):
        command = [*prefix, sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)

    return run
