"""What the package must do, in plain PyTorch: what the tests compare with; imports nothing of ours."""

import torch

INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def bits(tensor):
    """The bit patterns of a tensor, in the order of its indices."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if plain.dtype == torch.complex128:
        plain = torch.view_as_real(plain)
    return plain.view(INTEGER[plain.dtype.itemsize]).clone()


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(bits(actual), bits(expected))


def random_bits(shape, dtype, seed):
    """Every bit pattern is possible: NaNs with payloads, infinities, denormals, negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    count = 1
    for side in shape:
        count *= side
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


class ModelStore:
    """A store that keeps copies in a dict."""

    def __init__(self):
        self.tensors = {}

    def write(self, key, tensor):
        self.tensors[key] = (bits(tensor), tensor.shape, tensor.dtype)

    def check(self, key, tensor):
        expected, shape, dtype = self.tensors[key]
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert torch.equal(bits(tensor), expected)


def copy_plain(dst, src):
    """The copy, done when it returns."""
    dst.copy_(src)
    if dst.is_cuda or src.is_cuda:
        torch.cuda.synchronize()
