"""No option is ignored silently: one that finds nothing to act on is named, one that contradicts refused."""

import copy
import dataclasses
import logging

import pytest
import torch
from conftest import toy
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trainstream
from trainstream._options import WrapOptions
from trainstream._unused import _RULES, REPORTED
from trainstream.integrations._background import background_option
from ts_core.errors import ArgumentTypeError, DoesNotFitError, OptionError, StateError
from ts_core.testing import devices


def events(model):
    return trainstream.memory_report(model)["events"]


def frozen():
    return toy().requires_grad_(False)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def test_every_option_has_a_rule_or_an_event_of_its_own():
    names = {field.name for field in dataclasses.fields(WrapOptions)}
    assert set(_RULES).isdisjoint(REPORTED)
    assert set(_RULES) | REPORTED == names


# (make the model, make the optimizer, options, the option named, a part of the reason)
CASES = [
    (toy, None, {"activation_offload": True, "recompute": True}, "activation_offload=True", "recompute=True"),
    (
        toy,
        None,
        {"activation_offload": True, "recompute": [0, 2]},
        "activation_offload=True",
        "for 2 of 3 blocks",
    ),
    (
        lambda: toy(depth=2),
        None,
        {"activation_offload": 1.0, "recompute": 1.0},
        "activation_offload=1.0",
        "recompute=1.0",
    ),
    (toy, None, {"host_arena": "2GiB"}, "host_arena=2.00 GiB", "on the CPU"),
    (toy, None, {"max_inflight_bytes": "64MiB"}, "max_inflight_bytes=64.00 MiB", "on the CPU"),
    (toy, None, {"vram_headroom": 0.3}, "vram_headroom=0.3", "on the CPU"),
    (toy, None, {"max_activation_slowdown": 0.5}, "max_activation_slowdown=0.5", "by measurement"),
    (toy, None, {"min_offload_bytes": 0, "recompute": False}, "min_offload_bytes=0", "no block offloads"),
    (toy, None, {"prefetch_depth": 2}, "prefetch_depth=2", "no weight is paged"),
    (toy, None, {"guard_params": False}, "guard_params=False", "no weight is paged"),
    (toy, None, {"disk_offload": "/tmp"}, "disk_offload=/tmp", "nothing has to live in files"),
    (toy, None, {"quant_block_size": 32}, "quant_block_size=32", "no weight is packed"),
    (frozen, None, {"quantize": "mxfp8", "quant_block_size": 128}, "quant_block_size=128", "of its own"),
    (toy, None, {"error_iters": 3}, "error_iters=3", "error_rank=0"),
    (toy, None, {"error_iters": 3, "error_rank": 2}, "error_iters=3", "no weight is packed"),
    (frozen, None, {"prefer": "speed", "quantize": "nf4"}, "prefer=speed", "quantize=nf4"),
    (toy, None, {"prefer": "speed"}, "prefer=speed", "frozen weight"),
    (toy, adamw, {"lr": 1e-4}, "lr=0.0001", "the given optimizer"),
    (toy, sgd, {"lr": 1e-4}, "lr=0.0001", "the given optimizer"),
    (frozen, None, {"lr": 1e-4}, "lr=0.0001", "no parameter requires grad"),
    (toy, sgd, {"moment_dtype": "bf16"}, "moment_dtype=bfloat16", "SGD"),
    (toy, sgd, {"threads": 2}, "threads=2", "SGD"),
    (toy, sgd, {"optimizer_mode": "auto"}, "optimizer_mode=auto", "SGD"),
    (frozen, None, {"max_grad_norm": 1.0}, "max_grad_norm=1.0", "no parameter requires grad"),
    (frozen, None, {"accumulation_steps": 2}, "accumulation_steps=2", "no parameter requires grad"),
    (lambda: nn.Linear(4, 4), None, {"capture": True}, "capture=True", "no stack of blocks"),
    (toy, None, {"vram_budget": "2GiB"}, "vram_budget", "on the CPU"),
    (toy, None, {"keep_precise": 0.1}, "keep_precise=0.1", "nothing is packed"),
    (toy, None, {"error_rank": 2}, "error_rank=2", "no weight is packed"),
    (toy, None, {"double_quant": True}, "double_quant=True", "no weight is packed"),
    (toy, None, {"outliers": 0.05}, "outliers=0.05", "no weight is packed"),
    (toy, None, {"fp8_backward": True}, "fp8_backward=True", "no weight is packed"),
    (toy, None, {"nvfp4_backward": True}, "nvfp4_backward=True", "no weight is packed"),
]


