"""Tensors of more than 2^31 values, in a process of their own: see beyond_32_bits.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def run(what):
    script = Path(__file__).with_name("beyond_32_bits.py")
    words = [sys.executable, str(script), what, "all" if NIGHTLY else "kinds"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"ended at {lines[-1:]}: {done.stderr[-2000:]}"
    codecs, results = lines[::2], lines[1::2]
    assert [codec for codec, result in zip(codecs, results, strict=True) if not result["good"]] == []
    return codecs


@pytest.mark.skipif(sys.platform != "linux", reason="maps memory as Linux does")
def test_decoding():
    """One codec of each kind; every night all of them."""
    assert len(run("decode")) >= 8


@pytest.mark.skipif(sys.platform != "linux", reason="maps memory as Linux does")
@pytest.mark.skipif(not NIGHTLY, reason="minutes of work: every night")
def test_encoding():
    assert len(run("encode")) >= 8
