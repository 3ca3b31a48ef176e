"""Models and an oracle shared by the tests of the composition."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(**changes):
    torch.manual_seed(0)
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        **changes,
    }
    return LlamaForCausalLM(LlamaConfig(**settings)).float().train()


def toy(width=16, depth=4):
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(depth)]
    )


@pytest.fixture
def one_thread():
    """Tiny tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_limit_of_another_test():
    """A test that fails before it unwraps leaves its limit on the GPU's memory."""
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture(autouse=True)
def _context_as_assumed(monkeypatch):
    """Small budgets of a GPU are counted beside `CONTEXT_BYTES`: what this process really holds beside its
    tensors depends on the tests before. The tests of what is measured put the function back."""
    if torch.cuda.is_available():
        monkeypatch.setattr("trainstream._budget.context_bytes", lambda device: None)


@pytest.fixture
def llama():
    return tiny_llama()


@pytest.fixture
def ids():
    return torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(3))


def train(model, optimizer, batches):
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def twin(model):
    """A deep copy made before anything of ours touches the model."""
    return copy.deepcopy(model)