@pytest.mark.parametrize(
    ("make", "optimizer", "options", "name", "reason"), CASES, ids=[f"{c[3]}-{c[4]}" for c in CASES]
)
@pytest.mark.parametrize("device", ["cpu"])
def test_an_option_that_finds_nothing_to_do_is_named(make, optimizer, options, name, reason, device):
    model = make()
    chosen = optimizer(model) if optimizer else None
    model, _ = trainstream.wrap(model, chosen, device=device, **options)
    told = [line for line in events(model) if line.startswith(name) and "ignored" in line]
    assert len(told) == 1
    assert reason in told[0]


# Options that act: the same values where they have something to act on.
ACTING = [
    {"activation_offload": True, "min_offload_bytes": 0},
    {"activation_offload": 0.5, "recompute": [1]},
    {"param_offload": True, "prefetch_depth": 2, "guard_params": False, "disk_offload": "/tmp"},
    {"lr": 1e-4, "moment_dtype": "bf16", "threads": 1, "max_grad_norm": 1.0, "accumulation_steps": 2},
    {"activation_offload": False, "recompute": False, "host_arena": None},
    {},
]


@pytest.mark.parametrize("options", ACTING, ids=[",".join(o) or "none" for o in ACTING])
def test_an_option_that_acts_is_not(options):
    model, _ = trainstream.wrap(toy(), **options)
    assert not [line for line in events(model) if "ignored" in line]
    model, _ = trainstream.wrap(frozen(), quantize="nf4", quant_block_size=32, error_rank=1, error_iters=2)
    assert not [line for line in events(model) if "ignored" in line]


ANY = st.fixed_dictionaries({}, optional={o: st.just(v) for *_, c, _, _ in CASES for o, v in c.items()})


@given(options=ANY)
def test_any_options_together_are_refused_or_named(options):
    options = {key: value for key, value in options.items() if key not in ("capture", "vram_budget")}
    try:
        model, _ = trainstream.wrap(toy(4, 2), **options)
    except OptionError:
        return
    lines = events(model)
    assert any(line.startswith("host_arena=auto: ") for line in lines) == ("host_arena" not in options)
    said = "\n".join(line for line in lines if not line.startswith("host_arena=auto: "))
    for name in ("host_arena", "max_inflight_bytes", "vram_headroom", "quant_block_size", "error_iters"):
        assert (f"{name}=" in said) == (name in options)
    trainstream.unwrap(model)


def test_a_codec_for_weights_that_are_all_trained_is_refused():
    model = toy()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(OptionError, match=r"quantize='nf4'.*trained.*freeze the base"):
        trainstream.wrap(model, quantize="nf4")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    with pytest.raises(OptionError, match=r"quantize='int8'.*no stack of blocks"):
        trainstream.wrap(nn.Linear(4, 4).requires_grad_(False), quantize="int8")
    trainstream.wrap(toy(), quantize="auto")


def test_packed_before_and_packed_here_are_told_apart():
    model = frozen()
    trainstream.quantize_model(model, "int8")
    model, _ = trainstream.wrap(model, quantize="nf4")
    assert any("0 weights are packed here; 8 were packed before" in line for line in events(model))


def test_no_block_at_all_is_refused():
    with pytest.raises(OptionError, match=r"blocks: expected None or at least one module"):
        trainstream.wrap(toy(), blocks=[])
    with pytest.raises(OptionError, match=r"blocks: expected None or at least one module"):
        trainstream.wrap(toy(), blocks=nn.ModuleList())


def test_verbose_shows_the_events(caplog):
    with caplog.at_level(logging.WARNING, "trainstream"):
        trainstream.wrap(toy())
        assert not caplog.records
        model, _ = trainstream.wrap(toy(), verbose=True)
    assert [record.getMessage() for record in caplog.records] == events(model)


def test_names_of_other_libraries_are_answered_with_ours():
    table = {"learning_rate": "lr", "gradient_checkpointing": "recompute", "ram": "ram_budget"}
    for name, ours in table.items():
        with pytest.raises(OptionError, match=rf"no option '{name}'; did you mean {ours}\?"):
            trainstream.wrap(toy(), **{name: 1})


def test_one_slot_is_not_said_to_bring_anything_ahead():
    model, _ = trainstream.wrap(toy(depth=2), param_offload=[0])
    assert any("through one slot: none is brought ahead" in line for line in events(model))


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("paged", [True, False])
def test_wrap_under_inference_mode_trains_as_outside(paged, device):
    x = torch.randn(3, 16, device=device)
    plain, model = toy().to(device), toy().to(device)
    with torch.inference_mode():
        ours, optimizer = trainstream.wrap(model, param_offload=paged, lr=1e-2)
    reference, expected = trainstream.wrap(plain, param_offload=paged, lr=1e-2)
    for _ in range(2):
        for net, step in ((ours, optimizer), (reference, expected)):
            net(x).square().sum().backward()
            step.step()
            step.zero_grad()
        with torch.inference_mode():
            ours(x)
    with torch.inference_mode():
        trainstream.unwrap(ours)
    trainstream.unwrap(reference)
    for p, q in zip(ours.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not p.is_inference()


def test_a_model_made_under_inference_mode_is_refused():
    with torch.inference_mode():
        model = toy()
    with pytest.raises(OptionError, match=r"'0\.0\.weight' was made under torch\.inference_mode"):
        trainstream.wrap(model)


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}])
def test_a_model_on_the_meta_device_is_refused(options):
    with torch.device("meta"):
        model = toy()
    with pytest.raises(OptionError, match=r"'0\.0\.weight' is on the meta device.*load the model's weights"):
        trainstream.wrap(model, **options)


