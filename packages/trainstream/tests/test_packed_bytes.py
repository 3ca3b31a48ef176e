"""A packed base keeps its bytes: adapters saved and loaded, a Trainer resumed, paged or not."""

import copy

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from test_trainer import build, lora
from test_trainer_plan import trainer

import trainstream
from ts_core import registry
from ts_core.testing import assert_bit_equal
from ts_quant import QuantizedTensor, quantize_model

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]
CODECS = [name for name in registry.codecs() if getattr(registry.codec(name), "encodes", False)]
PACKINGS = [(name, False) for name in CODECS] + [("nf4", True), ("int8", True)]
RESUMED = [("mxfp8", False), ("fp8_row", False), ("nvfp4", False), ("nf4", True)]  # the slow one


def base(packing, seed=0):
    codec, double = packing
    model = build(seed).requires_grad_(False)
    assert quantize_model(model, codec, double_quant=double)["tensors"]
    return model


def bytes_of(model):
    """Packed bytes by the place of the weight, adapters or not."""
    return {
        (name.removeprefix("base_model.model.").replace(".base_layer", ""), part): tensor.detach().clone()
        for name, weight in model.named_parameters()
        if isinstance(weight, QuantizedTensor)
        for part, tensor in weight.packed.items()
    }


def same(one, other):
    assert one
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert_bit_equal(other[key], tensor)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("wrapped", [False, True])
def test_adapters_are_saved_and_loaded_beside_it(packing, wrapped, tmp_path):
    """By PEFT's own functions: into the model, and from a folder onto a base that is packed again."""
    model = lora(base(packing), init_lora_weights=False)
    before = bytes_of(model)
    if wrapped:
        options = {"param_offload": True, "disk_offload": str(tmp_path)}
        model, _ = trainstream.wrap(model, device="cpu", **options)
    adapter = {n: torch.full_like(t, 0.25) for n, t in get_peft_model_state_dict(model).items()}
    assert not set_peft_model_state_dict(model, adapter).unexpected_keys
    assert all(bool((p == 0.25).all()) for n, p in model.named_parameters() if "lora_" in n)
    same(before, bytes_of(model))
    model.save_pretrained(tmp_path / "adapter")
    same(before, bytes_of(model))
    if wrapped:
        trainstream.unwrap(model)
        same(before, bytes_of(model))
    again = PeftModel.from_pretrained(base(packing), tmp_path / "adapter")
    same(before, bytes_of(again))
    ids = torch.arange(12).view(2, 6)
    assert_bit_equal(again(input_ids=ids).logits.detach(), model.eval()(input_ids=ids).logits.detach())


@pytest.mark.parametrize("packing", RESUMED, ids=str)
def test_a_trainer_resumes_beside_it(packing, tmp_path):
    """The base was packed before, and is neither written nor packed again; both runs end alike."""
    first = trainer(tmp_path, {}, lora(base(packing), init_lora_weights=False))
    before = bytes_of(first.model)
    first.train()
    same(before, bytes_of(first.model))
    paged = {"param_offload": True, "disk_offload": str(tmp_path)}
    again = trainer(tmp_path, paged, lora(base(packing)))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    same(before, bytes_of(again.model))
    expected = dict(first.model.named_parameters())
    for name, parameter in again.model.named_parameters():
        if not isinstance(parameter, QuantizedTensor):
            assert torch.equal(parameter.detach(), expected[name].detach()), name
    trainstream.unwrap(again.model)
    same(before, bytes_of(again.model))


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_state_of_a_wrapped_model_goes_in_and_out(packing, tmp_path):
    """Whole, and in part: only what is named is read."""
    model = lora(base(packing), init_lora_weights=False)
    before = bytes_of(model)
    model, _ = trainstream.wrap(model, device="cpu", param_offload=True, disk_offload=str(tmp_path))
    state = copy.deepcopy(model.state_dict())
    other = lora(base(packing, seed=1), init_lora_weights=False)
    other, _ = trainstream.wrap(other, device="cpu", param_offload=True, disk_offload=str(tmp_path))
    own = bytes_of(other)
    other.load_state_dict({n: t for n, t in state.items() if "lora_" in n}, strict=False)
    same(own, bytes_of(other))
    other.load_state_dict(state)
    same(before, bytes_of(other))
    for one in (model, other):
        trainstream.unwrap(one)
