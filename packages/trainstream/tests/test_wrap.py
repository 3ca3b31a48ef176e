import copy
import json
import pickle

import peft
import pytest
import torch
from conftest import tiny_llama, toy, train, twin
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trainstream
import ts_quant
from trainstream._staging import Followers
from ts_core.errors import ArgumentTypeError, DoesNotFitError, OptionError, StateError
from ts_core.plan import Plan
from ts_core.testing import devices
from ts_optim import OffloadAdamW

# PEFT still reads the old name of a property that transformers renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


def batches(count=4, device="cpu"):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 97, (2, 9), generator=generator).to(device) for _ in range(count)]


def assert_same(model, oracle, rtol=1e-5, atol=1e-6):
    for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("device", devices())
def test_training_equals_the_unwrapped_model(device):
    model = tiny_llama().to(device)
    oracle = twin(model)
    expected = train(oracle, torch.optim.AdamW(oracle.parameters(), **ADAMW), batches(device=device))
    model, optimizer = trainstream.wrap(model, torch.optim.AdamW(model.parameters(), **ADAMW))
    assert isinstance(optimizer, OffloadAdamW)
    losses = train(model, optimizer, batches(device=device))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=1e-6)
    assert_same(model, oracle)


@given(depth=st.integers(0, 4), width=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_any_module_trains_as_before(depth, width, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)], nn.Linear(width, 3))
    oracle = twin(model)
    ours, optimizer = trainstream.wrap(model, torch.optim.AdamW(model.parameters(), **ADAMW))
    assert ours is model
    reference = torch.optim.AdamW(oracle.parameters(), **ADAMW)
    x = torch.randn(5, width)
    for _ in range(3):
        for net, opt in ((model, optimizer), (oracle, reference)):
            opt.zero_grad()
            net(x).square().sum().backward()
            opt.step()
    assert_same(model, oracle)
    report = trainstream.memory_report(model)
    assert report["params"]["total"] == sum(p.numel() for p in oracle.parameters())
    assert report["tiers"]["host"] == 8 * report["params"]["total"]
    assert trainstream.unwrap(model) is model
    assert_same(model, oracle)


def test_forward_and_gradients_are_bit_identical(llama, ids):
    oracle = twin(llama)
    model, _ = trainstream.wrap(llama)
    for net in (model, oracle):
        net(input_ids=ids, labels=ids).loss.backward()
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_groups_and_state_are_carried_over(ids):
    model = tiny_llama()
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    stock = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 1e-3}], lr=1e-2
    )
    train(model, stock, batches(2))
    oracle = twin(model)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in oracle.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in oracle.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 1e-3},
        ],
        lr=1e-2,
    )
    reference.load_state_dict(stock.state_dict())
    model, optimizer = trainstream.wrap(model, stock)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3]
    train(model, optimizer, batches(3))
    train(oracle, reference, batches(3))
    assert_same(model, oracle)


@pytest.mark.parametrize("fused", [False, True])
def test_the_state_of_another_optimizer_follows_its_parameters(fused):
    model = toy()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True, fused=fused)
    model(torch.randn(3, 16)).sum().backward()
    optimizer.step()
    parameter = next(model.parameters())
    entry = optimizer.state[parameter]
    moved = Followers(optimizer)(parameter, torch.device("meta"))
    assert all(where is entry and value.device.type == "meta" for where, _, value in moved)
    expected = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"} | ({"step"} if fused else set())
    assert {key for _, key, _ in moved} == expected
    assert Followers(optimizer)(parameter, torch.device("cpu")) == []
    assert Followers(optimizer)(nn.Parameter(torch.zeros(1)), torch.device("meta")) == []
    assert Followers(None)(parameter, torch.device("meta")) == []
    ours = OffloadAdamW(model.parameters())
    ours.step()
    assert Followers(ours)(parameter, torch.device("meta")) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, fused=True),
    ],
)
def test_another_optimizer_goes_on_after_its_weights_have_moved(make):
    model = toy().cuda()
    optimizer = make(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(3, 16, device="cuda")).sum().backward()
        optimizer.step()

    step()
    trainstream.wrap(model, optimizer, param_offload=True)
    step()
    trainstream.unwrap(model)
    step()
    assert all(p.is_cuda for p in model.parameters())


def test_a_scheduler_made_before_wrap_still_steers():
    model = toy()
    stock = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(stock, lambda step: 0.5**step)
    model, optimizer = trainstream.wrap(model, stock)
    model(torch.randn(3, 16)).sum().backward()
    optimizer.step()
    scheduler.step()  # without a warning that no step came before it
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, maximize=True),
        lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    ],
)
def test_other_optimizers_are_kept_and_said_so(make):
    model = toy()
    stock = make(model.parameters())
    model, optimizer = trainstream.wrap(model, stock)
    assert optimizer is stock
    assert any("kept as it is" in line for line in trainstream.memory_report(model)["events"])
    model(torch.randn(3, 16)).sum().backward()
    optimizer.step()
    assert trainstream.memory_report(model)["plan"]["history"][0]["step"] == 1
    with pytest.raises(OptionError, match="max_grad_norm"):
        trainstream.wrap(trainstream.unwrap(model), stock, max_grad_norm=1.0)


