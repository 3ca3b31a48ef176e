"""Guarded Parameters: what waits for a pending update, what need not, what a failed update leaves."""

import copy
import gc
import io
import operator
import pickle
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core import guard as module
from ts_core.guard import GuardedParameter, guard, guard_of, release


def made(values=(1.0, 2.0, 3.0), divert=None, **options):
    parameter = nn.Parameter(torch.tensor(values), **options)
    return parameter, guard(parameter, divert or (lambda p, g: None))


class Pending:
    """An update that writes its values when it is waited for."""

    def __init__(self, parameter, value=5.0):
        self.memory = parameter.detach()
        guard_of(parameter).escaped = False
        self.value = value
        self.calls = 0

    def __call__(self):
        self.calls += 1
        self.memory.fill_(self.value)


def pickled(p):
    return pickle.loads(pickle.dumps(p))


def saved(p):
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    return torch.load(file)


USES = {
    "operator": lambda p: p + 0.0,
    "function": lambda p: torch.add(p, 0.0),
    "keyword": lambda p: torch.add(input=p, other=torch.zeros(3)),
    "reversed": lambda p: torch.zeros(3) + p,
    "list": lambda p: torch.stack([p, p])[0],
    "in_a_list_of_keywords": lambda p: torch.stack(tensors=[p])[0],
    "foreach": lambda p: torch._foreach_add([p], 0.0)[0],
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "item": lambda p: torch.full((3,), p[0].item()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "clone": lambda p: p.clone(),
    "in_place": lambda p: p.requires_grad_(False).mul_(1.0),
    "module": lambda p: nn.functional.linear(torch.ones(1, 1), p.view(3, 1))[0],
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "save": saved,
    "state_dict": lambda p: nn.ParameterList([p]).state_dict()["0"],
    "storage": lambda p: torch.tensor(p.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32),
    "data_ptr": lambda p: (p.data_ptr(), p)[1],
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_every_use_of_the_value_waits(use):
    parameter, entry = made()
    entry.pending = pending = Pending(parameter)
    assert torch.equal(use(parameter).detach(), torch.full((3,), 5.0))
    assert pending.calls == 1
    assert entry.pending is None


@pytest.mark.parametrize("use", [lambda p: p.grad, lambda p: p.grad.zero_(), lambda p: p._version])
def test_reading_the_gradient_waits(use):
    parameter, entry = made()
    parameter.grad = torch.ones(3)
    entry.pending = pending = Pending(parameter)
    use(parameter)
    assert pending.calls == 1


PASSIVE = {
    "shape": lambda p: p.shape == (3,),
    "size": lambda p: p.size(0) == 3,
    "len": lambda p: len(p) == 3,
    "dtype": lambda p: p.dtype is torch.float32,
    "device": lambda p: p.device.type == "cpu" and not p.is_cuda,
    "numbers": lambda p: p.numel() * p.element_size() == p.nbytes == 12,
    "strides": lambda p: p.stride() == (1,) and p.is_contiguous() and p.dim() == p.ndim == 1,
    "kind": lambda p: p.requires_grad and p.is_leaf and p.grad_fn is None and p.is_floating_point(),
    "identity": lambda p: p in {p} and isinstance(p, nn.Parameter),
    "hook": lambda p: p.register_hook(lambda g: None) is not None,
    "landed_hook": lambda p: p.register_post_accumulate_grad_hook(lambda g: None) is not None,
}


@pytest.mark.parametrize("use", PASSIVE.values(), ids=PASSIVE.keys())
def test_what_reads_neither_value_nor_gradient_does_not_wait(use):
    parameter, entry = made()
    entry.pending = pending = Pending(parameter)
    assert use(parameter)
    assert pending.calls == 0
    assert entry.pending is pending


def test_assigning_and_deleting_the_gradient_does_not_wait():
    parameter, entry = made()
    entry.pending = pending = Pending(parameter)
    parameter.grad = torch.ones(3)
    parameter.grad = None
    parameter.grad = torch.ones(3)
    del parameter.grad
    assert pending.calls == 0
    assert parameter.grad is None
    assert pending.calls == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_wait_that_fails_leaves_the_update_pending(error):
    parameter, entry = made()
    good = Pending(parameter)
    failures = [error("once"), error("twice")]

    def pending():
        if failures:
            raise failures.pop()
        good()

    entry.pending = pending
    for _ in range(2):
        with pytest.raises(error):
            parameter + 1
        assert entry.pending is pending
    assert torch.equal(parameter + 1, torch.full((3,), 6.0))
    assert entry.pending is None


def test_what_becomes_pending_during_a_wait_stays():
    parameter, entry = made()
    later = Pending(parameter)

    def pending():
        entry.pending = later

    entry.pending = pending
    entry.wait()
    assert entry.pending is later
    assert later.calls == 0
    entry.wait()
    assert (later.calls, entry.pending) == (1, None)


def test_release_waits_and_frees_the_parameter_whatever_the_update_says():
    parameter, entry = made()
    entry.pending = Pending(parameter)
    release(parameter)
    assert parameter.tolist() == [5.0] * 3
    assert type(parameter) is nn.Parameter
    release(parameter)  # nothing to do

    def fails():
        raise ValueError("no update")

    guard(parameter, lambda p, g: None).pending = fails
    with pytest.raises(ValueError, match="no update"):
        release(parameter)
    assert type(parameter) is nn.Parameter
    assert guard_of(parameter) is None
    assert parameter.tolist() == [5.0] * 3


def test_an_interrupted_release_keeps_the_guard():
    parameter, entry = made()
    pending = Pending(parameter)

    def interrupted():
        raise KeyboardInterrupt

    entry.pending = interrupted
    with pytest.raises(KeyboardInterrupt):
        release(parameter)
    assert guard_of(parameter) is entry
    assert type(parameter) is GuardedParameter
    entry.pending = pending
    release(parameter)
    assert pending.calls == 1


def test_escapes_are_noted_and_metadata_is_none():
    for use, escapes in (
        (lambda p: p.shape, False),
        (lambda p: p.clone(), False),
        (lambda p: p + 1, False),
        (lambda p: p.data, True),
        (lambda p: p.detach(), True),
        (lambda p: p.data_ptr(), True),
        (lambda p: p.untyped_storage(), True),
    ):
        parameter, entry = made()
        use(parameter)
        assert entry.escaped is escapes


def test_hooks_move_to_the_guard_and_back():
    parameter = nn.Parameter(torch.ones(2))
    seen = []
    before = parameter.register_hook(lambda g: seen.append("before"))
    entry = guard(parameter, lambda p, g: [hook(g) for hook in entry.hooks.values()])
    during = parameter.register_hook(lambda g: seen.append("during"))
    landed = parameter.register_post_accumulate_grad_hook(hook=lambda p: seen.append("landed"))
    (parameter * 2).sum().backward()
    assert seen == ["before", "during"]
    assert list(entry.landed_hooks) == [landed.id]
    during.remove()
    assert list(entry.hooks) == [before.id]
    release(parameter)
    seen.clear()
    (parameter * 2).sum().backward()
    assert seen == ["before", "landed"]
    before.remove()
    landed.remove()
    (parameter * 2).sum().backward()
    assert seen == ["before", "landed"]


@given(passes=st.integers(1, 4), kept=st.booleans())
def test_gradients_are_diverted_pass_by_pass(passes, kept):
    shares = []
    parameter, _ = made(divert=lambda p, g: shares.append(g))
    if kept:
        parameter.grad = torch.full((3,), 7.0)
    for i in range(passes):
        (parameter * (i + 1) + parameter).sum().backward()
    assert [s.tolist() for s in shares] == [[i + 2.0] * 3 for i in range(passes)]
    assert (parameter.grad is None) is not kept
    if kept:
        assert parameter.grad.tolist() == [7.0] * 3


ACTIONS = ("read", "mul", "pend", "release", "guard", "copy", "view", "grad", "list")


@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=12))
def test_any_sequence_of_uses_equals_that_of_a_plain_parameter(actions):
    parameter, _ = made()
    plain = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    with torch.no_grad():
        for i, action in enumerate(actions):
            if action == "pend":
                entry = guard(parameter, lambda p, g: None)
                entry.wait()
                entry.pending = Pending(parameter, float(i))
                plain.fill_(float(i))
            elif action == "release":
                release(parameter)
            elif action == "guard":
                guard(parameter, lambda p, g: None)
            else:
                results = []
                for p in (parameter, plain):
                    if action == "mul":
                        p.mul_(1.5)
                    elif action == "view":
                        p.view(3, 1)[0] = -1.0
                    elif action == "grad":
                        p.grad = p * 2
                    elif action == "list":
                        torch._foreach_add_([p], 1.0)
                    results.append(copy.deepcopy(p) if action == "copy" else p.tolist())
                if action == "copy":
                    assert type(results[0]) is type(results[1]) is nn.Parameter
                    results = [r.tolist() for r in results]
                assert results[0] == results[1]
    assert parameter.tolist() == plain.tolist()


