from collections.abc import Sequence

from torch import Tensor

SUM_CHUNK: int
BLOCK: int
LOW_ALIGN: int
with_cuda: bool

def isa() -> str: ...
def set_isa(name: str) -> None: ...
def pool_address() -> int: ...
def pool_workers() -> int: ...
def thread_count(threads: int = 0) -> int: ...
def adamw_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    lows: Sequence[Tensor],
    hyper: Tensor,
    groups: Sequence[int],
    grad_scale: float = ...,
    reconcile: bool = ...,
    threads: int = ...,
) -> None: ...
def grad_sumsq(grads: Sequence[Tensor], partials: Tensor, out: Tensor, threads: int = ...) -> None: ...
def grad_narrow(
    grads: Sequence[Tensor], low: Tensor, lost: Tensor, partials: Tensor, out: Tensor
) -> None: ...
def stream_probe_(a: Tensor, b: Tensor, c: Tensor, d: Tensor, threads: int = ...) -> None: ...
def stream_probe_bytes_(a: Tensor, b: Tensor, c: Tensor, d: Tensor, threads: int = ...) -> None: ...
def adamw_blocks_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    m_scales: Sequence[Tensor],
    v_scales: Sequence[Tensor],
    steps: Sequence[Tensor],
    lows: Sequence[Tensor],
    emas: Sequence[Tensor],
    hyper: Tensor,
    groups: Sequence[int],
    seeds: Sequence[int],
    numbers: Sequence[int],
    partials: Tensor,
    sums: Tensor,
    grad_scale: float = ...,
    ema_decay: float = ...,
    reconcile: bool = ...,
    threads: int = ...,
) -> None: ...
def pack_moments_(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    m_codes: Tensor,
    v_codes: Tensor,
    m_scales: Tensor,
    v_scales: Tensor,
    threads: int = ...,
) -> None: ...
def unpack_moments_(
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    m_codes: Tensor,
    v_codes: Tensor,
    m_scales: Tensor,
    v_scales: Tensor,
    threads: int = ...,
) -> None: ...
