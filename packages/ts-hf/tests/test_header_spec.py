"""Specs from headers, on disk and by HTTP range reads from a server on this machine."""

import contextlib
import http.server
import json
import struct
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ts_core.errors import CheckpointError, OptionError, StorageError
from ts_hf.config_spec import spec_from_config
from ts_hf.header_spec import find_spec, http_fetch, read_header, spec_from_headers

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
}


def weights(layers=3, hidden=16, inner=32, vocabulary=50):
    named = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    named["lm_head.weight"] = (vocabulary, hidden)
    for i in range(layers):
        at = f"model.layers.{i}"
        named |= {f"{at}.self_attn.{p}_proj.weight": (hidden, hidden) for p in "qkvo"}
        named |= {f"{at}.mlp.{p}_proj.weight": (inner, hidden) for p in ("gate", "up")}
        named[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
        named |= {f"{at}.{p}_layernorm.weight": (hidden,) for p in ("input", "post_attention")}
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in named.items()}


def headers_of(tensors):
    return {name: ("BF16", tuple(t.shape)) for name, t in tensors.items()}


@pytest.fixture
def folder(tmp_path):
    save_file(weights(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


class Server(http.server.BaseHTTPRequestHandler):
    root = None
    ranges = True
    asked = ()

    def do_GET(self):
        name = self.path.rpartition("/resolve/main/")[2]
        file = self.root / name
        if not file.is_file():
            self.send_error(404)
            return
        data, status = file.read_bytes(), 200
        if self.ranges and (given := self.headers.get("Range")):
            begin, end = given.removeprefix("bytes=").split("-")
            data, status = data[int(begin) : int(end) + 1], 206
        self.asked.append((name, len(data)))
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nothing"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("no_proxy", "*")
    handler = type("Here", (Server,), {"root": tmp_path, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_headers_say_what_the_config_says():
    spec = spec_from_headers(headers_of(weights()), CONFIG)
    by_config = spec_from_config(CONFIG)
    assert spec.numel == by_config.numel
    assert [b.kind for b in spec.blocks] == [b.kind for b in by_config.blocks]
    assert [len(c) for c in spec.classes()] == [1, 3, 1, 1]
    assert spec.stack[0].saved == by_config.stack[0].saved
    assert not spec.tied
    assert spec.hidden == 16


def test_without_a_config_the_names_must_do():
    spec = spec_from_headers(headers_of(weights()))
    assert spec.hidden == 16
    tied = {name: entry for name, entry in headers_of(weights()).items() if "lm_head" not in name}
    assert spec_from_headers(tied).tied
    with pytest.raises(CheckpointError, match="no layer stack"):
        spec_from_headers({"a.weight": ("F32", (2, 2))})


def test_experts_stored_one_by_one_are_stacked():
    named = {}
    for i in range(2):
        named |= {f"model.layers.{i}.mlp.experts.{e}.up_proj.weight": ("BF16", (8, 4)) for e in range(6)}
        named[f"model.layers.{i}.mlp.gate.weight"] = ("BF16", (6, 4))
    found = {t.name: t for t in spec_from_headers(named, {"num_experts_per_tok": 3}).stack[0].tensors}
    assert found["mlp.experts.up_proj.weight"].shape == (6, 8, 4)
    assert found["mlp.experts.up_proj.weight"].active == 0.5
    assert "8 assumed" in spec_from_headers(named).notes[0]


@pytest.mark.parametrize(
    ("name", "stored", "shape", "numel", "size"),
    [
        ("q_proj.weight", "F8_E4M3", (16, 16), 256, 256),
        ("q_proj.weight", "U8", (128, 1), 256, 128),
        ("q_proj.qweight", "I32", (2, 16), 256, 128),
        ("q_proj.scales", "F16", (2, 16), 32, 64),
    ],
)
def test_packed_tensors_count_as_stored_and_are_frozen(name, stored, shape, numel, size):
    named = {f"layers.{i}.self_attn.{name}": (stored, shape) for i in range(2)}
    tensor = spec_from_headers(named).stack[0].tensors[0]
    assert (tensor.numel, tensor.bytes, tensor.trained) == (numel, size, False)


@pytest.mark.parametrize("what", ["", "config.json", "model.safetensors"])
def test_folder_config_and_file(folder, what):
    spec = find_spec(str(folder / what))
    assert spec.numel == spec_from_config(CONFIG).numel


def test_an_unknown_family_is_read_from_headers(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "brand_new"}))
    assert find_spec(str(folder)).numel == spec_from_config(CONFIG).numel


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_hub_is_read_by_ranges(hub, tmp_path, ranges, shards):
    handler, endpoint = hub
    handler.ranges = ranges
    every = weights(inner=4096)
    names = sorted(every)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "brand_new"}))
    if shards == 1:
        save_file(every, tmp_path / "model.safetensors")
    else:
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, own in parts.items():
            save_file({name: every[name] for name in own}, tmp_path / file)
        index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    spec = find_spec("someone/a-model", endpoint=endpoint)
    assert spec.numel == sum(t.numel() for t in every.values())
    if ranges:
        assert max(size for _, size in handler.asked) <= 1 << 16


def test_a_known_family_needs_one_small_read(hub, folder):
    handler, endpoint = hub
    assert find_spec("someone/a-model", endpoint=endpoint).numel == spec_from_config(CONFIG).numel
    assert [name for name, _ in handler.asked] == ["config.json"]


def test_what_a_hub_does_not_have(hub):
    with pytest.raises(StorageError, match=r"no 'someone/else' here, .*404: there is no such model"):
        find_spec("someone/else", endpoint=hub[1])
    with pytest.raises(OptionError, match="expected a folder, a file or a name"):
        find_spec(" ")
    with pytest.raises(StorageError, match="cannot be read"):
        http_fetch("http://127.0.0.1:1/x", 0, 8)


def test_a_reader_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    asked = []

    def fetch(address, begin, end):
        asked.append(address)
        return json.dumps(CONFIG).encode()

    assert find_spec("a/b", fetch=fetch, endpoint="memory:").numel == spec_from_config(CONFIG).numel
    assert asked == ["memory:/a/b/resolve/main/config.json"]


def test_what_is_in_the_cache_is_not_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    at = tmp_path / "models--a--b" / "snapshots" / "abc"
    at.mkdir(parents=True)
    (at / "config.json").write_text(json.dumps(CONFIG))

    def fetch(*_):
        raise AssertionError("asked")

    assert find_spec("a/b", fetch=fetch).numel == spec_from_config(CONFIG).numel


def test_names_that_lead_nowhere(folder):
    with pytest.raises(OptionError, match=r"did you mean .*config\.json"):
        find_spec(str(folder / "confg.json"))
    with pytest.raises(OptionError, match="neither"):
        find_spec(__file__)
    (folder / "empty").mkdir()
    with pytest.raises(OptionError, match="neither a config"):
        find_spec(str(folder / "empty"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 10) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 8) + b'{"a": 1}',
        struct.pack("<Q", 36) + b'{"a": {"dtype": "F9", "shape": [2]}}',
    ],
)
def test_broken_headers_are_refused(data):
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(lambda begin, end: data[begin:end], "here")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_refused(data):
    with contextlib.suppress(CheckpointError):
        assert isinstance(read_header(lambda begin, end: data[begin:end], "here"), dict)


@pytest.mark.parametrize("index", [{}, {"weight_map": {"a": "../b.safetensors"}}, {"weight_map": {"a": 1}}])
def test_an_index_that_names_no_files_of_the_folder(tmp_path, index):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "brand_new"}))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="weight_map"):
        find_spec(str(tmp_path))
