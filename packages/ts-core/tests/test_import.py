"""What importing costs and touches, in processes of their own."""

import subprocess
import sys

MODULES = (
    "ts_core, ts_core.errors, ts_core.options, ts_core.memory, ts_core.dtypes, ts_core.blocks, "
    "ts_core.registry, ts_core.trace, ts_core.ops, ts_core.runtime, ts_core.testing, "
    "ts_core.usage, ts_core.hardware"
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
ts_core.usage.host_usage(), ts_core.usage.device_usage("cpu")
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
    assert "ts_core" in new
    assert not new & {
        "pytest",
        "hypothesis",
        "numpy",
        "psutil",
        "transformers",
        "peft",
        "ts_quant",
        "trainstream",
    }


def test_testing_without_its_tools_says_what_to_install():
    code = """
import sys
sys.modules["pytest"] = sys.modules["hypothesis"] = None
import ts_core.testing, ts_core.testing.plugin
from ts_core.errors import MissingDependencyError
helpers = ts_core.testing
assert helpers.tolerance and helpers.opcheck_all and helpers.make_tensor
for tool, call in [("pytest", helpers.devices), ("pytest", lambda: helpers.gpu),
                   ("hypothesis", helpers.shapes), ("hypothesis", helpers.float_tensors)]:
    try:
        call()
    except MissingDependencyError as error:
        assert f"pip install {tool}" in str(error)
    else:
        raise SystemExit("no error")
"""
    run(code)


def test_version_is_that_of_the_installed_package():
    assert run("import ts_core; print(ts_core.__version__)").startswith("0.1.0")
