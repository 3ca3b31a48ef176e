"""What importing costs and touches, in processes of their own."""

import subprocess
import sys

import pytest

MODULES = (
    "ts_core, ts_core.errors, ts_core.options, ts_core.memory, ts_core.dtypes, ts_core.blocks, "
    "ts_core.registry, ts_core.trace, ts_core.ops, ts_core.runtime, ts_core.testing"
)


def run(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_and_use_never_touch_cuda():
    code = f"""
import torch, {MODULES}
ts_core.memory.host_budget()
ts_core.blocks.block_map(torch.nn.Linear(2, 2))
ts_core.registry.copy_engine(), ts_core.registry.host_allocator(), ts_core.registry.set_copy_engine(None)
assert not torch.cuda.is_initialized()
assert not torch.cuda._is_in_bad_fork()
"""
    run(code)


def test_import_brings_in_nothing_that_only_tests_or_other_packages_need():
    code = f"""
import torch, sys
before = set(sys.modules)
import {MODULES}
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(" ".join(sorted(new)))
"""
    new = set(run(code).split())
    assert {"ts_core", "psutil"} <= new
    assert not new & {"pytest", "hypothesis", "numpy", "transformers", "peft", "ts_quant", "trainstream"}


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_testing_without_its_tools_says_what_to_install(missing):
    code = f"""
import sys
sys.modules[{missing!r}] = None
import ts_core.testing, ts_core.testing.plugin
from ts_core.errors import MissingDependencyError
assert ts_core.testing.tolerance and ts_core.testing.opcheck_all and ts_core.testing.make_tensor
calls = {{"pytest": [lambda: ts_core.testing.devices(), lambda: ts_core.testing.gpu],
          "hypothesis": [lambda: ts_core.testing.shapes(), lambda: ts_core.testing.float_tensors()]}}
for call in calls[{missing!r}]:
    try:
        call()
    except MissingDependencyError as error:
        assert "pip install {missing}" in str(error)
    else:
        raise SystemExit("no error")
"""
    run(code)


def test_version_is_that_of_the_installed_package():
    assert run("import ts_core; print(ts_core.__version__)").startswith("0.1.0")
