import torch

with_cuda: bool

def quantize_nf4(
    x: torch.Tensor, codes: torch.Tensor, absmax: torch.Tensor, block_size: int, threads: int = 0
) -> None: ...
def dequantize_nf4(
    codes: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor, block_size: int, threads: int = 0
) -> None: ...
def quantize_int8(
    x: torch.Tensor, codes: torch.Tensor, absmax: torch.Tensor, block_size: int, threads: int = 0
) -> None: ...
def dequantize_int8(
    codes: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor, block_size: int, threads: int = 0
) -> None: ...
def dequantize_nf4_dq(
    codes: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor,
    nested_map: torch.Tensor,
    out: torch.Tensor,
    block_size: int,
    threads: int = 0,
) -> None: ...
def encode_int8_dq(
    x: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor,
    codes: torch.Tensor,
    block_size: int,
    threads: int = 0,
) -> None: ...
def dequantize_int8_dq(
    codes: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor,
    out: torch.Tensor,
    block_size: int,
    threads: int = 0,
) -> None: ...
def dequantize_fp4(
    codes: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor, block_size: int, threads: int = 0
) -> None: ...
def dequantize_fp4_dq(
    codes: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor,
    nested_map: torch.Tensor,
    out: torch.Tensor,
    block_size: int,
    threads: int = 0,
) -> None: ...
def dequantize_int8_rows(
    codes: torch.Tensor, row_absmax: torch.Tensor, out: torch.Tensor, columns: int, threads: int = 0
) -> None: ...
def dequantize_gguf(blocks: torch.Tensor, out: torch.Tensor, type: int, threads: int = 0) -> None: ...
def dequantize_groups(
    codes: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor,
    out: torch.Tensor,
    group_size: int,
    bits: int,
    awq: bool,
    zero_offset: int,
    threads: int = 0,
) -> None: ...
def dequantize_published_fp4(
    codes: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor,
    out: torch.Tensor,
    kind: int,
    transposed: bool,
    threads: int = 0,
) -> None: ...
def dequantize_published_fp8(
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    tile_rows: int,
    tile_columns: int,
    threads: int = 0,
) -> None: ...
def quantize_fp8(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, layout: int, threads: int = 0
) -> None: ...
def dequantize_fp8(
    codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, layout: int, threads: int = 0
) -> None: ...
def quantize_nvfp4(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    tensor_scale: torch.Tensor,
    peak: torch.Tensor,
    threads: int = 0,
) -> None: ...
def dequantize_nvfp4(
    codes: torch.Tensor,
    scale: torch.Tensor,
    tensor_scale: torch.Tensor,
    out: torch.Tensor,
    threads: int = 0,
) -> None: ...
def transpose_bytes(
    codes: torch.Tensor, out: torch.Tensor, rows: int, columns: int, threads: int = 0
) -> None: ...
def capture_id(like: torch.Tensor) -> int: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...
def pool_address() -> int: ...
def pool_workers() -> int: ...
