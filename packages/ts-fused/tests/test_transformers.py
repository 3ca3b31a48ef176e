"""The modules of transformers themselves, where that package is installed."""

import platform

import pytest
import torch

from ts_core.testing import assert_bit_equal, make_tensor
from ts_fused import causal_lm_loss, rms_norm

pytestmark = pytest.mark.filterwarnings("ignore")


x86 = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="PyTorch's summation order is known on x86"
)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", exc_type=ImportError)


@x86
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_have_the_bits_of_the_modules(transformers, dtype):
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for hidden in (48, 576, 2048):
        x = make_tensor((7, hidden), dtype=dtype)
        weight = make_tensor((hidden,), dtype=dtype, seed=1)
        for module, offset in ((LlamaRMSNorm(hidden, eps=1e-5), 0.0), (Gemma2RMSNorm(hidden, eps=1e-5), 1.0)):
            module = module.to(dtype)
            with torch.no_grad():
                module.weight.copy_(weight)
                assert_bit_equal(rms_norm(x, module.weight, 1e-5, offset=offset), module(x))


def test_loss_of_a_model_with_a_soft_cap(transformers):
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=4, final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).float()
    ids = torch.randint(0, 97, (2, 9))
    parameters = list(model.parameters())
    loss = model(ids, labels=ids).loss
    want = torch.autograd.grad(loss, parameters)
    hidden = model.model(ids).last_hidden_state
    ours = causal_lm_loss(
        hidden, model.lm_head.weight, ids, softcap=config.final_logit_softcapping, chunk_size=4
    )
    got = torch.autograd.grad(ours, parameters)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-6)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
