"""What people do with a model while it is wrapped: equal to the plain model, or refused in so many words."""

import copy
import io
import itertools
import pickle
import warnings

import accelerate
import pytest
import torch
from conftest import tiny_llama
from grid_models import (
    NIGHTLY,
    HostOptimizer,
    Stack,
    assert_same_grads,
    assert_same_values,
    batch,
    both,
    build,
    offload_adamw,
    one,
    paged,
    resident,
    same_bits,
    step,
    values,
)
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import trainstream
from ts_core.errors import StateError
from ts_core.testing import devices

# transformers is renaming what PEFT, its own Trainer and people's scripts still use.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*deprecated:FutureWarning")

POLICIES = ["keep", "offload", "recompute"]
HOWS = ["host", "disk", "wrap"]
KINDS = ["llama_tied", "lora"]
COMPILED = [
    ("before", "keep", "eager"),
    ("before", "recompute", "aot_eager"),
    ("after", "offload", "aot_eager"),
    ("method", "recompute", "eager"),
]
TRAINED = [
    ("llama_tied", "keep", False),
    ("llama_tied", "recompute", True),
    ("lora", "offload", False),
    ("lora", "keep", True),
]
GENERATED = [
    ("llama_tied", "keep"),
    ("lora", "recompute"),
    ("gemma2", "offload"),
    ("mixtral", "recompute"),
    ("gpt2", "keep"),
    ("qwen2", "recompute"),
]
if NIGHTLY:
    COMPILED = list(itertools.product(["before", "after", "method"], POLICIES, ["eager", "aot_eager"]))
    TRAINED = list(itertools.product(KINDS, POLICIES, [False, True]))
    GENERATED = list(itertools.product([kind for kind, _ in GENERATED], POLICIES))
everywhere = pytest.mark.parametrize("how", HOWS)


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def is_paged(module):
    return hasattr(module.__dict__.get("forward"), "with_weights")


def logits(model, seed=9, device="cpu"):
    with torch.no_grad():
        return model.eval()(input_ids=batch(seed, device)).logits


# -- saving and copying --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@everywhere
def test_save_pretrained_writes_what_the_plain_model_writes(how, kind, tmp_path):
    with both(lambda: build(kind), how) as ((model, optimizer), (oracle, reference)):
        step(model, optimizer)
        step(oracle, reference)
        for net, name in ((model, "ours"), (oracle, "plain")):
            net.save_pretrained(tmp_path / name)
        written = sorted(path.name for path in (tmp_path / "plain").iterdir())
        assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == written
        for name in written:
            if name.endswith(".safetensors"):
                ours, plain = (load_file(tmp_path / folder / name) for folder in ("ours", "plain"))
                assert ours.keys() == plain.keys()
                assert all(same_bits(ours[key], value) for key, value in plain.items())
        if kind != "lora":
            again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
            assert_same_values(again, oracle)


@pytest.mark.parametrize("kind", ["llama_tied", "lora", "stack"])
@pytest.mark.parametrize("policy", POLICIES)
@everywhere
def test_copies_are_plain_models(how, policy, kind):
    with both(lambda: build(kind), how, policy) as ((model, optimizer), (oracle, reference)):
        step(model, optimizer)
        step(oracle, reference)
        copies = [copy.deepcopy(model)]
        if kind != "lora":  # a PEFT model with hooks of transformers does not pickle, wrapped or not
            copies.append(pickle.loads(pickle.dumps(model)))
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
        assert all(same_bits(state[name], value) for name, value in oracle.state_dict().items())
        before = values(model)
        for other in copies:
            assert all(type(p) is nn.Parameter for p in other.parameters())
            assert not any(is_paged(module) for module in other.modules())
            assert_same_values(other, oracle)
            twin = copy.deepcopy(oracle)
            a, b = (offload_adamw(list(net.parameters())) for net in (other, twin))
            assert step(other, a, seed=2) == step(twin, b, seed=2)
            assert_same_values(other, twin)
        # Training a copy leaves the model alone.
        assert all(same_bits(before[name], value) for name, value in values(model).items())
        assert step(model, optimizer, seed=3) == step(oracle, reference, seed=3)


def test_a_copied_block_is_a_plain_block():
    with both(lambda: build("stack"), "host") as ((model, _), (oracle, _)):
        assert is_paged(model.layers[1])
        block = copy.deepcopy(model.layers[1])
        x = torch.randn(2, 3, 32)
        assert torch.equal(block.eval()(x), oracle.layers[1].eval()(x))
        assert not is_paged(block)


