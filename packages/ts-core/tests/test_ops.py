import gc
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_core import ops
from ts_core.errors import ArgumentError, StateError
from ts_core.testing import devices, float_tensors, opcheck_all

LIBRARY = ops.OpLibrary("ts_core_test")
NUMBER = itertools.count()


def check_axpy(x, y, a=2.0):
    if x.shape != y.shape:
        raise ArgumentError(f"[axpy] y: expected shape {tuple(x.shape)}, given {tuple(y.shape)}")


AXPY = LIBRARY.define(
    "axpy(Tensor x, Tensor y, float a=2.0) -> Tensor",
    cpu=lambda x, y, a=2.0: (x * a + y).contiguous(),
    fake=lambda x, y, a=2.0: torch.empty_like(x, memory_format=torch.contiguous_format),
    check=check_axpy,
)


def fill_natively(x, value):
    # As a C++ kernel does: PyTorch sees no write.
    torch.utils.dlpack.from_dlpack(x).fill_(value) if x.is_cuda else x.detach().numpy().fill(value)


FILL = LIBRARY.define("fill_(Tensor(a!) x, float value) -> ()", cpu=fill_natively, fake=lambda x, value: None)


def add_to_all(tensors, *, out=None, value=1.0):
    for tensor in tensors:
        tensor.add_(value)
    if out is not None:
        out.copy_(tensors[0])


MANY = LIBRARY.define(
    "many_(Tensor(a!)[] tensors, *, Tensor(b!)? out=None, float value=1.0) -> ()",
    cpu=add_to_all,
    fake=lambda tensors, *, out=None, value=1.0: None,
)


@pytest.mark.parametrize("device", devices())
def test_every_op_of_a_namespace_passes_opcheck(device):
    def x():
        return torch.arange(6.0, device=device).reshape(2, 3)

    samples = {
        "axpy": [(x(), x()), (x().t(), x().t(), 0.5)],
        "fill_": [(x(), 3.0)],
        "many_": lambda: [([x(), x()],)],
    }
    assert opcheck_all("ts_core_test", samples) == 4


@given(st.data())
def test_a_defined_op_runs_its_kernel_with_the_given_arguments(data):
    x = data.draw(float_tensors(flavours=("normal", "zeros", "integers")))
    a = data.draw(st.floats(-4, 4, width=32))
    assert torch.equal(AXPY(x, x, a), x * a + x)
    assert torch.equal(torch.ops.ts_core_test.axpy(x, x), x * 2.0 + x)
    assert torch.equal(AXPY(y=x, x=x, a=a), x * a + x)


@given(st.tuples(st.integers(1, 5)), st.tuples(st.integers(1, 5)))
def test_the_contract_holds_in_eager_on_meta_and_on_fake_tensors(a, b):
    from torch._subclasses import FakeTensorMode

    def results():
        yield AXPY(torch.ones(a), torch.ones(b))
        yield AXPY(torch.ones(a, device="meta"), torch.ones(b, device="meta"))
        with FakeTensorMode():
            yield AXPY(torch.ones(a), torch.ones(b))

    produced = results()
    if a == b:
        assert [tuple(r.shape) for r in produced] == [a, a, a]
        return
    for make in (torch.ones, lambda s: torch.ones(s, device="meta")):
        with pytest.raises(ArgumentError, match=r"\[axpy\] y: expected shape"):
            AXPY(make(a), make(b))
    with FakeTensorMode(), pytest.raises(ArgumentError, match=r"\[axpy\] y: expected shape"):
        AXPY(torch.ones(a), torch.ones(b))


def test_grad_mode_is_refused_wherever_the_tensor_is():
    plain, leaf = torch.ones(2), torch.ones(2, requires_grad=True)
    for call in (
        lambda: AXPY(plain, leaf),
        lambda: AXPY(leaf, plain),
        lambda: MANY([plain, leaf * 2]),
        lambda: MANY([plain], out=leaf * 2),
        lambda: AXPY(leaf.to("meta"), plain.to("meta")),
    ):
        with pytest.raises(StateError, match=r"ts_core_test::\w+\] .*requires grad.*no_grad"):
            call()
    with torch.no_grad():
        assert torch.equal(AXPY(leaf, plain), torch.full((2,), 3.0))


def test_ops_work_inside_an_autograd_function():
    class Axpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return AXPY(x, y)

        @staticmethod
        def backward(ctx, grad):
            return AXPY(grad, torch.zeros_like(grad)), grad

    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    Axpy.apply(x, y).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert torch.equal(y.grad, torch.ones(3))


def test_a_native_write_moves_the_version_so_that_a_stale_backward_raises():
    weight = torch.ones(3)
    x = torch.ones(3, requires_grad=True)
    loss = (x * weight).sum()
    before = weight._version
    FILL(weight, 5.0)
    assert torch.equal(weight, torch.full((3,), 5.0))
    assert weight._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_versions_of_lists_and_keyword_outputs_move_and_inputs_stay():
    a, b, out = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    MANY([a, b], out=out, value=2.0)
    assert torch.equal(out, torch.full((2,), 2.0))
    assert min(a._version, b._version, out._version) >= 1
    x = torch.ones(2)
    AXPY(x, x)
    assert x._version == 0


def test_inference_mode_works():
    with torch.inference_mode():
        x = torch.ones(2)
        FILL(x, 4.0)
        assert torch.equal(AXPY(x, x), torch.full((2,), 12.0))


