"""fp8 and nvfp4 through `wrap()`: packed as `quantize` packs, whole or paged, planned and reported."""

import copy

import pytest
import torch
from test_better_packing import PLACES, WIDTH, events, frozen, packed

import trainstream
from ts_core.errors import OptionError
from ts_core.testing import assert_bit_equal
from ts_quant import quantize_model
from ts_quant.codecs import resolve

CODECS = ("fp8", "fp8_row", "fp8_block", "nvfp4")


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("codec", CODECS)
def test_packed_paged_and_computed(places, codec, tmp_path):
    model = frozen()
    same = copy.deepcopy(model)
    report = quantize_model(same, codec)
    model.head.requires_grad_(True)
    where = {**places, "disk_offload": str(tmp_path)}
    model, _ = trainstream.wrap(model, quantize=codec, device="cpu", **where)
    assert model._trainstream_session.plan.numerics.quantize == resolve(codec)
    for p, q in zip(packed(model), packed(same), strict=True):
        assert (p.codec, p.meta) == (q.codec, q.meta)
        for name, part in q.packed.items():
            assert_bit_equal(p.packed[name], part)
    assert sum(p.packed_bytes for p in packed(model)) == report["bytes_after"]
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        model(x).sum().backward()
    assert_bit_equal(trainstream.unwrap(model)(x), same(x))


@pytest.mark.parametrize("places", PLACES[:2])
def test_the_worst_nvfp4_weights_become_fp8(places):
    model = frozen()
    same = copy.deepcopy(model)
    report = quantize_model(same, "nvfp4", keep_precise=0.2)
    assert report["kept_precise"] > 0
    model, _ = trainstream.wrap(model, quantize="nvfp4", keep_precise=0.2, **places)
    line = f"keep_precise=0.2: {report['kept_precise']} of 6 weights are fp8, by measured error"
    assert line in events(model)
    assert {p.codec for p in packed(model)} == {"nvfp4", resolve("fp8")}
    for p, q in zip(packed(model), packed(same), strict=True):
        assert_bit_equal(p.dequantize(), q.dequantize())


@pytest.mark.parametrize("codec", ["fp8", "nvfp4"])
def test_their_scales_are_not_quantized_again(codec):
    model = frozen()
    with pytest.raises(OptionError, match="double_quant"):
        trainstream.wrap(model, quantize=codec, double_quant=True)
    assert not packed(model)
    assert "_trainstream_session" not in model.__dict__
