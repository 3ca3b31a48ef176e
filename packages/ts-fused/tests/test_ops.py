import subprocess
import sys

import pytest
import torch

import ts_fused
from ts_core.errors import ArgumentError, ArgumentTypeError
from ts_core.testing import assert_bit_equal, devices, make_tensor, opcheck_all
from ts_fused import _C, _ops, reference


def samples(device):
    def floats(*shape, dtype=torch.float32, seed=0):
        return make_tensor(shape, dtype=dtype, device=device, seed=seed)

    targets = torch.tensor([1, -100, 16], device=device)
    half = floats(3, 48, dtype=torch.bfloat16)
    x, weight, rstd = floats(3, 48), floats(48, seed=1), floats(3, seed=2).abs()
    q, k, angle = floats(2, 5, 3, 16), floats(2, 3, 5, 16, seed=1).transpose(1, 2)[:, :, :1], floats(2, 5, 8)
    return {
        "rms_norm_forward": [(x, weight, 1e-6, 0.0), (half, weight, 1e-6, 0.0), (half, weight, 1e-6, 1.0)],
        "rms_norm_backward": [
            (x, x, weight, rstd, 0.0, True, True),
            (half, half, weight, rstd, 1.0, False, True),
            (half.float(), half, weight, rstd, 0.0, True, False),
            (x, x, weight, rstd, 0.0, True, True, x.t().contiguous().t()),
        ],
        "cross_entropy_rows_": [
            (floats(3, 17), targets, floats(3), -100, 0.0, 1.0, 0.0, True),
            (floats(3, 17, dtype=torch.float16), targets, floats(3), -100, 30.0, 1.0, 0.1, False),
        ],
        "add_rms_norm_forward": [(x, x, weight, 1e-6, 0.0), (half, half, weight, 1e-6, 1.0)],
        "gated_forward": [(x, x, False), (half[:, ::2], half[:, :24], True)],
        "gated_backward": [(x, x, x, False, True, True), (half, half, half, True, False, True)],
        "gated_pair_backward": [(x[:, :24], x, True)],
        "rotary_heads": [
            (q, k, angle, angle, 16, False, False),
            (q, None, angle, angle, 8, True, True),
            (k.expand(2, 5, 7, 16), q.half().float(), angle.bfloat16(), angle.bfloat16(), 16, True, False),
        ],
        "scale_cast": [(x, torch.tensor(2.0, device=device), torch.bfloat16)],
        "copy_each_": [
            ([floats(3, 17, dtype=torch.float16), floats(5)], [floats(3, 17), floats(5).bfloat16()]),
            ([floats(6, 4).t()], [half.view(12, 12)[:4, :6]]),
        ],
        "label_counts": [(targets, -100, 17)],
        "loss_total": [(floats(3),)],
    }


@pytest.mark.parametrize("device", devices())
def test_every_op_passes_opcheck(device):
    assert opcheck_all("ts_fused", samples(device)) == 24


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("source", _ops.FLOATS)
@pytest.mark.parametrize("result", _ops.FLOATS)
def test_scale_cast_rounds_once(device, source, result):
    for size in (0, 1, 17, 100_003):
        x = make_tensor((size,), dtype=source, device=device)
        scale = torch.tensor(0.3, device=device)
        assert_bit_equal(_ops.scale_cast(x, scale, result), (x.float() * scale).to(result))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("count", [1, 3, 64, 150])
def test_copy_each_gives_the_bits_of_copy(device, count):
    """Every pair of dtypes, sizes about a piece of work, empty ones, and starts that are on no 16 bytes."""
    sizes = [1, 7, 8, 1023, 1024, 1025, 0, 5000, 2048]
    targets, sources = [], []
    for n in range(count):
        size = sizes[n % len(sizes)]
        source, result = _ops.FLOATS[n % 3], _ops.FLOATS[n // 3 % 3]
        sources.append(make_tensor((size + 1,), dtype=source, device=device, seed=n)[n % 2 :][:size])
        whole = torch.full((size + 16,), 7.0, dtype=result, device=device)
        targets.append(whole[8 + n % 3 :][:size])
    before = [t._version for t in targets]
    _ops.copy_each_(targets, sources)
    for n, (target, source) in enumerate(zip(targets, sources, strict=True)):
        assert_bit_equal(target, source.to(target.dtype))
        assert target._version > before[n]
        whole = target._base
        assert (whole[: 8 + n % 3] == 7).all()
        assert (whole[8 + n % 3 + target.numel() :] == 7).all()


@pytest.mark.parametrize("device", devices())
def test_copy_each_takes_what_the_kernel_does_not(device):
    a, b = torch.zeros(4, 6, device=device).t(), torch.zeros(3, dtype=torch.float64, device=device)
    _ops.copy_each_([a, b], [torch.ones(6, 4, device=device), torch.full((3,), 0.1, device=device)])
    assert a.eq(1).all()
    assert b.eq(torch.tensor(0.1, device=device).double()).all()
    with pytest.raises(ArgumentError, match="1 tensors"):
        _ops.copy_each_([a], [])
    with pytest.raises(ArgumentError, match="shape"):
        _ops.copy_each_([a], [b])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("size", [0, 1, 1000, 5000])
def test_label_counts_and_loss_total(device, size):
    targets = torch.arange(-3, size - 3, device=device)
    counts = _ops.label_counts(targets, -2, 100).tolist()
    wrong = ((targets < 0) | (targets >= 100)) & (targets != -2)
    assert counts == [int(((targets >= 0) & (targets < 100)).sum()), int(wrong.sum())]
    losses = make_tensor((size,), device=device)
    assert _ops.loss_total(losses).item() == pytest.approx(losses.double().sum().item(), rel=1e-12, abs=1e-12)


def test_loss_has_the_same_bits_for_every_instruction_set_and_thread_count(variants):
    for dtype in _ops.FLOATS:
        logits = make_tensor((41, 1500), dtype=dtype, flavour="mixed_scale")
        targets = torch.arange(41) * 7

        def run(logits=logits, targets=targets):
            results = []
            for cap, smoothing in ((0.0, 0.0), (2.0, 0.1)):
                z, losses = logits.clone(), torch.empty(41)
                _ops.cross_entropy_rows_(z, targets, losses, -100, cap, 0.7, smoothing, True)
                results += [z, losses]
            return results

        first, *others = variants(run)
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert_bit_equal(b, a)


def test_exponential_and_tanh_over_their_whole_range():
    z = torch.linspace(-95, 0, 65536)
    for cap in (0.0, 1.0):
        rows, losses = torch.stack([z, z / 10]), torch.empty(2)
        wide = rows.double() if cap == 0.0 else torch.tanh(rows.double())
        got = rows.clone()
        _ops.cross_entropy_rows_(got, torch.zeros(2, dtype=torch.long), losses, -100, cap, 1.0, 0.0, True)
        want = torch.softmax(wide, -1)
        want[:, 0] -= 1.0
        if cap:
            want *= 1.0 - wide**2
            # 1 - tanh^2 cancels: what is left of it carries the rounding of tanh.
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=3e-7)
        else:
            torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=2e-38)
        exact = torch.logsumexp(wide, -1) - wide[:, 0]
        torch.testing.assert_close(losses.double(), exact, rtol=1e-6, atol=1e-6)


