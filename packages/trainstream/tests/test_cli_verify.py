"""`trainstream verify`: what it certifies, and that it fails on each kind of fault, put in on purpose."""

import importlib
import json
import types

import pytest
import torch
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from tiny_models import save_tiny_model, tiny_config
from torch import nn
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from trainstream._verify import Verifier, checksum
from trainstream.cli import app
from ts_core.testing import devices
from ts_paging.pager import WeightPager
from ts_quant import quantize_model

command = importlib.import_module("trainstream.cli.verify")  # the command is a function of that name
NAMES = ["repeatable", "plain PyTorch", "streamed, keep", "streamed, offload", "streamed, recompute"]
NAMES += ["reached", "accumulation", "clipping", "packing"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("verify") / "tiny", num_hidden_layers=3)


def verify(*words):
    return CliRunner().invoke(app, ["verify", *map(str, words)])


def verdicts(model, device="cpu", **options):
    checks = list(Verifier(model, torch.device(device), steps=2, rows=1, length=12, **options).run())
    return {check.name: check for check in checks}


def test_a_model_is_certified(tiny):
    result = verify(tiny, "--json", "--steps", "2", "--layers", "2")
    assert result.exit_code == 0, result.output
    *checks, last = map(json.loads, result.stdout.splitlines())
    assert [check["name"] for check in checks] == NAMES
    assert last["ok"]
    assert last["layers"] == "2 of 3 layers"
    assert (last["weights"], last["method"]) == ("the checkpoint's", "full")
    assert {check["status"] for check in last["checks"]} == {"ok"}
    sums = {check["data"]["checksum"] for check in checks if "checksum" in check["data"]}
    assert len(sums) == 1
    assert [check["data"]["paged_groups"] for check in checks[2:5]] == [2, 2, 2]


def test_people_get_a_certificate_of_adapters_on_a_packed_base(tiny):
    result = verify(tiny / "config.json", "--steps", "2", "--layers", "1", "--quantize", "nf4", "--seq", "12")
    assert result.exit_code == 0, result.output
    assert "weights the checkpoint's" in result.stdout
    assert "lora, base nf4" in result.stdout
    assert result.stdout.splitlines()[-1] == "VERIFIED: streaming changes no bit of this training"


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_fused_kernels_are_not_taken_for_a_wrong_gradient(tmp_path):
    """They are on over packed weights, and round otherwise than PyTorch's own."""
    config = tiny_config(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).requires_grad_(False)
    quantize_model(model, "nf4")
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False))
    check = Verifier(model, torch.device("cpu"), steps=2)._plain()
    assert (check.status, check.detail.split(" first gradients")[0]) == ("ok", "first loss and 28")


def test_wrong_weights_in_a_slot_are_found(tiny, monkeypatch):
    finish = WeightPager._finish

    def corrupt(self, slot):
        finish(self, slot)
        if slot.arriving is not None:
            slot.buffer.view(torch.uint8)[7] ^= 1

    monkeypatch.setattr(WeightPager, "_finish", corrupt)
    result = verify(tiny, "--steps", "2", "--layers", "2", "--random")
    assert result.exit_code == 1
    assert "NOT VERIFIED" in result.stdout
    assert "streamed, keep" in result.stdout.splitlines()[-1]


def test_a_parameter_that_nothing_uses_is_named():
    model = tiny_llama()
    model.model.layers[1].mlp.extra = nn.Parameter(torch.ones(3))
    found = verdicts(model)["reached"]
    assert found.status == "failed"
    assert found.data["missed"] == ["model.layers.1.mlp.extra"]


class Mixing(nn.Module):
    """Takes position ids, and lets every token see all before it whatever they are."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(vocab_size=31)
        self.embed = nn.Embedding(31, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 31)

    def forward(self, input_ids, position_ids=None, labels=None, use_cache=False):
        hidden = self.embed(input_ids).cumsum(1)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        logits = self.head(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return types.SimpleNamespace(logits=logits, loss=loss)


def test_documents_that_see_each_other_are_found():
    torch.manual_seed(0)
    found = verdicts(Mixing())
    assert found["packing"].status == "failed"
    assert "first document changes the second" in found["packing"].detail
    assert all(check.status == "ok" for name, check in found.items() if name != "packing")


def test_a_model_without_position_ids_is_not_asked_about_packing():
    class Plain(Mixing):
        def forward(self, input_ids, labels=None, use_cache=False):
            return super().forward(input_ids, labels=labels)

    torch.manual_seed(0)
    assert verdicts(Plain())["packing"].status == "skipped"


@pytest.mark.parametrize("device", [d for d in devices() if getattr(d, "values", (d,))[0] != "cpu"])
def test_a_gpu_is_certified(device):
    model = tiny_llama(hidden_size=64).to(torch.bfloat16)
    assert {check.status for check in verdicts(model, device).values()} == {"ok"}


def test_a_check_that_cannot_be_made_is_a_failed_one(monkeypatch):
    monkeypatch.setattr(Verifier, "_accumulates", lambda self: torch.zeros(2) @ torch.zeros(3))
    found = verdicts(tiny_llama())
    assert found["accumulation"].status == "failed"
    assert found["clipping"].status == "ok"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no/such/folder/here"], "no/such/folder/here"),
        (["tiny", "--layers", "9"], "the model has 3, given 9"),
        (["tiny", "--layers", "1", "--whole"], "give one of them"),
        (["tiny", "--method", "some"], "expected auto, full or lora"),
        (["tiny", "--method", "full", "--quantize", "nf4"], "freezes nothing"),
        (["tiny", "--quantize", "nothing"], "quantize"),
        (["tiny", "--device", "abacus"], "abacus"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(tiny, words, says):
    result = verify(*(tiny if word == "tiny" else word for word in words))
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_cutting_keeps_a_layer_of_each_kind_and_few_experts():
    config = tiny_config(num_hidden_layers=12)
    config.layer_types = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 6
    config.num_experts, config.num_experts_per_tok = 64, 16
    assert command._kinds(config) == 6
    changes = command._changes(config, 6, True)
    assert changes["num_hidden_layers"] == len(changes["layer_types"]) == 6
    assert (changes["num_experts"], changes["num_experts_per_tok"]) == (8, 8)
    assert "num_experts" not in command._changes(config, 6, False)


def test_what_does_not_fit_is_refused_with_numbers(tiny, monkeypatch):
    monkeypatch.setattr(command, "_room", lambda device: 1000)
    result = verify(tiny)
    assert result.exit_code == 2
    assert "1 of 3 layers need about" in result.stderr


def test_checksums_are_of_bits():
    zero = torch.zeros(3)
    assert checksum(zero) != checksum(-zero)
    assert checksum(zero.bfloat16()) == checksum(zero.half())
    assert checksum(torch.arange(6.0).reshape(2, 3).T) == checksum(torch.arange(6.0).reshape(2, 3).T.clone())
