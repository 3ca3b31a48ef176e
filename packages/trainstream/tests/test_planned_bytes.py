"""What is planned for slots and for recordings is what they hold, or more."""

import contextlib
import dataclasses
import json

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import trainstream
from trainstream._budget import Limits
from trainstream._decide import decide
from trainstream._first import packing_of, planned_job
from trainstream._session import session_of
from ts_core.job import POLICIES, Choice, Setting, assumed_profile
from ts_core.planner import Budgets, staged_bytes
from ts_core.step import predict
from ts_hf.config_spec import spec_from_config
from ts_quant.matmul import emulated

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
LAYERS, RANK = 3, 4
OPERANDS = ("fp8_row", "fp8_block", "mxfp8", "nvfp4")


class Block(nn.Module):
    """Frozen matrices of one stack of widths, and a little that trains."""

    def __init__(self, width, inner):
        super().__init__()
        shapes = ((width, inner), (inner, width))
        self.up, self.down = (
            nn.Linear(*shape, bias=False, dtype=torch.bfloat16).requires_grad_(False) for shape in shapes
        )
        self.norm = nn.LayerNorm(width, dtype=torch.bfloat16)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


@given(
    codec=st.sampled_from((*OPERANDS, "nf4", "int8")),
    multiplies=st.booleans(),
    backward=st.booleans(),
    width=st.sampled_from((64, 128, 512, 1024)),
    inner=st.sampled_from((64, 512, 640)),
    double=st.booleans(),
    ready=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_slots_are_planned_to_the_byte(
    tmp_path_factory, codec, multiplies, backward, width, inner, double, ready
):
    """Of each packed format, decoded in a slot or multiplied there; packed by `wrap()` or before."""
    model = nn.Sequential(*(Block(width, inner) for _ in range(3)))
    options = {"device": "cpu", "param_offload": True, "fp8_backward": backward, "nvfp4_backward": backward}
    double = double and codec in ("nf4", "int8")
    if ready:
        trainstream.quantize_model(model, codec, double_quant=double)
    else:
        options |= {"quantize": codec, "double_quant": double}
    folder = str(tmp_path_factory.mktemp("files"))
    with emulated() if multiplies else contextlib.nullcontext():
        trainstream.wrap(model, disk_offload=folder, plan_tokens=16, **options)
        session = session_of(model)
        pager, planned = session.pager, session.relief.places.decided
        held = sum(slot.buffer.nbytes for slot in pager.slots)
        specs = planned.specs
        assert held == pager.slot_count * max(spec.slot for spec in specs if spec.kind == "block")
        # What arrives beside a slot is what does not lie in it as it is stored.
        arrives = [
            sum(
                t.nbytes
                for p, seat in zip(b.parameters, b.seats, strict=True)
                if not seat.packed
                for t in getattr(p, "packed", {}).values()
            )
            for b in pager.blocks
        ]
        assert arrives == [spec.staged for spec in specs if spec.kind == "block"]
        assert planned.layout.device_bytes >= held + staged_bytes(planned.layout.slots, max(arrives))
        trainstream.unwrap(model)


def llama(lora, hidden, inner):
    """A small one, and what its config says of it."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, dtype="bfloat16",
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear"))
    return model, spec_from_config(json.loads(config.to_json_string()))


@pytest.mark.parametrize(
    ("kind", "paged", "recompute", "hidden", "inner", "tokens"),
    [
        ("full", True, True, 64, 64, 64),
        ("lora", True, False, 64, 256, 64),
        ("lora", False, True, 64, 64, 16),
        ("lora-nf4", True, True, 64, 64, 16),
    ],
)
def test_recordings_take_no_more_than_planned(kind, paged, recompute, hidden, inner, tokens, tmp_path):
    """At fixed addresses, and on a CPU whatever their operations make."""
    torch.manual_seed(0)
    model, spec = llama(kind != "full", hidden, inner)
    codec = "nf4" if kind == "lora-nf4" else "none"
    model, optimizer = trainstream.wrap(
        model, capture=True, device="cpu", param_offload=paged, recompute=recompute, activation_offload=False,
        quantize=codec, plan_tokens=tokens, disk_offload=str(tmp_path),
    )  # fmt: skip
    ids = torch.randint(0, 128, (1, tokens))
    for _ in range(4):  # watched, seen, recorded, replayed
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    captured = trainstream.memory_report(model)["captured"]
    assert captured["blocks"] > 1, captured["fallbacks"]
    policies = ("recompute",) if recompute else ("keep",)
    choice = counts(session_of(model).plan, spec, paged, policies[0], codec)
    found = []
    for capture in (False, True):
        job = planned_job(
            spec, cpu=True, seq_len=tokens, lora_rank=0 if kind == "full" else RANK, trains=kind == "full",
            policies=policies, capture=capture,
        )  # fmt: skip
        found.append(predict(spec, job, assumed_profile("cpu"), choice, cpu=True).device_bytes)
    assert 0 < captured["bytes"] <= found[1] - found[0]
    trainstream.unwrap(model)


def counts(plan, spec, paged, policy, codec):
    """Return a plan with one policy in counts."""
    places, policies = [], []
    for members in spec.classes():
        block = spec.blocks[members[0]].kind == "block"
        away = len(members) if paged and block else 0
        places.append((len(members) - away, 0, 0, away))
        policies.append(tuple(len(members) * (block and policy == name) for name in POLICIES))
    setting = Setting(packing_of(codec), slots=max(plan.slots, 1))
    return Choice(setting, tuple(places), tuple(policies))


@pytest.mark.parametrize(("times", "cap", "tight"), [(8, False, False), (1.5, False, True), (8, True, True)])
def test_the_heap_is_kept_tight_where_ram_is_what_is_short(times, cap, tight, monkeypatch, tmp_path):
    """Holes between tensors may take as much as activations do: no plan counts them."""
    kept = []
    monkeypatch.setattr("trainstream._wrap.keep_heap_tight", lambda: kept.append(True))
    model = nn.Sequential(*(Block(256, 256) for _ in range(3)))
    need = 4 << 20
    limits = Limits(
        Budgets(int(times * need), None, 1 << 30), 1 << 30 if cap else None, lambda: 0, int(times * need)
    )
    monkeypatch.setattr("trainstream._wrap.limits", lambda *a, **k: limits)
    decided = decided_with(monkeypatch, need)
    trainstream.wrap(model, device="cpu", disk_offload=str(tmp_path), plan_tokens=16)
    assert decided == [need]
    assert bool(kept) == tight
    trainstream.unwrap(model)


def decided_with(monkeypatch, nbytes):
    """Let a plan take so many bytes, whatever it is; returns a list of what plans took."""
    found = []

    def decided(*given, **more):
        made = decide(*given, **more)
        found.append(nbytes)
        return dataclasses.replace(made, layout=dataclasses.replace(made.layout, device_bytes=nbytes))

    monkeypatch.setattr("trainstream._wrap.decide", decided)
    return found
