"""Trees of files as containers show them; every figure is worked out by hand."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_core.memory import cgroup_limit, host_budget

MIB = 2**20
NONE_V1 = 9223372036854771712
MEMINFO = "MemTotal:       {total} kB\nMemFree:  1024 kB\nMemAvailable:   {available} kB\n"


def tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(total=64 * 1024 * MIB, available=32 * 1024 * MIB):
    return MEMINFO.format(total=total // 1024, available=available // 1024)


def v2(path, limit, current=None, inactive=None, high=None, active=0):
    """Files of one v2 group; sizes in MiB."""
    base = f"sys/fs/cgroup{path.rstrip('/')}"
    files = {f"{base}/memory.max": f"{limit if limit == 'max' else limit * MIB}\n"}
    if current is not None:
        files[f"{base}/memory.current"] = f"{current * MIB}\n"
    if inactive is not None:
        cache = f"inactive_file {inactive * MIB}\nactive_file {active * MIB}\n"
        files[f"{base}/memory.stat"] = f"anon 12\nfile 99\n{cache}"
    if high is not None:
        files[f"{base}/memory.high"] = f"{high if high == 'max' else high * MIB}\n"
    return files


def v1(path, limit_bytes, used=0, stat=""):
    base = f"sys/fs/cgroup/memory{path.rstrip('/')}"
    return {
        f"{base}/memory.limit_in_bytes": f"{limit_bytes}\n",
        f"{base}/memory.usage_in_bytes": f"{used}\n",
        f"{base}/memory.stat": stat,
    }


def test_v2_max_means_no_limit(tmp_path):
    tree(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/meminfo": meminfo(), **v2("/", "max", 100, 10)})
    assert cgroup_limit(tmp_path) is None
    budget = host_budget(tmp_path, ranks=1)
    assert budget.limit_bytes is None
    assert budget.available_bytes == 32 * 1024 * MIB
    assert budget.total_bytes == 64 * 1024 * MIB
    assert budget.source == "MemAvailable"


def test_v2_limit_of_a_parent_counts_with_what_is_used_and_what_can_be_dropped(tmp_path):
    files = {"proc/self/cgroup": "0::/parent/leaf\n", "proc/meminfo": meminfo()}
    files |= v2("/parent/leaf", "max", 100, 50) | v2("/parent", 1024, 700, 300)
    limit = cgroup_limit(tree(tmp_path, files))
    assert limit.limit_bytes == 1024 * MIB
    assert limit.available_bytes == 624 * MIB
    assert limit.source.endswith("parent")
    budget = host_budget(tmp_path, ranks=1)
    assert budget.available_bytes == 624 * MIB
    assert budget.limit_bytes == 1024 * MIB
    assert budget.source == limit.source


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_are_read_again_and_again_can_be_dropped_too(tmp_path, version):
    """In each step, where they cannot be read past the cache: half of the active list counts."""
    if version == 2:
        files = {"proc/self/cgroup": "0::/a\n"} | v2("/a", 1024, 1000, 100, active=600)
    else:
        stat = f"active_file 5\ntotal_inactive_file {100 * MIB}\ntotal_active_file {600 * MIB}\n"
        files = {"proc/self/cgroup": "4:memory:/a\n"} | v1("/a", 1024 * MIB, 1000 * MIB, stat)
    tree(tmp_path, files)
    assert cgroup_limit(tmp_path).available_bytes == (1024 - 1000 + 100 + 300) * MIB


def test_more_cache_than_is_used_is_not_free(tmp_path):
    files = {"proc/self/cgroup": "0::/a\n"} | v2("/a", 1024, 200, 100, active=900)
    assert cgroup_limit(tree(tmp_path, files)).available_bytes == 1024 * MIB


def test_the_group_that_leaves_least_decides_not_the_smallest_limit(tmp_path):
    files = {"proc/self/cgroup": "0::/a/b\n"} | v2("/a/b", 512, 100, 0) | v2("/a", 1024, 1000, 10)
    limit = cgroup_limit(tree(tmp_path, files))
    assert limit.limit_bytes == 512 * MIB
    assert limit.available_bytes == 34 * MIB


def test_throttling_above_memory_high_counts_as_a_limit(tmp_path):
    files = {"proc/self/cgroup": "0::/a\n"} | v2("/a", 1024, 100, 0, high=256)
    assert cgroup_limit(tree(tmp_path, files)).available_bytes == 156 * MIB
    files = {"proc/self/cgroup": "0::/b\n"} | v2("/b", 1024, 100, 0, high="max")
    assert cgroup_limit(tree(tmp_path, files)).available_bytes == 924 * MIB


def test_v1_none_and_512_mib(tmp_path):
    files = {"proc/self/cgroup": "4:memory:/\n", "proc/meminfo": meminfo()} | v1("/", NONE_V1, 5 * MIB)
    assert cgroup_limit(tree(tmp_path / "none", files)) is None
    assert host_budget(tmp_path / "none", ranks=1).available_bytes == 32 * 1024 * MIB
    files |= v1("/", 536870912, 12 * MIB)
    assert cgroup_limit(tree(tmp_path / "some", files)).available_bytes == 500 * MIB


@pytest.mark.parametrize("page", [4096, 16384, 65536])
def test_v1_none_for_every_page_size(tmp_path, page):
    files = {"proc/self/cgroup": "4:memory:/\n"} | v1("/", (2**63 - 1) // page * page)
    assert cgroup_limit(tree(tmp_path, files)) is None


def test_v1_uses_the_hierarchical_figures(tmp_path):
    stat = f"inactive_file 1\nhierarchical_memory_limit {300 * MIB}\ntotal_inactive_file {20 * MIB}\n"
    files = {"proc/self/cgroup": "4:cpu,memory:/\n"} | v1("/", NONE_V1, 100 * MIB, stat)
    limit = cgroup_limit(tree(tmp_path, files))
    # The ancestor that sets it is outside of what the container sees.
    assert (limit.limit_bytes, limit.available_bytes) == (300 * MIB, 220 * MIB)


def test_hybrid_with_a_path_outside_the_container_uses_the_root_of_the_mount(tmp_path):
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/some/path\n1:cpu:/\n0::/\n",
        "proc/meminfo": meminfo(),
        "sys/fs/cgroup/unified/cgroup.procs": "1\n",
    } | v1("/", 512 * MIB, 112 * MIB)
    limit = cgroup_limit(tree(tmp_path, files))
    assert limit.available_bytes == 400 * MIB
    assert limit.source == str(tmp_path / "sys/fs/cgroup/memory")


def test_hybrid_counts_both_hierarchies(tmp_path):
    files = {"proc/self/cgroup": "4:memory:/x\n0::/y\n"} | v1("/x", 512 * MIB, 112 * MIB)
    files |= {
        "sys/fs/cgroup/unified/y/memory.max": f"{300 * MIB}\n",
        "sys/fs/cgroup/unified/y/memory.current": f"{50 * MIB}\n",
    }
    limit = cgroup_limit(tree(tmp_path, files))
    assert (limit.limit_bytes, limit.available_bytes) == (300 * MIB, 250 * MIB)


@pytest.mark.skipif(sys.platform == "win32", reason="no colons in file names")
def test_a_path_may_hold_colons(tmp_path):
    files = {"proc/self/cgroup": "0::/a:b/c:0\n"} | v2("/a:b/c:0", 256, 56, 0)
    assert cgroup_limit(tree(tmp_path, files)).available_bytes == 200 * MIB
    files = {"proc/self/cgroup": "4:memory:/a:b\n"} | v1("/a:b", 256 * MIB, 6 * MIB)
    assert cgroup_limit(tree(tmp_path / "v1", files)).available_bytes == 250 * MIB


@pytest.mark.parametrize("path", ["/../other", "/a/../../x", "/gone/deeper"])
def test_a_path_that_the_mount_does_not_show_means_its_root(tmp_path, path):
    files = {"proc/self/cgroup": f"0::{path}\n"} | v2("/", 256, 56, 0)
    tree(tmp_path, {**files, "sys/fs/other/memory.max": "1\n", "sys/fs/cgroup/gone/memory.max": "1\n"})
    assert cgroup_limit(tmp_path).available_bytes == 200 * MIB


def test_mountinfo_tells_which_part_of_the_path_the_mount_shows(tmp_path):
    files = {
        "proc/self/cgroup": "5:memory:/docker/abc/job\n",
        "proc/self/mountinfo": (
            "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
            "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro,nosuid shared:9 - cgroup cgroup rw,memory\n"
            "36 31 0:33 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"
            "garbage\n\n37 1 - cgroup2\n"
        ),
    } | v1("/job", 100 * MIB, 40 * MIB)
    files |= v1("/", 200 * MIB, 150 * MIB)
    limit = cgroup_limit(tree(tmp_path, files))
    assert (limit.limit_bytes, limit.available_bytes) == (100 * MIB, 50 * MIB)


def test_mountinfo_finds_an_unusual_mount_point_with_a_blank(tmp_path):
    files = {
        "proc/self/cgroup": "0::/job\n",
        "proc/self/mountinfo": "30 1 0:26 / /my\\040groups rw - cgroup2 cgroup2 rw\n",
        "my groups/job/memory.max": f"{64 * MIB}\n",
        "my groups/job/memory.current": f"{60 * MIB}",
    }
    assert cgroup_limit(tree(tmp_path, files)).available_bytes == 4 * MIB


def test_never_negative_and_never_more_cache_than_used(tmp_path):
    files = {"proc/self/cgroup": "0::/\n"} | v2("/", 100, 130, 10)
    assert cgroup_limit(tree(tmp_path / "over", files)).available_bytes == 0
    files = {"proc/self/cgroup": "0::/\n"} | v2("/", 100, 50, 80)
    assert cgroup_limit(tree(tmp_path / "cache", files)).available_bytes == 100 * MIB


def test_a_group_without_usage_figures_still_limits(tmp_path):
    tree(tmp_path, {"proc/self/cgroup": "0::/\n", **v2("/", 100)})
    assert cgroup_limit(tmp_path).available_bytes == 100 * MIB


def test_a_limit_above_what_the_machine_has_changes_nothing(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "proc/meminfo": meminfo(1024 * MIB, 700 * MIB)}
    budget = host_budget(tree(tmp_path, files | v2("/", 4096, 10, 0)), ranks=1)
    assert (budget.available_bytes, budget.limit_bytes) == (700 * MIB, 4096 * MIB)
    assert budget.source == "MemAvailable"


def test_proc_unreadable_or_absent(tmp_path):
    assert cgroup_limit(tmp_path) is None
    assert cgroup_limit(tmp_path / "nothing") is None
    # Without its files the plain figures of the machine are what is left.
    budget = host_budget(tmp_path, ranks=1)
    assert 0 < budget.available_bytes <= budget.total_bytes
    # Directories where files belong: opening raises something else than "not found".
    for name in ("proc/self/cgroup", "proc/self/mountinfo", "proc/meminfo", "sys/fs/cgroup/memory.max"):
        (tmp_path / name).mkdir(parents=True)
    assert cgroup_limit(tmp_path) is None
    assert host_budget(tmp_path, ranks=1).available_bytes > 0
    # A limit that can be read counts though /proc cannot.
    tree(tmp_path, {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * MIB}\n"})
    assert cgroup_limit(tmp_path).available_bytes == 3 * MIB
    assert host_budget(tmp_path, ranks=1).available_bytes == 3 * MIB


@given(garbage=st.binary(max_size=200), numbers=st.text(max_size=30))
def test_garbage_never_raises(tmp_path_factory, garbage, numbers):
    root = tmp_path_factory.mktemp("garbage")
    tree(root, {"proc/self/cgroup": "0::/a\n4:memory:/a\n", **v2("/a", 5), **v1("/a", 5)})
    for path in list(root.rglob("*")):
        if path.is_file():
            path.write_bytes(garbage)
    host_budget(root, ranks=1)
    (root / "proc/self/cgroup").write_text("0::/a\n")
    (root / "sys/fs/cgroup/a/memory.max").write_bytes(numbers.encode("utf-8", "replace"))
    limit = cgroup_limit(root)
    assert limit is None or (numbers.strip().isdigit() and limit.limit_bytes == int(numbers))


sizes = st.integers(0, 2000)


@given(
    st.lists(st.tuples(st.none() | sizes, sizes, sizes), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 3000),
)
def test_budget_is_the_minimum_over_all_ancestors_and_the_machine(tmp_path_factory, chain, old, available):
    """Chain of (limit, used, inactive) in MiB, from the mount's root to the leaf."""
    root = tmp_path_factory.mktemp("chain")
    names = [f"g{depth}" for depth in range(1, len(chain))]
    leaf = "/" + "/".join(names)
    files = {"proc/meminfo": meminfo(4096 * MIB, available * MIB)}
    files["proc/self/cgroup"] = f"4:memory:{leaf}\n" if old else f"0::{leaf}\n"
    for depth, (limit, used, inactive) in enumerate(chain):
        path = "/" + "/".join(names[:depth])
        if old:
            stat = f"total_inactive_file {inactive * MIB}\n"
            files |= v1(path, NONE_V1 if limit is None else limit * MIB, used * MIB, stat)
        else:
            files |= v2(path, "max" if limit is None else limit, used, inactive)
    budget = host_budget(tree(root, files), ranks=1)
    limits = [
        (lim, max(lim - used + min(inactive, used), 0)) for lim, used, inactive in chain if lim is not None
    ]
    assert budget.limit_bytes == (min(lim for lim, _ in limits) * MIB if limits else None)
    assert budget.available_bytes == min([available, *(left for _, left in limits)]) * MIB
