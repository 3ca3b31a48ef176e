"""The example scripts run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script, *words):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("script", "words", "says"),
    [
        ("hf_finetune.py", ["--lora", "--compare", "--steps", "2", "--seq", "16"], "largest difference"),
        ("lora_large_model.py", ["--steps", "2", "--seq", "16", "--quantize", "nvfp4"], "memory by tier"),
    ],
)
def test_examples_run(script, words, says):
    done = run(script, *words)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


@pytest.mark.parametrize(
    ("script", "words", "says"),
    [
        ("hf_finetune.py", ["--activation-offload", "2.0"], "activation_offload"),
        ("lora_large_model.py", ["--quantize", "nf5"], "quantize"),
    ],
)
def test_what_is_not_accepted_is_refused_clearly(script, words, says):
    done = run(script, *words)
    assert done.returncode != 0
    assert says in done.stderr.splitlines()[-1]