def test_what_holds_or_is_part_of_a_wrapped_model_is_refused():
    model, _ = trainstream.wrap(toy())
    with pytest.raises(StateError, match=r"the model is wrapped already"):
        trainstream.wrap(model)
    with pytest.raises(StateError, match=r"its module 'inner' is wrapped already"):
        trainstream.wrap(nn.ModuleDict({"inner": model}))
    with pytest.raises(StateError, match=r"part of a Sequential that is wrapped already"):
        trainstream.wrap(model[1])
    trainstream.wrap(copy.deepcopy(model))  # a copy is a plain model
    trainstream.unwrap(model)
    trainstream.wrap(model[1])


def test_an_optimizer_of_other_parameters_too_is_told():
    model, other = toy(depth=2), nn.Linear(3, 3)
    held = [*model[0].parameters(), *other.parameters()]
    model, optimizer = trainstream.wrap(model, torch.optim.AdamW(held))
    said = events(model)
    assert any("2 of its 6 parameters are not the model's" in line for line in said)
    assert any("does not hold 4 parameters that require grad (1.0.weight, ...)" in line for line in said)
    before = other.weight.clone()
    (model(torch.ones(1, 16)).sum() + other(torch.ones(1, 3)).sum()).backward()
    optimizer.step()
    assert not torch.equal(before, other.weight)


def test_an_optimizer_goes_on_after_unwrap():
    model, plain = toy(), toy()
    x = torch.randn(3, 16)
    model, optimizer = trainstream.wrap(model, param_offload=True, lr=1e-2)
    reference, expected = trainstream.wrap(plain, lr=1e-2)
    for step in range(4):
        for net, steps in ((model, optimizer), (reference, expected)):
            net(x).square().sum().backward()
            steps.step()
            steps.zero_grad()
        if step == 1:
            model = trainstream.unwrap(model)
    optimizer.synchronize()
    trainstream.unwrap(reference)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_int8_moments_in_gpu_mode_are_refused_by_the_options_that_were_given():
    match = r"moment_dtype='int8' with optimizer_mode='gpu'.*optimizer_mode='cpu'.*moment_dtype='bfloat16'"
    with pytest.raises(OptionError, match=match):
        trainstream.wrap(toy(), moment_dtype="8bit", optimizer_mode="gpu")


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(ArgumentTypeError, match=r"wrap\(optimizer\)"):
        trainstream.wrap(toy(), 1e-3)


def test_a_budget_below_what_is_taken_says_so():
    model, _ = trainstream.wrap(toy(), param_offload=True)
    session = model._trainstream_session
    with pytest.raises(
        DoesNotFitError, match=r"RAM where the limit is .* below what is taken .* ram of at least"
    ):
        session.set_budget(ram=1)
    with pytest.raises(DoesNotFitError, match="of disk where none may be used"):
        session.set_budget(disk=0)
    with pytest.raises(DoesNotFitError, match=r"RAM where the limit is .* below what is taken"):
        trainstream.wrap(toy(), ram_budget=1)
    session.set_budget(vram="1GiB")
    assert "vram=1.00 GiB ignored: the model computes on the CPU" in events(model)


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        ("host_arena", "big", "'auto', False, None"),
        ("peer", "big", "'auto', False, None"),
        ("ram_budget", "lots", "None"),
        ("max_inflight_bytes", "lots", "None"),
    ],
)
def test_a_wrong_size_names_what_else_is_accepted(option, value, accepted):
    with pytest.raises(
        OptionError, match=rf"option {option}: expected {accepted}, a number of bytes or a size"
    ):
        trainstream.wrap(toy(), **{option: value})


def test_a_wrong_save_in_background_names_the_switches():
    assert background_option(False) is None
    assert background_option(True) is not None
    with pytest.raises(OptionError, match="save_in_background: expected True, False, or the bytes"):
        background_option("yes")


@pytest.mark.parametrize("value", [None, False, "none", "auto"])
def test_quantize_model_without_a_codec_says_that_it_packs(value):
    with pytest.raises(OptionError, match=r"quantize: expected a codec, .*'nf4'.* This call packs"):
        trainstream.quantize_model(frozen(), value)
