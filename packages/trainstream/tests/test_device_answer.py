"""A model says where it computes, wherever its first Parameter is."""

import copy
import pickle

import peft
import pytest
import torch
from conftest import tiny_llama
from transformers import LlamaForCausalLM

import trainstream
from trainstream._device import answer_with

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@pytest.mark.parametrize("lora", [False, True])
def test_the_device_is_the_one_asked_for_and_copies_are_of_the_plain_class(lora):
    model = tiny_llama()
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    inner = model.get_base_model() if lora else model
    elsewhere = torch.device("meta")
    undo = answer_with(model, elsewhere)
    assert model.device == inner.device == inner.model.device == elsewhere
    assert isinstance(inner, LlamaForCausalLM)
    assert type(inner).__name__ == "LlamaForCausalLM"
    ids = torch.arange(5)[None]
    for other in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        assert type(other) is LlamaForCausalLM
        assert other.device == torch.device("cpu")
        assert torch.equal(other(input_ids=ids).logits, inner(input_ids=ids).logits)
    assert inner.device == elsewhere  # copying put it back
    for step in undo:
        step()
    assert type(inner) is LlamaForCausalLM
    assert model.device == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_paged_embedding_does_not_move_the_model_to_the_host():
    model, _ = trainstream.wrap(tiny_llama(), device="cuda", param_offload=True)
    session = model._trainstream_session
    assert model.device.type == "cuda"
    assert session.plan.device == "cuda:0"
    trainstream.unwrap(model)
