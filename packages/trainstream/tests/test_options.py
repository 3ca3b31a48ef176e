import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trainstream
from trainstream._options import WrapOptions
from ts_core.errors import OptionError, TrainStreamError

# Every option of wrap(): values carried out now, values refused as not built yet, and wrong values.
NOW = {
    "optimizer_mode": ["cpu", "gpu", "auto"],
    "offload": ["auto", True],
    "activation_offload": ["auto", False, True, 0.0, 0, 0.5],
    "param_offload": ["auto", False, True, 0.0, 0.5, [], [0, 1]],
    "quantize": ["auto", "none", None, False, "int8", "nf4", "fp8", "mxfp8", "fp8_row", "fp8_block", "nvfp4"],
    "quant_block_size": [2, 64, 4096],
    "prefer": ["exact", "speed"],
    "recompute": ["auto", False, True, 0.0, 0.5, [], [0]],
    "attention": ["auto", "cudnn", "efficient", "flash", "math", None],
    "outliers": [0, False, None, "auto", True, 0.1],
    "nvfp4_backward": [False, True],
    "fp8_backward": [False, True],
    "kernels": ["auto", True, False, None],
    "fused_lora": ["auto", True, False, None],
    "keep_precise": [0, False, None, 0.05, 0.5, True, "auto"],
    "error_rank": [0, 16],
    "error_iters": [1, 5],
    "double_quant": [False, True],
    "disk_offload": [None, "/tmp"],
    "moe_paging": [False],
    "host_arena": ["auto", False, None, "2GiB", 1 << 30],
    "peer": ["auto", False, None],
    "moment_dtype": [
        "auto",
        "float32",
        "fp32",
        torch.float32,
        "bfloat16",
        "bf16",
        torch.bfloat16,
        "int8",
        "8bit",
    ],
    "device": [None, "cpu", torch.device("cpu")],
    "blocks": [None],
    "distributed": [None, False],
    "guard_params": [True, False],
    "max_grad_norm": [None, 1.0, 1],
    "accumulation_steps": [None, 1, 8],
    "vram_headroom": [0.0, 0.1, 1.0],
    "check_memory": [True, False],
    "max_inflight_bytes": [None, "1GiB", 1 << 20],
    "max_activation_slowdown": [0.15, 0, 0.5, 3],
    "prefetch_depth": [1, 2, 4],
    "plan_tokens": [None, 1, 4096],
    "min_offload_bytes": [1 << 20, "1MiB", 0, "2MiB"],
    "threads": [None, 1, 64],
    "profile": [True, False],
    "lr": [0, 1e-3],
    "verbose": [True, False],
    "vram_budget": [None, 1, 1 << 30, "12GiB", "1.5G", "512 MB"],
    "ram_budget": [None, 1 << 30, "4096"],
    "disk_budget": [None, 0, "1TiB"],
    "schedule": ["auto", "microbatch"],
    "capture": ["auto", True, False],
    "lossless": ["auto", False],
}
LATER = {
    "moe_paging": [True],
    "peer": ["2GiB"],
    "distributed": [True],
    "schedule": ["block"],
    "lossless": [True],
}
WRONG = {
    "optimizer_mode": ["tpu", None, 1],
    "offload": [False, "yes", 1],
    "activation_offload": ["yes", 1.5, -0.1, None],
    "param_offload": ["all", 2, [-1], [0.5]],
    "quantize": ["int4", 8, True],
    "quant_block_size": [0, 1, 3, -2, 64.0, "64"],
    "prefer": ["quality", None],
    "recompute": ["some", 1.01, ["a"]],
    "attention": ["fa3", False],
    "outliers": [0.2, -0.1, "some"],
    "nvfp4_backward": ["auto", 1],
    "fp8_backward": ["auto", None],
    "kernels": ["on", 1],
    "fused_lora": ["on", 0],
    "keep_precise": [0.6, "some"],
    "error_rank": [-1, 1.5, None],
    "error_iters": [0, "2"],
    "double_quant": ["auto", 1],
    "disk_offload": [7, True, "/no/such/directory"],
    "moe_paging": ["auto", None],
    "host_arena": ["big", True, -1, 0],
    "peer": ["all", True],
    "moment_dtype": ["fp64", torch.float16, None, ["x"]],
    "device": ["tpu", "cuda:99", 1.5, "meta"],
    "blocks": ["layers", 3, [1]],
    "distributed": ["auto", 1],
    "guard_params": [None, 1],
    "max_grad_norm": [0, -1.0, float("nan"), float("inf"), "1"],
    "accumulation_steps": [0, -1, 1.5, True],
    "vram_headroom": [-0.1, 1.1, "10%"],
    "check_memory": ["no", 0],
    "max_inflight_bytes": ["lots", -1, 0],
    "max_activation_slowdown": [-0.1, "x"],
    "prefetch_depth": [0, 1.5],
    "plan_tokens": [0, -1, 2.5, "long"],
    "min_offload_bytes": ["small", -1],
    "threads": [0, -1, 2.5],
    "profile": ["auto"],
    "lr": [-1e-3, float("nan"), "1e-3"],
    "verbose": [1],
    "vram_budget": [0, "0", "12 parsecs", -1, 1.5, "auto"],
    "ram_budget": [-1, "", "-1GiB", [1]],
    "disk_budget": [True, "nan", 1 << 63],
    "schedule": ["random"],
    "capture": [None, 1],
    "lossless": [None, 0],
}


