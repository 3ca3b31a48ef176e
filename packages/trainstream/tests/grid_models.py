"""Models and training sequences of the equality grid, the resident run of each, and how a model is paged."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from types import SimpleNamespace

import peft
import torch
import torch.nn.functional as F
from conftest import tiny_llama
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import trainstream
import ts_quant
from trainstream._device import answer_with
from ts_core.blocks import find_blocks
from ts_core.guard import GuardedParameter
from ts_optim import OffloadAdamW
from ts_paging.activations import FileActivations, HostActivations
from ts_paging.files import FileTensors
from ts_paging.pager import WeightPager
from ts_quant import QuantizedTensor

LAYERS = 4
#: The complete products run with HYPOTHESIS_PROFILE=nightly; otherwise selections with every value in them.
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",  # its backward on a GPU gives the same bits every time
}


class StackBlock(nn.Module):
    """A gated block with a bare Parameter and dropout, of no library."""

    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 48)
        self.mlp = nn.Linear(48, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        inner = F.dropout(F.gelu(self.up(self.norm(x))), 0.1, self.training)
        return x + self.mlp(inner) * self.scale


class Stack(nn.Module):
    """Embedding, blocks, norm and head, called as a causal language model is."""

    def __init__(self, block=StackBlock, tied=False, layers=LAYERS):
        super().__init__()
        self.embed = nn.Embedding(97, 32)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 97, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, labels=None, use_cache=None, output_hidden_states=False):
        x = self.embed(input_ids)
        hidden = [x]
        for layer in self.layers:
            x = layer(x)
            hidden.append(x)
        logits = self.head(self.norm(x))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits, hidden_states=hidden)


def lora(model, **changes):
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.2, "target_modules": ["q_proj", "down_proj"]}
    config = peft.LoraConfig(**{**settings, **changes})
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zeros would hide what the other factor does
            p.data.normal_(0, 0.1)
    return model


def llama(**changes):
    return tiny_llama(**{"num_hidden_layers": LAYERS, "attn_implementation": "eager", **changes})


BUILD = {
    "llama": llama,
    "llama_tied": lambda: llama(tie_word_embeddings=True, attention_dropout=0.1),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=97, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64, attn_implementation="eager"
        )
    ),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, sliding_window=4)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    ),
    "lora": lambda: lora(llama().bfloat16()),
    "stack": Stack,
}


def build(kind, codec="none"):
    """Make a model in train mode; for a codec, two of three of its block matrices are frozen."""
    torch.manual_seed(0)
    model = BUILD[kind]().train()
    if codec != "none" and kind != "lora":
        for block in find_blocks(model):
            matrices = [p for p in block.parameters() if p.dim() > 1]
            for index, p in enumerate(matrices):
                p.requires_grad_(index % 3 == 1)
    return model


def batch(step, device="cpu", shape=(2, 9)):
    ids = torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(step))
    return ids.to(device)


# -- sequences: each takes (model, ids), calls backward and returns its losses


def _loss(model, ids, **options):
    return model(input_ids=ids, labels=ids, **{"use_cache": False, **options}).loss


def one(model, ids):
    loss = _loss(model, ids)
    loss.backward()
    return [loss]


def forward_order(model, ids):
    first, second = _loss(model, ids), _loss(model, ids.flip(1))
    first.backward()
    second.backward()
    return [first, second]


def reverse_order(model, ids):
    first, second = _loss(model, ids), _loss(model, ids.flip(1))
    second.backward()
    first.backward()
    return [first, second]


def summed(model, ids):
    loss = _loss(model, ids) + _loss(model, ids.flip(1))
    loss.backward()
    return [loss]


def retained(model, ids):
    loss = _loss(model, ids)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def accumulated(model, ids):
    return [one(model, ids.roll(shift, 1))[0] for shift in range(3)]


def penalised(model, ids):
    # On the host in both runs: a paged Parameter is there, and a sum taken on a GPU has other bits.
    # After the loss, so that its gradients are the first to arrive; and by one thread, so that they are not
    # the first or the last as the threads for the GPU and for the host happen to run.
    loss = _loss(model, ids)
    # A packed one is decoded to its dtype first: float() alone would decode it without rounding to bfloat16.
    read = [p.dequantize() if isinstance(p, QuantizedTensor) else p for p in model.parameters()]
    penalty = sum(p.cpu().float().pow(2).sum() for p in read)
    loss = loss + 1e-3 * penalty.to(ids.device)
    one_thread = not any(isinstance(p, GuardedParameter) for p in model.parameters())
    with torch.autograd.set_multithreading_enabled(not one_thread):
        loss.backward()
    return [loss]


def cached(model, ids):
    loss = _loss(model, ids, use_cache=True)
    loss.backward()
    return [loss]


def hidden(model, ids):
    output = model(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True)
    loss = output.loss + sum(h.float().pow(2).mean() for h in output.hidden_states)
    loss.backward()
    return [loss]


def hooked(model, ids):
    seen = []

    def see(module, args, output):
        seen.append(output[0] if isinstance(output, tuple) else output)

    blocks = find_blocks(model)
    handles = [m.register_forward_hook(see) for block in blocks for m in (block, block.mlp)]
    loss = _loss(model, ids)
    loss = loss + sum(h.float().pow(2).mean() for h in seen[: 2 * len(blocks)])
    loss.backward()
    for handle in handles:
        handle.remove()
    return [loss]


#: Sequence -> (forward passes, backward passes) of every block.
SEQUENCES = {
    one: (1, 1),
    forward_order: (2, 2),
    reverse_order: (2, 2),
    summed: (2, 2),
    retained: (1, 2),
    accumulated: (3, 3),
    penalised: (1, 1),
    cached: (1, 1),
    hidden: (1, 1),
    hooked: (1, 1),
}


# -- running and comparing -------------------------------------------------------------------------------


def sum_in_fp32(p):
    """Let a 16-bit parameter's gradients add up in fp32 from the second on."""

    def widen(grad):
        if p.grad is not None and p.grad.dtype is not torch.float32:
            before, p.grad = p.grad, None
            p.grad_dtype = None
            p.grad = before.float()

    p.register_hook(widen)