def test_several_threads_may_wait_at_once():
    parameter, entry = made()
    started, go = threading.Barrier(4), threading.Event()
    memory = parameter.detach()

    def pending():
        started.wait(60)
        assert go.wait(60)
        memory.fill_(5.0)

    entry.pending = pending
    results = []
    threads = [threading.Thread(target=lambda: results.append((parameter * 1).tolist())) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait(60)
    go.set()
    for thread in threads:
        thread.join()
    assert results == [[5.0] * 3] * 3
    assert entry.pending is None


def test_a_guard_does_not_keep_its_parameter():
    parameter, entry = made()
    key, gone = id(parameter), weakref.ref(parameter)
    entry.pending = lambda: None
    del parameter
    gc.collect()
    assert gone() is None
    assert entry.parameter() is None
    assert key not in module._table


def test_guarding_twice_is_guarding_once():
    parameter, entry = made()
    assert guard(parameter, print) is entry
    assert guard_of(torch.zeros(1)) is None


def fill(p, entry):
    with torch._C.DisableTorchFunctionSubclass():
        entry.note_filled(p)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    ("hand_out", "ends"),
    {
        "detach": (lambda p: p.detach(), True),
        "view": (lambda p: p.view(3, 1), True),
        "data": (lambda p: p.data, True),
        "numpy": (lambda p: p.numpy(), True),
        "array of a view": (lambda p: p.detach()[1:].numpy(), True),
        "storage": (lambda p: p.untyped_storage(), True),
        "storage of a view": (lambda p: p.detach().untyped_storage(), True),
        "typed storage": (lambda p: p.detach().storage(), True),
        "memory view": (lambda p: memoryview(p.numpy()), True),
        "pointer": (lambda p: p.data_ptr(), False),
    }.values(),
)
def test_an_escape_is_over_when_nobody_holds_the_memory_any_more(hand_out, ends):
    p, entry = made(requires_grad=False)
    fill(p, entry)
    assert not entry.escaped
    held = hand_out(p)
    assert entry.escaped
    for _ in range(2):
        fill(p, entry)
        assert entry.escaped  # it can still be written
    del held
    gc.collect()
    assert entry.escaped  # it may have been: what was filled before is not to be trusted
    fill(p, entry)
    assert entry.escaped is not ends