def pairs(table):
    return [
        pytest.param(name, value, id=f"{name}={value}") for name, values in table.items() for value in values
    ]


def test_the_tables_cover_every_option():
    names = {field.name for field in dataclasses.fields(WrapOptions)}
    assert names == set(NOW) == set(WRONG)
    assert set(LATER) <= names


@pytest.mark.parametrize(("name", "value"), pairs(NOW))
def test_carried_out(name, value):
    WrapOptions.from_kwargs(**{name: value})


@pytest.mark.parametrize(("name", "value"), pairs(LATER))
def test_not_built_yet_is_refused_and_says_so(name, value):
    with pytest.raises(ValueError, match=rf"{name}.*not available in this release") as caught:
        WrapOptions.from_kwargs(**{name: value})
    assert isinstance(caught.value, OptionError)


@pytest.mark.parametrize(("name", "value"), pairs(WRONG))
def test_wrong_value_names_option_and_value(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        WrapOptions.from_kwargs(**{name: value})
    assert isinstance(caught.value, TrainStreamError)
    assert "not available in this release" not in str(caught.value)


def test_wrong_option_leaves_the_model_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(OptionError):
        trainstream.wrap(model, quantize="int4")
    assert "_trainstream_session" not in model.__dict__


@given(st.text(min_size=1).filter(lambda name: name not in NOW))
def test_unknown_options_are_refused(name):
    with pytest.raises(OptionError, match="no option"):
        WrapOptions.from_kwargs(**{name: 1})


def test_near_misses_are_suggested():
    with pytest.raises(OptionError, match="quantize"):
        WrapOptions.from_kwargs(quantise="nf4")


BUDGETS = {
    "vram_budget": "TRAINSTREAM_VRAM",
    "ram_budget": "TRAINSTREAM_RAM",
    "disk_budget": "TRAINSTREAM_DISK",
}


@pytest.fixture(autouse=True)
def _no_budgets_from_outside(monkeypatch):
    for variable in BUDGETS.values():
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("name", BUDGETS)
def test_budgets_become_bytes(name):
    for given_value, expected in (("8GiB", 8 << 30), ("1GB", 10**9), (4096, 4096), ("4096", 4096)):
        assert getattr(WrapOptions.from_kwargs(**{name: given_value}), name) == expected


@given(st.sampled_from(sorted(BUDGETS)), st.integers(0, 2**63 - 1))
def test_any_number_of_bytes_is_a_budget(name, size):
    size = max(size, int(name != "disk_budget"))  # no file at all is a budget; no memory at all is none
    assert getattr(WrapOptions.from_kwargs(**{name: size}), name) == size
    assert getattr(WrapOptions.from_kwargs(**{name: str(size)}), name) == size


@pytest.mark.parametrize(("name", "variable"), BUDGETS.items())
def test_the_environment_gives_a_budget_where_no_option_does(name, variable, monkeypatch):
    monkeypatch.setenv(variable, "8GiB")
    checked = WrapOptions.from_kwargs()
    assert getattr(checked, name) == 8 << 30
    assert [getattr(checked, other) for other in BUDGETS if other != name] == [None, None]
    assert getattr(WrapOptions.from_kwargs(**{name: "1GiB"}), name) == 1 << 30
    assert getattr(WrapOptions.from_kwargs(**{name: 1}), name) == 1
    monkeypatch.setenv(variable, "")
    assert getattr(WrapOptions.from_kwargs(), name) is None


@pytest.mark.parametrize("text", ["lots", "-1", "8 parsecs", "1e9", " "])
@pytest.mark.parametrize(("name", "variable"), BUDGETS.items())
def test_a_wrong_value_in_the_environment_names_the_variable(name, variable, text, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(OptionError, match=rf"{name}.*{variable}.*{text}"):
        WrapOptions.from_kwargs()


@given(st.integers(-4, 5000) | st.floats(allow_nan=True) | st.booleans() | st.none())
def test_block_size_accepts_even_integers_only(value):
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 2 and value % 2 == 0
    if good:
        assert WrapOptions.from_kwargs(quant_block_size=value).quant_block_size == value
    else:
        with pytest.raises(OptionError):
            WrapOptions.from_kwargs(quant_block_size=value)
