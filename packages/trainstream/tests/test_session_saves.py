"""`session.save` writes what decides bits, and `session.load_optimizer` compares it."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from test_background_saving import same_state, train
from test_trainer import build, lora

import trainstream
from trainstream._session import session_of
from trainstream.integrations._plan_file import PLAN_FILE, read_plan
from ts_core.errors import CheckpointError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]
MADE = {"quantize": "nf4", "moment_dtype": "bfloat16", "kernels": True}


def run(adapters=True, device="cpu", **options):
    model = lora(build(), init_lora_weights=False) if adapters else build()
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return trainstream.wrap(model.to(device), adamw, device=device, **options)


def trained_of(model):
    return {n: p.detach().cpu().clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two steps that is saved, and what it is after two more."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("saves") / "saved"
    model, optimizer = run(**MADE)
    train(model, optimizer, 2)
    session_of(model).save(folder)
    middle = trained_of(model)
    train(model, optimizer, 2, seed=1)
    return folder, middle, trained_of(model)


@pytest.mark.parametrize("place", [{}, {"param_offload": True, "recompute": True}], ids=["resident", "paged"])
def test_a_run_goes_on_with_the_same_bits_wherever_things_are(saved, tmp_path, place):
    folder, middle, end = saved
    assert read_plan(folder).plan.numerics.moment_dtype == "bfloat16"
    model, optimizer = run(**MADE, **place, disk_offload=str(tmp_path))
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in middle.items():
            named[name].copy_(value)
    session_of(model).load_optimizer(folder)
    train(model, optimizer, 2, seed=1)
    assert all(torch.equal(value, end[name]) for name, value in trained_of(model).items())
    trainstream.unwrap(model)


@pytest.mark.parametrize(
    ("name", "saved_value", "given"),
    [("quantize", "nf4", "int8"), ("moment_dtype", "bfloat16", "float32"), ("kernels", True, False)],
)
def test_other_bits_are_refused_by_name_and_nothing_is_lost(saved, name, saved_value, given):
    folder, _, _ = saved
    model, optimizer = run(**{**MADE, name: given})
    train(model, optimizer, 1)
    weights, state = trained_of(model), copy.deepcopy(optimizer.state_dict())
    words = rf"option {name}: .* made with {saved_value!r}, given {given!r}"
    with pytest.raises(CheckpointError, match=words):
        session_of(model).load_optimizer(folder)
    assert all(torch.equal(value, weights[key]) for key, value in trained_of(model).items())
    assert same_state(state, optimizer.state_dict())
    train(model, optimizer, 1)


def test_other_parameters_are_refused_by_name(saved):
    folder, _, _ = saved
    model, _ = run(adapters=False, moment_dtype="bfloat16", kernels=True)
    with pytest.raises(CheckpointError, match=r"quantize|packed weights"):
        session_of(model).load_optimizer(folder)


def test_a_save_of_an_earlier_release_loads_and_says_what_was_not_compared(tmp_path):
    model, optimizer = run()
    train(model, optimizer, 1)
    session_of(model).save(tmp_path / "a")
    (tmp_path / "a" / PLAN_FILE).unlink()
    state = copy.deepcopy(optimizer.state_dict())
    fresh, other = run()
    session_of(fresh).load_optimizer(tmp_path / "a")
    assert same_state(state, other.state_dict())
    assert any(f"no {PLAN_FILE}" in line for line in session_of(fresh).events.events)


def test_a_damaged_plan_is_named_and_nothing_is_lost(tmp_path):
    model, optimizer = run()
    train(model, optimizer, 1)
    session_of(model).save(tmp_path / "a")
    (tmp_path / "a" / PLAN_FILE).write_text('{"format": 99}')
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError, match=r"trainstream\.json"):
        session_of(model).load_optimizer(tmp_path / "a")
    assert same_state(state, optimizer.state_dict())


def still_open(model):
    """Let attention be as on a GPU before the first large call."""
    choice = session_of(model).kernels.attention
    choice.open, choice.why = True, ""
    return choice


def change_attention(folder, value, undecided=()):
    path = folder / PLAN_FILE
    content = json.loads(path.read_text())
    content["plan"]["numerics"]["attention"] = value
    content["open"] = list(undecided)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("backend", ["math", None])
def test_attention_that_is_not_measured_yet_takes_what_was_chosen(tmp_path, backend):
    model, optimizer = run()
    train(model, optimizer, 1)
    session_of(model).save(tmp_path / "a")
    change_attention(tmp_path / "a", backend)
    fresh, _ = run()
    choice = still_open(fresh)
    session_of(fresh).load_optimizer(tmp_path / "a")
    assert (choice.open, choice.backend) == (False, backend)
    assert session_of(fresh).plan.numerics.attention == backend
    assert str(tmp_path / "a") in session_of(fresh).decisions[-1]


def test_attention_that_was_chosen_is_compared(tmp_path):
    model, optimizer = run(attention="math")
    train(model, optimizer, 1)
    session_of(model).save(tmp_path / "a")
    fresh, _ = run(attention="flash")
    with pytest.raises(CheckpointError, match=r"option attention: .* with 'math', given 'flash'"):
        session_of(fresh).load_optimizer(tmp_path / "a")


def test_attention_that_no_step_had_decided_stays_open(tmp_path):
    model, _ = run()
    choice = still_open(model)
    session_of(model).save(tmp_path / "a")
    saved = read_plan(tmp_path / "a")
    assert saved.undecided == ("attention",)
    assert "attention" not in saved.force({}, build())
    session_of(model).load_optimizer(tmp_path / "a")
    assert choice.open
    choice.open, choice.backend = False, "flash"
    session_of(model).kernels._measured(choice)
    session_of(model).load_optimizer(tmp_path / "a")  # of before the measurement
    other, _ = run(attention="math")
    with pytest.raises(CheckpointError, match=r"option attention: .* with None, given 'math'"):
        session_of(other).load_optimizer(tmp_path / "a")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_a_run_goes_on_with_the_same_bits(tmp_path):
    device, options = "cuda", {**MADE, "offload": True}
    model, optimizer = run(device=device, **options)
    train(model, optimizer, 2, device=device)
    session_of(model).save(tmp_path / "a")
    state = copy.deepcopy(optimizer.state_dict())
    fresh, other = run(device=device, **options)
    session_of(fresh).load_optimizer(tmp_path / "a")
    assert same_state(state, other.state_dict())
    assert load_file(tmp_path / "a/adapter_model.safetensors")
    wrong, _ = run(device=device, **{**options, "moment_dtype": "float32"})
    with pytest.raises(CheckpointError, match="moment_dtype"):
        session_of(wrong).load_optimizer(tmp_path / "a")
