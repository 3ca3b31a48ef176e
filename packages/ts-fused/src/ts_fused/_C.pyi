from torch import Tensor

with_cuda: bool

def isa() -> str: ...
def set_isa(name: str) -> None: ...
def pool_address() -> int: ...
def pool_workers() -> int: ...
def rms_norm_forward(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    rstd: Tensor,
    eps: float,
    offset: float,
    gemma: bool,
    mean_lanes: int,
    residual: Tensor | None = None,
    sum: Tensor | None = None,
    threads: int = 0,
) -> None: ...
def rms_norm_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    grad_x: Tensor | None,
    partial: Tensor | None,
    grad_weight: Tensor | None,
    rows_per_chunk: int,
    offset: float,
    gemma: bool,
    grad_sum: Tensor | None = None,
    threads: int = 0,
) -> None: ...
def rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_out: Tensor,
    k_out: Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    inverse: bool,
    threads: int = 0,
) -> None: ...
def gated_forward(gate: Tensor, up: Tensor, y: Tensor, gelu: bool, threads: int = 0) -> None: ...
def gated_backward(
    grad_y: Tensor,
    gate: Tensor,
    up: Tensor,
    grad_gate: Tensor | None,
    grad_up: Tensor | None,
    gelu: bool,
    threads: int = 0,
) -> None: ...
def cross_entropy_rows(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    ignore_index: int,
    softcap: float,
    scale: float,
    smoothing: float,
    with_grad: bool,
    threads: int = 0,
) -> None: ...
def scale_cast(src: Tensor, scale: Tensor, out: Tensor, threads: int = 0) -> None: ...
def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None: ...
def label_counts(targets: Tensor, ignore_index: int, vocab: int, counts: Tensor) -> None: ...
def loss_total(losses: Tensor, total: Tensor) -> None: ...