def test_an_escape_of_a_trained_value_or_of_exchanged_memory_stays():
    p, entry = made()
    fill(p, entry)
    p.detach()
    fill(p, entry)
    assert entry.escaped
    frozen, entry = made(requires_grad=False)
    fill(frozen, entry)
    frozen.data = torch.ones(3)
    fill(frozen, entry)
    assert entry.escaped


@given(st.lists(st.sampled_from(["detach", "numpy", "drop", "fill", "op"]), max_size=20))
def test_nothing_that_can_be_written_unseen_counts_as_seen(uses):
    p, entry = made(requires_grad=False)
    held = []
    fill(p, entry)
    for use in uses:
        if use == "detach":
            held.append(p.detach())
        elif use == "numpy":
            held.append(p.numpy())
        elif use == "drop" and held:
            held.pop(0)
        elif use == "fill":
            fill(p, entry)
        else:
            p + 1
        assert entry.escaped or not held


HANDED_OUT = {
    "split": lambda p: p.split(1),
    "chunk": lambda p: p.chunk(3),
    "unbind": lambda p: p.unbind(),
    "unsafe_split": lambda p: torch.unsafe_split(p, 1),
    "hsplit": lambda p: torch.hsplit(p, 3),
    "list": lambda p: list(p),
    "in a list": lambda p: torch.atleast_3d([p, p]),
    "in keywords": lambda p: torch.chunk(input=p, chunks=2),
    "copy": lambda p: copy.copy(p),
    "expand": lambda p: p.expand(2, 3),
    "unfold": lambda p: p.unfold(0, 2, 1),
    "alias": lambda p: torch.ops.aten.alias(p),
    "broadcast": lambda p: torch.broadcast_tensors(p, torch.zeros(2, 3)),
}


