"""PEFT on wrapped models: every kind of adapter trains, switches, saves and merges as on a plain model."""

import copy

import peft
import pytest
import torch
from test_trainer import build

import trainstream
from ts_core import registry
from ts_core.errors import ArgumentTypeError, OptionError, StateError
from ts_hf import load_model
from ts_hf.adapters import merge_adapters
from ts_quant import QuantizedTensor, dequantize_model

# PEFT uses names that transformers has renamed, and reminds of what it saves.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpointing:FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"
    ),
]
PLACES = {
    "resident": {},
    "paged": {
        "param_offload": True,
        "recompute": [0],
        "activation_offload": True,
        "min_offload_bytes": 0,
    },
}
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora dropout": {"use_dora": True, "lora_dropout": 0.2},
    "dropout": {"lora_dropout": 0.2},
    "lora bias": {"lora_bias": True},
    "all linear": {"target_modules": "all-linear"},
    "head saved": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "new tokens": {"trainable_token_indices": [3, 4]},
    "olora": {"init_lora_weights": "olora"},
}


def lora(model, name="default", **changes):
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **changes}
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings), adapter_name=name)
    torch.manual_seed(2)
    for key, p in model.named_parameters():
        if "lora_B" in key and settings.get("init_lora_weights") != "olora":
            p.data.normal_(0, 0.05)  # zeros would hide what the other factor does
    return model


def base_model(codec):
    model = build()
    if codec != "none":
        model.requires_grad_(False)
        trainstream.quantize_model(model, codec)
    return model


def decoded(model):
    """The same values without packing."""
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if isinstance(p, QuantizedTensor):
                module._parameters[name] = torch.nn.Parameter(p.dequantize().clone(), requires_grad=False)
    return model