def test_adam_without_decay_is_taken_over():
    model = toy()
    oracle = twin(model)
    model, optimizer = trainstream.wrap(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    assert isinstance(optimizer, OffloadAdamW)
    reference = torch.optim.Adam(oracle.parameters(), lr=1e-2)
    x = torch.randn(3, 16)
    for _ in range(3):
        for net, opt in ((model, optimizer), (oracle, reference)):
            opt.zero_grad()
            net(x).square().sum().backward()
            opt.step()
    assert_same(model, oracle)


def test_clipping_equals_clip_grad_norm():
    model = toy()
    oracle = twin(model)
    model, optimizer = trainstream.wrap(
        model, torch.optim.AdamW(model.parameters(), **ADAMW), max_grad_norm=0.01
    )
    reference = torch.optim.AdamW(oracle.parameters(), **ADAMW)
    x = torch.randn(3, 16)
    for _ in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        oracle(x).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.01)
        reference.step()
        torch.testing.assert_close(torch.as_tensor(float(optimizer.last_grad_norm)), norm)
    assert_same(model, oracle)


def lora(model, dropout=0.0):
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=["q_proj", "down_proj"])
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("codec", ["int8", "nf4"])
def test_lora_on_a_quantized_base_trains_on_the_decoded_weights(codec, device):
    model = lora(tiny_llama())
    oracle = twin(model)
    for module in oracle.modules():
        inside = isinstance(module, nn.Linear) and 97 not in (module.in_features, module.out_features)
        if inside and not module.weight.requires_grad:
            module.weight.data = ts_quant.dequantize(ts_quant.quantize(module.weight.data, codec))
    oracle = oracle.to(device)
    model, optimizer = trainstream.wrap(model, None, lr=1e-2, quantize=codec, device=device)
    base = model.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight
    assert isinstance(base, ts_quant.QuantizedTensor)
    assert base.codec == codec
    assert base.device.type == device
    reference = torch.optim.AdamW([p for p in oracle.parameters() if p.requires_grad], lr=1e-2)
    losses = train(model, optimizer, batches(device=device))
    expected = train(oracle, reference, batches(device=device))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=2e-5, atol=2e-5)
    assert trainstream.memory_report(model)["params"]["quantize"] == codec


def test_quantizing_a_trained_weight_is_refused_before_anything_changes():
    model = toy()
    for p in model.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW([{"params": list(model[0].parameters())}], lr=0.1)
    model[0][0].weight.requires_grad_(True)
    before = {name: p.clone() for name, p in model.named_parameters()}
    trainstream.wrap(model, optimizer, quantize="nf4")  # the trained weight is not quantized, the others are
    assert not isinstance(model[0][0].weight, ts_quant.QuantizedTensor)
    assert torch.equal(model[0][0].weight, before["0.0.weight"])
    assert isinstance(model[1][0].weight, ts_quant.QuantizedTensor)


def test_report_is_plain_data_and_adds_up(llama):
    oracle_bytes = sum(p.numel() * 4 for p in llama.parameters())
    oracle_bytes += sum(b.numel() * b.element_size() for b in llama.buffers())
    model, optimizer = trainstream.wrap(llama)
    train(model, optimizer, batches(2))
    optimizer.zero_grad(set_to_none=True)
    report = json.loads(json.dumps(trainstream.memory_report(model)))
    assert {"events", "params", "plan", "experts", "tiers", "moved", "times", "blocks"} <= set(report)
    assert report["params"]["paged_blocks"] == 0
    assert report["experts"] == {"copied": 0}
    assert report["tiers"]["device"] == oracle_bytes
    assert report["tiers"]["host"] == 8 * report["params"]["trainable"]
    assert len(report["plan"]["history"]) == 2
    assert sum(row["parameters"] for row in report["blocks"]) == report["params"]["total"]
    kinds = [row["kind"] for row in report["blocks"]]
    assert kinds.count("block") == 2
    session = model._trainstream_session
    assert session.plan.policy == ("keep", "keep")
    assert Plan.from_json(session.plan.to_json()) == session.plan
    assert not session.adapting
    assert session.decisions


