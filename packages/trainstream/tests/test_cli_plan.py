"""`trainstream plan`: the answer for people and programs, what does not fit, and mistakes."""

import importlib
import json
import struct

import pytest
from typer.testing import CliRunner

from trainstream.cli import app
from ts_core.hardware import ASSUMED, ASSUMED_RATES
from ts_core.job import assumed_profile

# The command has the same name as the module.
plan = importlib.import_module("trainstream.cli.plan")

SMALL = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
LARGE = {
    **SMALL,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
MACHINE = ("--vram", "24GiB", "--ram", "64GiB", "--disk", "0")


@pytest.fixture
def ask(tmp_path):
    def ask(config, *words):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return CliRunner().invoke(app, ["plan", str(path), *words])

    return ask


def answer(result):
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("{")]
    return json.loads(line)


def test_an_answer_for_people(ask):
    result = ask(LARGE, *MACHINE)
    assert result.exit_code == 0
    for word in (
        "14.8 B weights",
        "48 blocks",
        "model.layers.0",
        "fits ",
        "tokens/s",
        "limited by",
        "rates ",
    ):
        assert word in result.stdout


def test_an_answer_for_programs(ask):
    data = answer(ask(LARGE, *MACHINE, "--json"))
    assert data["event"] == "plan"
    assert data["fits"] is True
    assert data["model"]["parameters"] == 14_770_033_664
    taken, budgets = data["prediction"], data["budgets"]
    assert taken["device_bytes"] <= budgets["device"] < 24 << 30
    assert taken["host_bytes"] <= budgets["host"] == 64 << 30
    assert taken["step_s"] > 0
    assert len([b for b in data["plan"]["blocks"] if b["kind"] == "block"]) == 48
    assert data["decisions"]


def test_report_reads_what_plan_printed(ask, tmp_path):
    from trainstream._runs import read_forecast

    (tmp_path / "plan.json").write_text(ask(SMALL, *MACHINE, "--json").stdout)
    assert read_forecast(tmp_path / "plan.json")["step_s"] > 0


@pytest.mark.parametrize("words", [("--full",), ("--lora", "--quantize", "none", "--seq", "4096")])
def test_what_does_not_fit_and_the_options_that_do(ask, words):
    result = ask(LARGE, "--vram", "4GiB", "--ram", "8GiB", "--disk", "0", *words, "--json")
    data = answer(result)
    assert result.exit_code == 1
    assert data["fits"] is False
    assert data["options"]
    for option in data["options"]:
        # The option's words replace those of the question, and then it fits.
        given = {"--vram": "4GiB", "--ram": "8GiB", "--disk": "0"}
        change = option["change"].split()
        kept = [w for w in words if not (w == "--full" and "--lora" in change)]
        pairs = dict(zip(change[::2], change[1::2], strict=False)) if len(change) > 1 else {}
        again = [w for pair in (given | pairs).items() for w in pair]
        extra = change if len(change) == 1 else []
        rest = [w for i, w in enumerate(kept) if w not in pairs and not (i and kept[i - 1] in pairs)]
        assert ask(LARGE, *again, *rest, *extra).exit_code == 0, option


