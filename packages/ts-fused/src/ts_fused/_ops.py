"""The native operations of this package: schemas, contracts, fake kernels.

None has a derivative; `rms_norm.py`, `rotary.py`, `gated_mlp.py` and `cross_entropy.py` wrap them in autograd
functions.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from ts_core.errors import ArgumentError, ArgumentTypeError, message
from ts_core.ops import OpLibrary

from . import _C

__all__ = [
    "FLOATS",
    "add_rms_norm_forward",
    "copy_each_",
    "cross_entropy_rows_",
    "gated_backward",
    "gated_forward",
    "gated_pair_backward",
    "label_counts",
    "loss_total",
    "needs_graph",
    "rms_norm_backward",
    "rms_norm_forward",
    "rotary_heads",
    "scale_cast",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT_NAMES = "float32, bfloat16 or float16"
_LIBRARY = OpLibrary("ts_fused")


def _mean_lanes() -> int:
    """Lanes of PyTorch's CPU sum kernel: 256-bit vectors on x86 (with AVX-512 too), else as built."""
    if platform.machine().lower() in ("x86_64", "amd64") or torch.backends.cpu.get_cpu_capability() in (
        "SVE256",
        "ZVECTOR",
        "VSX",
    ):
        return 8
    return 4


_MEAN_LANES = _mean_lanes()


def needs_graph(a: Tensor, b: Tensor) -> bool:
    """Whether autograd is to see an operation on the two; a node that nobody asks for costs as much."""
    return torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)


