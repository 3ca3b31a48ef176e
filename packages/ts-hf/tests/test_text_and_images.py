"""Models that take text and images are streamed, packed and saved as those that take text alone."""

import peft
import pytest
import torch
import transformers
from conftest import tiny_config

from ts_hf import load_model, save_model
from ts_quant import QuantizedTensor

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
IMAGE = 96  # the token in whose place an image's features are put


def llava():
    vision = transformers.CLIPVisionConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16,
        patch_size=8, projection_dim=16,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=tiny_config("llama"), image_token_index=IMAGE, image_seq_length=4
    )
    return transformers.LlavaForConditionalGeneration(config), {"pixel_values": torch.randn(1, 3, 16, 16)}


def qwen2_vl():
    text = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    return transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
    ), {}


@pytest.fixture(params=[llava, qwen2_vl], ids=["llava", "qwen2_vl"])
def saved(request, tmp_path):
    torch.manual_seed(0)
    model, images = request.param()
    model.float().eval().save_pretrained(tmp_path / "model")
    ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(1))
    if images:
        ids[0, 2:6] = IMAGE
    return model, tmp_path / "model", {"input_ids": ids, **images}


def test_it_is_what_from_pretrained_loads(saved, tmp_path):
    plain, folder, batch = saved
    model = load_model(folder, quantize=None, dtype="fp32")
    assert type(model) is type(plain)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)
    assert model.trainstream_receipt["unused"] == []
    save_model(model, tmp_path / "again")
    again = type(plain).from_pretrained(tmp_path / "again")
    for (name, p), q in zip(again.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_the_language_model_is_packed_and_adapters_train(saved):
    plain, folder, batch = saved
    model = load_model(folder, quantize="nf4", dtype="fp32")
    packed = [n for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)]
    assert packed
    assert all("language_model.layers" in name for name in packed)
    matrices = [n for n, p in plain.named_parameters() if "language_model.layers" in n and p.dim() == 2]
    assert sorted(packed) == sorted(matrices)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-2)
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, -100)
    losses = []
    for _ in range(6):
        loss = adapted(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_random_weights_and_files(saved, tmp_path):
    plain, folder, batch = saved
    drawn = load_model(folder, random_weights=True, dtype="fp32")
    assert type(drawn) is type(plain)
    in_files = load_model(folder, quantize=None, dtype="fp32", disk_offload=tmp_path)
    with torch.no_grad():
        assert torch.equal(in_files(**batch).logits, plain(**batch).logits)
        assert bool(drawn(**batch).logits.isfinite().all())
    changed = load_model(folder, dtype="fp32", text_config={"rms_norm_eps": 0.5})
    assert changed.config.text_config.rms_norm_eps == 0.5