def test_without_a_gpu_it_plans_for_ram(ask, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    data = answer(ask(SMALL, "--ram", "8GiB", "--disk", "20GiB", "--json"))
    assert data["budgets"]["host"] is None
    assert data["plan"]["device"] == "cpu"
    assert data["prediction"]["host_bytes"] == 0


def test_without_a_gpu_no_gpu_is_spoken_of(ask, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for words in (("--ram", "8GiB"), ("--ram", "1GiB"), ("--ram", "24GiB", "--full")):
        said = ask(SMALL, *words, "--disk", "20GiB")
        assert said.exit_code == 0
        about = said.stdout.partition("may use")[2]
        for word in ("GPU", "gpu", "VRAM", "device", "come from RAM", "offload,", "h2d"):
            assert word not in about, word
        assert "limited by compute" in about
    refused = ask(SMALL, "--ram", "8GiB", "--capture")
    assert refused.exit_code == 2
    assert "on a GPU only" in refused.stderr


def test_captured_blocks_take_memory_and_few_launches(ask):
    words = (*MACHINE, "--json", "--seq", "512", "--tflops", "900", "--quantize", "none")
    plain, captured = answer(ask(SMALL, *words)), answer(ask(SMALL, *words, "--capture"))
    assert plain["prediction"]["limiter"] == "launch"
    assert captured["prediction"]["step_s"] < plain["prediction"]["step_s"]
    assert captured["prediction"]["device_bytes"] > plain["prediction"]["device_bytes"]
    (gain,) = [help["gain"] for help in plain["helps"] if help["text"] == "--capture"]
    assert gain == pytest.approx(plain["prediction"]["step_s"] / captured["prediction"]["step_s"], rel=1e-6)
    assert not [help for help in captured["helps"] if help["text"] == "--capture"]
    assert any(line.startswith("capture: ") for line in captured["decisions"])


def test_rates_can_be_given(ask, tmp_path):
    slow = answer(ask(LARGE, *MACHINE, "--json", "--link", "2", "--quantize", "none"))
    fast = answer(ask(LARGE, *MACHINE, "--json", "--link", "60", "--tflops", "900", "--quantize", "none"))
    assert slow["prediction"]["limiter"] == "h2d"
    assert fast["prediction"]["step_s"] < slow["prediction"]["step_s"]
    assert "h2d" in "".join(fast["decisions"])
    measured = assumed_profile(h2d_bytes_per_s=2e9, both_bytes_per_s=3.3e9, d2h_bytes_per_s=2e9)
    (tmp_path / "doctor.json").write_text(f'{{"event": "doctor", "profile": {measured.to_json()}}}')
    given = answer(
        ask(LARGE, *MACHINE, "--json", "--quantize", "none", "--hardware", str(tmp_path / "doctor.json"))
    )
    assert given["prediction"]["step_s"] == pytest.approx(slow["prediction"]["step_s"], rel=1e-6)
    assert set(measured.rates) == set(ASSUMED_RATES["cuda"])
    assert set(measured.assumed) | set(measured.measured) == set(ASSUMED)


def test_options_reach_the_plan(ask):
    nf4 = answer(ask(LARGE, *MACHINE, "--json", "--quantize", "nf4", "--batch", "2", "--micro-batch", "2"))
    assert nf4["plan"]["numerics"]["quantize"] == "nf4"
    assert nf4["micro_batch"] == 2
    assert {b["codec"] for b in nf4["plan"]["blocks"] if b["kind"] == "block"} == {"nf4"}
    full = answer(ask(SMALL, *MACHINE, "--json", "--full", "--moments", "int8"))
    assert full["plan"]["numerics"]["moment_dtype"] == "int8"


def test_what_is_stored_packed_stays_so_unless_every_weight_is_trained(ask):
    stored = {**LARGE, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    lora = answer(ask(stored, *MACHINE, "--json"))
    assert lora["model"]["bytes"] < 12 << 30
    assert {b["codec"] for b in lora["plan"]["blocks"] if b["kind"] == "block"} == {"gptq"}
    full = answer(ask(stored, "--vram", "80GiB", "--ram", "512GiB", "--full", "--json"))
    assert full["model"]["bytes"] > 25 << 30
    assert "decoded" in full["model"]["notes"][0]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--vram", "lots"), "vram"),
        (("--vram", "0"), "vram"),
        (("--vram", "24"), "write the unit too, as in 24GiB"),
        (("--quantize", "nf5"), "quantize"),
        (("--full", "--quantize", "nf4"), "packed weights are frozen"),
        (("--full", "--lora"), "exclude each other"),
        (("--lora", "--full", "--rank", "8"), "exclude each other"),
        (("--full", "--rank", "8"), "every weight is trained"),
        (("--batch", "4", "--micro-batch", "3"), "divisor"),
        (("--prefer", "cheap"), "prefer"),
        (("--moments", "fp8"), "moments"),
        (("--link", "0"), "link"),
        (("--hardware", "nowhere.json"), "nowhere.json"),
    ],
)
def test_mistakes_are_one_line(ask, words, text):
    result = ask(SMALL, *MACHINE[2:], *words)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert text in result.stderr


def test_weights_count_as_they_are_loaded(ask):
    spec = answer(ask(SMALL, *MACHINE, "--json"))["model"]
    assert spec["bytes"] == 2 * spec["parameters"]
    assert answer(ask({**SMALL, "torch_dtype": "float32"}, *MACHINE, "--json"))["model"] == spec


def gguf(path, kind, layers=2, hidden=256, inner=512, vocabulary=64):
    """The header of a Llama in a GGUF file, as published: version 3, values, tensors."""

    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    values = {"block_count": layers, "embedding_length": hidden, "attention.head_count": 4}
    data = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    for name, value in values.items():
        data += text(f"llama.{name}") + struct.pack("<II", 4, value)
    shapes = {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,)}
    for i in range(layers):
        shapes |= {f"blk.{i}.attn_{part}.weight": (hidden, hidden) for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_{part}.weight": (inner, hidden) for part in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down.weight": (hidden, inner), f"blk.{i}.attn_norm.weight": (hidden,)}
    for name, shape in shapes.items():
        data += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        data += struct.pack("<IQ", kind if len(shape) == 2 else 0, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(values) + 1) + data)
    return sum(n * m for n, *ms in shapes.values() for m in ms or [1])


@pytest.mark.parametrize(("kind", "each"), [(12, 144 / 256), (8, 34 / 32), (1, 2)])
def test_a_gguf_file_or_its_folder(tmp_path, kind, each):
    numel = gguf(tmp_path / "m.gguf", kind)
    for place in (tmp_path / "m.gguf", tmp_path):
        found = answer(CliRunner().invoke(app, ["plan", str(place), *MACHINE, "--json"]))
        assert found["fits"]
        model = found["model"]
        assert model["parameters"] == numel
        packed = 2 * (4 * 256 * 256 + 3 * 256 * 512)
        assert model["bytes"] == packed * each + 2 * (numel - packed)
        codecs = {b["codec"] for b in found["plan"]["blocks"] if b["kind"] == "block"}
        assert codecs == {{12: "gguf_q4_k", 8: "gguf_q8_0", 1: "none"}[kind]}


def test_a_model_that_is_not_there(tmp_path):
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "config.json"), *MACHINE])
    assert result.exit_code == 2
    assert "there is no" in result.stderr
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    result = CliRunner().invoke(app, ["plan", str(tmp_path / "config.json"), *MACHINE])
    assert result.exit_code == 2
    assert "hidden_size is missing" in result.stderr


def test_a_slow_rate_is_not_shown_as_none():
    from trainstream.cli.plan import _rate

    assert [_rate(x) for x in (0.1234, 3.21, 12.6, 1671.2)] == ["0.12", "3.2", "13", "1,671"]
