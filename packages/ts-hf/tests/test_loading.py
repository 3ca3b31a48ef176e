"""load_model against from_pretrained: values, buffers, ties, dtypes, packing, memory, options."""

import json
import logging
import os
import subprocess
import sys
import types

import pytest
import torch
import transformers
from conftest import tiny_config, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ts_quant
from ts_core import memory
from ts_core.errors import CheckpointError, DeviceError, DoesNotFitError, MissingDependencyError, OptionError
from ts_core.testing import assert_bit_equal, devices
from ts_hf import Checkpoint, build, load_model, load_tokenizer, loading, read_ahead, streaming
from ts_hf.prequantized import take_quantization
from ts_paging.files import locate
from ts_quant.error_fit import quantize_with_error

KINDS = [
    "llama",
    "qwen2",
    "gemma2",
    "gemma3",
    "mistral",
    "mixtral",
    "qwen3_moe",
    "phi3",
    "cohere",
    "granite",
    "gpt2",
]


def save(model, folder, **options):
    model.save_pretrained(folder, **options)
    return folder


def stock(folder, dtype=torch.float32, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def assert_same_model(ours, theirs, ids):
    with torch.no_grad():
        assert_bit_equal(ours(ids).logits, theirs(ids).logits)
    mine, other = dict(ours.named_buffers()), dict(theirs.named_buffers())
    assert mine.keys() == other.keys()
    for name, buffer in other.items():
        assert_bit_equal(mine[name], buffer)
    state, other_state = ours.state_dict(), theirs.state_dict()
    assert state.keys() == other_state.keys()
    for name, tensor in other_state.items():
        assert_bit_equal(state[name], tensor)
    assert {n: p.requires_grad for n, p in ours.named_parameters()} == {
        n: p.requires_grad for n, p in theirs.named_parameters()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_equals_from_pretrained(kind, tmp_path, ids):
    folder = save(tiny_model(kind), tmp_path, max_shard_size="20KB")
    ours = load_model(folder, quantize=None, dtype="fp32")
    assert_same_model(ours, stock(folder), ids)
    assert not ours.training
    assert ours.trainstream_receipt["unused"] == []
    assert ours.trainstream_receipt["tensors"] > 0, "loaded by transformers, not by us"
    assert type(ours.generation_config) is transformers.GenerationConfig


@settings(max_examples=16, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    kind=st.sampled_from(["llama", "gemma2", "gpt2", "mixtral"]),
    stored=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    wanted=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    shard=st.sampled_from(["20KB", "5GB"]),
    tied=st.booleans(),
)
def test_equals_from_pretrained_across_dtypes_shards_and_ties(
    tmp_path_factory, ids, kind, stored, wanted, shard, tied
):
    folder = tmp_path_factory.mktemp("m")
    save(tiny_model(kind, tie_word_embeddings=tied).to(stored), folder, max_shard_size=shard)
    ours, theirs = load_model(folder, quantize=None, dtype=wanted), stock(folder, wanted)
    assert_same_model(ours, theirs, ids)
    assert (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight) == (
        theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    )
    assert ours.config.dtype == wanted


def test_tied_head_present_and_different(tmp_path, ids):
    model = tiny_model(tie_word_embeddings=False)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    folder = save(model, tmp_path)
    assert_same_model(load_model(folder, quantize=None, dtype="fp32"), stock(folder), ids)
    # A config that calls them tied although they differ: transformers keeps both, and so do we.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert_same_model(load_model(folder, quantize=None, dtype="fp32"), stock(folder), ids)


def test_tied_source_absent_but_target_present(tmp_path, ids):
    import safetensors.torch

    folder = save(tiny_model(tie_word_embeddings=True), tmp_path)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_same_model(load_model(folder, quantize=None, dtype="fp32"), stock(folder), ids)


def rewrite(folder, change):
    import safetensors.torch

    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize(
    "lost", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_parameter_in_no_file_is_an_error(lost, quantize, tmp_path):
    folder = rewrite(save(tiny_model(), tmp_path), lambda tensors: tensors.pop(lost))
    with pytest.raises(CheckpointError, match=rf"1 parameters .* first: '{lost}'"):
        load_model(folder, quantize=quantize)


def test_missing_expert_is_an_error(tmp_path):
    folder = save(tiny_model("mixtral"), tmp_path)
    with Checkpoint(folder) as checkpoint:
        lost = next(name for name in checkpoint if ".experts.2." in name)
    rewrite(folder, lambda tensors: tensors.pop(lost))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_model(folder, quantize=None)


def test_unused_tensors_are_listed_and_logged(tmp_path, caplog):
    folder = rewrite(save(tiny_model(), tmp_path), lambda tensors: tensors.update(
        {"model.layers.7.extra.weight": torch.ones(2),
         "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    ))  # fmt: skip
    with caplog.at_level(logging.INFO, logger="trainstream"):
        model = load_model(folder, quantize=None)
    assert model.trainstream_receipt["unused"] == [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.7.extra.weight",
    ]
    assert "1 tensors of the checkpoint have no place" in caplog.text
    assert "loaded" in caplog.text


def test_shape_that_does_not_fit(tmp_path):
    def change(tensors):
        tensors["model.norm.weight"] = torch.ones(33)

    folder = rewrite(save(tiny_model(), tmp_path), change)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor 'model\.norm\.weight' has shape \(33,\)"
    ):
        load_model(folder, quantize=None)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_without_a_word_in_the_config(dtype, tmp_path):
    def change(tensors):
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(dtype)

    folder = rewrite(save(tiny_model(), tmp_path), change)
    with pytest.raises(CheckpointError, match=r"is quantized, but its config does not say how"):
        load_model(folder, quantize=None)


def test_nan_in_a_weight_to_pack_names_the_file(tmp_path):
    folder = rewrite(
        save(tiny_model(), tmp_path),
        lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"][0, 0].fill_(float("nan")),
    )
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*up_proj\.weight.*NaN"):
        load_model(folder, quantize="int8")


# -- buffers ------------------------------------------------------------------------------------------------


class OwnConfig(transformers.PretrainedConfig):
    model_type = "own_buffers"

    def __init__(self, hidden_size=8, vocab_size=11, lost_buffer=False, **rest):
        super().__init__(**rest)
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.lost_buffer = lost_buffer


class OwnLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, config.hidden_size), persistent=False)
        drawn = torch.empty(config.hidden_size)
        nn.init.constant_(drawn, 3.0)
        self.register_buffer("drawn", drawn, persistent=False)
        self.register_buffer("count", torch.tensor(7), persistent=True)
        if config.lost_buffer:
            self.register_buffer("ghost", torch.empty(2, device="meta"), persistent=False)

    def forward(self, hidden):
        return self.proj(hidden) * self.scale + self.drawn


class OwnModel(transformers.PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([OwnLayer(config), OwnLayer(config)])
        self.post_init()

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class OwnForCausalLM(transformers.PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids):
        return self.lm_head(self.model(input_ids))


@pytest.fixture
def own_model(tmp_path):
    transformers.AutoConfig.register("own_buffers", OwnConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM, exist_ok=True)
    torch.manual_seed(0)
    model = OwnForCausalLM(OwnConfig()).eval()
    model.model.layers[1].count.fill_(9)
    return model, save(model, tmp_path / "own")


def test_buffers_made_in_init_have_their_values(own_model):
    model, folder = own_model
    ours = load_model(folder, quantize=None, dtype="fp32")
    for (name, mine), (_, theirs) in zip(ours.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(ours(tokens), model(tokens))


def test_persistent_buffer_absent_from_the_file_keeps_the_value_of_init(own_model):
    _, folder = own_model
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.count"))
    ours = load_model(folder, quantize=None)
    assert int(ours.model.layers[1].count) == 7
    assert ours.trainstream_receipt["buffers_from_init"] == ["model.layers.1.count"]


def test_buffer_without_a_value_is_an_error(own_model):
    _, folder = own_model
    with pytest.raises(CheckpointError, match=r"buffer model\.layers\.0\.ghost has no value"):
        load_model(folder, quantize=None, lost_buffer=True)


def test_parameters_a_checkpoint_may_lack_are_initialized(own_model, monkeypatch):
    _, folder = own_model
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.proj.bias"))
    monkeypatch.setattr(OwnForCausalLM, "_keys_to_ignore_on_load_missing", [r"proj\.bias"], raising=False)
    ours = load_model(folder, quantize=None)
    assert torch.equal(ours.model.layers[1].proj.bias, torch.zeros(8, dtype=torch.bfloat16))
    assert ours.trainstream_receipt["initialized"] == ["model.layers.1.proj.bias"]


@given(keep=st.integers(0, 40))
def test_empty_parameters_keeps_buffers_and_small_parameters(keep):
    with build.empty_parameters(keep):
        layer = nn.BatchNorm1d(20)
        layer.extra = nn.Parameter(torch.ones(2, 20), requires_grad=False)
    assert layer.running_var.tolist() == [1.0] * 20
    assert layer.weight.is_meta == (keep < 20)
    assert layer.extra.is_meta == (keep < 40)
    assert not layer.extra.requires_grad
    assert not nn.Linear(2, 2).weight.is_meta


def test_what_a_checkpoint_fills_is_not_initialized_before(llama_folder, ids, monkeypatch):
    from transformers import initialization

    init = dict(initialization.TORCH_INIT_FUNCTIONS)

    def refused(tensor, *args, **kwargs):
        raise AssertionError("initialized")

    for name in init:
        monkeypatch.setitem(initialization.TORCH_INIT_FUNCTIONS, name, refused)
    ours = load_model(llama_folder, None, "fp32")
    monkeypatch.undo()
    assert_same_model(ours, stock(llama_folder), ids)


# -- packing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "mixtral"])
@pytest.mark.parametrize("codec", ["int8", "nf4"])
def test_packs_block_matrices_and_nothing_else(kind, codec, device, tmp_path, ids):
    folder = save(tiny_model(kind), tmp_path, max_shard_size="20KB")
    ours = load_model(folder, quantize=codec, dtype="fp32", quant_block_size=32, device=device)
    theirs = stock(folder)
    plain = dict(theirs.named_parameters())
    receipt = ours.trainstream_receipt
    packed = 0
    for name, parameter in ours.named_parameters():
        stored = isinstance(parameter, ts_quant.QuantizedTensor)
        inside = ".layers." in name or ".h." in name
        assert stored == (inside and parameter.dim() >= 2), name
        if stored:
            packed += parameter.numel()
            assert isinstance(parameter, nn.Parameter)
            assert not parameter.requires_grad
            want = ts_quant.quantize(plain[name].detach().to(device), codec, block_size=32).dequantize()
            assert_bit_equal(parameter.dequantize(), want)
            with torch.no_grad():
                plain[name].copy_(want)
        else:
            assert_bit_equal(parameter.detach().cpu(), plain[name].detach())
            assert receipt["skipped"][name]
    assert receipt["quantize"] == codec
    assert receipt["share_packed"] == packed / receipt["parameters"]
    assert receipt["bytes_after"] < receipt["bytes_before"]
    if device == "cpu" and kind != "mixtral":
        with torch.no_grad():
            torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)


@given(
    numel=st.integers(1, 5000),
    block=st.integers(1, 64).map(lambda n: 2 * n),
    codec=st.sampled_from(["int8", "nf4"]),
    double=st.booleans(),
)
def test_packed_bytes_is_what_the_codec_takes(numel, block, codec, double):
    packed = ts_quant.quantize(torch.ones(numel), codec, block_size=block, double_quant=double)
    assert loading.packed_bytes(numel, codec, block, double) == packed.packed_bytes


@pytest.mark.parametrize("codec", ["int8", "nf4"])
@pytest.mark.parametrize("files", [False, True])
def test_scales_are_quantized_while_reading(tmp_path, codec, files):
    folder = save(tiny_model(), tmp_path)
    plain = load_model(folder, dtype=torch.float32)
    where = {"disk_offload": str(tmp_path)} if files else {}
    model = load_model(folder, quantize=codec, dtype=torch.float32, double_quant=True, **where)
    packed = {n: p for n, p in model.named_parameters() if isinstance(p, ts_quant.QuantizedTensor)}
    assert packed
    for name, parameter in packed.items():
        want = ts_quant.quantize(plain.get_parameter(name), codec, double_quant=True)
        assert parameter.meta == want.meta
        for part, tensor in want.packed.items():
            assert torch.equal(parameter.packed[part], tensor)


def test_auto_packs_only_as_far_as_needed(tmp_path, monkeypatch):
    folder = save(tiny_model(hidden_size=64, intermediate_size=256, num_hidden_layers=4), tmp_path)
    full = load_model(folder, dtype="bf16").trainstream_receipt
    assert full["quantize"] is None
    sizes = {
        codec: load_model(folder, quantize=codec).trainstream_receipt["bytes_after"]
        for codec in ("int8", "nf4")
    }
    assert sizes["nf4"] < sizes["int8"] < full["bytes_before"]

    def with_ram(free, **options):
        monkeypatch.setattr(loading, "host_budget", lambda: type("B", (), {"available_bytes": free}))
        return load_model(folder, **options).trainstream_receipt["quantize"]

    assert with_ram(full["bytes_before"], ram_fraction=1.0) is None
    assert with_ram(full["bytes_before"] - 1, ram_fraction=1.0) == "int8"
    assert with_ram(sizes["int8"], ram_fraction=1.0) == "int8"
    assert with_ram(sizes["int8"] - 1, ram_fraction=1.0) == "nf4"
    assert with_ram(sizes["nf4"] + 1, ram_fraction=0.5) == "nf4"
    with pytest.raises(DoesNotFitError, match="nf4"):
        with_ram(sizes["nf4"] - 1)


def test_what_ram_cannot_hold_is_refused_before_a_weight_is_read(tmp_path, monkeypatch):
    folder = save(tiny_model(hidden_size=64, intermediate_size=256, num_hidden_layers=4), tmp_path)
    size = load_model(folder, quantize=None, dtype="bf16").trainstream_receipt["bytes_after"]

    def with_ram(free, **options):
        budget = memory.HostBudget(1 << 50, free + (128 << 20), None, "a test")
        monkeypatch.setattr(memory, "host_budget", lambda *a, **k: budget)
        return load_model(folder, dtype="bf16", **options)

    with_ram(size, quantize=None)
    with pytest.raises(DoesNotFitError, match=r"\[load_model\] .* of RAM are needed.*disk_offload=DIR"):
        with_ram(size - 1, quantize=None)
    with_ram(size - 1, quantize="nf4")
    with_ram(0, quantize=None, disk_offload=str(tmp_path))


PEAK = """
import json, resource, sys, torch
import transformers, ts_quant, ts_hf
from ts_hf import load_model
transformers.utils.logging.disable_progress_bar()
def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
how = {"quantize": sys.argv[3], "keep_precise": float(sys.argv[4])}
load_model(sys.argv[2], **how)  # import and warm everything up
before = status("VmRSS")
model = load_model(sys.argv[1], **how)
print(json.dumps({"peak": status("VmHWM") - before, **model.trainstream_receipt, "skipped": None}))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")  # noqa: PTH110
@pytest.mark.parametrize("codec", ["nf4", "none"])
def test_peak_memory_is_the_packed_model_and_one_tensor(codec, tmp_path):
    small = save(tiny_model(), tmp_path / "small")
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "vocab_size": 2048,
        "head_dim": 64,
    }
    config = tiny_config(**sizes, num_attention_heads=16, num_key_value_heads=16)
    torch.manual_seed(0)
    model = load_model(config, quantize=None, random_weights=True)
    folder = save(model, tmp_path / "large", max_shard_size="70MB")
    del model
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), str(small), codec, "0"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["checkpoint_bytes"] > 190e6
    largest = 4096 * 1024 * 2
    assert result["peak"] <= 1.1 * (result["bytes_after"] + largest), result


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_the_system_is_told_of_each_tensor_once_before_it_is_read(llama_folder, monkeypatch, quantize):
    said, read, late = [], Checkpoint.read, []
    monkeypatch.setattr(Checkpoint, "expect", lambda self, name: said.append(name))

    def reading(self, name, **where):
        late.extend([name] if name not in said else [])
        ahead.append(sum(self.info(key).nbytes for key in said) - sum(done))
        done.append(self.info(name).nbytes)
        return read(self, name, **where)

    ahead, done = [], []
    monkeypatch.setattr(Checkpoint, "read", reading)
    monkeypatch.setattr(read_ahead, "_AHEAD_BYTES", 20_000)
    load_model(llama_folder, quantize)
    with Checkpoint(llama_folder) as checkpoint:
        largest = max(checkpoint.info(name).nbytes for name in checkpoint)
        assert sorted(said) == sorted(checkpoint)
    assert not late
    assert max(ahead) <= 20_000 + 2 * largest


def test_what_stays_in_the_checkpoints_files_is_not_read_ahead(llama_folder, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(Checkpoint, "expect", lambda self, name: said.append(name))
    load_model(llama_folder, dtype="fp32", disk_offload=tmp_path)
    assert not said


# -- random weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "mixtral"])
def test_random_weights_are_drawn_as_the_class_does(kind, monkeypatch):
    from ts_hf import build as built

    config = tiny_config(kind)
    monkeypatch.setattr(built, "SMALL_NUMEL", 64)
    torch.manual_seed(3)
    one = load_model(config, quantize=None, dtype="fp32", random_weights=True)
    torch.manual_seed(3)
    two = load_model(config, quantize=None, dtype="fp32", random_weights=True)
    theirs = tiny_model(kind)
    for (name, mine), (_, again), (_, stocked) in zip(
        one.named_parameters(), two.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert_bit_equal(mine, again)
        mine, stocked = mine.detach(), stocked.detach()
        if float(stocked.std()) == 0.0:
            assert torch.equal(mine, stocked), name
        else:
            assert abs(float(mine.std() / stocked.std()) - 1.0) < 0.25, name
    torch.manual_seed(3)
    packed = load_model(config, quantize="nf4", dtype="fp32", random_weights=True)
    reference = dict(one.named_parameters())
    for name, parameter in packed.named_parameters():
        if isinstance(parameter, ts_quant.QuantizedTensor):
            assert_bit_equal(parameter.dequantize(), ts_quant.quantize(reference[name].detach()).dequantize())
        else:
            assert_bit_equal(parameter, reference[name])
    assert one.trainstream_receipt["tensors"] == 0
    assert packed.trainstream_receipt["share_packed"] > 0.3


def test_random_weights_need_only_the_config_file(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    model = load_model(tmp_path, quantize=None, random_weights=True, num_hidden_layers=3)
    assert len(model.model.layers) == 3
    assert model.dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match="neither"):
        load_model(tmp_path, quantize=None)
    with pytest.raises(OptionError, match="random_weights"):
        load_model(tiny_config())


# -- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("quantize", "int4", "expected one of"),
        ("quantize", True, "expected one of"),
        ("keep_precise", 0.6, "a fraction up to 0.5"),
        ("error_rank", -1, ">= 0"),
        ("error_iters", 0, ">= 1"),
        ("double_quant", 1, "True or False"),
        ("disk_offload", 3, "expected None or a directory"),
        ("dtype", "float64", "expected one of"),
        ("dtype", "int8", "expected one of"),
        ("quant_block_size", 3, "divisible by 2"),
        ("quant_block_size", 0, ">= 2"),
        ("ram_fraction", 1.5, "<= 1"),
        ("trust_remote_code", 1, "True or False"),
        ("random_weights", "yes", "True or False"),
        ("device", "tpu", "'cpu', 'cuda'"),
        ("device", "meta", "'cpu', 'cuda'"),
        ("hidden_sise", 3, "neither an option of load_model nor an attribute of LlamaConfig"),
        ("_name_or_path", "x", "neither an option"),
    ],
)
def test_bad_options_name_themselves(option, value, words, llama_folder):
    with pytest.raises(OptionError, match=f"option {option}.*{words}"):
        load_model(llama_folder, **{option: value})


@pytest.mark.parametrize("in_files", [False, True])
def test_fits_of_the_error_are_kept(llama_folder, tmp_path, in_files):
    disk = tmp_path if in_files else None
    model = load_model(llama_folder, "nf4", error_rank=2, error_iters=2, disk_offload=disk)
    plain = dict(load_model(llama_folder, None).named_parameters())
    packed = {n: p for n, p in model.named_parameters() if isinstance(p, ts_quant.QuantizedTensor)}
    fitted = 0
    for name, p in packed.items():
        want = quantize_with_error(plain[name].detach(), "nf4", 2, 2)
        assert_bit_equal(p.dequantize(), want.dequantize())
        assert (p.error_factors is None) == (want.error_factors is None)
        for got, part in zip(p.error_factors or (), want.error_factors or (), strict=True):
            assert_bit_equal(got, part)
            assert (locate(got) is not None) == in_files
            fitted += 1
    assert fitted


def test_a_rank_without_packing_is_in_the_receipt(llama_folder):
    model = load_model(llama_folder, None, error_rank=2, double_quant=True)
    assert "error_rank=2 ignored" in model.trainstream_receipt["reason"]
    assert "double_quant=True ignored" in model.trainstream_receipt["reason"]


@pytest.mark.parametrize("value", ["none", None, False, "auto"])
def test_ways_to_ask_for_no_packing(value, llama_folder):
    assert load_model(llama_folder, quantize=value).trainstream_receipt["quantize"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(llama_folder):
    with pytest.raises(DeviceError, match="no CUDA device"):
        load_model(llama_folder, device="cuda")


def test_config_overrides_reach_the_model(llama_folder, ids):
    model = load_model(
        llama_folder, quantize=None, dtype="fp32", attn_implementation="eager", rms_norm_eps=0.5
    )
    assert model.config._attn_implementation == "eager"
    assert model.config.rms_norm_eps == 0.5
    assert_same_model(model, stock(llama_folder, attn_implementation="eager", rms_norm_eps=0.5), ids)


@pytest.mark.parametrize("content", ["{", '{"model_type": "no_such_model"}', "{}"])
def test_unusable_config(content, llama_folder):
    (llama_folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model(llama_folder)


def test_no_config(llama_folder):
    (llama_folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model(llama_folder)


def test_model_that_is_no_causal_lm(tmp_path):
    transformers.ViTConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1).save_pretrained(
        tmp_path
    )
    with pytest.raises(CheckpointError, match="no causal language model"):
        load_model(tmp_path, random_weights=True)


def test_code_of_a_checkpoint_does_not_run(llama_folder, tmp_path):
    config = json.loads((llama_folder / "config.json").read_text())
    config.update(model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    (llama_folder / "config.json").write_text(json.dumps(config))
    mark = tmp_path / "ran"
    (llama_folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass C: pass\nclass M: pass\n")
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        load_model(llama_folder)
    assert not mark.exists()


def test_model_code_needs_permission():
    config = tiny_config()
    config.auto_map = {"AutoModelForCausalLM": "evil--M"}
    config.__class__ = type("Unknown", (type(config),), {})
    with pytest.raises(OptionError, match="trust_remote_code"):
        build.build_model(config, torch.float32)


def test_other_transformers_internals_fall_back(llama_folder, ids, monkeypatch):
    def missing():
        raise streaming.UnknownTablesError("no module named core_model_loading")

    monkeypatch.setattr(streaming, "_tables", missing)
    ours = load_model(llama_folder, quantize=None, dtype="fp32")
    assert_same_model(ours, stock(llama_folder), ids)
    assert ours.trainstream_receipt["reason"] == "loaded by transformers"
    with pytest.raises(OptionError, match="quantize='nf4' is not available with transformers"):
        load_model(llama_folder, quantize="nf4")


def test_missing_or_old_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__="4.57.0"))
    with pytest.raises(MissingDependencyError, match=r"found 4\.57\.0"):
        build.import_transformers()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        build.import_transformers()


def test_generation_config_is_loaded(llama_folder):
    path = llama_folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temperature": 0.25, "do_sample": True}))
    assert load_model(llama_folder, quantize=None).generation_config.temperature == 0.25
    path.unlink()
    assert load_model(llama_folder, quantize=None).generation_config.eos_token_id == 2


def test_saved_again_it_is_the_same_checkpoint(tmp_path):
    folder = save(tiny_model("mixtral"), tmp_path / "a")
    load_model(folder, quantize=None, dtype="fp32").save_pretrained(tmp_path / "b")
    with Checkpoint(folder) as one, Checkpoint(tmp_path / "b") as two:
        assert sorted(one) == sorted(two)
        for name in one:
            assert_bit_equal(one.read(name), two.read(name))


def test_tokenizer_of_a_folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded("a b")["input_ids"] == tokenizer("a b")["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(tmp_path / "empty")


def test_owner_and_stored_quantization():
    layer = nn.Sequential(nn.Linear(2, 2))
    assert build.owner_of(layer, "0.bias") == (layer[0], "bias")
    config = tiny_config()
    assert take_quantization(config, None) is None
    config.quantization_config = {"quant_method": "awq", "bits": 4}
    assert take_quantization(config, None) == {"quant_method": "awq", "bits": 4}
    assert not hasattr(config, "quantization_config")
    config.quantization_config = transformers.AwqConfig(bits=4)
    assert take_quantization(config, None)["quant_method"] == "awq"
    config.text_config = types.SimpleNamespace(quantization_config={"quant_method": "fp8"})
    assert take_quantization(config, None) == {"quant_method": "fp8"}