@pytest.mark.parametrize("hand_out", HANDED_OUT.values(), ids=HANDED_OUT)
def test_whatever_shares_the_memory_is_noted(hand_out):
    p, entry = made(requires_grad=False)
    result = hand_out(p)
    assert entry.escaped
    del result


COPIES = {
    "clone": lambda p: p.clone(),
    "sum": lambda p: p.sum(),
    "stack": lambda p: torch.stack([p, p]),
    "split of a copy": lambda p: p.clone().split(1),
    "max": lambda p: p.max(0),
    "in place": lambda p: p.add_(1),
    "comparison": lambda p: p == p,
    "shape": lambda p: p.shape,
    "deepcopy": lambda p: copy.deepcopy(p),
}


@pytest.mark.parametrize("use", COPIES.values(), ids=COPIES)
def test_what_has_memory_of_its_own_is_no_escape(use):
    p, entry = made(requires_grad=False)
    use(p)
    assert not entry.escaped


def test_a_shallow_copy_is_an_ordinary_parameter():
    p, _ = made()
    twin = copy.copy(p)
    assert type(twin) is nn.Parameter
    assert twin.requires_grad
    assert twin.data_ptr() == p.data_ptr()


# -- reads that do not wait


ALSO_NEW = ("function", "in_a_list_of_keywords")
NEW_VALUES = {
    **{name: USES[name] for name in ALSO_NEW},
    "operator": lambda p: p + 0.0,
    "reversed": lambda p: torch.zeros(3) + p,
    "keyword": lambda p: torch.add(input=p, other=torch.zeros(3)),
    "list": lambda p: torch.stack([p, p])[0],
    "foreach": lambda p: torch._foreach_add([p], 0.0)[0],
    "clone": lambda p: p.clone(),
    "cast": lambda p: p.double(),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "overload": lambda p: torch.ops.aten.add.Tensor(p, torch.zeros(3)),
}
STILL_WAITS = {
    **{name: use for name, use in USES.items() if name not in NEW_VALUES},
    "overload": lambda p: torch.ops.aten.mul_.Tensor(p, torch.ones(3)),
    "augmented": lambda p: operator.iadd(p, 0.0),
    "assigned": lambda p: (operator.setitem(p, 0, 5.0), p)[1],
    "out": lambda p: torch.add(p, 0.0, out=torch.empty(3)),
    "inplace": lambda p: nn.functional.relu(p, inplace=True),
    "itself": lambda p: p.contiguous(),
    "keeps": lambda p: p.float(),
    "reversed_in_place": lambda p: torch.zeros(3).add_(p),
    "renormalized": lambda p: nn.functional.embedding(torch.arange(3), p.view(3, 1), max_norm=9.0)[:, 0],
}


@pytest.mark.parametrize("use", NEW_VALUES.values(), ids=NEW_VALUES.keys())
def test_a_new_value_is_made_at_once_where_reads_do_not_wait(use):
    parameter, entry = made()
    entry.waits = False
    entry.pending = pending = Pending(parameter)
    with torch.no_grad():
        assert use(parameter).tolist() == [1.0, 2.0, 3.0]
        assert pending.calls == 0
        entry.wait()
        assert use(parameter).tolist() == [5.0] * 3
    entry.pending = pending
    use(parameter.requires_grad_())  # what a graph records is what is trained
    assert pending.calls == 2


@pytest.mark.parametrize("use", STILL_WAITS.values(), ids=STILL_WAITS.keys())
@pytest.mark.parametrize("grad", [False, True])
def test_writes_and_what_hands_out_memory_wait_all_the_same(use, grad):
    parameter, entry = made(requires_grad=False)
    entry.waits = False
    entry.pending = pending = Pending(parameter)
    with torch.set_grad_enabled(grad):
        found = use(parameter)
        assert pending.calls == 1
        assert torch.equal(found.detach(), torch.full((3,), 5.0))


def test_a_gradient_is_waited_for_where_values_are_not():
    parameter, entry = made()
    parameter.grad = torch.ones(3)
    entry.waits = False
    entry.pending = pending = Pending(parameter)
    with torch.no_grad():
        assert parameter.grad.tolist() == [1.0] * 3
    assert pending.calls == 1
