"""Cores that a process may use: trees of files as containers show them, and masks of real processes."""

import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_core._cgroup import cpu_quota
from ts_core.cores import usable_cores

MASK = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(path, text):
    return {f"sys/fs/cgroup{path.rstrip('/')}/cpu.max": text}


def v1(path, quota, period):
    base = f"sys/fs/cgroup/cpu{path.rstrip('/')}"
    return {f"{base}/cpu.cfs_quota_us": f"{quota}\n", f"{base}/cpu.cfs_period_us": f"{period}\n"}


def test_no_files_and_no_quota_leave_the_affinity_mask(tmp_path):
    assert cpu_quota(tmp_path) is None
    assert usable_cores(tmp_path) == MASK
    tree(tmp_path, {"proc/self/cgroup": "0::/a\n", **v2("/a", "max 100000\n"), **v2("/", "max 100000\n")})
    assert cpu_quota(tmp_path) is None
    assert usable_cores(tmp_path) == MASK


@pytest.mark.parametrize(
    ("text", "cores"), [("50000 100000", 0.5), ("150000 100000", 1.5), ("800000 100000", 8.0), ("7 2", 3.5)]
)
def test_quota_of_v2(tmp_path, text, cores):
    tree(tmp_path, {"proc/self/cgroup": "0::/pod\n", **v2("/pod", f"{text}\n")})
    assert cpu_quota(tmp_path) == cores
    assert usable_cores(tmp_path) == min(MASK, math.ceil(cores))


def test_an_ancestor_counts(tmp_path):
    files = {**v2("/", "max 100000"), **v2("/a", "100000 100000"), **v2("/a/b", "400000 100000")}
    tree(tmp_path, {"proc/self/cgroup": "0::/a/b\n", **files})
    assert cpu_quota(tmp_path) == 1.0


def test_v1_beside_v2_and_minus_one_is_none(tmp_path):
    lines = "5:cpu,cpuacct:/job\n3:memory:/other\n0::/\n"
    mounts = "31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    files = {"proc/self/cgroup": lines, "proc/self/mountinfo": mounts}
    tree(tmp_path, {**files, **v1("/job", -1, 100000), **v1("/", -1, 100000)})
    assert cpu_quota(tmp_path) is None
    tree(tmp_path, v1("/job", 250000, 100000))
    assert cpu_quota(tmp_path) == 2.5


@given(
    text=st.one_of(st.text(max_size=12), st.sampled_from(["", "max", "1", "0 0", "0 100000", "1 0", "-5 9"]))
)
def test_what_cannot_be_understood_is_no_quota(tmp_path_factory, text):
    root = tmp_path_factory.mktemp("cgroup")
    tree(root, {"proc/self/cgroup": "0::/\n", **v2("/", text)})
    assert (cpu_quota(root) or 1.0) > 0
    assert 1 <= usable_cores(root) <= MASK


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks on this system")
def test_the_affinity_mask_of_the_process_counts(tmp_path):
    core = min(os.sched_getaffinity(0))
    code = (
        f"import os, sys; os.sched_setaffinity(0, {{{core}}}); "
        "from ts_core.cores import usable_cores; print(usable_cores(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, check=True, text=True
    )
    assert done.stdout.split() == ["1"]
