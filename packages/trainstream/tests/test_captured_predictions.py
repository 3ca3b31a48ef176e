"""What the cost model says of captured blocks, beside steps that were measured on an H200."""

import dataclasses

import pytest

from trainstream._first import packing_of, planned_job
from ts_core.job import Choice, Setting, assumed_profile
from ts_core.step import predict
from ts_hf.config_spec import spec_from_config

SHAPES = {
    "7b": (3584, 18944, 28, 28, 4, 152064),
    "8b": (4096, 12288, 36, 32, 8, 151936),
    "14b": (5120, 13824, 48, 40, 8, 152064),
}
KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size",
)  # fmt: skip
LINK = 55.4e9
H200 = dataclasses.replace(
    assumed_profile(
        h2d_bytes_per_s=LINK,
        d2h_bytes_per_s=LINK,
        both_bytes_per_s=95.1e9,
        device_copy_bytes_per_s=3.93e12,
        launch_s=6.62e-6,
    ),
    rates={
        "decode_weights_per_s": {"nf4": 1.14e12},
        "matmul_flops_per_s": {"bfloat16/1024": 95.7e12, "bfloat16/4096": 803e12},
    },
)


def predicted(shape, codec, tokens, paged=0, policies=None, rows=1, micro=1, capture=True):
    config = {"model_type": "qwen2", "dtype": "bfloat16", **dict(zip(KEYS, SHAPES[shape], strict=True))}
    spec = spec_from_config({**config, "tie_word_embeddings": False})
    packing = packing_of(codec)
    job = planned_job(
        spec, cpu=False, seq_len=tokens, batch=rows, lora_rank=16, trains=False, packings=[packing],
        capture=capture, micro_batches=(micro,),
    )  # fmt: skip
    places, kept = [], []
    for members in spec.classes():
        count = len(members)
        stack = spec.blocks[members[0]].kind == "block"
        places.append((count - paged, 0, paged, 0) if stack else (count, 0, 0, 0))
        kept.append((policies or (count, 0, 0)) if stack else (0, 0, 0))
    setting = Setting(packing, "float32", micro, "microbatch", 2)
    return predict(spec, job, H200, Choice(setting, tuple(places), tuple(kept)))


@pytest.mark.parametrize(
    ("plan", "seconds"),
    [
        ({"shape": "14b", "codec": "nf4", "tokens": 512}, 0.109),
        ({"shape": "14b", "codec": "nf4", "tokens": 2048}, 0.252),
        ({"shape": "7b", "codec": "nf4", "tokens": 512}, 0.066),
        ({"shape": "8b", "codec": "nf4", "tokens": 2048, "rows": 8, "micro": 2}, 1.092),
        ({"shape": "7b", "codec": "none", "tokens": 512, "paged": 17, "policies": (6, 14, 8)}, 0.342),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_step_with_captured_blocks_is_priced_as_measured(plan, seconds):
    assert predicted(**plan).step_s == pytest.approx(seconds, rel=0.15)


def test_without_captures_the_host_limits_short_rows():
    plain, captured = (predicted("7b", "nf4", 512, capture=way) for way in (False, True))
    assert plain.limiter == "launch"
    assert plain.busy_s["launch"] > 3 * captured.busy_s["launch"]
