"""More than 2^31 parameters, in a process of its own: see beyond_32_bits.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


@pytest.mark.skipif(sys.platform != "linux", reason="maps memory as Linux does")
@pytest.mark.parametrize(
    "moments",
    [
        "int8",
        *(
            pytest.param(name, marks=pytest.mark.skipif(not NIGHTLY, reason="8 s of work: every night"))
            for name in ("float32", "bfloat16")
        ),
    ],
)
def test_the_last_parameters_are_updated_as_they_are_alone(moments):
    script = Path(__file__).with_name("beyond_32_bits.py")
    done = subprocess.run([sys.executable, str(script), moments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert said["numel"] > 2**31
    assert said["differ"] == {}