def _expect_float(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOATS:
        raise ArgumentTypeError(message(op, name, f"a {_FLOAT_NAMES} tensor", str(tensor.dtype)))


def _expect_device(op: str, name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ArgumentError(
            message(op, name, f"a tensor on {like.device}", f"one on {tensor.device}", "Move it there first")
        )


def _expect_shape(op: str, name: str, tensor: Tensor, shape: torch.Size | tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ArgumentError(message(op, name, f"shape {tuple(shape)}", f"shape {tuple(tensor.shape)}"))


def _expect_like(
    op: str,
    name: str,
    tensor: Tensor,
    like: Tensor,
    of: str,
    *,
    shape: torch.Size | tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Check one operand fully; shape and dtype are those of `like`, which is called `of`, unless given."""
    _expect_shape(op, name, tensor, like.shape if shape is None else shape)
    _expect_device(op, name, tensor, like)
    if tensor.dtype != (like.dtype if dtype is None else dtype):
        wanted = f"the dtype of {of}, {like.dtype}" if dtype is None else str(dtype)
        raise ArgumentTypeError(message(op, name, wanted, str(tensor.dtype)))


def _out_dtype(x: Tensor, weight: Tensor, offset: float) -> torch.dtype:
    if offset != 0.0 or x.dtype == weight.dtype:
        return x.dtype
    return torch.float32  # what any two different ones of the three promote to


def _check_norm(op: str, x: Tensor, weight: Tensor) -> None:
    _expect_float(op, "x", x)
    _expect_float(op, "weight", weight)
    if x.dim() == 0:
        raise ArgumentError(message(op, "x", "at least one dimension", "a 0-dimensional tensor"))
    if x.shape[-1] == 0:
        raise ArgumentError(message(op, "x", "a last dimension of at least 1", f"shape {tuple(x.shape)}"))
    _expect_shape(op, "weight", weight, (x.shape[-1],))
    _expect_device(op, "weight", weight, x)


def _check_forward(x: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    _check_norm("rms_norm", x, weight)


def _empty_forward(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=_out_dtype(x, weight, offset), device=x.device)
    return y, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)


def _forward(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    y, rstd = _empty_forward(x, weight, eps, offset)
    _C.rms_norm_forward(x.contiguous(), weight.contiguous(), y, rstd, eps, offset, offset != 0.0, _MEAN_LANES)
    return y, rstd


rms_norm_forward = _LIBRARY.define(
    "rms_norm_forward(Tensor x, Tensor weight, float eps, float offset) -> (Tensor, Tensor)",
    cpu=_forward,
    fake=_empty_forward,
    check=_check_forward,
)


def _check_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> None:
    _check_norm("add_rms_norm", x, weight)
    _expect_like("add_rms_norm", "residual", residual, x, "x")


def _empty_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = _empty_forward(x, weight, eps, offset)
    return y, torch.empty(x.shape, dtype=x.dtype, device=x.device), rstd


def _add_forward(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, total, rstd = _empty_add(x, residual, weight, eps, offset)
    form = (eps, offset, offset != 0.0, _MEAN_LANES)
    _C.rms_norm_forward(x.contiguous(), weight.contiguous(), y, rstd, *form, residual.contiguous(), total)
    return y, total, rstd


add_rms_norm_forward = _LIBRARY.define(
    "add_rms_norm_forward(Tensor x, Tensor residual, Tensor weight, float eps, float offset) -> "
    "(Tensor, Tensor, Tensor)",
    cpu=_add_forward,
    fake=_empty_add,
    check=_check_add,
)


def _check_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    need_x: bool,
    need_weight: bool,
    grad_sum: Tensor | None = None,
) -> None:
    op = "rms_norm_backward"
    _check_norm(op, x, weight)
    _expect_like(op, "grad_y", grad_y, x, "x", dtype=_out_dtype(x, weight, offset))
    _expect_like(op, "rstd", rstd, x, "x", shape=x.shape[:-1], dtype=torch.float32)
    if grad_sum is not None:
        _expect_like(op, "grad_sum", grad_sum, x, "x")


def _empty_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    need_x: bool,
    need_weight: bool,
    grad_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    grad_x = torch.empty(x.shape if need_x else (0,), dtype=x.dtype, device=x.device)
    grad_weight = torch.empty(weight.shape if need_weight else (0,), dtype=weight.dtype, device=x.device)
    return grad_x, grad_weight


def _backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: float,
    need_x: bool,
    need_weight: bool,
    grad_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = _empty_backward(grad_y, x, weight, rstd, offset, need_x, need_weight)
    rows = rstd.numel()
    # Chunks depend on the number of rows and the kind of device alone, so sums repeat on any thread count.
    rows_per_chunk = max(8, -(-rows // (256 if x.is_cuda else 64)))
    partial = None
    if x.is_cuda and not need_weight:
        # Nothing is added up over rows: as many blocks as there is work for, so that loads of some overlap
        # with reductions of others. A block takes eight rows at once up to this size, one beyond.
        rows_per_chunk = 8 if weight.numel() <= 1024 else 1
    if need_weight:
        chunks = max(1, -(-rows // rows_per_chunk))
        partial = torch.empty((chunks, weight.numel()), dtype=torch.float32, device=x.device)
    _C.rms_norm_backward(
        grad_y.contiguous(),
        x.contiguous(),
        weight.contiguous(),
        rstd.contiguous(),
        grad_x if need_x else None,
        partial,
        grad_weight if need_weight else None,
        rows_per_chunk,
        offset,
        offset != 0.0,
        grad_sum.contiguous() if grad_sum is not None and need_x else None,
    )
    return grad_x, grad_weight


rms_norm_backward = _LIBRARY.define(
    "rms_norm_backward(Tensor grad_y, Tensor x, Tensor weight, Tensor rstd, float offset, bool need_x, "
    "bool need_weight, Tensor? grad_sum=None) -> (Tensor, Tensor)",
    cpu=_backward,
    fake=_empty_backward,
    check=_check_backward,
)


def _check_rows(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    ignore_index: int,
    softcap: float,
    scale: float,
    smoothing: float,
    with_grad: bool,
) -> None:
    op = "cross_entropy_rows_"
    _expect_float(op, "logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_contiguous():
        raise ArgumentError(
            message(op, "logits", "a contiguous (rows, vocab >= 1) tensor", f"shape {tuple(logits.shape)}")
        )
    for name, tensor, dtype in (("targets", targets, torch.int64), ("losses", losses, torch.float32)):
        _expect_like(op, name, tensor, logits, "logits", shape=logits.shape[:1], dtype=dtype)
        if not tensor.is_contiguous():
            raise ArgumentError(message(op, name, "a contiguous tensor", f"strides {tensor.stride()}"))


def _nothing(*args: object) -> None:
    """Fake kernel of an op that only writes to its arguments."""


cross_entropy_rows_ = _LIBRARY.define(
    "cross_entropy_rows_(Tensor(a!) logits, Tensor targets, Tensor(b!) losses, int ignore_index, "
    "float softcap, float scale, float smoothing, bool with_grad) -> ()",
    cpu=lambda *args: _C.cross_entropy_rows(*args),
    fake=_nothing,
    check=_check_rows,
)


def _check_scale(src: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    op = "scale_cast"
    _expect_float(op, "src", src)
    if dtype not in FLOATS or scale.dtype != torch.float32:
        raise ArgumentTypeError(
            message(op, "dtype", f"{_FLOAT_NAMES}, and a float32 scale", f"{dtype}, {scale.dtype}")
        )
    if scale.numel() != 1:
        raise ArgumentError(message(op, "scale", "one element", f"shape {tuple(scale.shape)}"))
    _expect_device(op, "scale", scale, src)


def _scale_cast(src: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(src.shape, dtype=dtype, device=src.device)
    _C.scale_cast(src.contiguous(), scale, out)
    return out


scale_cast = _LIBRARY.define(
    "scale_cast(Tensor src, Tensor scale, ScalarType dtype) -> Tensor",
    cpu=_scale_cast,
    fake=lambda src, scale, dtype: torch.empty(src.shape, dtype=dtype, device=src.device),
    check=_check_scale,
)


def _check_copies(targets: list[Tensor], sources: list[Tensor]) -> None:
    op = "copy_each_"
    if len(targets) != len(sources):
        raise ArgumentError(message(op, "sources", f"{len(targets)} tensors", len(sources)))
    for target, source in zip(targets, sources, strict=True):
        _expect_shape(op, "sources", source, target.shape)
        _expect_device(op, "sources", source, targets[0])
        _expect_device(op, "targets", target, targets[0])


def _native_copy(tensor: Tensor) -> bool:
    return tensor.dtype in FLOATS and tensor.is_contiguous()


def _copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    if not targets:
        return
    if targets[0].is_cuda and all([_native_copy(t) for t in (*targets, *sources)]):
        _C.copy_each(targets, sources)
    else:
        torch._foreach_copy_(targets, sources)


#: Copy every source to its target, each rounded to the dtype of the latter, in one launch on CUDA. PyTorch's
#: own grouped copy gives large pieces to few multiprocessors: 15 us for the small matrices of a LoRA layer.
copy_each_ = _LIBRARY.define(
    "copy_each_(Tensor(a!)[] targets, Tensor[] sources) -> ()",
    cpu=_copy_each,
    fake=lambda targets, sources: None,
    check=_check_copies,
)


def _check_targets(targets: Tensor, ignore_index: int, vocab: int) -> None:
    if targets.dtype != torch.int64:
        raise ArgumentTypeError(message("label_counts", "targets", "torch.int64", str(targets.dtype)))


def _label_counts(targets: Tensor, ignore_index: int, vocab: int) -> Tensor:
    counts = torch.empty(2, dtype=torch.int64, device=targets.device)
    _C.label_counts(targets.contiguous(), ignore_index, vocab, counts)
    return counts


label_counts = _LIBRARY.define(
    "label_counts(Tensor targets, int ignore_index, int vocab) -> Tensor",
    cpu=_label_counts,
    fake=lambda targets, ignore_index, vocab: torch.empty(2, dtype=torch.int64, device=targets.device),
    check=_check_targets,
)


def _check_losses(losses: Tensor) -> None:
    if losses.dtype != torch.float32:
        raise ArgumentTypeError(message("loss_total", "losses", "torch.float32", str(losses.dtype)))


def _loss_total(losses: Tensor) -> Tensor:
    total = torch.empty((), dtype=torch.float64, device=losses.device)
    _C.loss_total(losses.contiguous(), total)
    return total


loss_total = _LIBRARY.define(
    "loss_total(Tensor losses) -> Tensor",
    cpu=_loss_total,
    fake=lambda losses: torch.empty((), dtype=torch.float64, device=losses.device),
    check=_check_losses,
)


MAX_ROTARY_DIM = 1024


def _check_rotary(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool, inverse: bool
) -> None:
    op = "rotary"
    _expect_float(op, "q", q)
    if q.dim() != 4:
        raise ArgumentError(message(op, "q", "four dimensions", f"shape {tuple(q.shape)}"))
    if k is not None:
        if k.dtype != q.dtype:
            raise ArgumentTypeError(message(op, "k", f"the dtype of q, {q.dtype}", str(k.dtype)))
        _expect_device(op, "k", k, q)
        wanted = (q.shape[0], q.shape[1], k.shape[2] if k.dim() == 4 else "heads", q.shape[3])
        if k.dim() != 4 or tuple(k.shape) != wanted:
            raise ArgumentError(message(op, "k", f"(batch, tokens, heads, dim) = {wanted}", tuple(k.shape)))
    if not (2 <= rotary_dim <= min(q.shape[3], MAX_ROTARY_DIM)) or rotary_dim % 2:
        given = f"{rotary_dim} with heads of {q.shape[3]}"
        raise ArgumentError(
            message(op, "rotary_dim", "an even number of 2 to the head's size and 1024", given)
        )
    _expect_float(op, "cos", cos)
    if sin.dtype != cos.dtype:
        raise ArgumentTypeError(message(op, "sin", f"the dtype of cos, {cos.dtype}", str(sin.dtype)))
    for name, tensor in (("cos", cos), ("sin", sin)):
        _expect_device(op, name, tensor, q)
        if tensor.dim() != 3 or tensor.shape[-1] not in (rotary_dim, rotary_dim // 2):
            wide = f"a last dimension of {rotary_dim} or {rotary_dim // 2}"
            raise ArgumentError(message(op, name, wide, f"shape {tuple(tensor.shape)}"))
        _expect_shape(op, name, tensor, (q.shape[0], q.shape[1], cos.shape[-1]))


def _heads_like(x: Tensor) -> Tensor:
    # As with PyTorch's own elementwise operations, a transposed view in gives a transposed view out.
    out = torch.empty_like(x)
    return out if out.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _empty_rotary(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    return _heads_like(q), q.new_empty((0,)) if k is None else _heads_like(k)


def _packed_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _rotary(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    q_out, k_out = _empty_rotary(q, k, cos, sin, rotary_dim, interleaved, inverse)
    q, cos, sin = _packed_rows(q), _packed_rows(cos), _packed_rows(sin)
    second = (None, None) if k is None else (_packed_rows(k), k_out)
    _C.rotary(q, second[0], cos, sin, q_out, second[1], rotary_dim, interleaved, inverse)
    return q_out, k_out


rotary_heads = _LIBRARY.define(
    "rotary_heads(Tensor q, Tensor? k, Tensor cos, Tensor sin, int rotary_dim, bool interleaved, "
    "bool inverse) -> (Tensor, Tensor)",
    cpu=_rotary,
    fake=_empty_rotary,
    check=_check_rotary,
)


def _check_gated(op: str, gate: Tensor, **others: Tensor) -> None:
    _expect_float(op, "gate", gate)
    if gate.dim() == 0 or gate.shape[-1] == 0:
        raise ArgumentError(
            message(op, "gate", "a last dimension of at least 1", f"shape {tuple(gate.shape)}")
        )
    for name, tensor in others.items():
        _expect_like(op, name, tensor, gate, "gate")


def _rows_of(tensor: Tensor) -> Tensor:
    """View as (rows, width) with rows without gaps; copied only where that is impossible.

    What is contiguous is that already, whatever its shape.
    """
    return tensor if tensor.is_contiguous() else _packed_rows(tensor).reshape(-1, tensor.shape[-1])


def _gated_forward(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _C.gated_forward(_rows_of(gate), _rows_of(up), y, gelu)
    return y


gated_forward = _LIBRARY.define(
    "gated_forward(Tensor gate, Tensor up, bool gelu) -> Tensor",
    cpu=_gated_forward,
    fake=lambda gate, up, gelu: torch.empty(gate.shape, dtype=gate.dtype, device=gate.device),
    check=lambda gate, up, gelu: _check_gated("gated_mlp", gate, up=up),
)


def _empty_gated(
    grad_y: Tensor, gate: Tensor, up: Tensor, gelu: bool, need_gate: bool, need_up: bool
) -> tuple[Tensor, Tensor]:
    shapes = (gate.shape if need else (0,) for need in (need_gate, need_up))
    grad_gate, grad_up = (torch.empty(shape, dtype=gate.dtype, device=gate.device) for shape in shapes)
    return grad_gate, grad_up


def _gated_backward(
    grad_y: Tensor, gate: Tensor, up: Tensor, gelu: bool, need_gate: bool, need_up: bool
) -> tuple[Tensor, Tensor]:
    grads = _empty_gated(grad_y, gate, up, gelu, need_gate, need_up)
    grad_gate = _rows_of(grads[0]) if need_gate else None
    grad_up = _rows_of(grads[1]) if need_up else None
    _C.gated_backward(_rows_of(grad_y), _rows_of(gate), _rows_of(up), grad_gate, grad_up, gelu)
    return grads


gated_backward = _LIBRARY.define(
    "gated_backward(Tensor grad_y, Tensor gate, Tensor up, bool gelu, bool need_gate, bool need_up) -> "
    "(Tensor, Tensor)",
    cpu=_gated_backward,
    fake=_empty_gated,
    check=lambda grad_y, gate, up, *_: _check_gated("gated_mlp", gate, up=up, grad_y=grad_y),
)


def _check_pair(grad_y: Tensor, pair: Tensor, gelu: bool) -> None:
    if pair.dim() == 0 or pair.shape[-1] % 2:
        raise ArgumentError(
            message("gated_mlp", "gate", "an even last dimension", f"shape {tuple(pair.shape)}")
        )
    gate, up = pair.chunk(2, -1)
    _check_gated("gated_mlp", gate, up=up, grad_y=grad_y)


def _gated_pair_backward(grad_y: Tensor, pair: Tensor, gelu: bool) -> Tensor:
    result = torch.empty(pair.shape, dtype=pair.dtype, device=pair.device)
    gate, up, grad_gate, grad_up = (_rows_of(half) for t in (pair, result) for half in t.chunk(2, -1))
    _C.gated_backward(_rows_of(grad_y), gate, up, grad_gate, grad_up, gelu)
    return result


gated_pair_backward = _LIBRARY.define(
    "gated_pair_backward(Tensor grad_y, Tensor pair, bool gelu) -> Tensor",
    cpu=_gated_pair_backward,
    fake=lambda grad_y, pair, gelu: torch.empty(pair.shape, dtype=pair.dtype, device=pair.device),
    check=_check_pair,
)