# -- evaluation and generation -------------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("kind", "policy"), GENERATED)
def test_evaluation_and_generation_between_steps(kind, policy, device):
    with both(lambda: build(kind), "disk", policy, device) as runs:
        seen = []
        for model, optimizer in runs:
            losses = [step(model, optimizer, device=device)]
            losses.append(logits(model, device=device).tolist())
            ids = batch(4, device)
            settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            if (
                kind == "mixtral"
            ):  # with a cache, transformers 5.17 takes the router loss of a mask of another length
                settings["output_router_logits"] = False
            for cache in (True, False):
                mask = torch.ones_like(ids)
                tokens = model.generate(input_ids=ids, attention_mask=mask, use_cache=cache, **settings)
                losses.append(tokens.tolist())
            beams = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), num_beams=2, **settings
            )
            losses.append(beams.tolist())
            with torch.inference_mode():
                losses.append(model(input_ids=ids).logits.tolist())
            losses.append(step(model.train(), optimizer, seed=1, device=device))
            seen.append(losses)
        assert seen[0] == seen[1]
        assert_same_values(runs[0][0], runs[1][0])


def test_a_block_whose_forward_somebody_replaced():
    """The replacement runs in the slot, is in copies, and is there again afterwards."""
    with both(Stack, "host") as ((model, _), (oracle, _)):
        pass
    for net in (model, oracle):
        for layer in net.layers:
            layer.forward = Doubled(layer)
    own = [layer.forward for layer in model.layers]
    with paged(model, "host") as (pager, _):
        assert torch.equal(logits(model), logits(oracle))
        assert {block.runs for block in pager.blocks} == {1}
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(logits(other), logits(oracle))
            assert other.layers[0].forward.layer is other.layers[0]
    assert [layer.forward for layer in model.layers] == own


