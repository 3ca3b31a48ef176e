"""Quantized tensors in safetensors files."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from ts_core.errors import CheckpointError
from ts_core.testing import assert_bit_equal, make_tensor, shapes
from ts_quant import from_safetensors_dict, quantize, to_safetensors_dict


def round_trip(path, tensors, metadata):
    save_file(tensors, path, metadata)
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@given(data=st.data())
def test_round_trip_through_a_file(tmp_path_factory, data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    codec = data.draw(st.sampled_from(["nf4", "int8"]))
    tensors, metadata, saved = {}, {}, {}
    for seed, name in enumerate(("layers.0.weight", "layers.1.weight")):
        x = make_tensor(data.draw(shapes(min_side=0)), dtype=dtype, seed=seed)
        saved[name] = quantize(x, codec, block_size=2 * data.draw(st.integers(1, 40)))
        more, description = to_safetensors_dict(name, saved[name])
        tensors |= more
        metadata |= description
    tensors, metadata = round_trip(tmp_path_factory.mktemp("st") / "a.safetensors", tensors, metadata)
    for name, want in saved.items():
        got = from_safetensors_dict(name, tensors, metadata)
        assert (got.codec, got.shape, got.dtype, got.block_size) == (
            want.codec,
            want.shape,
            want.dtype,
            want.block_size,
        )
        for part, tensor in want.packed.items():
            assert_bit_equal(got.packed[part], tensor)


@pytest.mark.parametrize(
    "change",
    [
        {"codec": "nf5"},
        {"codec": 3},
        {"shape": [4, 63]},
        {"shape": [-4, -64]},
        {"shape": 256},
        {"shape": [[4], 64]},
        {"dtype": "float99"},
        {"dtype": "int8"},
        {"block_size": 63},
        {"block_size": "64"},
        {"block_size": 1 << 80},
        {"packed": ["codes"]},
        {"packed": []},
        {"packed": ["codes", "absmax", "more"]},
        {"version": 2},
    ],
)
def test_damaged_description(change):
    tensors, metadata = to_safetensors_dict("w", quantize(torch.ones(4, 64)))
    metadata["w"] = json.dumps(json.loads(metadata["w"]) | change)
    with pytest.raises(CheckpointError, match="tensor 'w'"):
        from_safetensors_dict("w", tensors, metadata)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"codec": "nf4"}', "[" * 100_000])
def test_description_that_is_none(text):
    tensors, _ = to_safetensors_dict("w", quantize(torch.ones(4, 64)))
    with pytest.raises(CheckpointError, match="damaged description"):
        from_safetensors_dict("w", tensors, {"w": text})


def test_missing_parts():
    tensors, metadata = to_safetensors_dict("w", quantize(torch.ones(4, 64)))
    with pytest.raises(CheckpointError, match="no description"):
        from_safetensors_dict("v", tensors, metadata)
    del tensors["w.absmax"]
    with pytest.raises(CheckpointError, match="absmax"):
        from_safetensors_dict("w", tensors, metadata)


def test_a_short_tensor():
    tensors, metadata = to_safetensors_dict("w", quantize(torch.ones(4, 64)))
    tensors["w.codes"] = tensors["w.codes"][:-1]
    with pytest.raises(CheckpointError, match="codes"):
        from_safetensors_dict("w", tensors, metadata)
