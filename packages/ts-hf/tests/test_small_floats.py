"""`load_model` with fp8 and nvfp4: packed while reading as `quantize` packs, and counted right."""

import pytest
import torch
from test_loading import save, tiny_model

import ts_quant
from ts_core.errors import OptionError
from ts_core.testing import assert_bit_equal
from ts_hf import load_model, loading
from ts_quant.codecs import resolve

CODECS = ("fp8", "mxfp8", "fp8_row", "fp8_block", "nvfp4")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("files", [False, True])
def test_packed_while_reading(tmp_path, codec, files):
    folder = save(tiny_model(), tmp_path)
    plain = dict(load_model(folder, quantize=None, dtype=torch.float32).named_parameters())
    where = {"disk_offload": str(tmp_path)} if files else {}
    model = load_model(folder, quantize=codec, dtype=torch.float32, **where)
    packed = {n: p for n, p in model.named_parameters() if isinstance(p, ts_quant.QuantizedTensor)}
    assert packed
    for name, parameter in packed.items():
        want = ts_quant.quantize(plain[name].detach(), codec)
        assert (parameter.codec, parameter.meta) == (resolve(codec), want.meta)
        for part, expected in want.packed.items():
            assert_bit_equal(parameter.packed[part], expected)
        size = loading.packed_bytes(tuple(parameter.shape), codec, 64)
        assert size == parameter.packed_bytes


@pytest.mark.parametrize("codec", ["fp8", "nvfp4"])
def test_quantized_scales_are_refused(tmp_path, codec):
    folder = save(tiny_model(), tmp_path)
    with pytest.raises(OptionError, match="double_quant"):
        load_model(folder, quantize=codec, double_quant=True)
