"""Header parsing and reading, against the safetensors package."""

import json
import os
import random
import resource
import struct
import subprocess
import sys

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ts_core.errors import ArgumentError, CheckpointError, StateError, StorageError
from ts_core.testing import assert_bit_equal, shapes
from ts_hf.safetensors_reader import MAX_HEADER_BYTES, SafetensorsReader

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.complex64,
]


def write(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def raw_file(path, content):
    path.write_bytes(content)
    return path


def entry(dtype="U8", shape=(1,), offsets=(0, 1)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def oracle(path):
    """What the safetensors package reads, or None if it refuses."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {
                name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape())
                for name in sorted(file.keys())
            }
    except safetensors.SafetensorError:
        return None
    except OverflowError:  # a size beyond what its Python side can show
        return {}


DAMAGED = {
    "length_2_62": lambda p: write(p, {}, length=2**62),
    "length_max": lambda p: write(p, {}, length=2**64 - 1),
    "length_zero": lambda p: write(p, {}, length=0),
    "length_beyond_file": lambda p: write(p, {"a": entry()}, b"x", length=1000),
    "offsets_inverted": lambda p: write(p, {"a": entry(offsets=(1, 0))}, b"x"),
    "offsets_single": lambda p: write(p, {"a": entry(offsets=(0,))}, b"x"),
    "offsets_overlap": lambda p: write(
        p, {"a": entry(shape=(2,), offsets=(0, 2)), "b": entry(offsets=(1, 2))}, b"xx"
    ),
    "offsets_overlap_and_hole": lambda p: write(  # as many bytes in all as the file has
        p, {"a": entry(shape=(2,), offsets=(0, 2)), "b": entry(shape=(2,), offsets=(1, 3))}, b"xxxx"
    ),
    "offsets_hole": lambda p: write(p, {"a": entry(), "b": entry(offsets=(2, 3))}, b"xxx"),
    "offsets_first_hole": lambda p: write(p, {"a": entry(offsets=(1, 2))}, b"xx"),
    "offsets_past_end": lambda p: write(p, {"a": entry(shape=(9,), offsets=(0, 9))}, b"x"),
    "offsets_negative": lambda p: write(p, {"a": entry(offsets=(-1, 0))}, b"x"),
    "offsets_float": lambda p: write(p, {"a": entry(offsets=(0.0, 1.0))}, b"x"),
    "offsets_bool": lambda p: write(p, {"a": entry(offsets=(False, True))}, b"x"),
    "shape_overflow": lambda p: write(p, {"a": entry(shape=(2**33, 2**33), offsets=(0, 1))}, b"x"),
    "shape_overflow_to_zero": lambda p: write(p, {"a": entry(shape=(2**32, 2**32), offsets=(0, 0))}),
    "shape_negative": lambda p: write(p, {"a": entry(shape=(-1,))}, b"x"),
    "shape_no_list": lambda p: write(p, {"a": {"dtype": "U8", "shape": 1, "data_offsets": [0, 1]}}, b"x"),
    "dtype_unknown": lambda p: write(p, {"a": entry("F99")}, b"x"),
    "dtype_no_string": lambda p: write(p, {"a": entry(5)}, b"x"),
    "size_not_shape": lambda p: write(p, {"a": entry("F32", (2,), (0, 4))}, b"xxxx"),
    "size_not_bytes": lambda p: write(p, {"a": entry("F4", (1,), (0, 1))}, b"x"),
    "empty_file": lambda p: raw_file(p, b""),
    "seven_bytes": lambda p: raw_file(p, b"1234567"),
    "header_no_json": lambda p: write(p, b"{hello"),
    "header_no_object": lambda p: write(p, b"[1]"),
    "header_no_utf8": lambda p: write(p, b'{"a\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
    "header_lone_surrogate": lambda p: write(
        p, b'{"a\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"
    ),
    "header_nested": lambda p: write(p, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "header_nan": lambda p: write(p, b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"x"),
    "header_huge_number": lambda p: write(
        p, b'{"a":{"dtype":"U8","shape":[' + b"9" * 6000 + b'],"data_offsets":[0,1]}}'
    ),
    "entry_no_object": lambda p: write(p, {"a": [1]}, b"x"),
    "metadata_no_strings": lambda p: write(p, {"__metadata__": {"a": 1}}),
    "metadata_no_object": lambda p: write(p, {"__metadata__": "x"}),
    "trailing_bytes": lambda p: write(p, {"a": entry()}, b"xy"),
    "data_missing": lambda p: write(p, {"a": entry(shape=(2,), offsets=(0, 2))}, b"x"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_damaged_file_is_refused_by_name_as_the_oracle_does(fault, tmp_path):
    path = DAMAGED[fault](tmp_path / "bad.safetensors")
    assert oracle(path) is None
    with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
        SafetensorsReader(path)


def test_duplicate_name_is_refused(tmp_path):
    one = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    path = write(tmp_path / "twice.safetensors", b"{" + one + b"," + one + b"}", b"x")
    with pytest.raises(CheckpointError, match=r"twice\.safetensors.*'a' occurs twice"):
        SafetensorsReader(path)


def test_header_limit_holds_even_if_the_file_is_as_long(tmp_path):
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(2 * MAX_HEADER_BYTES)
    with pytest.raises(CheckpointError, match="header length"):
        SafetensorsReader(path)


def test_huge_claims_allocate_nothing(tmp_path):
    path = write(tmp_path / "a.safetensors", {"a": entry("F64", (2**40,), (0, 2**43))}, b"x" * 64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        SafetensorsReader(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_unaligned_data_in_any_order(tmp_path):
    tensors = {
        "u": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "b": torch.arange(5).to(torch.bfloat16),
        "f": torch.arange(7.0),
        "e": torch.zeros(0, 4),
        "s": torch.tensor(2.5),
    }
    names = {"u": "U8", "b": "BF16", "f": "F32", "e": "F32", "s": "F32"}
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        header[name] = entry(names[name], tensor.shape, (len(data), len(data) + len(raw)))
        data += raw
    path = write(tmp_path / "odd.safetensors", dict(reversed(header.items())), data)
    assert oracle(path) is not None
    with SafetensorsReader(path) as reader:
        # The empty tensor begins where the scalar does, and comes first.
        assert reader.keys() == ["u", "b", "f", "e", "s"]
        for name, tensor in tensors.items():
            assert_bit_equal(reader.read(name), tensor)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    dtype=st.sampled_from(DTYPES),
    shape=shapes(min_dims=0, max_dims=3, min_side=0, max_numel=300),
    seed=st.integers(0, 99),
)
def test_read_gives_back_the_bits(tmp_path, dtype, shape, seed):
    count = max(1, torch.Size(shape).numel() * dtype.itemsize)
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    raw = raw % 2 if dtype == torch.bool else raw
    tensor = raw[: torch.Size(shape).numel() * dtype.itemsize].clone().view(dtype).reshape(shape)
    path = tmp_path / "any.safetensors"
    safetensors.torch.save_file({"x": tensor, "pad": torch.zeros(1, dtype=torch.uint8)}, path)
    with SafetensorsReader(path) as reader:
        got = reader.read("x")
        into = reader.read("x", out=torch.empty(shape, dtype=dtype))
        assert reader.info("x").shape == tuple(shape)
    for value in (got, into):
        assert value.dtype == dtype
        assert value.shape == tensor.shape
        assert value.reshape(-1).tolist() == tensor.reshape(-1).tolist() or bool(
            (_bits(value) == _bits(tensor)).all()
        )


def _bits(tensor):
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _mutations():
    number = st.sampled_from(
        [0, 1, 2, 3, 4, 8, 12, 2**31, 2**62, 2**63, 2**64 - 1, 2**64, -1, 1.0, True, None, "4"]
    )
    return st.lists(
        st.one_of(
            st.tuples(st.just("offset"), st.integers(0, 2), st.integers(0, 1), number),
            st.tuples(st.just("shape"), st.integers(0, 2), st.integers(0, 1), number),
            st.tuples(
                st.just("dtype"),
                st.integers(0, 2),
                st.sampled_from(["U8", "F16", "F64", "F4", "X", 3]),
                st.none(),
            ),
            st.tuples(
                st.just("drop"),
                st.integers(0, 2),
                st.sampled_from(["dtype", "shape", "data_offsets"]),
                st.none(),
            ),
            st.tuples(st.just("byte"), st.integers(0, 400), st.integers(0, 255), st.none()),
            st.tuples(st.just("cut"), st.integers(0, 400), st.none(), st.none()),
            st.tuples(st.just("grow"), st.integers(1, 9), st.none(), st.none()),
            st.tuples(
                st.just("length"),
                number.filter(lambda n: type(n) is int and 0 <= n < 2**64),
                st.none(),
                st.none(),
            ),
        ),
        min_size=1,
        max_size=3,
    )


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(changes=_mutations())
def test_mutated_files_never_crash_and_agree_with_the_oracle(tmp_path, changes):
    header = {
        "a": entry("F32", (2, 1), (0, 8)),
        "b": entry("U8", (3,), (8, 11)),
        "c": entry("F16", (2,), (11, 15)),
    }
    items = list(header.values())
    for kind, where, what, value in changes:
        if kind == "offset":
            items[where].get("data_offsets", [0, 0])[what] = value
        elif kind == "shape":
            items[where].get("shape", [0])[0] = value
        elif kind == "dtype":
            items[where]["dtype"] = what
        elif kind == "drop":
            items[where].pop(what, None)
    raw = json.dumps(header).encode()
    blob = bytearray(struct.pack("<Q", len(raw)) + raw + bytes(range(15)))
    for kind, where, what, _ in changes:
        if kind == "byte" and where < len(blob):
            blob[where] = what
        elif kind == "cut":
            del blob[where:]
        elif kind == "grow":
            blob += b"\0" * where
        elif kind == "length":
            blob[:8] = struct.pack("<Q", where)
    path = tmp_path / "mutant.safetensors"
    path.write_bytes(blob)
    expected = oracle(path)
    try:
        reader = SafetensorsReader(path)
    except CheckpointError as error:
        if "mutant.safetensors" not in str(error):
            raise
        return
    with reader:
        assert expected is not None, "accepted what the safetensors package refuses"
        assert {
            name: (reader.info(name).stored_dtype, list(reader.info(name).shape)) for name in reader
        } == expected
        for name in reader:
            if reader.info(name).dtype is not None:
                with safetensors.safe_open(path, framework="pt") as file:
                    assert bool((_bits(reader.read(name)) == _bits(file.get_tensor(name))).all())


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.binary(max_size=64), st.integers(0, 2**32))
def test_random_bytes_never_crash(tmp_path, tail, seed):
    rng = random.Random(seed)
    path = tmp_path / "noise.safetensors"
    path.write_bytes(struct.pack("<Q", rng.choice([len(tail), 2, 5, rng.getrandbits(64)])) + tail)
    if oracle(path) is None:
        with pytest.raises(CheckpointError):
            SafetensorsReader(path)


def test_metadata_keys_and_membership(tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2)}, path, metadata={"format": "pt"})
    with SafetensorsReader(str(path)) as reader:
        assert reader.metadata == {"format": "pt"}
        assert "w" in reader
        assert "v" not in reader
        assert len(reader) == 1
        assert list(reader) == ["w"]
        with pytest.raises(CheckpointError, match=r"m\.safetensors: there is no tensor 'v'"):
            reader.read("v")


def test_out_must_match(tmp_path):
    path = tmp_path / "o.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2, 3)}, path)
    with SafetensorsReader(path) as reader:
        for bad in (torch.empty(3, 2), torch.empty(2, 3, dtype=torch.int32), torch.empty(3, 2).t()):
            with pytest.raises(ArgumentError, match="out: expected a contiguous CPU tensor"):
                reader.read("w", out=bad)


def test_a_hint_changes_nothing_and_may_be_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file({"w": torch.arange(5.0), "none": torch.zeros(0)}, path)
    with SafetensorsReader(path) as reader:
        for name in ("w", "none"):
            reader.expect(name)
        with pytest.raises(CheckpointError, match="no tensor 'x'"):
            reader.expect("x")

        def refused(*args):
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(os, "posix_fadvise", refused)
        reader.expect("w")
        assert reader.read("w").tolist() == [0, 1, 2, 3, 4]
    reader.expect("w")  # closed: nothing is left to hint at


def test_a_part_is_the_bytes_of_that_range(tmp_path):
    path = tmp_path / "p.safetensors"
    tensors = {"w": torch.arange(1000.0), "v": torch.arange(7, dtype=torch.int16), "none": torch.zeros(0)}
    safetensors.torch.save_file(tensors, path)
    with SafetensorsReader(path) as reader:
        for name, offset, count in (
            ("w", 0, 4000),
            ("w", 1001, 3),
            ("v", 3, 11),
            ("w", 4000, 0),
            ("none", 0, 0),
        ):
            out = torch.full((count,), 255, dtype=torch.uint8)
            reader.read_part(name, offset, out)
            assert torch.equal(out, tensors[name].view(torch.uint8)[offset : offset + count])
            reader.expect(name, offset, count)
        for offset, count in ((-1, 2), (3999, 2), (4001, 0)):
            with pytest.raises(ArgumentError, match="a range of the tensor's 4000 bytes"):
                reader.read_part("w", offset, torch.empty(count, dtype=torch.uint8))
        for bad in (torch.empty(4), torch.empty(8, dtype=torch.uint8)[::2]):
            with pytest.raises(ArgumentError, match="out: expected a contiguous uint8 CPU tensor"):
                reader.read_part("w", 0, bad)
        with pytest.raises(CheckpointError, match="no tensor 'x'"):
            reader.read_part("x", 0, torch.empty(0, dtype=torch.uint8))
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CheckpointError, match=r"p\.safetensors.*shrank"):
            reader.read_part(reader.keys()[-1], 0, torch.empty(14, dtype=torch.uint8))
    with pytest.raises(StateError, match="closed"):
        reader.read_part("w", 0, torch.empty(1, dtype=torch.uint8))


def test_read_after_close_and_missing_file(tmp_path):
    path = tmp_path / "c.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2)}, path)
    reader = SafetensorsReader(path)
    reader.close()
    with pytest.raises(StateError, match="closed"):
        reader.read("w")
    with pytest.raises(StorageError):
        SafetensorsReader(tmp_path / "none.safetensors")


def test_file_that_shrinks_while_open(tmp_path):
    path = tmp_path / "s.safetensors"
    safetensors.torch.save_file({"w": torch.ones(100)}, path)
    with SafetensorsReader(path) as reader:
        os.truncate(path, path.stat().st_size - 6)
        with pytest.raises(CheckpointError, match=r"s\.safetensors.*shrank"):
            reader.read("w")


def test_sub_byte_dtypes_are_listed_but_not_read(tmp_path):
    path = write(tmp_path / "f4.safetensors", {"a": entry("F4", (2,), (0, 1))}, b"x")
    with SafetensorsReader(path) as reader:
        assert reader.info("a").dtype is None
        with pytest.raises(CheckpointError, match="F4"):
            reader.read("a")


def test_importing_the_package_is_cheap():
    code = "import sys, ts_hf; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
