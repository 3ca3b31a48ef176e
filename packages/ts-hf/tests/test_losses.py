"""The loss from hidden states against the model's own, and the divisor of accumulated losses."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import tiny_config, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ts_core.errors import ArgumentError, ArgumentTypeError, OptionError
from ts_hf.losses import backbone, causal_lm_loss_for, count_items, head_of

# PEFT asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

KINDS = ["llama", "qwen2", "gemma2", "cohere", "granite", "gpt2", "phi3"]


def ours(model, ids, labels, **options):
    return causal_lm_loss_for(model, backbone(model)(input_ids=ids).last_hidden_state, labels, **options)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(model, reference, tolerance=1e-6):
    mine, theirs = gradients(model), gradients(reference)
    assert mine.keys() == theirs.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(
            mine[name], grad, rtol=1e-5, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_models_own_loss_and_gradients(kind, chunk_size, ids):
    model = tiny_model(kind)
    # Large logits, so that a cap or a scale that is left out shows.
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30)
    reference = copy.deepcopy(model)
    labels = ids.clone()
    labels[0, :5] = -100
    expected = reference(ids, labels=labels).loss
    expected.backward()
    loss = ours(model, ids, labels, chunk_size=chunk_size)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert_same_gradients(model, reference, tolerance=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "scale", "cap"),
    [
        ("llama", {}, 1.0, None),
        ("gemma2", {}, 1.0, 3.0),
        ("gemma2", {"final_logit_softcapping": None}, 1.0, None),
        ("gemma3", {}, 1.0, None),
        ("cohere", {}, 0.3, None),
        ("granite", {}, 0.25, None),
        ("mixtral", {}, 1.0, None),
        ("gpt2", {}, 1.0, None),
    ],
)
def test_what_the_config_does_to_the_logits(kind, changes, scale, cap):
    head = head_of(tiny_model(kind, **changes))
    assert (head.scale, head.soft_cap, head.vocabulary) == (scale, cap, 97)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_temperature", 2.0),
        ("lm_head_scale", 0.5),
        ("logits_scaling", 2.0),  # of a Llama: divide or multiply?
        ("output_multiplier", 3.0),
        ("my_logit_softcap", 30.0),
        ("logits_multiplier", [1.0, 2.0]),
    ],
)
def test_unknown_changes_of_the_logits_are_refused_by_name(name, value, ids):
    model = tiny_model()
    setattr(model.config, name, value)
    with pytest.raises(OptionError, match=name):
        ours(model, ids, ids)


@pytest.mark.parametrize(
    "name", ["attn_logit_softcapping", "router_logit_scale", "logit_scale_init_value", "lm_head_scale"]
)
def test_settings_that_do_not_touch_the_logits_pass(name, ids):
    model = tiny_model()
    setattr(model.config, name, 1.0 if name == "lm_head_scale" else 7.0)
    assert head_of(model).scale == 1.0


@given(
    scale=st.floats(0.1, 4.0),
    cap=st.one_of(st.none(), st.floats(0.5, 30.0)),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_formula_against_float64(scale, cap, bias, seed):
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model("cohere", logit_scale=scale)
    model.config.final_logit_softcapping = cap
    model.lm_head = nn.Linear(32, 97, bias=bias)
    hidden = torch.randn(2, 5, 32, generator=generator, requires_grad=True)
    labels = torch.randint(0, 97, (2, 5), generator=generator)
    labels[0, 2] = -100
    loss = causal_lm_loss_for(model, hidden, labels, chunk_size=3)
    (grad,) = torch.autograd.grad(loss, hidden)
    exact = hidden.detach().double().requires_grad_()
    logits = exact[:, :-1] @ model.lm_head.weight.double().t()
    logits = (logits + model.lm_head.bias.double() if bias else logits) * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    want = F.cross_entropy(logits.reshape(-1, 97), labels[:, 1:].reshape(-1))
    (want_grad,) = torch.autograd.grad(want, exact)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.double(), want_grad, rtol=1e-4, atol=1e-6)


# -- divisor of accumulated losses --------------------------------------------------------------------------


def test_count_is_taken_after_the_shift():
    assert count_items(torch.zeros(4, 9, dtype=torch.long)) == 32
    assert count_items(torch.tensor([5, 6, -100, 7])) == 2
    assert count_items(torch.zeros(0, 9, dtype=torch.long)) == 0
    assert count_items(torch.zeros(3, 1, dtype=torch.long)) == 0
    with pytest.raises(ArgumentTypeError):
        count_items(torch.zeros(2, 3))
    with pytest.raises(ArgumentTypeError):
        count_items([[1]])
    with pytest.raises(ArgumentError):
        count_items(torch.tensor(1))


@given(
    st.lists(st.lists(st.sampled_from([-100, -1, 0, 5]), min_size=4, max_size=4), min_size=1, max_size=5),
    st.sampled_from([-100, -1, 0]),
)
def test_count_items_counts(rows, ignore):
    assert count_items(torch.tensor(rows), ignore) == sum(
        label != ignore for row in rows for label in row[1:]
    )


def accumulated_rows():
    """Three rows of nine tokens with 1, 7 and 3 trailing labels, drawn right after the model."""
    model = tiny_model(bos_token_id=None, eos_token_id=None, pad_token_id=None).float()
    rows = [torch.randint(0, 97, (1, 9)) for _ in range(3)]
    labels = []
    for row, count in zip(rows, (1, 7, 3), strict=True):
        labels.append(torch.full_like(row, -100))
        labels[-1][:, -count:] = row[:, -count:]
    return model, rows, labels


def total_norm(model):
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def test_gradients_of_an_accumulated_window_are_those_of_one_batch():
    model, rows, labels = accumulated_rows()
    window = sum(count_items(each) for each in labels)
    assert window == 11
    logged = 0.0
    for row, label in zip(rows, labels, strict=True):
        loss = ours(model, row, label, num_items=window, chunk_size=4)
        loss.backward()
        logged += loss.item()
    assert abs(total_norm(model) - 2.67313) < 2e-5
    accumulated = gradients(model)
    model.zero_grad()
    whole = ours(model, torch.cat(rows), torch.cat(labels), num_items=torch.tensor(window))
    whole.backward()
    assert abs(whole.item() - logged) < 1e-5
    for name, grad in gradients(model).items():
        torch.testing.assert_close(accumulated[name], grad, rtol=1e-5, atol=1e-6)
    # The mean of the means is another number: 3.60046.
    model.zero_grad()
    for row, label in zip(rows, labels, strict=True):
        (ours(model, row, label) / 3).backward()
    assert abs(total_norm(model) - 3.60046) < 2e-5


def test_every_position_labelled_divides_by_the_shifted_count():
    model, _, _ = accumulated_rows()
    ids = torch.randint(0, 97, (4, 9))
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].reshape(-1, 97)
        want = F.cross_entropy(logits, ids[:, 1:].reshape(-1), reduction="sum") / 32
        assert abs(ours(model, ids, ids) - want) < 1e-5
        assert abs(ours(model, ids, ids, num_items=count_items(ids)) - want) < 1e-5


# -- nothing to learn ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 4, 9, 1000])
@pytest.mark.parametrize("num_items", [None, 5, 0, torch.tensor(5)])
@pytest.mark.parametrize("case", ["all_masked", "only_position_0", "length_1", "empty_batch"])
@pytest.mark.parametrize("plain", [True, False])
def test_no_label_gives_zero_loss_and_zero_gradients(case, num_items, chunk_size, plain):
    model = tiny_model()
    if not plain:
        model.lm_head.register_forward_hook(lambda module, args, output: output)
    shape = {"length_1": (2, 1), "empty_batch": (0, 9)}.get(case, (2, 9))
    ids = torch.randint(0, 97, shape)
    labels = torch.full_like(ids, -100)
    if case == "only_position_0":
        labels[:, 0] = 3
    hidden = torch.randn(*shape, 32, requires_grad=True)
    loss = causal_lm_loss_for(model, hidden, labels, num_items=num_items, chunk_size=chunk_size)
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    for name, grad in gradients(model).items():
        assert torch.equal(grad, torch.zeros_like(grad)), name
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert all(state["exp_avg"].isfinite().all() for state in optimizer.state.values())


@pytest.mark.parametrize("counted", [True, False])
def test_one_masked_micro_batch_in_a_window(counted):
    model = tiny_model()
    ids = torch.randint(0, 97, (4, 9))
    labels = ids.clone()
    labels[1] = -100
    window = count_items(labels)
    total = sum(
        ours(model, ids[i : i + 1], labels[i : i + 1], num_items=window if counted else None).item()
        for i in range(4)
    )
    with torch.no_grad():
        if counted:
            assert abs(total - model(ids, labels=labels).loss) < 1e-5
        else:
            want = sum(model(ids[i : i + 1], labels=labels[i : i + 1]).loss.item() for i in (0, 2, 3))
            assert abs(total - want) < 1e-5


@pytest.mark.parametrize("chunk_size", [1, 4, 9, 1000])
def test_only_the_last_label_of_a_long_row(chunk_size):
    model = tiny_model()
    reference = copy.deepcopy(model)
    ids = torch.randint(0, 97, (1, 64))
    labels = torch.full_like(ids, -100)
    labels[0, -1] = 5
    ours(model, ids, labels, chunk_size=chunk_size).backward()
    F.cross_entropy(reference(ids).logits[:, -2], labels[:, -1]).backward()
    assert_same_gradients(model, reference)
    assert total_norm(model) > 0


@pytest.mark.parametrize("ignore", [0, -1])
def test_other_ignore_indices(ignore, ids):
    model = tiny_model()
    labels = ids.clone()
    labels[:, 3:6] = ignore
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].reshape(-1, 97)
        want = F.cross_entropy(logits, labels[:, 1:].reshape(-1), ignore_index=ignore)
        assert abs(ours(model, ids, labels, ignore_index=ignore) - want) < 1e-5


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("label", [97, -5, 10**12])
def test_labels_outside_the_vocabulary(label, plain, ids):
    model = tiny_model()
    if not plain:
        model.lm_head.register_forward_hook(lambda module, args, output: output)
    labels = ids.clone()
    labels[0, 4] = label
    with pytest.raises(ArgumentError, match=f"0 <= label < 97, or -100, given {label}"):
        ours(model, ids, labels)


def test_bad_arguments(ids):
    model = tiny_model()
    hidden = torch.zeros(2, 11, 32)
    with pytest.raises(ArgumentTypeError, match="labels"):
        causal_lm_loss_for(model, hidden, ids.float())
    for labels in (ids[:, :-1], ids[0]):
        with pytest.raises(ArgumentError, match="labels"):
            causal_lm_loss_for(model, hidden, labels)
    with pytest.raises(ArgumentError, match="num_items"):
        causal_lm_loss_for(model, hidden, ids, num_items=-1)
    with pytest.raises(ArgumentError, match="num_items"):
        causal_lm_loss_for(model, hidden, ids, num_items=0)
    with pytest.raises(OptionError, match="chunk_size"):
        causal_lm_loss_for(model, hidden, ids, chunk_size=0)


# -- what is around the head --------------------------------------------------------------------------------


def test_models_with_layers_between_backbone_and_head_are_refused(ids):
    bert = transformers.BertLMHeadModel(
        transformers.BertConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, is_decoder=True
        )
    )
    with pytest.raises(OptionError, match="part of a larger module"):
        head_of(bert)
    model = tiny_model()
    model.projection = nn.Linear(32, 32)
    with pytest.raises(OptionError, match="'projection'"):
        head_of(model)


def test_models_without_backbone_or_head():
    with pytest.raises(OptionError, match="base_model_prefix"):
        backbone(nn.Linear(2, 2))
    with pytest.raises(OptionError, match="no output head"):
        head_of(transformers.LlamaModel(tiny_config()))


def lora(model, **options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    )
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    "options", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}]
)
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*tied.*:UserWarning")
def test_inside_peft(kind, options, ids):
    model = lora(tiny_model(kind, tie_word_embeddings=False), **options)
    reference = copy.deepcopy(model)
    expected = reference(input_ids=ids, labels=ids).loss
    expected.backward()
    loss = ours(model, ids, ids, chunk_size=4)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    assert_same_gradients(model, reference)
    assert backbone(model) is model.get_base_model().model


def test_prompt_learning_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(OptionError, match="PromptTuningConfig"):
        backbone(peft.get_peft_model(tiny_model(), config))


def test_packed_base_trains_like_its_decoded_copy(tmp_path, ids):
    from ts_hf import load_model

    tiny_model().save_pretrained(tmp_path)
    packed = load_model(tmp_path, quantize="nf4", dtype="fp32")
    decoded = load_model(tmp_path, quantize=None, dtype="fp32")
    with torch.no_grad():
        for (name, mine), (_, plain) in zip(
            packed.named_parameters(), decoded.named_parameters(), strict=True
        ):
            if hasattr(mine, "dequantize") and hasattr(mine, "packed_bytes"):
                plain.copy_(mine.dequantize())
                assert plain.isfinite().all(), name
    packed, decoded = packed.requires_grad_(False), decoded.requires_grad_(False)
    torch.manual_seed(0)
    one = lora(packed)
    torch.manual_seed(0)
    two = lora(decoded)
    ours(one, ids, ids).backward()
    ours(two, ids, ids).backward()
    assert_same_gradients(one, two)
    assert math.isfinite(total_norm(one))


def test_bf16_model(ids):
    model = tiny_model().to(torch.bfloat16)
    with torch.no_grad():
        want = model.float()(ids, labels=ids).loss
        model.to(torch.bfloat16)
        got = ours(model, ids, ids)
    assert got.dtype == torch.float32
    assert abs(got - want) < 0.02


def test_float64_model(ids):
    model = tiny_model().double()
    with torch.no_grad():
        torch.testing.assert_close(
            ours(model, ids, ids), model(ids, labels=ids).loss.float(), rtol=1e-6, atol=1e-6
        )


@given(layers=st.integers(1, 3), heads=st.integers(1, 3), length=st.integers(1, 7), tied=st.booleans())
def test_the_backbone_is_the_model_without_its_head(layers, heads, length, tied):
    config = transformers.LlamaConfig(
        vocab_size=19,
        hidden_size=4 * heads,
        intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(length)[None] % 19
    with torch.no_grad():
        hidden = backbone(model)(input_ids=ids).last_hidden_state
        assert torch.equal(model.lm_head(hidden), model(ids).logits)


@pytest.mark.parametrize("kind", ["Bart", "BartForCausalLM", "Llama with a loss of its own"])
def test_models_that_do_not_predict_the_next_token_are_refused(kind):
    if kind.startswith("Llama"):
        model = tiny_model()
        model.loss_function = lambda logits, labels, **_: logits.sum()
    else:
        small = {
            f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")
        }
        config = transformers.BartConfig(
            vocab_size=97, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, **small
        )
        classes = {"Bart": transformers.BartForConditionalGeneration}
        model = classes.get(kind, transformers.BartForCausalLM)(config)
    with pytest.raises(OptionError, match="next tokens"):
        head_of(model)