def test_ops_check_their_arguments():
    x, weight, rstd = torch.randn(3, 8), torch.ones(8), torch.ones(3)
    zeros, targets = torch.zeros(3, 8), torch.zeros(3, dtype=torch.long)
    with torch.no_grad():
        for call, args, error in [
            (_ops.rms_norm_backward, (x[:2], x, weight, rstd, 0.0, True, True), ArgumentError),
            (_ops.rms_norm_backward, (x.half(), x, weight, rstd, 0.0, True, True), ArgumentTypeError),
            (_ops.rms_norm_backward, (x, x, weight, rstd[:2], 0.0, True, True), ArgumentError),
            (_ops.cross_entropy_rows_, (zeros.t(), targets, rstd, 0, 0.0, 1.0, 0.0, True), ArgumentError),
            (_ops.cross_entropy_rows_,
             (zeros, targets.int(), rstd, 0, 0.0, 1.0, 0.0, True), ArgumentTypeError),
            (_ops.cross_entropy_rows_, (zeros, targets[:2], rstd, 0, 0.0, 1.0, 0.0, True), ArgumentError),
            (_ops.cross_entropy_rows_,
             (zeros, targets, torch.ones(6)[::2], 0, 0.0, 1.0, 0.0, True), ArgumentError),
            (_ops.scale_cast, (x, rstd, torch.float32), ArgumentError),
            (_ops.scale_cast, (x, rstd[0], torch.float64), ArgumentTypeError),
            (_ops.label_counts, (targets.int(), 0, 3), ArgumentTypeError),
            (_ops.loss_total, (rstd.double(),), ArgumentTypeError),
        ]:  # fmt: skip
            with pytest.raises(error):
                call(*args)


def test_native_layer_checks_too():
    x, weight, rstd = torch.randn(3, 8), torch.ones(8), torch.ones(3)
    with pytest.raises(TypeError, match="x: expected float32"):
        _C.rms_norm_forward(x.double(), weight, x, rstd, 1e-6, 0.0, False, 8)
    with pytest.raises(ValueError, match="contiguous"):
        _C.rms_norm_forward(x.t(), weight, x, rstd, 1e-6, 0.0, False, 8)
    with pytest.raises(ValueError, match="mean_lanes"):
        _C.rms_norm_forward(x, weight, x.clone(), rstd, 1e-6, 0.0, False, 16)
    with pytest.raises(ValueError, match="24 elements"):
        _C.rms_norm_forward(x, weight, x[:2], rstd, 1e-6, 0.0, False, 8)
    with pytest.raises(ValueError, match="partial"):
        _C.rms_norm_backward(x, x, weight, rstd, None, None, weight.clone(), 8, 0.0, False)
    with pytest.raises(ValueError, match="rows_per_chunk"):
        _C.rms_norm_backward(x, x, weight, rstd, None, None, None, 0, 0.0, False)


def test_import_is_lean_and_leaves_the_gpu_alone():
    code = (
        "import sys, torch, ts_fused\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'transformers' not in sys.modules and 'hypothesis' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_native_module_is_explained():
    code = (
        "import sys\n"
        "sys.modules['ts_fused._C'] = None\n"
        "try:\n    import ts_fused\n"
        "except ImportError as error:\n    assert 'nanobind-backend' in str(error), error\n"
        "else:\n    raise SystemExit('imported')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_examples_in_the_docstrings():
    import doctest

    for module in (
        ts_fused.rms_norm,
        ts_fused.rotary,
        ts_fused.gated_mlp,
        ts_fused.chunked_cross_entropy,
        reference,
    ):
        module = sys.modules[module.__module__] if callable(module) else module
        failed, tried = doctest.testmod(module, extraglobs={"torch": torch})
        assert tried > 0
        assert failed == 0
