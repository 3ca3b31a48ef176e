from collections.abc import Sequence

from torch import Tensor

SUM_CHUNK: int
with_cuda: bool

def isa() -> str: ...
def set_isa(name: str) -> None: ...
def pool_address() -> int: ...
def pool_workers() -> int: ...
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
def stream_probe_(a: Tensor, b: Tensor, c: Tensor, d: Tensor, threads: int = ...) -> None: ...
