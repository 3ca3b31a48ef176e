import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paging_reference import DTYPES, assert_same_bits, bits, random_bits

from ts_core.errors import ArgumentTypeError
from ts_core.testing import shapes
from ts_paging import CopyEngine
from ts_paging.layout import copy_exactly, flat_bytes, is_dense, layout_of, stored_form

small = shapes(min_dims=0, max_dims=4, min_side=0, max_side=5, max_numel=200)
dtypes = st.sampled_from(DTYPES)


def arranged(tensor, order, step):
    """The same values with permuted dimensions, and with gaps if step > 1."""
    if step > 1 and tensor.ndim:
        wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] * step), dtype=tensor.dtype)
        copy_into = wide[..., ::step]
        if tensor.numel():
            copy_into.copy_(tensor) if tensor.dtype != torch.bool else copy_into.logical_or_(tensor)
        tensor = copy_into
    return tensor.permute(sorted(range(tensor.ndim), key=lambda d: order[d]))


@given(small, dtypes, st.permutations(range(4)), st.integers(1, 3), st.integers(0, 2**31))
def test_stored_form_keeps_bits_and_dense_strides(shape, dtype, order, step, seed):
    tensor = arranged(random_bits(shape, dtype, seed), order, step)
    stored = stored_form(tensor, "f")
    assert is_dense(stored)
    assert_same_bits(stored, tensor)
    if is_dense(tensor):
        assert stored.stride() == tensor.stride()
    layout = layout_of(stored)
    assert layout.nbytes == tensor.numel() * dtype.itemsize
    if layout.nbytes:
        flat = flat_bytes(stored)
        assert flat.shape == (layout.nbytes,)
        again = layout.view(flat.clone())
        assert again.stride() == stored.stride()
        assert_same_bits(again, tensor)
        assert layout.fits(again)


@given(small, dtypes, st.permutations(range(4)), st.integers(1, 3), st.integers(0, 2**31))
def test_copy_exactly_keeps_bits_between_layouts(shape, dtype, order, step, seed):
    src = random_bits(shape, dtype, seed)
    dst = arranged(torch.zeros(shape, dtype=dtype), range(4), step)
    assert copy_exactly(dst, src) is dst
    assert_same_bits(dst, src)


@given(small, st.permutations(range(4)), st.integers(1, 3))
def test_dense_means_each_byte_belongs_to_one_element(shape, order, step):
    tensor = arranged(torch.zeros(shape), order, step)
    offsets = {0}
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        offsets = {o + i * stride for o in offsets for i in range(size)}
    distinct = len(offsets) == tensor.numel() and offsets == set(range(tensor.numel()))
    assert is_dense(tensor) == (distinct or tensor.numel() == 0)


def test_expanded_conjugated_and_negated_views_are_stored_by_value():
    row = torch.randn(3)
    assert stored_form(row.expand(4, 3), "f").is_contiguous()
    z = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(stored_form(z.conj(), "f"), z.conj().resolve_conj())
    assert torch.equal(bits(stored_form(z.conj().imag, "f")), bits(-z.imag))


def test_the_graph_and_a_subclass_stay_outside():
    class Named(torch.Tensor):
        pass

    weight = torch.nn.Parameter(torch.randn(3))
    assert type(stored_form(weight, "f")) is torch.Tensor
    assert stored_form(weight, "f").data_ptr() == weight.data_ptr()
    assert type(stored_form(torch.randn(2).as_subclass(Named), "f")) is torch.Tensor


@pytest.mark.parametrize("bad", [None, [1.0], torch.empty(2, device="meta"), torch.zeros(2, 2).to_sparse()])
def test_what_has_no_bytes_here_is_refused(bad):
    with pytest.raises(ArgumentTypeError, match=r"\[f\] tensor"):
        stored_form(bad, "f")


def test_a_wrapper_of_tensors_is_refused():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
            made.inner = inner
            return made

        def __tensor_flatten__(self):
            return ["inner"], None

        @staticmethod
        def __tensor_unflatten__(tensors, *_):
            return Wrapper(tensors["inner"])

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(func)

    wrapper = Wrapper(torch.ones(2))
    with pytest.raises(ArgumentTypeError, match="one by one"):
        stored_form(wrapper, "f")
    with CopyEngine() as engine, pytest.raises(ArgumentTypeError, match="one by one"):
        engine.h2d(wrapper, torch.ones(2))