class HostOptimizer:
    """An optimizer that steps copies of a model's weights on the host, as that of a paged model does.

    Gradients are summed as `wrap()` has them summed for an `OffloadAdamW`, and as torch does for others.
    """

    def __init__(self, model, make):
        self._pairs = [
            (p, nn.Parameter(p.detach().cpu().clone(), requires_grad=p.requires_grad))
            for p in model.parameters()
        ]
        self.inner = make([twin for _, twin in self._pairs])
        for p, twin in self._pairs if isinstance(self.inner, OffloadAdamW) else ():
            if p.requires_grad and p.dtype.itemsize == 2:
                sum_in_fp32(p)
                twin.grad_dtype = None

    def zero_grad(self):
        for p, _ in self._pairs:
            p.grad = None

    def follow(self):
        """Take over values that were written outside."""
        with torch.no_grad():
            for p, twin in self._pairs:
                twin.copy_(p)

    def step(self):
        for p, twin in self._pairs:
            twin.grad = None if p.grad is None else p.grad.cpu()
        self.inner.step()
        with torch.no_grad():
            for p, twin in self._pairs:
                p.copy_(twin)


def adamw(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def offload_adamw(parameters):
    trained = [p for p in parameters if p.requires_grad]
    return OffloadAdamW(trained, lr=1e-2, accumulation_steps=None, accumulate_fp32=True)


@dataclasses.dataclass
class Result:
    losses: list
    gradients: list
    weights: dict


def values(model):
    found = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        value = p.dequantize() if isinstance(p, QuantizedTensor) else p.detach()
        found[name] = value.cpu().clone()
    return found


def train(model, optimizer, sequence, device="cpu", count=3, shapes=((2, 9),), first=0):
    losses, gradients = [], []
    for step in range(first, first + count):
        optimizer.zero_grad()
        torch.manual_seed(step)
        ids = batch(step, device, shapes[step % len(shapes)])
        losses.append([value.tolist() for value in sequence(model, ids)])
        gradients.append({n: p.grad.clone().cpu() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return Result(losses, gradients, values(model))


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def compare(result, expected):
    """Assert that two runs have the same bits: losses, gradients by name, weights at the end."""
    assert result.losses == expected.losses
    for step, gradients in enumerate(expected.gradients):
        assert result.gradients[step].keys() == gradients.keys()
        for name, grad in gradients.items():
            assert same_bits(result.gradients[step][name], grad), (step, name)
    assert result.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert same_bits(result.weights[name], value), name


def decode(model, codec):
    """Give the frozen block matrices the values that the codec makes of them."""
    if codec != "none":
        ts_quant.quantize_model(model, codec)
        ts_quant.dequantize_model(model)
    return model


_resident = {}


def resident(kind, sequence, codec, device, make=adamw, **settings):
    """Return the run of the model that stays where it computes, once for each question."""
    key = (kind, sequence, codec, device, make, *settings.values())
    if key not in _resident:
        model = decode(build(kind, codec), codec).to(device)
        _resident[key] = train(model, HostOptimizer(model, make), sequence, device, **settings)
    return _resident[key]


# -- paging -------------------------------------------------------------------------------


def stored(tensor, files, pinned):
    """Return the same bytes where the pager finds them: in a file, page-locked, or in ordinary memory."""
    if isinstance(tensor, QuantizedTensor):
        packed = {key: stored(part, files, pinned) for key, part in tensor.packed.items()}
        return QuantizedTensor(packed, tensor.codec, tuple(tensor.shape), tensor.dtype, tensor.block_size)
    if files is not None:
        return files.place(tensor.cpu())
    # Strides are kept: pin_memory() would compact them.
    raw = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8, pin_memory=pinned)
    host = raw.view(tensor.dtype).as_strided(tensor.size(), tensor.stride()) if raw.numel() else tensor.cpu()
    return host.copy_(tensor)


def place(model, files, device):
    """Move every Parameter into its tier and every buffer to the device, in place."""
    moved = {}
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)
        for key, p in module._parameters.items():
            if p is None:
                continue
            if id(p) not in moved:
                value = stored(p.detach(), files, device == "cuda")
                if isinstance(p, QuantizedTensor):
                    moved[id(p)] = nn.Parameter(value, requires_grad=False)
                else:
                    p.data = value
                    moved[id(p)] = p
            module._parameters[key] = moved[id(p)]
    return model


def outside(model, blocks):
    """List (name, module) of the modules that hold Parameters themselves and are in no block."""
    inside = {id(module) for block in blocks for module in block.modules()}
    return [(n, m) for n, m in model.named_modules() if m._parameters and id(m) not in inside]


@contextlib.contextmanager
def paging(model, tier="host", policy="keep", slots=2, device="cpu", *, blocks=None, edges=True, **options):
    """Page a model through a `WeightPager` of its own: blocks, and embedding, norm and head.

    Yields:
        The pager. The model is an ordinary one again afterwards.
    """
    files = FileTensors() if tier == "disk" else None
    place(model, files, device)
    store = FileActivations(files.store) if files is not None and device == "cpu" else HostActivations()
    pager = WeightPager(
        torch.device(device),
        slots=slots,
        gradients=files,
        activations=store,
        min_offload_bytes=0,
        **options,
    )
    stack = find_blocks(model, blocks)
    names = {id(module): name for name, module in model.named_modules()}
    around = outside(model, stack) if edges else []
    order = list(names)
    last = order.index(id(stack[-1]))
    tail = [name for name, module in around if order.index(id(module)) > last]
    policies = [policy] * len(stack) if isinstance(policy, str) else policy
    pager.attach([(names[id(b)], b, p) for b, p in zip(stack, policies, strict=True)], around, tail)
    undo = answer_with(model, torch.device(device))
    try:
        yield pager
    finally:
        for back in undo:
            back()
        if pager.blocks:
            pager.detach()
        if files is not None:
            files.close()


WRAP_POLICIES = {
    "keep": {},
    "offload": {"activation_offload": 1.0, "min_offload_bytes": 0},
    "recompute": {"recompute": True},
}


@contextlib.contextmanager
def paged(model, how, policy="keep", device="cpu", make=offload_adamw, **options):
    """Page a model by one of three ways: `wrap()`, or a pager of its own over host memory or files.

    Yields:
        The pager and an optimizer over the trained Parameters, made by `make`.
    """
    if how == "wrap":
        optimizer = make(list(model.parameters()))
        settings = {"param_offload": True, "device": device, **WRAP_POLICIES[policy], **options}
        model, optimizer = trainstream.wrap(model, optimizer, **settings)
        try:
            yield model._trainstream_session.pager, optimizer
        finally:
            trainstream.unwrap(model)
        return
    with paging(model, how, policy, device=device, **options) as pager:
        yield pager, make(list(model.parameters()))


@contextlib.contextmanager
def both(make_model, how, policy="keep", device="cpu", make=adamw, **options):
    """Yield ((paged model, its optimizer), (model that is not paged, its optimizer))."""
    torch.manual_seed(0)
    model = make_model()
    oracle = copy.deepcopy(model).to(device)
    if how == "wrap" and make is adamw:
        make = offload_adamw  # wrap() would put it in AdamW's place
    with paged(model, how, policy, device, make, **options) as (_, optimizer):
        yield (model, optimizer), (oracle, HostOptimizer(oracle, make))


def step(model, optimizer, sequence=one, seed=0, device="cpu"):
    optimizer.zero_grad()
    torch.manual_seed(seed)
    losses = [loss.item() for loss in sequence(model, batch(seed, device))]
    optimizer.step()
    return losses


def assert_same_values(model, oracle):
    ours, theirs = values(model), values(oracle)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert same_bits(ours[name], value), name


def assert_same_grads(model, oracle):
    for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or same_bits(p.grad.cpu(), q.grad.cpu()), name