def ids(seed):
    return torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(seed))


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model, optimizer, count=3, start=0):
    torch.manual_seed(5)
    losses = []
    for step in range(start, start + count):
        loss = model(input_ids=ids(step), labels=ids(step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits(model):
    model.eval()
    found = model(input_ids=ids(99), use_cache=False).logits
    model.train()
    return found


def twins(codec, place, folder, **changes):
    """A plain model with its optimizer, and the same wrapped; packed weights are decoded in the plain one."""
    base = base_model(codec)
    plain = lora(decoded(copy.deepcopy(base)), **changes)
    ours = lora(base, **changes)
    folder.mkdir(exist_ok=True)
    # PEFT's own arithmetic; fused layers round in other places.
    options = {"quantize": None, "kernels": False, "fused_lora": False, "disk_offload": str(folder)}
    options |= PLACES[place]
    ours, optimizer = trainstream.wrap(ours, adamw(ours), **options)
    return plain, adamw(plain), ours, optimizer


def same(ours, plain):
    torch.testing.assert_close(logits(ours), logits(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("codec", ["none", "nf4"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_saves_and_merges_as_on_a_plain_model(tmp_path, kind, codec, place):
    if kind == "olora" and codec != "none":
        with pytest.raises(StateError, match="packed"):  # it writes into the base
            lora(base_model(codec), **KINDS[kind])
        return
    plain, plain_optimizer, ours, optimizer = twins(codec, place, tmp_path / "files", **KINDS[kind])
    assert train(ours, optimizer) == pytest.approx(train(plain, plain_optimizer), rel=1e-6)
    expected = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    found = {n: p for n, p in ours.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    for name, p in found.items():
        torch.testing.assert_close(p.detach(), expected[name].detach(), rtol=1e-5, atol=1e-6, msg=name)
    ours.save_pretrained(tmp_path / "ours")
    if kind != "olora":  # that changed its base
        back = peft.PeftModel.from_pretrained(base_model(codec), tmp_path / "ours").train()
        torch.testing.assert_close(logits(back), logits(ours), rtol=1e-5, atol=1e-6)
    if kind == "lora bias":
        return  # PEFT merges it into layers that have a bias only
    trainstream.unwrap(ours)
    same(merge_adapters(ours), plain.merge_and_unload())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("codec", ["none", "nf4"])
def test_adapters_load_switch_mix_and_go_off_while_wrapped(tmp_path, codec, place):
    lora(build(), name="other", r=2).save_pretrained(tmp_path)
    plain, plain_optimizer, ours, optimizer = twins(codec, place, tmp_path / "files")
    for model, its in ((plain, plain_optimizer), (ours, optimizer)):
        train(model, its)
        model.load_adapter(tmp_path / "other", "second")
    same(ours, plain)
    before = logits(ours)
    for name in ("second", "default"):
        for model in (plain, ours):
            model.set_adapter(name)
        same(ours, plain)
        assert torch.equal(logits(ours), before) == (name == "default")
    with plain.disable_adapter(), ours.disable_adapter():
        same(ours, plain)
    assert train(ours, optimizer, 2, 3) == pytest.approx(train(plain, plain_optimizer, 2, 3), rel=1e-6)
    for model in (plain, ours):
        model.add_weighted_adapter(["default", "second"], [0.5, 0.5], "both", combination_type="cat")
        model.set_adapter("both")
    same(ours, plain)
    for model in (plain, ours):
        model.set_adapter("default")
        model.delete_adapter("second")
    same(ours, plain)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("codec", ["none", "nf4"])
def test_a_second_adapter_is_trained_after_the_first(tmp_path, codec, place):
    plain, plain_optimizer, ours, optimizer = twins(codec, place, tmp_path / "files")
    for model, its in ((plain, plain_optimizer), (ours, optimizer)):
        torch.manual_seed(4)
        model.add_adapter("two", peft.LoraConfig(r=2, target_modules=["k_proj", "q_proj"]))
        model.set_adapter("two")  # freezes the first, which gets no gradient from here on
        its.add_param_group({"params": [p for n, p in model.named_parameters() if ".two." in n]})
    assert train(ours, optimizer, 4) == pytest.approx(train(plain, plain_optimizer, 4), rel=1e-6)
    same(ours, plain)
    ours.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "two" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("place", PLACES)
def test_weights_merge_and_part_again_while_wrapped(tmp_path, place):
    plain, plain_optimizer, ours, optimizer = twins("none", place, tmp_path / "files")
    train(ours, optimizer), train(plain, plain_optimizer)
    for change in ("merge_adapter", "unmerge_adapter"):
        for model in (plain, ours):
            getattr(model, change)()
        same(ours, plain)
    assert train(ours, optimizer, 2, 3) == pytest.approx(train(plain, plain_optimizer, 2, 3), rel=1e-6)


def test_a_group_added_later_has_the_given_optimizers_defaults():
    layer = torch.nn.Linear(3, 3)
    given = torch.optim.AdamW(layer.parameters(), lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    _, optimizer = trainstream.wrap(layer, given)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    for key in ("lr", "betas", "eps", "weight_decay"):
        assert optimizer.param_groups[1][key] == given.defaults[key]


def test_packed_weights_are_merged_decoded_or_packed_again(tmp_path):
    _, _, ours, optimizer = twins("nf4", "paged", tmp_path)
    train(ours, optimizer)
    with pytest.raises(StateError, match="unwrap"):
        merge_adapters(ours)
    trainstream.unwrap(ours)
    before = logits(ours)
    with pytest.raises(StateError, match="packed"):
        copy.deepcopy(ours).merge_and_unload()  # PEFT's own cannot; it names the reason and changes nothing
    same_model = merge_adapters(copy.deepcopy(ours))
    torch.testing.assert_close(logits(same_model), before, rtol=1e-5, atol=1e-6)
    assert not isinstance(same_model.model.layers[0].self_attn.q_proj.weight, QuantizedTensor)
    assert isinstance(same_model.model.layers[0].self_attn.k_proj.weight, QuantizedTensor)
    again = merge_adapters(ours, repack=True)
    weight = again.model.layers[0].self_attn.q_proj.weight
    assert isinstance(weight, QuantizedTensor)
    exact = same_model.model.layers[0].self_attn.q_proj.weight.detach()
    assert torch.equal(weight.dequantize(), trainstream.quantize(exact, "nf4").dequantize())
    assert not any("lora" in name for name, _ in again.named_parameters())
    with pytest.raises(ArgumentTypeError, match="get_peft_model"):
        merge_adapters(again)


@pytest.mark.parametrize("kind", ["lora", "dora", "lora bias"])
@pytest.mark.parametrize("call", ["merge_and_unload", "merge_adapter"])
@pytest.mark.parametrize("safe", [False, True])
def test_pefts_own_merge_into_packed_weights_names_ours_and_changes_nothing(kind, call, safe):
    model = lora(base_model("nf4"), **KINDS[kind])
    before = logits(model)
    with pytest.raises(StateError, match=r"ts_hf\.merge_adapters\(model\)"):
        getattr(model, call)(safe_merge=safe)
    assert not model.base_model.model.model.layers[0].self_attn.q_proj.merged
    assert torch.equal(logits(model), before)


def test_other_kinds_of_adapters_name_it_too():
    changes = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    for config in (
        peft.LoHaConfig(**changes), peft.LoKrConfig(**changes), peft.VeraConfig(**changes),
        peft.IA3Config(**changes, feedforward_modules=["down_proj"]), peft.OFTConfig(**changes),
    ):  # fmt: skip
        model = peft.get_peft_model(base_model("nf4"), config)
        with pytest.raises((StateError, ArgumentTypeError), match=r"ts_hf\.merge_adapters\(model\)"):
            model.merge_and_unload()


def test_what_peft_saves_of_a_packed_base_loads_on_a_plain_one(tmp_path):
    model = lora(base_model("nf4"))
    model.save_pretrained(tmp_path)
    with pytest.raises(StateError, match=r"ts_hf\.save_model\(model, folder\)"):
        model.get_base_model().save_pretrained(tmp_path / "base")
    plain = build().requires_grad_(False)
    trainstream.quantize_model(plain, "nf4")
    dequantize_model(plain)
    again = peft.PeftModel.from_pretrained(plain, tmp_path)
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-6)


def test_a_format_that_is_not_written_here_is_not_packed_again(monkeypatch):
    model = lora(base_model("nf4"))
    codec = type(registry.codec("nf4"))
    monkeypatch.setattr(codec, "encodes", False)
    with pytest.raises(OptionError, match="repack"):
        merge_adapters(model, repack=True)
    assert isinstance(
        model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight, QuantizedTensor
    )


def test_factors_of_load_model_are_where_adapters_start(tmp_path):
    """What load_model(error_rank=) kept, wrap() puts into the adapters, and nothing else changes."""
    build().save_pretrained(tmp_path)
    exact, distances = logits(build()), {}
    for rank in (0, 8):
        model = load_model(tmp_path, "nf4", "fp32", error_rank=rank)
        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        packed = {part: tensor.clone() for part, tensor in layer.base_layer.weight.packed.items()}
        model, _ = trainstream.wrap(model, adamw(model))
        assert all(torch.equal(layer.base_layer.weight.packed[part], packed[part]) for part in packed)
        assert bool(layer.lora_B["default"].weight.any()) == bool(rank)
        if rank:
            lost = (
                build().model.layers[0].self_attn.q_proj.weight.detach()
                - layer.base_layer.weight.dequantize()
            )
            learned = layer.get_delta_weight("default").detach()
            assert float((lost - learned).square().sum()) < 0.5 * float(lost.square().sum())
        distances[rank] = float((logits(model) - exact).square().mean())
    assert distances[8] < 0.5 * distances[0]


def test_adapters_start_from_the_error_of_packing(tmp_path):
    """The LoftQ start: nearer to the unpacked model than packing alone."""
    exact = logits(build())

    def distance(**options):
        model = build()
        model.requires_grad_(False)
        torch.manual_seed(1)
        config = peft.LoraConfig(r=8, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
        model, _ = trainstream.wrap(model, adamw(model), quantize="nf4", **options)
        return float((logits(model) - exact).square().mean())

    assert distance(error_rank=8) < 0.5 * distance()
    # PEFT's own writes the rounded base into the model: not into one that is packed.
    packed = build()
    packed.requires_grad_(False)
    trainstream.quantize_model(packed, "nf4")
    with pytest.raises((StateError, ValueError, ImportError)):
        peft.get_peft_model(
            packed,
            peft.LoraConfig(
                target_modules=["q_proj"],
                init_lora_weights="loftq",
                loftq_config=peft.LoftQConfig(loftq_bits=4),
            ),
        )