def test_a_compiled_graph_holds_the_op():
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    with torch.no_grad():
        result = torch.compile(lambda x: AXPY(x, x) + 1, backend=backend, fullgraph=True)(torch.ones(2))
    assert torch.equal(result, torch.full((2,), 4.0))
    assert any("ts_core_test.axpy" in target for target in seen)


def test_defined_ops_lists_names_and_what_is_written():
    assert [op.name.split("::")[1] for op in ops.defined_ops("ts_core_test")][:3] == [
        "axpy",
        "fill_",
        "many_",
    ]
    assert set(ops.defined_ops("ts_core_test")) <= set(ops.defined_ops())
    by_name = {op.name: op for op in LIBRARY.ops}
    assert by_name["ts_core_test::axpy"].mutates == ()
    assert by_name["ts_core_test::fill_"].mutates == ("x",)
    assert by_name["ts_core_test::many_"].mutates == ("tensors", "out")
    assert by_name["ts_core_test::axpy"].overload is AXPY


def test_a_separate_cuda_kernel_is_registered_for_cuda():
    library = ops.OpLibrary(f"ts_core_test_{next(NUMBER)}")
    op = library.define(
        "f(Tensor x) -> Tensor", cpu=lambda x: x + 1, cuda=lambda x: x + 2, fake=torch.empty_like
    )
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CUDA")
    assert torch.equal(op(torch.zeros(1)), torch.ones(1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_cuda_kernel_runs_on_cuda_tensors():
    library = ops.OpLibrary(f"ts_core_test_{next(NUMBER)}")
    op = library.define(
        "f(Tensor x) -> Tensor", cpu=lambda x: x + 1, cuda=lambda x: x + 2, fake=torch.empty_like
    )
    assert op(torch.zeros(1, device="cuda")).item() == 2.0
    assert op(torch.zeros(1)).item() == 1.0


@pytest.mark.parametrize("namespace", ["", "a-b", "a::b", 3, None])
def test_bad_namespaces_are_refused(namespace):
    with pytest.raises(ArgumentError, match="namespace"):
        ops.OpLibrary(namespace)


@pytest.mark.parametrize(
    "schema", ["", "f", "other::f(Tensor x) -> Tensor", "f.out(Tensor x) -> ()", "g(Tensor"]
)
def test_bad_schemas_are_refused(schema):
    library = ops.OpLibrary(f"ts_core_test_{next(NUMBER)}")
    with pytest.raises(ArgumentError, match="schema"):
        library.define(schema, cpu=lambda x: x, fake=lambda x: x)
    assert library.ops == ()


def test_a_second_op_of_the_same_name_is_refused():
    with pytest.raises(StateError, match="ts_core_test::axpy is declared already"):
        LIBRARY.define("axpy(Tensor x) -> Tensor", cpu=lambda x: x, fake=lambda x: x)


def test_opcheck_all_finds_what_is_missing_or_wrong():
    library = ops.OpLibrary(name := f"ts_core_test_{next(NUMBER)}")
    library.define("good(Tensor x) -> Tensor", cpu=torch.clone, fake=torch.empty_like)
    x = torch.ones(2)
    with pytest.raises(AssertionError, match=r"ops without a sample: \['good'\]"):
        opcheck_all(name, {})
    with pytest.raises(AssertionError, match=r"samples of unknown ops: \['bad'\]"):
        opcheck_all(name, {"good": [(x,)], "bad": [(x,)]})
    with pytest.raises(AssertionError, match="good: the list of samples is empty"):
        opcheck_all(name, {"good": []})
    assert opcheck_all(name, {"good": [(x,)]}) == 1
    library.define("wrong_shape(Tensor x) -> Tensor", cpu=torch.clone, fake=lambda x: x.new_empty(7))
    with pytest.raises(AssertionError, match="wrong_shape, sample 1"):
        opcheck_all(name, {"good": [(x,)], "wrong_shape": [(torch.ones(7),), (x,)]})


def test_opcheck_all_finds_a_write_that_the_schema_hides():
    library = ops.OpLibrary(name := f"ts_core_test_{next(NUMBER)}")
    library.define("sly(Tensor x) -> Tensor", cpu=lambda x: x.add_(1).clone(), fake=torch.empty_like)
    with pytest.raises(AssertionError, match="sly, sample 0"):
        opcheck_all(name, {"sly": [(torch.ones(2),)]})


def test_opcheck_all_finds_an_op_that_runs_in_grad_mode(monkeypatch):
    from ts_core.testing import opcheck

    op = ops.DefinedOp("ts_core_test::axpy", "", lambda x: x + 1, ())
    with pytest.raises(AssertionError, match="its result has no graph"):
        opcheck._check_autograd_refusal(op, opcheck.Sample((torch.ones(2),)))
    # Nothing to refuse where no tensor can require grad.
    opcheck._check_autograd_refusal(op, opcheck.Sample((torch.ones(2, dtype=torch.int64),)))


def test_ops_live_as_long_as_their_library():
    library = ops.OpLibrary(name := f"ts_core_test_{next(NUMBER)}")
    op = library.define("f(Tensor x) -> Tensor", cpu=torch.clone, fake=torch.empty_like)
    gc.collect()
    assert torch.equal(op(torch.ones(1)), torch.ones(1))
    assert ops.defined_ops(name)[0].overload is op
