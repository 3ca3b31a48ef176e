"""The kernels: every instruction set, thread count and device against float64 and against each other."""

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core.testing import assert_bit_equal, devices, make_tensor, opcheck_all
from ts_optim import _C, adamw_step_, grad_sumsq, narrow_grads

SIZES = st.one_of(st.integers(0, 70), st.sampled_from([127, 129, 4095, 4096, 4097, 16385, 20000]))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
FLAVOURS = ("normal", "zeros", "sparse", "mixed_scale", "denormal", "large", "outlier")


def isas():
    """Variants that this machine can run."""
    before = _C.isa()
    found = []
    for name in ("portable", "avx2", "avx512"):
        try:
            _C.set_isa(name)
        except ValueError:
            continue
        found.append(name)
    _C.set_isa(before)
    return found


@pytest.fixture(autouse=True)
def _restore_isa():
    before = _C.isa()
    yield
    _C.set_isa(before)


def hyper_table(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1):
    return torch.tensor([[lr, beta1, beta2, eps, weight_decay]], dtype=torch.float64)


def problem(sizes, grad_dtype, low_dtype, seed, flavour="normal"):
    tensors = {"params": [], "grads": [], "exp_avgs": [], "exp_avg_sqs": [], "steps": [], "lows": []}
    for i, n in enumerate(sizes):

        def make(k, i=i, n=n, **kw):
            return make_tensor((n,), seed=seed + 10 * i + k, **kw)

        tensors["params"].append(make(0))
        tensors["grads"].append(make(1, dtype=grad_dtype, flavour=flavour))
        tensors["exp_avgs"].append(make(2) * 0.1)
        tensors["exp_avg_sqs"].append(make(3).square())
        tensors["steps"].append(torch.tensor(float(i)))
        if low_dtype is not None:
            tensors["lows"].append(tensors["params"][-1].to(low_dtype))
    return tensors


def clone(tensors, device="cpu"):
    return {k: [t.clone().to(device if k != "steps" else "cpu") for t in v] for k, v in tensors.items()}


def run(tensors, hyper, **kw):
    adamw_step_(
        *(tensors[k] for k in ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps", "lows")),
        hyper,
        [0] * len(tensors["params"]),
        **kw,
    )
    return tensors


def oracle(p, g, m, v, t, hyper, scale):
    """AdamW as the paper has it, float64."""
    lr, b1, b2, eps, wd = hyper[0].tolist()
    p, g, m, v = p.double(), g.double() * scale, m.double(), v.double()
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    update = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
    return p * (1 - lr * wd) - lr * update, m, v


@pytest.mark.parametrize("device", devices())
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=5),
    grad_dtype=DTYPES,
    low_dtype=st.sampled_from([None, torch.bfloat16, torch.float16]),
    beta1=st.sampled_from([0.0, 0.9, 0.99]),
    beta2=st.sampled_from([0.0, 0.95, 0.999]),
    scale=st.sampled_from([1.0, 0.25, 3e-3]),
    seed=st.integers(0, 1000),
)
def test_adamw_step_agrees_with_float64(device, sizes, grad_dtype, low_dtype, beta1, beta2, scale, seed):
    hyper = hyper_table(beta1=beta1, beta2=beta2)
    before = problem(sizes, grad_dtype, low_dtype, seed)
    after = run(clone(before, device), hyper, grad_scale=scale)
    for i in range(len(sizes)):
        t = float(before["steps"][i]) + 1
        got = [after[k][i].cpu() for k in ("params", "exp_avgs", "exp_avg_sqs")]
        args = [before[k][i] for k in ("params", "grads", "exp_avgs", "exp_avg_sqs")]
        p, m, v = oracle(*args, t, hyper, scale)
        torch.testing.assert_close(got[1].double(), m, rtol=3e-7, atol=1e-7)
        torch.testing.assert_close(got[2].double(), v, rtol=6e-7, atol=1e-37)
        # Three roundings reach the weight (decay, product, sum), eight make the update.
        # Terms of the first moment may cancel: the bound takes their sizes.
        kept = args[0].double() * (1 - 1e-2 * 0.1)
        moved = oracle(args[0], args[1].abs(), -args[2].abs(), args[3], t, hyper, -scale)[0] - kept
        allowed = 2.0**-24 * (3 * (p.abs() + moved) + 8 * moved) + 1e-40
        assert bool(((got[0].double() - p).abs() <= allowed).all())
        assert float(after["steps"][i]) == t
        if low_dtype is not None:
            assert_bit_equal(after["lows"][i], after["params"][i].to(low_dtype))


