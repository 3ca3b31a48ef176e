"""A model of two stacks: that of the language model is packed and paged, before packing and after."""

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import trainstream
from ts_core.blocks import parameter_bytes
from ts_core.testing import devices


def tiny_llava():
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
        projection_dim=32,
    )
    text = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=96, image_seq_length=4)
    return LlavaForConditionalGeneration(config).requires_grad_(False)


@pytest.mark.parametrize("device", devices())
def test_packed_text_blocks_are_still_the_stack(device):
    model = tiny_llava().to(device)
    layers = list(model.model.language_model.layers)
    assert trainstream.find_blocks(model) == layers
    trainstream.quantize_model(model, "nf4")
    text = sum(parameter_bytes(p) for layer in layers for p in layer.parameters())
    assert text < sum(parameter_bytes(p) for p in model.model.vision_tower.parameters())
    assert trainstream.find_blocks(model) == layers
    inputs = {
        "input_ids": torch.tensor([[1, 2, 96, 96, 96, 96, 5]], device=device),
        "pixel_values": torch.randn(1, 3, 16, 16, device=device),
    }
    expected = model(**inputs).logits
    # The fused kernels of a GPU round once where the modules' own code rounds more often.
    model, _ = trainstream.wrap(model, param_offload=True, kernels=False, fused_lora=False)
    paged = [row.name for row in model._trainstream_session.plan.blocks if row.kind == "block"]
    assert paged == [f"model.language_model.layers.{index}" for index in range(3)]
    assert torch.equal(model(**inputs).logits, expected)
