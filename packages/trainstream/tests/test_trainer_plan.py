"""Numerics travel with a checkpoint and are forced on a resumed run; placement is free."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_trainer import InOrder, arguments, build, lora, random_rows
from transformers import Trainer

import trainstream
from trainstream._session import session_of
from trainstream.integrations._plan_file import (
    PLAN_FILE,
    SavedPlan,
    packed_count,
    read_plan,
    trained_names,
    write_plan,
)
from ts_core.errors import CheckpointError
from ts_core.plan import BlockPlan, Numerics, Plan

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]
RUN = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def wrapped(**options):
    model = build()
    model.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    return trainstream.wrap(model, None, **options)[0]


def saved_by(model, folder, loss_chunk_size=1024):
    write_plan(folder, session_of(model), loss_chunk_size=loss_chunk_size)
    return read_plan(folder)


def test_it_holds_placement_numerics_and_version(tmp_path):
    model = wrapped(param_offload=True, recompute=[1], disk_offload=str(tmp_path))
    saved = saved_by(model, tmp_path)
    content = json.loads((tmp_path / PLAN_FILE).read_text())
    assert content["version"] == saved.version == trainstream.__version__
    assert saved.plan == session_of(model).plan
    assert saved.plan.policy == ("keep", "recompute")
    assert len(saved.plan.paged) >= 2
    assert saved.parameters == [["model.norm.weight"]]
    assert (saved.packed, saved.loss_chunk_size) == (0, 1024)
    trainstream.unwrap(model)


def test_what_was_left_open_is_forced_and_placement_is_not(tmp_path):
    packing = {"quant_block_size": 32, "keep_precise": 0.5, "error_rank": 2, "double_quant": True}
    made = wrapped(quantize="nf4", **packing, outliers=0.02)
    saved = saved_by(made, tmp_path)
    forced = saved.force({"param_offload": True, "moment_dtype": "auto"}, build())
    assert forced == {
        "param_offload": True,
        "quantize": "nf4",
        "quant_block_size": 32,
        "moment_dtype": "float32",
        "kernels": True,  # auto, over packed weights
        "fused_lora": True,
        "attention": None,
        "keep_precise": 0.5,
        "error_rank": 2,
        "error_iters": 1,
        "double_quant": True,
        "outliers": 0.02,
        "fp8_backward": False,
        "nvfp4_backward": False,
    }
    again = wrapped(**forced, disk_offload=str(tmp_path))
    saved.check(session_of(again))
    assert packed_count(again) == saved.packed > 0
    # A model that came packed is not packed once more.
    assert saved.force({}, again)["quantize"] == "none"
    trainstream.unwrap(again)


@pytest.mark.parametrize(
    ("made", "option", "value"),
    [
        ({"quantize": "nf4"}, "quantize", "int8"),
        ({"quantize": "nf4"}, "quantize", None),
        ({"quantize": "nf4"}, "quant_block_size", 128),
        ({}, "quantize", "nf4"),
        ({"quantize": "nf4", "keep_precise": 0.5}, "keep_precise", 0.25),
        ({"quantize": "nvfp4", "outliers": 0.02}, "outliers", 0.05),
        ({"quantize": "fp8_row", "fp8_backward": True}, "fp8_backward", False),
        ({"quantize": "nf4", "error_rank": 2}, "error_rank", 4),
        ({"quantize": "nf4", "double_quant": True}, "double_quant", False),
        ({"quantize": "nf4"}, "kernels", False),
        ({"fused_lora": True}, "fused_lora", None),
        ({"attention": "math"}, "attention", "flash"),
    ],
)
def test_what_asks_for_other_bits_is_an_error_that_names_it(tmp_path, made, option, value):
    saved = saved_by(wrapped(**made), tmp_path)
    with pytest.raises(CheckpointError, match=rf"option {option}: .* made with .*, given {value!r}"):
        saved.force({option: value}, build())


@pytest.mark.parametrize(
    "same", [{"quantize": "none"}, {"quantize": False}, {"moment_dtype": "fp32"}, {"kernels": None},
             {"fused_lora": None}, {"attention": None}, {"quant_block_size": 32}]
)  # fmt: skip
def test_other_spellings_of_the_same_are_no_difference(tmp_path, same):
    saved = saved_by(wrapped(), tmp_path)
    name = next(iter(same))
    assert saved.force(same, build())[name] == same[name]


def test_the_session_is_compared_too(tmp_path):
    saved = saved_by(wrapped(), tmp_path)
    session = session_of(wrapped())
    saved.check(session)
    other = dataclasses.replace(session.plan.numerics, moment_dtype="int8")
    session.plan = dataclasses.replace(session.plan, numerics=other)
    with pytest.raises(CheckpointError, match="moment_dtype"):
        saved.check(session)
    with pytest.raises(CheckpointError, match="3 packed weights, the model has 0"):
        dataclasses.replace(saved, packed=3).check(session_of(wrapped()))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' there, 'model.norm.weight' here"):
        dataclasses.replace(saved, parameters=[["lm_head.weight"]]).check(session_of(wrapped()))
    with pytest.raises(CheckpointError, match=r"groups of \[1, 1\] there, of \[1\] here"):
        dataclasses.replace(saved, parameters=[["a"], ["b"]]).check(session_of(wrapped()))


def test_chunks_of_the_loss():
    saved = SavedPlan(None, "1", Plan("cpu"), 256, 0, [])
    assert saved.chunk_size(None, 1024) == saved.chunk_size(256, 1024) == 256
    with pytest.raises(CheckpointError, match=r"loss_chunk_size: .*256, given 64"):
        saved.chunk_size(64, 1024)
    unchunked = dataclasses.replace(saved, loss_chunk_size=None)
    assert (unchunked.chunk_size(None, 1024), unchunked.chunk_size(64, 1024)) == (1024, 64)


@given(
    numerics=st.builds(
        Numerics,
        quantize=st.sampled_from(["none", "int8", "nf4"]),
        quant_block_size=st.sampled_from([32, 64]),
        kernels=st.booleans(),
        fused_lora=st.booleans(),
        attention=st.sampled_from([None, "math"]),
    ),
    size=st.one_of(st.none(), st.integers(1, 10)),
)
def test_every_plan_survives_the_file(numerics, size, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    model = torch.nn.Linear(2, 2)
    model, _ = trainstream.wrap(model)
    session = session_of(model)
    session.plan = Plan("cpu", (BlockPlan("a", tier="disk"),), numerics)
    write_plan(folder, session, loss_chunk_size=size)
    saved = read_plan(folder)
    assert (saved.plan, saved.loss_chunk_size) == (session.plan, size)
    assert saved.parameters == trained_names(model, session.optimizer) == [["weight", "bias"]]
    forced = saved.force({}, model)
    assert all(forced[name] == getattr(numerics, name) for name in forced)


@pytest.mark.parametrize(
    "damage", ["{", '{"format": 9}', '{"format": 1}', "[]", '{"format": 1, "version": "1", "plan": {}}']
)
def test_damaged_files_are_named(tmp_path, damage):
    assert read_plan(tmp_path) is None
    (tmp_path / PLAN_FILE).write_text(damage)
    with pytest.raises(CheckpointError, match=PLAN_FILE.replace(".", r"\.")):
        read_plan(tmp_path)


# --------------------------------------------------------------------------------------------- Trainer


def trainer(folder, options=None, model=None, **changes):
    return InOrder(
        model=model or build(),
        args=arguments(folder, **{**RUN, **changes}),
        train_dataset=random_rows(8),
        trainstream=options,
    )


def test_a_trainer_keeps_the_numerics_of_its_checkpoint(tmp_path):
    options = {"quantize": "int8", "quant_block_size": 32, "loss_chunk_size": 4}
    first = trainer(tmp_path, options, lora(build(), init_lora_weights=False))
    first.train()
    saved = read_plan(tmp_path / "checkpoint-2")
    assert (saved.plan.numerics.quantize, saved.loss_chunk_size) == ("int8", 4)
    resume = str(tmp_path / "checkpoint-2")
    for wrong in ({"quantize": "nf4"}, {"quant_block_size": 64}, {"loss_chunk_size": 5}):
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            trainer(tmp_path, wrong, lora(build())).train(resume_from_checkpoint=resume)
    again = trainer(tmp_path, {"param_offload": True, "disk_offload": str(tmp_path)}, lora(build()))
    again.train(resume_from_checkpoint=resume)
    assert again._loss_chunk_size == 4
    assert session_of(again.model).plan.numerics == saved.plan.numerics
    expected = dict(first.model.named_parameters())
    for name, parameter in again.model.named_parameters():
        assert torch.equal(parameter.detach(), expected[name].detach()), name
    trainstream.unwrap(again.model)


def test_checkpoints_of_a_stock_trainer_force_nothing(tmp_path):
    Trainer(model=build(), args=arguments(tmp_path, **RUN), train_dataset=random_rows(8)).train()
    assert read_plan(tmp_path / "checkpoint-2") is None
    again = trainer(tmp_path, {"loss_chunk_size": 7})
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again._loss_chunk_size == 7


def test_parameters_in_another_order_are_refused(tmp_path):
    """Optimizer state goes by position: two matrices of one shape would get each other's moments."""

    class Reversed(InOrder):
        def create_optimizer(self, *args):
            if self.optimizer is None:
                self.optimizer = torch.optim.AdamW(list(self.model.parameters())[::-1], lr=1e-2)
            return super().create_optimizer(*args)

    whole = trainer(tmp_path)
    whole.train()
    other = Reversed(
        model=build(), args=arguments(tmp_path, **RUN), train_dataset=random_rows(8), trainstream={}
    )
    with pytest.raises(CheckpointError, match=r"another order|groups of"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_model_that_the_budget_places_is_not_moved_first(tmp_path, monkeypatch):
    moved = []
    monkeypatch.setattr(Trainer, "_move_model_to_device", lambda self, model, device: moved.append(device))
    trainer(tmp_path, {})
    assert len(moved) == 1
    for options in ({"param_offload": True}, {"param_offload": [0]}, {"ram_budget": "64GiB"}):
        trainer(tmp_path, options)
    monkeypatch.setenv("TRAINSTREAM_VRAM", "8GiB")
    trainer(tmp_path, {})
    assert len(moved) == 1