@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4),
    grad_dtype=DTYPES,
    low_dtype=st.sampled_from([None, torch.bfloat16, torch.float16]),
    flavour=st.sampled_from(FLAVOURS),
    reconcile=st.booleans(),
    threads=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 1000),
)
def test_bits_do_not_depend_on_isa_threads_or_bucket(
    sizes, grad_dtype, low_dtype, flavour, reconcile, threads, seed
):
    before = problem(sizes, grad_dtype, low_dtype, seed, flavour)
    if low_dtype is not None and reconcile:
        for low in before["lows"]:
            low[::3] = 0.5
    results = []
    for name in isas():
        _C.set_isa(name)
        results.append(run(clone(before), hyper_table(), reconcile=reconcile, threads=threads))
        results.append(run(clone(before), hyper_table(), reconcile=reconcile, threads=1))
    single = clone(before)
    for i in range(len(sizes)):
        run({k: v[i : i + 1] for k, v in single.items()}, hyper_table(), reconcile=reconcile)
    results.append(single)
    for other in results[1:]:
        for name in before:
            for a, b in zip(results[0][name], other[name], strict=True):
                assert_bit_equal(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=50),
    grad_dtype=DTYPES,
    low_dtype=st.sampled_from([None, torch.bfloat16, torch.float16]),
    flavour=st.sampled_from(FLAVOURS),
    reconcile=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_cuda_gives_the_bits_of_the_cpu(sizes, grad_dtype, low_dtype, flavour, reconcile, seed):
    before = problem(sizes, grad_dtype, low_dtype, seed, flavour)
    if low_dtype is not None and reconcile:
        for low in before["lows"]:
            low[::3] = 0.5
    host = run(clone(before), hyper_table(), reconcile=reconcile)
    device = run(clone(before, "cuda"), hyper_table(), reconcile=reconcile)
    for name in before:
        for a, b in zip(device[name], host[name], strict=True):
            assert_bit_equal(a, b)
    sums = grad_sumsq([g.cuda() for g in before["grads"]])
    assert_bit_equal(sums, grad_sumsq(before["grads"]))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("low_dtype", [torch.bfloat16, torch.float16])
