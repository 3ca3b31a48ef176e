"""What a packed tensor remembers about its packing: plain, comparable, checked where it comes from files."""

import json
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core import registry
from ts_core.errors import ArgumentError, OptionError
from ts_quant import Meta, PackedCodec, Part, QuantizedTensor, from_safetensors_dict, quantize
from ts_quant.storage import to_safetensors_dict

VALUES = st.one_of(
    st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.text(max_size=8)
)
METAS = st.builds(
    lambda size, options: Meta.make(size, **options),
    st.integers(0, 2**40),
    st.dictionaries(st.sampled_from(["group", "bits", "sym", "order", "scale"]), VALUES),
)


@given(METAS)
def test_plain_and_back(meta):
    assert Meta.of(meta.plain()) == meta == Meta.of(meta)
    assert hash(Meta.of(meta.plain())) == hash(meta)
    assert Meta.of((meta.block_size, dict(meta.options))) == meta
    if meta.options:
        assert Meta.of(json.loads(json.dumps(meta.plain()))) == meta
    assert pickle.loads(pickle.dumps(meta.plain())) == meta.plain()
    for name, value in meta.options:
        assert meta.get(name) == value
    assert meta.get("no such option", 7) == 7


def test_what_is_off_is_left_out():
    assert Meta.make(64, double_quant=False, order=None) == Meta(64)
    assert Meta(64).plain() == 64


@pytest.mark.parametrize(
    "value",
    [
        None, "64", 64.0, True, (), (64,), (64, (), ()), ("64", ()), (True, ()), (64, "ab"), (64, ("ab",)),
        (64, (("a", None),)), (64, (("a", [1]),)), (64, ((1, 1),)), (64, (("", 1),)),
        (64, (("a", "x" * 65),)),
        (64, tuple((f"o{i}", i) for i in range(33))), (64, {"a": {}}),
    ],
)  # fmt: skip
def test_anything_else_is_refused(value):
    with pytest.raises(ArgumentError, match=r"Meta\.of"):
        Meta.of(value)


class Published(PackedCodec):
    """A format with parts of its own shapes, which only decodes: one scale per group of rows."""

    name = "test-published"
    encodes = False

    def parts(self, shape, meta):
        group = self.meta_of(meta).get("group", 1)
        return {
            "weight": Part(torch.int16, (shape[1], shape[0])),
            "scales": Part(torch.float16, (shape[0] // group,)),
            "order": Part(torch.int32, (shape[1],)),
        }

    def decode(self, packed, shape, dtype, meta, out=None):
        scales = packed["scales"].float().repeat_interleave(self.meta_of(meta).get("group"))
        value = (packed["weight"].T.float() * scales[:, None])[:, packed["order"].long()].to(dtype)
        return value if out is None else out.copy_(value)


@pytest.fixture
def published():
    registry.register_codec(Published())
    yield Meta.make(0, group=2)
    registry._codecs.pop("test-published")


def test_a_published_format_is_kept_as_it_came(published):
    packed = {
        "order": torch.tensor([2, 0, 1], dtype=torch.int32),
        "scales": torch.tensor([0.5, 2.0], dtype=torch.float16),
        "weight": torch.arange(12, dtype=torch.int16).view(3, 4),
    }
    made = QuantizedTensor.from_packed(packed, "test-published", (4, 3), torch.float32, published)
    assert list(made.packed) == ["weight", "scales", "order"]
    want = (packed["weight"].T.float() * torch.tensor([0.5, 0.5, 2.0, 2.0])[:, None])[:, [2, 0, 1]]
    for got in (
        made,
        pickle.loads(pickle.dumps(made)),
        from_safetensors_dict("w", *to_safetensors_dict("w", made)),
        made.view(4, 3),
    ):
        assert (got.codec, got.meta) == ("test-published", published)
        assert torch.equal(got.dequantize(), want)
    # It cannot say what a cut or another shape would be in its bytes: those are decoded.
    assert torch.equal(made[1], want[1])
    assert torch.equal(made.view(12), want.view(12))
    assert torch.equal(made.t(), want.t())
    assert made.packed_bytes == registry.codec("test-published").packed_bytes((4, 3), published)


def test_a_published_format_is_not_made(published):
    with pytest.raises(OptionError, match=r"test-published.*makes none.*'nf4'"):
        quantize(torch.ones(4, 3), "test-published")
    for wrong in ("q4", ["nf4"]):
        with pytest.raises(OptionError, match=r"expected one of .*'nf4'.*'fp8'") as error:
            quantize(torch.ones(4, 3), wrong)
        assert "test-published" not in str(error.value)


def test_wrong_parts_of_a_published_format(published):
    packed = {
        "weight": torch.zeros(4, 3, dtype=torch.int16),
        "scales": torch.zeros(2, dtype=torch.float16),
        "order": torch.zeros(3, dtype=torch.int32),
    }
    with pytest.raises(ArgumentError, match=r"weight.*\(3, 4\)"):
        QuantizedTensor.from_packed(packed, "test-published", (4, 3), torch.float32, published)