class Doubled:
    """Runs the class's forward and doubles what comes out."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, *args, **kwargs):
        return 2 * type(self.layer).forward(self.layer, *args, **kwargs)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("policy", POLICIES)
@everywhere
def test_a_cache_that_holds_something_already(how, policy):
    """Training on a continuation: keys and values of a prefix come in, and must not be added twice."""
    with both(lambda: build("llama"), how, policy) as runs:
        results = []
        for model, _ in runs:
            ids = batch(3, shape=(2, 12))
            with torch.no_grad():
                prefix = model(input_ids=ids[:, :5], use_cache=True).past_key_values
            output = model(input_ids=ids[:, 5:], labels=ids[:, 5:], past_key_values=prefix)
            output.loss.backward()
            results.append((output.loss.item(), prefix.get_seq_length()))
        assert results[0] == results[1]
        assert_same_grads(runs[0][0], runs[1][0])


# -- gradients and optimizers --------------------------------------------------------------------------------


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "ours": lambda p: offload_adamw(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["host", "disk"])
def test_any_optimizer_steps_paged_weights(how, name):
    def make(parameters):
        return OPTIMIZERS[name]([p for p in parameters if p.requires_grad])

    for kind in KINDS:
        with both(lambda kind=kind: build(kind), how, make=make) as ((model, optimizer), (oracle, reference)):
            for seed in range(3):
                assert step(model, optimizer, seed=seed) == step(oracle, reference, seed=seed)
            assert_same_values(model, oracle)


@pytest.mark.parametrize("name", ["sgd", "rmsprop", "adafactor", "ours"])
def test_wrap_keeps_other_optimizers(name):
    def make(parameters):
        return OPTIMIZERS[name]([p for p in parameters if p.requires_grad])

    with both(lambda: build("llama"), "wrap", make=make) as ((model, optimizer), (oracle, reference)):
        for seed in range(3):
            assert step(model, optimizer, seed=seed) == step(oracle, reference, seed=seed)
        assert_same_values(model, oracle)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clip", [1e-3, 1e9])
@everywhere
def test_clipping_scaling_and_schedules(how, clip, set_to_none):
    with both(lambda: build("llama_tied"), how, make=offload_adamw) as runs:
        seen = []
        for model, optimizer in runs:
            inner = optimizer
            if isinstance(optimizer, HostOptimizer):  # a scheduler and a scaler want a real one
                inner = offload_adamw(list(model.parameters()))
            schedule = torch.optim.lr_scheduler.OneCycleLR(inner, max_lr=1e-2, total_steps=8)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
            record = []
            for seed in range(4):
                inner.zero_grad(set_to_none=set_to_none)
                torch.manual_seed(seed)
                loss = model(input_ids=batch(seed), labels=batch(seed)).loss
                scaler.scale(loss).backward()
                scaler.unscale_(inner)
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
                scaler.step(inner)
                scaler.update()
                schedule.step()
                record.append((loss.item(), norm.item(), scaler.get_scale(), inner.param_groups[0]["lr"]))
            seen.append((record, values(model)))
        assert seen[0][0] == seen[1][0]
        assert all(same_bits(seen[0][1][name], value) for name, value in seen[1][1].items())


@everywhere
def test_gradients_edited_by_hand(how):
    with both(lambda: build("llama"), how) as ((model, optimizer), (oracle, reference)):
        for net, opt in ((model, optimizer), (oracle, reference)):
            for seed in range(3):
                opt.zero_grad()
                torch.manual_seed(seed)
                one(net, batch(seed))
                weights = [net.model.layers[i].mlp.up_proj.weight for i in range(3)]
                weights[0].grad.mul_(0.5)
                weights[1].grad = torch.ones_like(weights[1])
                if seed == 1:
                    weights[2].grad = None
                opt.step()
        assert_same_values(model, oracle)


@pytest.mark.parametrize("policy", POLICIES)
@everywhere
def test_autocast(how, policy):
    def sequence(model, ids):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss]

    with both(lambda: build("llama_tied"), how, policy) as ((model, optimizer), (oracle, reference)):
        for seed in range(3):
            ours = step(model, optimizer, sequence, seed)
            assert ours == step(oracle, reference, sequence, seed)
        assert_same_values(model, oracle)


# -- transformers' own checkpointing -------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@everywhere
def test_gradient_checkpointing_besides(how, policy, reentrant):
    def sequence(model, ids):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return [loss]

    with both(lambda: build("llama_tied"), how, policy) as ((model, optimizer), (oracle, reference)):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for seed in range(3):
            assert step(model, optimizer, sequence, seed) == step(oracle, reference, sequence, seed)
            assert_same_grads(model, oracle)
        assert_same_values(model, oracle)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backward_pass_within_a_backward_pass_loses_no_gradient(policy):
    """Reentrant checkpointing over two blocks at a time: head and norm have gradients under way already."""

    def pairwise(model, ids):
        x = model.embed(ids)
        for first in (0, 2):
            run = nn.Sequential(model.layers[first], model.layers[first + 1])
            x = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=True)
        loss = model.head(model.norm(x)).pow(2).mean()
        loss.backward()
        return [loss]

    with both(lambda: build("stack"), "host", policy) as ((model, optimizer), (oracle, reference)):
        for seed in range(2):
            assert step(model, optimizer, pairwise, seed) == step(oracle, reference, pairwise, seed)
            assert_same_grads(model, oracle)


# -- torch.compile -------------------------------------------------------------------------------------------


# The compiler looks at .grad of what comes in where a graph was broken, here behind every block.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(("when", "policy", "backend"), COMPILED)
def test_torch_compile(when, policy, backend):
    expected = resident("llama", one, "none", "cpu", offload_adamw)
    model = build("llama")
    optimizer = offload_adamw(list(model.parameters()))
    run = model
    if when == "before":
        run = torch.compile(model, backend=backend)
    options = {
        "offload": {"activation_offload": 1.0, "min_offload_bytes": 0},
        "recompute": {"recompute": True},
    }
    model, optimizer = trainstream.wrap(model, optimizer, param_offload=True, **options.get(policy, {}))
    if when == "after":
        run = torch.compile(model, backend=backend)
    if when == "method":
        model.compile(backend=backend)
    losses = [step(run, optimizer, seed=seed) for seed in range(3)]
    assert losses == expected.losses
    assert all(same_bits(values(model)[name], value) for name, value in expected.weights.items())
    session = model._trainstream_session
    assert {b.runs for b in session.pager.blocks} == {6 if policy == "recompute" else 3}
    trainstream.unwrap(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_blocks_are_paged():
    expected = resident("stack", one, "none", "cpu", offload_adamw)
    model = build("stack")
    for block in model.layers:
        block.compile(backend="eager")
    with paged(model, "disk") as (pager, optimizer):
        assert [step(model, optimizer, seed=seed) for seed in range(3)] == expected.losses
        assert {block.runs for block in pager.blocks} == {3}


# -- Trainer and accelerate ----------------------------------------------------------------------------------


def arguments(folder, **changes):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **changes,
    }
    return TrainingArguments(**settings)


def rows():
    ids = batch(0, shape=(12, 9))
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.mark.parametrize(("kind", "policy", "checkpointing"), TRAINED)
def test_the_stock_trainer_trains_a_wrapped_model(kind, policy, checkpointing, tmp_path):
    runs = []
    for ours in (True, False):
        model = build(kind)
        optimizer = offload_adamw(list(model.parameters()))
        if ours:
            options = {"param_offload": True, "recompute": policy == "recompute"}
            if policy == "offload":
                options |= {"activation_offload": 1.0, "min_offload_bytes": 0}
            model, optimizer = trainstream.wrap(model, optimizer, **options)
        settings = arguments(
            tmp_path,
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        trainer = Trainer(model, settings, train_dataset=rows(), optimizers=(optimizer, schedule))
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        runs.append((logged, norms, values(model)))
    assert runs[0][:2] == runs[1][:2]
    assert len(runs[0][0]) == 3
    assert all(same_bits(runs[0][2][name], value) for name, value in runs[1][2].items())


@pytest.mark.parametrize("placement", [True, False])
@pytest.mark.parametrize("wrap_first", [True, False])
def test_accelerate_prepares_a_wrapped_model(placement, wrap_first):
    runs = []
    for ours in (True, False):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = build("llama_tied")
        optimizer = offload_adamw(list(model.parameters()))
        if ours and wrap_first:
            model, optimizer = trainstream.wrap(model, optimizer, param_offload=True)
        model, optimizer = accelerator.prepare(model, optimizer, device_placement=[placement, placement])
        if ours and not wrap_first:
            model, inner = trainstream.wrap(model, optimizer.optimizer, param_offload=True)
            assert inner is optimizer.optimizer
        losses = []
        for seed in range(4):
            with accelerator.accumulate(model):
                torch.manual_seed(seed)
                loss = model(input_ids=batch(seed), labels=batch(seed)).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        runs.append((losses, values(accelerator.unwrap_model(model))))
        state = accelerator.get_state_dict(model)
        assert all(same_bits(state[name], value) for name, value in runs[-1][1].items() if name in state)
    accelerate.state.AcceleratorState._reset_state(True)
    assert runs[0][0] == runs[1][0]
    assert all(same_bits(runs[0][1][name], value) for name, value in runs[1][1].items())


# -- what is refused -----------------------------------------------------------------------------------------


@everywhere
def test_conversions_are_refused_by_name_and_moves_are_not(how):
    model = build("llama")
    oracle = copy.deepcopy(model)
    with paged(model, how) as (_, optimizer):
        before = values(model)
        with pytest.raises(StateError, match=r"dtype.*unwrap"):
            model.to(torch.bfloat16)
        with pytest.raises(StateError, match=r"dtype.*unwrap"):
            model.half()
        assert model.to("cpu") is model
        assert model.cpu().float() is model
        assert model.requires_grad_(True) is model
        assert all(same_bits(before[name], value) for name, value in values(model).items())
        reference = offload_adamw(list(oracle.parameters()))
        assert step(model, optimizer) == step(oracle, reference)


def test_wrapping_twice_is_refused():
    model, _ = trainstream.wrap(tiny_llama(), param_offload=True)
    with pytest.raises(StateError, match="wrapped already"):
        trainstream.wrap(model)
    trainstream.unwrap(model)


def test_a_model_is_wrapped_trained_and_unwrapped_again_and_again():
    model, oracle = Stack(), None
    torch.manual_seed(0)
    model = build("stack")
    oracle = copy.deepcopy(model)
    reference = offload_adamw(list(oracle.parameters()))
    optimizer = offload_adamw(list(model.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed, how in enumerate(["wrap", "host", "disk", "wrap"]):
            with paged(model, how, POLICIES[seed % 3], make=lambda _: optimizer):
                assert step(model, optimizer, seed=seed) == step(oracle, reference, seed=seed)
            assert_same_values(model, oracle)
            assert step(model, optimizer, seed=seed) == step(oracle, reference, seed=seed)


def test_autograd_grad_for_a_paged_weight_is_refused_by_name():
    model = build("llama")
    with paged(model, "wrap"):
        weight = model.model.layers[0].self_attn.q_proj.weight
        with pytest.raises(StateError, match=r"autograd\.grad for a paged weight of shape \(32, 32\)"):
            torch.autograd.grad(model(batch(0)).logits.sum(), [weight])
        inputs = model.get_input_embeddings()(batch(0)).detach().requires_grad_()
        (grad,) = torch.autograd.grad(model(inputs_embeds=inputs).logits.sum(), inputs)
        assert grad.shape == inputs.shape