def test_wrap_twice_and_unwrap_twice_are_refused(llama, ids):
    before = llama(input_ids=ids).logits
    model, optimizer = trainstream.wrap(llama)
    with pytest.raises(StateError, match="wrapped already"):
        trainstream.wrap(model)
    assert trainstream.unwrap(model) is model
    with pytest.raises(StateError):
        trainstream.unwrap(model)
    with pytest.raises(StateError):
        trainstream.memory_report(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    train(model, optimizer, batches(1))  # the optimizer stays usable
    trainstream.wrap(model, optimizer)


@pytest.mark.parametrize("bad", [None, 3, "model", {}])
def test_wrong_kinds_are_type_errors(bad):
    with pytest.raises(ArgumentTypeError):
        trainstream.wrap(bad)
    if bad is not None:
        with pytest.raises(ArgumentTypeError):
            trainstream.wrap(toy(), bad)


def test_what_does_not_fit_is_refused_and_nothing_changes(monkeypatch):
    from ts_core import memory

    real = memory.host_budget()
    import dataclasses

    monkeypatch.setattr(memory, "host_budget", lambda *a, **k: dataclasses.replace(real, available_bytes=100))
    model = toy()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(MemoryError, match="trained parameters") as caught:
        trainstream.wrap(model, disk_budget=1000)
    assert isinstance(caught.value, DoesNotFitError)
    assert "_trainstream_session" not in model.__dict__
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    model, _ = trainstream.wrap(model, check_memory=False, disk_budget=1000)
    trainstream.unwrap(model)
    # With a disk, what RAM has no room for goes there.
    model, _ = trainstream.wrap(model)
    assert len(model._trainstream_session.plan.paged) == 4


def test_nothing_to_train():
    model = toy().requires_grad_(False)
    model, optimizer = trainstream.wrap(model)
    assert optimizer is None
    assert trainstream.memory_report(model)["params"]["trainable"] == 0
    trainstream.unwrap(model)


def test_copies_and_pickles_of_a_wrapped_model_are_plain_models(llama, ids):
    model, _ = trainstream.wrap(llama)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)
        trainstream.wrap(other)


def test_generate_eval_and_saving_work_while_wrapped(llama, ids, tmp_path):
    oracle = twin(llama)
    model, _ = trainstream.wrap(llama)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.eval().generate(ids, **settings), oracle.eval().generate(ids, **settings))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert_same(again, oracle, rtol=0, atol=0)
    model.load_state_dict(oracle.state_dict())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_the_host_moves_to_the_gpu():
    model = lora(tiny_llama())
    oracle = twin(model).to("cuda")
    parameters = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = trainstream.wrap(model, torch.optim.AdamW(parameters, **ADAMW), device="cuda")
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert all(a is b for a, b in zip(parameters, optimizer.param_groups[0]["params"], strict=True))
    reference = torch.optim.AdamW([p for p in oracle.parameters() if p.requires_grad], **ADAMW)
    losses = train(model, optimizer, batches(device="cuda"))
    expected = train(oracle, reference, batches(device="cuda"))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_card_without_room_is_refused_before_anything_moves(monkeypatch):
    import dataclasses

    from ts_core import memory

    real = memory.device_budget("cuda")
    monkeypatch.setattr(
        memory, "device_budget", lambda d: dataclasses.replace(real, available_bytes=1000, cached_bytes=0)
    )
    model = toy(64)
    with pytest.raises(DoesNotFitError, match="of the device where"):
        trainstream.wrap(model, device="cuda")
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(OptionError, match="none of the model's parameters"):
        trainstream.wrap(toy(), torch.optim.AdamW(toy().parameters()))


def test_quantize_says_how_much_was_packed():
    with pytest.raises(OptionError, match="every matrix of the 4 blocks is trained"):
        trainstream.wrap(toy(), quantize="nf4")
    model, _ = trainstream.wrap(toy().requires_grad_(False), quantize="nf4")
    assert any("8 weights are packed" in line for line in trainstream.memory_report(model)["events"])


def test_saving_a_packed_model_says_what_to_do(tmp_path):
    model, _ = trainstream.wrap(tiny_llama().requires_grad_(False), quantize="int8")
    with pytest.raises(StateError, match="dequantize_model"):
        model.save_pretrained(tmp_path)
    assert ts_quant.dequantize_model(model) > 0
    model.save_pretrained(tmp_path)


@pytest.mark.parametrize("policy", [{"recompute": True}, {"activation_offload": 1.0, "min_offload_bytes": 0}])
def test_resident_packed_weights_with_a_policy(policy):
    expected = trainstream.wrap(lora(tiny_llama()), None, lr=1e-2, quantize="nf4")
    ours = trainstream.wrap(lora(tiny_llama()), None, lr=1e-2, quantize="nf4", **policy)
    for step in range(2):
        torch.manual_seed(step)
        assert train(*ours, batches(1)) == train(*expected, batches(1))
    for p, q in zip(ours[0].parameters(), expected[0].parameters(), strict=True):
        assert not p.requires_grad or torch.equal(p, q)
