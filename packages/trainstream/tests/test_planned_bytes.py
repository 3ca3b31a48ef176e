"""What is planned for slots is what they hold, also where they hold packed operands."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trainstream
from trainstream._session import session_of
from ts_core.planner import staged_bytes
from ts_quant.matmul import emulated

pytestmark = pytest.mark.usefixtures("one_thread")
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
