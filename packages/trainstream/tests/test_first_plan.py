"""`wrap()` and `trainstream plan` give the same answer about the same model and budgets."""

import copy
import dataclasses
import gc
import json
import weakref
from types import SimpleNamespace

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import trainstream
from trainstream import _first
from trainstream._budget import Limits
from trainstream._decide import _settling, decide, moment_formats
from trainstream._first import live_spec, packing_of, planned_job
from trainstream._inventory import Inventory
from trainstream._options import WrapOptions
from trainstream._paging import asked
from trainstream._session import session_of
from trainstream._staging import frozen_weights
from trainstream._watch import Watch, _tokens
from ts_core.advice import assign
from ts_core.blocks import block_map, find_blocks
from ts_core.cost import group_sizes
from ts_core.errors import DoesNotFitError, OptionError
from ts_core.job import Room, Setting, assumed_profile
from ts_core.planner import Budgets
from ts_core.search import choose
from ts_hf.config_spec import spec_from_config
from ts_optim import OffloadAdamW

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RANK = 4


def config_of(layers=4, hidden=64, inner=192, vocabulary=512, tied=False):
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=vocabulary, tie_word_embeddings=tied, dtype="bfloat16",
    )  # fmt: skip


def model_of(config, lora):
    """The live model, with no memory of its own."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
        if lora:
            model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear"))
    return model


def decided_of(model, room, device, hardware, **options):
    checked = WrapOptions.from_kwargs(**options)
    blocks = find_blocks(model)
    want = asked(checked, len(blocks), cpu=device.type == "cpu")
    inventory = Inventory(model, block_map(model), blocks)
    bounds = Limits(Budgets(room.device, room.host, room.disk), None, lambda: 0, room.device)
    formats = moment_formats(None, checked)
    optimizer = OffloadAdamW([p for p in model.parameters() if p.requires_grad], moment_dtype=formats[0])
    return decide(model, inventory, blocks, device, optimizer, want, bounds, checked, formats, hardware)


def spec_of_config(config):
    return spec_from_config(json.loads(config.to_json_string()))


@st.composite
def cases(draw):
    config = config_of(
        layers=draw(st.integers(2, 6)),
        hidden=64 * draw(st.integers(1, 2)),
        inner=64 * draw(st.integers(2, 6)),
        vocabulary=64 * draw(st.integers(2, 40)),
        tied=draw(st.booleans()),
    )
    lora, cpu = draw(st.booleans()), draw(st.booleans())
    spec = spec_of_config(config)
    full = spec.bytes * (1 if lora else 8)
    tokens = draw(st.sampled_from([16, 256, 2048]))
    more = tokens * 64 * 100
    device = int(full * draw(st.floats(0.1, 2.0))) + draw(st.sampled_from([0, more, 8 * more]))
    host = None if cpu else int(full * draw(st.floats(0.1, 3.0)))
    disk = draw(st.sampled_from([0, 20 * full]))
    prefer = draw(st.sampled_from(["exact", "speed"])) if lora else "exact"
    return config, spec, lora, tokens, Room(device, host, disk), prefer


@given(cases())
@settings(max_examples=20, deadline=None)
def test_wrap_and_plan_agree(case):
    config, spec, lora, tokens, room, prefer = case
    cpu = room.host is None
    hardware = assumed_profile("cpu" if cpu else "cuda")
    formats = ("float32", "bfloat16", "int8")
    job = planned_job(
        spec,
        cpu=cpu,
        seq_len=tokens,
        lora_rank=RANK if lora else 0,
        trains=not lora,
        packings=[packing_of(name) for name in (("none", "int8", "nf4") if lora else ("none",))],
        moments=formats[:1] if lora else formats,
        prefer=prefer,
        capture=not cpu,  # as wrap() does by itself
    )
    model = model_of(config, lora)
    ask = {"plan_tokens": tokens, "prefer": prefer}
    try:
        found = choose(spec, job, hardware, room)
    except DoesNotFitError:
        with pytest.raises(DoesNotFitError):
            decided_of(model, room, CPU if cpu else CUDA, hardware, **ask)
        return
    decided = decided_of(model, room, CPU if cpu else CUDA, hardware, **ask)
    setting = found.choice.setting
    assert decided.codec == setting.packing.name
    assert decided.moments == setting.moments
    assert decided.depth == setting.slots - 1
    places, policies = assign(spec, found)
    settled = decided.layout.settled
    here = {"device", "settled"}
    for index, tier in enumerate(decided.layout.tiers):
        now = "device" if index in settled else tier
        assert now == ("device" if places[index] in here else places[index])
    blocks = [policies[i] for i, block in enumerate(spec.blocks) if block.kind == "block"]
    chosen = list(decided.want.fallback)
    # What keeps its activations falls back to recomputing, should there be no room.
    assert [b if b != "keep" else "recompute" for b in blocks] == chosen
    assert decided.step_s == found.prediction.step_s


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("lora", "codec"), [(False, "none"), (True, "none"), (True, "int8"), (True, "nf4")])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_what_a_config_says_of_bytes_is_what_the_live_model_takes(lora, codec, moments, tied, device):
    config = config_of(layers=2, tied=tied)
    model, spec = model_of(config, lora), spec_of_config(config)
    blocks = find_blocks(model)
    inventory = Inventory(model, block_map(model), blocks)
    optimizer = OffloadAdamW([p for p in model.parameters() if p.requires_grad])
    packed = frozenset(id(p) for p in frozen_weights(model, blocks)) if codec != "none" else frozenset()
    settling = _settling(inventory, device, optimizer)
    live = inventory.specs(device, optimizer, codec, 64, packed, settling, moments)
    job = planned_job(spec, cpu=device == CPU, seq_len=8, lora_rank=RANK if lora else 0, trains=not lora)
    worked_out = group_sizes(spec, job, Setting(packing_of(codec), moments))
    for group, other in zip(live, worked_out, strict=True):
        # Adapters keep exact moments, and a norm is not worth a slot.
        leave_out = {"name", *(["fixed"] if lora and moments != "float32" else [])}
        leave_out |= {"pageable"} if group.kind == "norm" else set()
        same = {key: value for key, value in vars(group).items() if key not in leave_out}
        assert same == {key: value for key, value in vars(other).items() if key not in leave_out}


def test_a_model_with_adapters_has_the_spec_of_its_base():
    config = config_of(layers=2)
    spec, adapters = live_spec(model := model_of(config, True), block_map(model))
    for block, other in zip(spec.blocks, spec_of_config(config).blocks, strict=True):
        assert (block.saved, block.kernels, block.numel) == (other.saved, other.kernels, other.numel)
    seven = (7, 6 * 64 + 192, 7 * RANK)
    assert adapters == ((0, 0, 0), seven, seven, (0, 0, 0), (0, 0, 0))


@pytest.mark.parametrize(("tokens", "used", "streams"), [(64, 0, False), (4096, 0, False), (4096, 700, True)])
def test_a_first_input_that_is_longer_than_planned_makes_room(tokens, used, streams):
    said, streamed = [], []
    places = SimpleNamespace(
        decided=SimpleNamespace(tokens=1024, reserve=100),
        limits=SimpleNamespace(used=lambda: used),
        removable=lambda: [3, 4],
        enough_of=lambda candidates, over: candidates[: over // 100],
        write_down=lambda session: None,
    )
    session = SimpleNamespace(
        plan=SimpleNamespace(device="cpu"),
        events=SimpleNamespace(add=said.append),
        relief=SimpleNamespace(places=places, stream=lambda chosen: streamed.append(chosen) or "streams"),
        tuner=SimpleNamespace(governor=SimpleNamespace(room=1000)),
    )
    ids = torch.zeros(2, tokens // 2, dtype=torch.long)
    Watch(session)._make_room_as_planned(_tokens((), {"input_ids": ids, "scale": torch.ones(3)}))
    assert streamed == ([[3]] if streams else [])
    assert len(said) == streams


def test_tokens_of_inputs_that_are_no_ids_are_all_but_the_last_dimension():
    assert _tokens((torch.zeros(2, 5, 8),), {}) == 10
    assert _tokens((), {}) == 0


def test_optimizer_state_that_ram_has_no_room_for_where_no_weight_may_leave():
    model = model_of(config_of(), lora=False)
    ask = {"param_offload": False, "plan_tokens": 256}
    with pytest.raises(DoesNotFitError):  # files would have room, but nothing may go there
        decided_of(model, Room(64 << 20, 1 << 20, 1 << 40), CUDA, assumed_profile("cuda"), **ask)
    decided = decided_of(model, Room(64 << 20, 1 << 30, 1 << 40), CUDA, assumed_profile("cuda"), **ask)
    assert decided.layout.settled == tuple(range(7))


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_too_many_tokens_are_what_is_named_where_weights_have_room(device):
    host = None if device == CPU else 1 << 30
    with pytest.raises(DoesNotFitError, match=r"100,000 tokens .*would help: fewer plan_tokens") as caught:
        decided_of(
            model_of(config_of(), lora=True), Room(6 << 20, host, 1 << 40), device,
            assumed_profile(device.type), plan_tokens=100_000,
        )  # fmt: skip
    assert "at least" not in str(caught.value)  # what is there already


def test_a_plan_with_a_single_slot_is_carried_out(monkeypatch):
    def single(*given, **more):
        found = decide(*given, **more)
        return dataclasses.replace(found, depth=0, layout=dataclasses.replace(found.layout, slots=1))

    monkeypatch.setattr("trainstream._wrap.decide", single)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of(layers=3)).float()
    plain = copy.deepcopy(model)
    model, optimizer = trainstream.wrap(model, param_offload=True, lr=1e-3)
    session = session_of(model)
    assert (session.pager.slot_count, session.plan.prefetch_depth) == (1, 0)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    ids = torch.arange(16).view(1, 16)
    for step in range(3):
        losses = [m(input_ids=ids, labels=ids).loss for m in (model, plain)]
        assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-5)
        for loss, one in zip(losses, (optimizer, reference), strict=True):
            loss.backward()
            one.step()
            one.zero_grad()
        if step == 1:
            session.set_budget(ram="8GiB")
    trainstream.unwrap(model)
    with pytest.raises(OptionError, match="prefetch_depth"):
        trainstream.wrap(model, prefetch_depth=0)


def test_nothing_holds_the_weights_that_were_packed():
    model = LlamaForCausalLM(config_of(layers=2)).requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    before = [weakref.ref(block.mlp.up_proj.weight) for block in model.model.layers]
    model, _ = trainstream.wrap(model, quantize="nf4")
    gc.collect()
    assert [ref() for ref in before] == [None, None]
    trainstream.unwrap(model)


@pytest.mark.parametrize(
    ("budget", "measures"), [(None, True), ("4GiB", True), ("1GiB", False), (1 << 28, False)]
)
def test_a_machine_is_not_measured_with_more_ram_than_a_budget_has(budget, measures, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        _first, "profile_hardware", lambda device: asked.append(device) or assumed_profile("cuda")
    )
    monkeypatch.setattr(_first, "kept_profile", lambda device: None)
    found = _first.rates_of(torch.device("cuda"), WrapOptions(ram_budget=budget))
    assert found == assumed_profile("cuda")
    assert bool(asked) == measures
