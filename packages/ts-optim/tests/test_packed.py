"""Kernels of packed moments: the bits of the PyTorch reference, on every instruction set and device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core.errors import ArgumentError, ArgumentTypeError
from ts_core.testing import assert_bit_equal, devices, make_tensor
from ts_optim import _C, adamw_blocks_, adamw_step_
from ts_optim.moments import block_count, pack, unpack
from ts_optim.reference import adamw_float32, decode_int8, encode_int8, random16, round_bf16

SIZES = st.one_of(st.integers(0, 40), st.sampled_from([255, 256, 257, 511, 513, 4096, 17000]))
FLAVOURS = ("normal", "zeros", "sparse", "mixed_scale", "denormal", "large", "outlier")
GRADS = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
LOWS = st.sampled_from([None, torch.bfloat16, torch.float16])
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}
SEED, DECAY, SCALE = 0x1234_5678_9ABC, 0.9, 0.5


def isas():
    before, found = _C.isa(), []
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


def root_of(v):
    return v.double().sqrt().float()


def packed(m, v):
    codes = [torch.empty(m.shape, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.empty(block_count(m.numel())) for _ in range(2)]
    pack(m, v, codes, scales)
    return codes, scales


def hyper_table(beta1=0.9, eps=1e-8):
    return torch.tensor([[1e-2, beta1, 0.999, eps, 0.1]], dtype=torch.float64)


def problem(sizes, moments, grad_dtype, low_dtype, seed, flavour="normal"):
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "m_scales", "v_scales", "steps", "lows", "emas")
    tensors = {name: [] for name in names}
    for i, n in enumerate(sizes):

        def make(k, n=n, i=i, **kw):
            return make_tensor((n,), seed=seed + 10 * i + k, **kw)

        m, v = make(2, flavour="mixed_scale") * 0.1, make(3, flavour=flavour).square().clamp(max=3e38)
        tensors["params"].append(make(0))
        tensors["grads"].append(make(1, dtype=grad_dtype, flavour=flavour))
        tensors["steps"].append(torch.tensor(float(i)))
        tensors["emas"].append(make(4))
        if low_dtype is not None:
            tensors["lows"].append(tensors["params"][-1].to(low_dtype))
        if moments == "int8":
            (m, v), scales = packed(m, v)
            tensors["m_scales"].append(scales[0])
            tensors["v_scales"].append(scales[1])
        tensors["exp_avgs"].append(m.to(FORMATS[moments]))
        tensors["exp_avg_sqs"].append(v.to(FORMATS[moments]))
    return tensors


def clone(tensors, device="cpu"):
    return {k: [t.clone().to("cpu" if k == "steps" else device) for t in v] for k, v in tensors.items()}


def run(tensors, hyper, **kw):
    count = len(tensors["params"])
    options = {"grad_scale": SCALE, "ema_decay": DECAY, "measure": True} | kw
    lists = (*tensors.values(), hyper, [0] * count, [SEED] * count, list(range(5, 5 + count)))
    return adamw_blocks_(*lists, **options)


def expected(tensors, i, moments, hyper):
    """Everything that a step leaves of tensor i, by the reference."""
    lr, beta1, beta2, eps, weight_decay = hyper[0].tolist()
    t = {k: v[i] for k, v in tensors.items() if v}
    step = int(t["steps"]) + 1
    m, v = t["exp_avgs"], t["exp_avg_sqs"]
    if moments == "int8":
        m, v = decode_int8(m, v, t["m_scales"], t["v_scales"])
    arguments = (t["params"], t["grads"].float(), m.float(), v.float(), step)
    p, m, v, root = adamw_float32(
        *arguments, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, grad_scale=SCALE
    )
    bits = random16(SEED, step, 5 + i, p.numel())
    after = {"params": p}
    if "lows" in t:
        after["lows"] = p.to(t["lows"].dtype)
    if moments == "float32":
        after |= {"exp_avgs": m, "exp_avg_sqs": v}
    elif moments == "bfloat16":
        after |= {"exp_avgs": round_bf16(m, bits), "exp_avg_sqs": round_bf16(v, bits)}
    else:
        names = ("exp_avgs", "exp_avg_sqs", "m_scales", "v_scales")
        after |= zip(names, encode_int8(m, root, bits, nearest=beta1 < 0.9375), strict=True)
    return after


@pytest.mark.parametrize("moments", FORMATS)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=3),
    grad_dtype=GRADS,
    low_dtype=LOWS,
    beta1=st.sampled_from([0.0, 0.9, 0.95, 0.99]),
    flavour=st.sampled_from(FLAVOURS),
    threads=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 1000),
)
def test_every_instruction_set_gives_the_bits_of_the_reference(
    moments, sizes, grad_dtype, low_dtype, beta1, flavour, threads, seed
):
    hyper = hyper_table(beta1)
    before = problem(sizes, moments, grad_dtype, low_dtype, seed, flavour)
    results = []
    for name in isas():
        _C.set_isa(name)
        after = clone(before)
        sums = run(after, hyper, threads=threads if name != "portable" else 1)
        results.append({**after, "sums": [sums]})
    for other in results[1:]:
        for key, values in other.items():
            for a, b in zip(values, results[0][key], strict=True):
                assert_bit_equal(a, b)
    after = results[0]
    for i in range(len(sizes)):
        for key, value in expected(before, i, moments, hyper).items():
            assert_bit_equal(after[key][i], value)
        e, p = before["emas"][i].double(), after["params"][i].double()
        torch.testing.assert_close(
            after["emas"][i].double(), DECAY * e + (1 - DECAY) * p, rtol=3e-7, atol=3e-7
        )
        g, moved = before["grads"][i].double(), after["params"][i] - before["params"][i]
        want = torch.stack([x.double().square().sum() for x in (g, moved, p)])
        torch.testing.assert_close(after["sums"][0][i], want, rtol=1e-12, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("pinned", [False, True])
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=40),
    grad_dtype=GRADS,
    low_dtype=LOWS,
    beta1=st.sampled_from([0.9, 0.95]),
    flavour=st.sampled_from(FLAVOURS),
    seed=st.integers(0, 1000),
)
def test_cuda_gives_the_bits_of_the_cpu(moments, pinned, sizes, grad_dtype, low_dtype, beta1, flavour, seed):
    before = problem(sizes, moments, grad_dtype, low_dtype, seed, flavour)
    host = clone(before)
    sums = run(host, hyper_table(beta1))
    device = clone(before, "cuda")
    if pinned:  # state in host memory, read and written over the link
        for name in device.keys() - {"grads", "lows", "steps"}:
            device[name] = [t.cpu().pin_memory() for t in device[name]]
    assert_bit_equal(run(device, hyper_table(beta1)).cpu(), sums)
    torch.cuda.synchronize()
    for name, values in host.items():
        for a, b in zip(device[name], values, strict=True):
            assert_bit_equal(a.cpu(), b)


@pytest.mark.parametrize("reconcile", [False, True])
@given(sizes=st.lists(SIZES, min_size=1, max_size=4), low_dtype=LOWS, seed=st.integers(0, 1000))
def test_fp32_in_blocks_is_the_plain_kernel(reconcile, sizes, low_dtype, seed):
    blocks = problem(sizes, "float32", torch.bfloat16, low_dtype, seed)
    for low in blocks["lows"]:
        low[::3] += 1.0  # edited
    plain = clone(blocks)
    run(blocks, hyper_table(), reconcile=reconcile)
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "steps", "lows")
    arguments = (*(plain[k] for k in names), hyper_table(), [0] * len(sizes), SCALE)
    adamw_step_(*arguments, reconcile=reconcile)
    for name in names:
        for a, b in zip(blocks[name], plain[name], strict=True):
            assert_bit_equal(a, b)


@given(
    n=SIZES,
    first=st.sampled_from(FLAVOURS),
    second=st.sampled_from(FLAVOURS),
    exponent=st.integers(-44, 36),
    seed=st.integers(0, 10**6),
)
def test_packing_what_was_unpacked_gives_the_same_bytes(n, first, second, exponent, seed):
    scale = 10.0**exponent
    m = (make_tensor((n,), seed=seed, flavour=first) * scale).clamp(-3e38, 3e38)
    v = (make_tensor((n,), seed=seed + 1, flavour=second) * scale).square().clamp(max=3e38)
    codes, scales = packed(m, v)
    for mine, theirs in zip((*codes, *scales), encode_int8(m, root_of(v)), strict=True):
        assert_bit_equal(mine, theirs)
    m1, v1 = unpack(codes, scales)
    for mine, theirs in zip((m1, v1), decode_int8(*codes, *scales), strict=True):
        assert_bit_equal(mine, theirs)
    again, scales_again = packed(m1, v1)
    for a, b in zip((*codes, *scales), (*again, *scales_again), strict=True):
        assert_bit_equal(a, b)


@pytest.mark.parametrize("beta1", [0.9, 0.95])
@given(
    n=st.sampled_from([1, 255, 256, 700]),
    flavour=st.sampled_from(FLAVOURS),
    exponent=st.integers(-30, 18),
    steps=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_what_steps_leave_survives_unpacking(beta1, n, flavour, exponent, steps, seed):
    tensors = problem([n], "int8", torch.float32, None, seed, flavour)
    for k in range(steps):
        tensors["grads"] = [make_tensor((n,), seed=seed + k, flavour=flavour) * 10.0**exponent]
        tensors["grads"][0].nan_to_num_()
        run(tensors, hyper_table(beta1))
    stored = [tensors[k][0] for k in ("exp_avgs", "exp_avg_sqs", "m_scales", "v_scales")]
    codes, scales = packed(*unpack(stored[:2], stored[2:]))
    for a, b in zip(stored, (*codes, *scales), strict=True):
        assert_bit_equal(a, b)


@given(exponent=st.integers(-15, 18), seed=st.integers(0, 1000))
def test_codes_miss_by_no_more_than_their_gaps(exponent, seed):
    m = make_tensor((2000,), seed=seed) * 10.0**exponent
    v = (make_tensor((2000,), seed=seed + 1).abs() + 0.05).square() * 100.0**exponent
    m1, v1 = unpack(*packed(m, v))
    s, s1 = v.sqrt(), v1.sqrt()
    assert bool(((s1 - s).abs() <= s / 32 * 1.001).all())
    r, r1 = m / s, m1 / s1
    most = torch.nn.functional.pad(r.abs(), (0, 48)).view(-1, 256).amax(1).repeat_interleave(256)[:2000]
    assert bool(((r1 - r).abs() <= torch.maximum(r.abs() / 16, most / 100) * 1.001).all())


def test_zero_is_exact_and_nothing_else_becomes_zero():
    m = torch.tensor([0.0, 1.0, -1.0, 0.0, 1e-30] + [1.0] * 251)
    v = torch.tensor([0.0, 0.0, 1e-30, 1.0, 1e-10] + [1.0] * 251)
    m1, v1 = unpack(*packed(m, v))
    assert m1[:2].tolist() == [0.0, 0.0]
    assert v1[:2].tolist() == [0.0, 0.0]
    assert m1[3] == 0.0
    assert bool((v1[2:] > 0).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["exp_avg", "exp_avg_sq"])
def test_a_block_that_is_not_finite_is_not_finite_afterwards(bad, where):
    m, v = torch.ones(600), torch.ones(600)
    {"exp_avg": m, "exp_avg_sq": v}[where][300] = bad
    m1, v1 = unpack(*packed(m, v))
    assert bool(v1[256:512].isnan().all())
    assert bool(m1[:256].isfinite().all() and m1[512:].isfinite().all() and v1[:256].isfinite().all())


def test_bf16_keeps_what_is_not_finite_and_makes_nothing_infinite():
    x = torch.tensor(
        [float("inf"), -float("inf"), float("nan"), torch.finfo(torch.float32).max, 0.0, -0.0, 1.5]
    )
    up = round_bf16(x, torch.full((7,), 65535))
    assert up[:2].tolist() == [float("inf"), -float("inf")]
    assert bool(up[2].isnan())
    assert up[3:].tolist() == [torch.finfo(torch.bfloat16).max, 0.0, -0.0, 1.5]


@given(seed=st.integers(0, 2**63 - 1), number=st.integers(0, 1000), step=st.integers(1, 10**6))
def test_random_bits_are_uniform_in_every_step_and_spread_over_steps(seed, number, step):
    bits = random16(seed, step, number, 1 << 14).double()
    assert abs(float(bits.mean()) / 65535 - 0.5) < 0.02
    low = random16(seed, step, number, 512)
    over = torch.stack([random16(seed, step + k, number, 512) for k in range(55)]).double() / 65536
    assert float((over.sort(0).values.diff(dim=0)).amax()) < 0.05  # no wide gap: random ones have 0.08
    assert not torch.equal(low, random16(seed, step, number + 1, 512))
    assert not torch.equal(low, random16(seed ^ 1, step, number, 512))


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_rounding_has_no_bias(moments):
    n = 1 << 16
    tensors = problem([n], "float32", torch.float32, None, 0)
    exact = clone(tensors)
    run(exact, hyper_table(0.95))
    want = [exact["exp_avgs"][0].double(), exact["exp_avg_sqs"][0].double()]
    if moments == "int8":
        codes, scales = packed(tensors["exp_avgs"][0], tensors["exp_avg_sqs"][0])
        m, v = unpack(codes, scales)
        tensors |= {"exp_avgs": [codes[0]], "exp_avg_sqs": [codes[1]]}
        tensors |= {"m_scales": [scales[0]], "v_scales": [scales[1]]}
    else:
        m, v = (tensors[k][0].bfloat16().float() for k in ("exp_avgs", "exp_avg_sqs"))
        tensors |= {"exp_avgs": [m.bfloat16()], "exp_avg_sqs": [v.bfloat16()]}
    exact = clone(tensors) | {"exp_avgs": [m], "exp_avg_sqs": [v], "m_scales": [], "v_scales": []}
    run(exact, hyper_table(0.95))
    want = exact["exp_avg_sqs"][0].double().sqrt() if moments == "int8" else exact["exp_avg_sqs"][0].double()
    run(tensors, hyper_table(0.95))
    got = tensors["exp_avg_sqs"][0]
    if moments == "int8":
        got = decode_int8(*(tensors[k][0] for k in ("exp_avgs", "exp_avg_sqs", "m_scales", "v_scales")))[1]
        got = got.double().sqrt()
    error = (got.double() - want) / want
    inside = want > want.view(-1, 256).amax(1).repeat_interleave(256) / 3000
    # 5 standard errors of rounding within a gap of 1/16 or 1/128.
    assert abs(float(error[inside].mean())) < 5 * float(error[inside].std()) / n**0.5


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"grads": []}, ArgumentError, "grads"),
        ({"exp_avgs": [torch.zeros(4, dtype=torch.int8)]}, ArgumentTypeError, "exp_avgs"),
        ({"exp_avg_sqs": [torch.zeros(4)]}, ArgumentTypeError, "exp_avg_sqs"),
        ({"exp_avg_sqs": [torch.zeros(3, dtype=torch.uint8)]}, ArgumentError, "exp_avg_sqs"),
        ({"m_scales": []}, ArgumentError, "m_scales"),
        ({"v_scales": [torch.zeros(2)]}, ArgumentError, "v_scales"),
        ({"v_scales": [torch.zeros(1).double()]}, ArgumentTypeError, "v_scales"),
        ({"params": [torch.zeros(4).double()]}, ArgumentTypeError, "params"),
        ({"grads": [torch.zeros(8)[::2]]}, ArgumentError, "grads"),
        ({"emas": [torch.zeros(4).double()]}, ArgumentTypeError, "emas"),
        ({"steps": [torch.zeros(2)]}, ArgumentError, "steps"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(change, error, argument):
    tensors = problem([4], "int8", torch.float32, None, 0)
    before = clone(tensors)
    with pytest.raises((error, ValueError, TypeError), match=argument):
        run(tensors | change, hyper_table())
    for name, values in tensors.items():
        for a, b in zip(values, before[name], strict=True):
            assert_bit_equal(a, b)


@pytest.mark.parametrize("groups", [[1], [-1], []])
def test_bad_groups_are_refused(groups):
    tensors = problem([4], "bfloat16", torch.float32, None, 0)
    with pytest.raises((ArgumentError, ValueError), match="groups"):
        adamw_blocks_(*tensors.values(), hyper_table(), groups, [0], [0])


def test_the_probe_of_packed_moments_runs_and_checks():
    a, b, c, d = torch.ones(128), torch.full((128,), 2.0), torch.zeros(256, dtype=torch.uint8), None
    d = c.clone()
    _C.stream_probe_bytes_(a, b, c, d)
    assert a.tolist() == [2.0] * 128
    with pytest.raises(ValueError, match="tensors"):
        _C.stream_probe_bytes_(a, b, c, torch.zeros(128, dtype=torch.uint8))


def test_a_list_of_no_parameters_is_a_no_op():
    assert run({k: [] for k in problem([1], "int8", torch.float32, None, 0)}, hyper_table()).shape == (0, 3)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("moments", FORMATS)
def test_large_finite_gradients_leave_finite_moments(device, moments):
    tensors = problem([300], moments, torch.float32, None, 0)
    tensors["grads"] = [torch.full((300,), 1e38)]
    tensors = clone(tensors, device)
    for _ in range(3):
        run(tensors, hyper_table(), grad_scale=1.0)
    for name in ("params", "exp_avgs", "exp_avg_sqs"):
        assert bool(tensors[name][0].float().isfinite().all())