def test_low_copy_is_correctly_rounded(device, low_dtype):
    # lr and weight decay 0: the weight stays, only its rounding is written. All kinds of halfway cases.
    bits = torch.arange(0, 2**32, 65521, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    values = values[values.isfinite()]
    n = values.numel()
    zeros = torch.zeros(n)
    for name in isas():
        _C.set_isa(name)
        low = torch.empty(n, dtype=low_dtype, device=device)
        tensors = {
            "params": [values.to(device)],
            "grads": [zeros.to(device)],
            "exp_avgs": [zeros.to(device)],
            "exp_avg_sqs": [zeros.to(device)],
            "steps": [torch.tensor(0.0)],
            "lows": [low],
        }
        run(tensors, hyper_table(lr=0.0))
        assert_bit_equal(low, values.to(low_dtype))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("low_dtype", [torch.bfloat16, torch.float16])
def test_an_edited_low_copy_wins_over_its_master(device, low_dtype):
    master = torch.tensor([1.0001, 2.0001, 3.0001] * 11)
    low = master.to(low_dtype)
    low[1::3] = 7.0
    zeros = torch.zeros(33)
    tensors = clone(
        {
            "params": [master],
            "grads": [zeros],
            "exp_avgs": [zeros],
            "exp_avg_sqs": [zeros],
            "steps": [torch.tensor(0.0)],
            "lows": [low],
        },
        device,
    )
    run(tensors, hyper_table(lr=0.0), reconcile=True)
    assert tensors["params"][0].tolist() == torch.where(torch.arange(33) % 3 == 1, 7.0, master).tolist()


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("low_dtype", [torch.bfloat16, torch.float16])
@given(seed=st.integers(0, 10**6), away=st.integers(-2, 2))
def test_a_low_copy_is_edited_exactly_when_it_is_not_the_rounding(isa, low_dtype, seed, away):
    _C.set_isa(isa)
    bits = torch.randint(-(2**31), 2**31, (512,), generator=torch.Generator().manual_seed(seed))
    bits[::4] = bits[::4] >> 16 << 16 | 0x8000  # ties
    bits[1::4] = bits[1::4] >> 16 << 16 | 0x7FFF + bits[1::4] % 3
    bits[:8] = torch.tensor([0, -(2**31), 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 0x7FC00000, 1, -(2**31) + 1])
    param = bits.int().view(torch.float32)
    rounded = param.to(low_dtype)
    low = (rounded.view(torch.int16) + away).view(low_dtype)
    want = torch.where(low.view(torch.int16) == rounded.view(torch.int16), param, low.float())
    hyper = torch.tensor([[0.0, 0.9, 0.999, 1e-8, 0.0]], dtype=torch.float64)
    zeros = [torch.zeros(512) for _ in range(3)]
    adamw_step_([param], *([z] for z in zeros), [torch.tensor(0.0)], [low], hyper, [0], reconcile=True)
    torch.testing.assert_close(param, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", devices())
@given(sizes=st.lists(SIZES, min_size=1, max_size=5), dtype=DTYPES, seed=st.integers(0, 1000))
def test_sum_of_squares_is_the_float64_one(device, sizes, dtype, seed):
    grads = [make_tensor((n,), dtype=dtype, seed=seed + n).to(device) for n in sizes]
    got = grad_sumsq(grads).tolist()
    for g, value in zip(grads, got, strict=True):
        want = math.fsum(x * x for x in g.double().tolist())
        assert value == pytest.approx(want, rel=1e-13)


@given(n=SIZES, dtype=DTYPES, flavour=st.sampled_from(FLAVOURS), seed=st.integers(0, 1000))
def test_sum_of_squares_has_one_value(n, dtype, flavour, seed):
    grads = [make_tensor((n,), dtype=dtype, seed=seed, flavour=flavour) for _ in range(3)]
    results = []
    for name in isas():
        _C.set_isa(name)
        results += [grad_sumsq(grads, threads) for threads in (1, 3)]
        results.append(torch.cat([grad_sumsq([g]) for g in grads]))
    for other in results[1:]:
        assert_bit_equal(other, results[0])


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("n", [5, 100, 5000])
def test_sum_of_squares_survives_1e20_and_shows_non_finite_values(device, n):
    big = torch.full((n,), 1e20, dtype=torch.bfloat16, device=device)
    assert float(grad_sumsq([big])) == pytest.approx(n * float(big[0]) ** 2, rel=1e-12)
    for bad in (math.nan, math.inf, -math.inf):
        broken = big.clone()
        broken[n // 2] = bad
        assert [math.isfinite(x) for x in grad_sumsq([big, broken]).tolist()] == [True, False]


@pytest.mark.parametrize("device", devices())
def test_large_finite_gradients_leave_finite_state(device):
    tensors = problem([40], torch.bfloat16, None, 0)
    tensors["grads"] = [torch.full((40,), 1e30, dtype=torch.bfloat16)]
    tensors = clone(tensors, device)
    for _ in range(3):
        run(tensors, hyper_table())
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        assert bool(tensors[name][0].isfinite().all())


def test_denormal_mode_of_the_caller_changes_nothing():
    before = problem([5000], torch.float32, None, 3, "denormal")
    want = run(clone(before), hyper_table(), threads=2)
    try:
        supported = torch.set_flush_denormal(True)
        got = run(clone(before), hyper_table(), threads=2)
    finally:
        torch.set_flush_denormal(False)
    assert supported
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        assert_bit_equal(got[name][0], want[name][0])


@pytest.mark.parametrize("device", devices())
def test_found_inf_leaves_everything_as_it_was(device):
    before = clone(problem([33], torch.float32, torch.bfloat16, 0), device)
    after = run(clone(before, device), hyper_table(), found_inf=torch.ones((), device=device))
    for name in before:
        assert_bit_equal(after[name][0], before[name][0])
    run(after, hyper_table(), found_inf=torch.zeros((), device=device))
    assert float(after["steps"][0]) == 1.0


def test_versions_move_so_that_autograd_notices():
    tensors = problem([4], torch.float32, None, 0)
    version = tensors["params"][0]._version
    run(tensors, hyper_table())
    assert tensors["params"][0]._version > version


BAD = [
    ({"params": [torch.zeros(4, dtype=torch.float64)]}, TypeError, "params"),
    ({"grads": [torch.zeros(4, dtype=torch.int32)]}, TypeError, "grads"),
    ({"grads": [torch.zeros(5)]}, ValueError, "grads"),
    ({"grads": [torch.zeros(8)[::2]]}, ValueError, "grads"),
    ({"grads": []}, ValueError, "grads"),
    ({"exp_avgs": [torch.zeros(3)]}, ValueError, "exp_avgs"),
    ({"exp_avg_sqs": [torch.zeros(4, dtype=torch.bfloat16)]}, TypeError, "exp_avg_sqs"),
    ({"steps": [torch.tensor(0)]}, TypeError, "steps"),
    ({"steps": [torch.zeros(2)]}, ValueError, "steps"),
    ({"lows": [torch.zeros(4)]}, TypeError, "lows"),
    ({"lows": [torch.zeros(4, dtype=torch.bfloat16)] * 2}, ValueError, "lows"),
    ({"hyper": torch.zeros(1, 5)}, TypeError, "hyper"),
    ({"hyper": torch.zeros(1, 4, dtype=torch.float64)}, ValueError, "hyper"),
    ({"groups": [1]}, ValueError, "groups"),
    ({"groups": [0, 0]}, ValueError, "groups"),
]


@pytest.mark.parametrize(("change", "error", "argument"), BAD)
def test_bad_arguments_are_named_and_nothing_is_written(change, error, argument):
    arguments = {**problem([4], torch.float32, None, 0), "hyper": hyper_table(), "groups": [0]}
    before = arguments["params"][0].clone()
    with pytest.raises(error, match=argument):
        adamw_step_(**{**arguments, **change})
    assert_bit_equal(arguments["params"][0], before)


@pytest.mark.parametrize(("change", "error", "argument"), BAD)
def test_the_fake_kernel_refuses_the_same(change, error, argument):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def convert(v):
        return [mode.from_tensor(t) for t in v] if isinstance(v, list) else mode.from_tensor(v)

    arguments = {**problem([4], torch.float32, None, 0), "hyper": hyper_table(), **change}
    groups = arguments.pop("groups", [0])
    if argument == "steps" and arguments["steps"][0].numel() == 2:
        pytest.skip("the number of elements of a counter is checked by the native code")
    with mode, pytest.raises(error, match=argument):
        adamw_step_(**{k: convert(v) for k, v in arguments.items()}, groups=groups)


SPECIAL = torch.tensor(
    [0.0, -0.0, 1.5, math.inf, -math.inf, 2.0**-133, -(2.0**-126), 3.3895313892515355e38, 1 + 2.0**-7]
)
INEXACT = (1 + 2.0**-8, 1 + 2.0**-20, 3.4e38, 2.0**-149, 2.0**-134, 0.1, -1e-40, math.nan, -math.nan)


def check_narrow(grads):
    """Against what torch and `grad_sumsq` say, on the same device."""
    lows, lost, sums = narrow_grads(grads)
    assert lost.dtype is torch.uint8
    assert lost.device == grads[0].device
    want_lost = []
    for low, grad in zip(lows, grads, strict=True):
        want = grad.to(torch.bfloat16)
        number = ~torch.isnan(grad)
        assert low.shape == grad.shape
        assert low.data_ptr() % 16 == 0 or low.numel() == 0
        assert low.is_contiguous()
        assert_bit_equal(torch.isnan(low), ~number)  # a NaN stays one; which it is differs by device
        assert_bit_equal(low[number], want[number])
        want_lost.append(int(torch.ne(want, grad).any()))
    assert lost.tolist() == want_lost
    assert_bit_equal(sums, grad_sumsq(grads))
    assert len({low.untyped_storage().data_ptr() for low in lows}) == 1
    return lows, lost, sums


@pytest.mark.parametrize("device", devices())
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=5),
    flavour=st.sampled_from(FLAVOURS),
    exact=st.booleans(),
    off=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_a_narrow_form_is_that_of_torch(device, sizes, flavour, exact, off, seed):
    grads = []
    for i, n in enumerate(sizes):
        grad = make_tensor((n + off,), seed=seed + i, flavour=flavour)
        grad = grad.bfloat16().float() if exact and i != 1 else grad
        grads.append(grad.to(device)[off:])  # off the alignment of wide accesses
    _, lost, _ = check_narrow(grads)
    if exact:
        assert not any(flag for i, flag in enumerate(lost.tolist()) if i != 1)


@pytest.mark.parametrize("device", devices())
@given(
    n=st.sampled_from([1, 31, 33, 255, 257, 4096, 4097, 9001]),
    value=st.sampled_from(INEXACT),
    share=st.floats(0, 1, exclude_max=True),
    which=st.integers(0, 2),
)
def test_one_value_that_bf16_has_not_is_seen_wherever_it_is(device, n, value, share, which):
    grads = [SPECIAL.repeat(-(-n // 9))[:n].clone() for _ in range(3)]
    _, lost, _ = check_narrow([g.to(device) for g in grads])
    assert lost.tolist() == [0, 0, 0]
    grads[which][int(share * n)] = value
    _, lost, _ = check_narrow([g.to(device) for g in grads])
    assert lost.tolist() == [int(i == which) for i in range(3)]


@pytest.mark.parametrize("device", devices())
def test_narrow_forms_of_all_patterns_of_bits(device):
    bits = torch.arange(0, 2**32, 65521, dtype=torch.int64)
    halfway = torch.arange(0, 2**16, dtype=torch.int64) * 2**16 + 2**15
    values = torch.cat([bits, halfway, halfway - 1, halfway + 1, halfway - 2**15]).to(torch.int32)
    check_narrow([values.view(torch.float32).to(device), torch.ones(3, device=device)])


@pytest.mark.parametrize("device", devices())
def test_narrow_forms_of_many_tensors_and_of_nothing(device):
    """More than one launch takes; empty ones; shapes are kept."""
    many = [torch.full((i % 9, 3), float(i), device=device) for i in range(250)]
    many[200][1, 1] = 0.1
    _, lost, _ = check_narrow(many)
    assert lost.nonzero().tolist() == [[200]]
    lows, lost, sums = check_narrow([torch.zeros(0, device=device)] * 2)
    assert [low.shape for low in lows] == [(0,), (0,)]
    assert lost.tolist() == [0, 0]
    assert sums.tolist() == [0.0, 0.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_narrow_forms_come_on_the_stream_that_is_current():
    grad = torch.zeros(1 << 24, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        grad.fill_(1.5)
        lows, lost, sums = narrow_grads([grad])
        assert float(lows[0].float().sum()) == 1.5 * grad.numel()
        assert lost.tolist() == [0]
        assert sums.tolist() == [2.25 * grad.numel()]


def test_narrow_forms_are_refused_of_other_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode:
            with pytest.raises(TypeError, match=r"grads\[0\].*float32"):
                narrow_grads([torch.zeros(3, dtype=torch.bfloat16)])
            with pytest.raises(ValueError, match=r"grads\[1\].*contiguous"):
                narrow_grads([torch.zeros(3), torch.zeros(6)[::2]])
            lows, lost, sums = narrow_grads([torch.zeros(2, 3), torch.zeros(9)])
            assert [low.shape for low in lows] == [(2, 3), (9,)]
            assert (lost.shape, sums.shape) == ((2,), (2,))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_narrow_forms_are_refused_of_other_cuda_tensors():
    good = torch.zeros(3, device="cuda")
    with pytest.raises(TypeError, match=r"grads\[1\]"):
        narrow_grads([good, good.half()])
    with pytest.raises(ValueError, match=r"grads\[1\]"):
        narrow_grads([good, torch.zeros(6, device="cuda")[::2]])
    with pytest.raises(ValueError, match="grads"):
        narrow_grads([good, torch.zeros(3)])


def test_sum_of_squares_refuses_other_tensors():
    with pytest.raises(TypeError, match=r"grads\[0\]"):
        grad_sumsq([torch.zeros(3, dtype=torch.float64)])
    with pytest.raises(ValueError, match=r"grads\[1\]"):
        grad_sumsq([torch.zeros(3), torch.zeros(6)[::2]])


def test_probe_runs_and_checks():
    a, b, c, d = (torch.full((100,), 2.0) for _ in range(4))
    for name in isas():
        _C.set_isa(name)
        _C.stream_probe_(a, b, c, d, threads=1)
    assert a[0] == c[99] == d[50] == 2.0 ** (1 + len(isas()))
    with pytest.raises(ValueError, match="elements"):
        _C.stream_probe_(a, b, c, torch.zeros(3))


def packed_sample(tensors, dtype):
    count = len(tensors["params"])
    moments = [[torch.zeros_like(p, dtype=dtype) for p in tensors["params"]] for _ in range(2)]
    scales = [[p.new_zeros(-(-p.numel() // 256)) for p in tensors["params"]] for _ in range(2)]
    scales = scales if dtype is torch.uint8 else [[], []]
    emas = [p.clone() for p in tensors["params"]] if dtype is torch.bfloat16 else []
    lists = (tensors["params"], tensors["grads"], *moments, *scales, tensors["steps"], tensors["lows"], emas)
    return (*lists, hyper_table(), [0] * count, [1] * count, list(range(count)), 1.0, 0.9, True, True)


@pytest.mark.parametrize("device", devices())
def test_opcheck(device):
    tensors = clone(problem([7, 0, 20], torch.bfloat16, torch.bfloat16, 0), device)
    plain = clone(problem([3], torch.float32, None, 0), device)
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps", "lows")
    samples = {
        "adamw_step_": [
            (*(tensors[k] for k in names), hyper_table(), [0, 0, 0]),
            (*(plain[k] for k in names), hyper_table(), [0]),
        ],
        "grad_sumsq": [(tensors["grads"],), (plain["grads"], 2)],
        "grad_narrow": [(tensors["params"],), (plain["grads"], 2)],
        "adamw_blocks_": [packed_sample(tensors, torch.uint8), packed_sample(plain, torch.bfloat16)],
    }
    assert opcheck_all("ts_optim", samples) == 8
