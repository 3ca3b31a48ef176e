"""`kernels`, `fused_lora` and `attention` in the Trainer, in its checkpoints, and on the command line."""

import pytest
import torch
from test_benchmarks import compare, measure
from test_cli_finetune import finetune, place, save_tiny_model, write_texts  # noqa: F401
from test_peft import lora
from test_trainer import build
from test_trainer_plan import trainer

import trainstream
from trainstream.cli import loop
from trainstream.integrations._plan_file import read_plan
from ts_core.errors import CheckpointError
from ts_fused import _checked_lora, checked

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing:FutureWarning", "ignore::UserWarning"
)
CHOSEN = {"kernels": True, "fused_lora": True, "attention": "math"}


@pytest.fixture(autouse=True)
def _small_sizes_too(monkeypatch, one_thread):
    monkeypatch.setattr(_checked_lora, "WORTH_IT", 0)
    monkeypatch.setattr(checked, "WORTH_IT", {})


def made():
    return lora(build(), target_modules="all-linear")


def test_a_trainer_takes_them_and_its_checkpoints_keep_them(tmp_path):
    first = trainer(tmp_path, CHOSEN, made())
    first.train()
    report = trainstream.memory_report(first.model)
    fused = [row["kind"] for row in report["kernels"]["modules"] if row["fused"]]
    assert {kind: fused.count(kind) for kind in sorted(set(fused))} == {
        "add_rms_norm": 2, "gated_mlp": 2, "lora": 18, "rms_norm": 5, "rotary": 2,
    }  # fmt: skip
    resume = str(tmp_path / "checkpoint-2")
    numerics = read_plan(tmp_path / "checkpoint-2").plan.numerics
    assert (numerics.kernels, numerics.fused_lora, numerics.attention) == (True, True, "math")
    for wrong in ({"kernels": False}, {"fused_lora": None}, {"attention": None}):
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            trainer(tmp_path, wrong, made()).train(resume_from_checkpoint=resume)
    again = trainer(tmp_path, {"recompute": True}, made())  # another placement; the rest is left open
    again.train(resume_from_checkpoint=resume)
    expected = dict(first.model.named_parameters())
    for name, parameter in again.model.named_parameters():
        assert torch.equal(parameter.detach(), expected[name].detach()), name
    for each in (first, again):
        trainstream.unwrap(each.model)


def test_the_command_line_takes_them(tmp_path, monkeypatch, place):  # noqa: F811
    monkeypatch.chdir(place)
    seen = []
    wrap = trainstream.wrap

    def spy(*args, **options):
        found = wrap(*args, **options)
        seen.append(trainstream.memory_report(found[0]))
        return found

    monkeypatch.setattr(loop.trainstream, "wrap", spy)
    words = ["wrap.kernels=true", "wrap.fused_lora=true", "wrap.attention=math"]
    finetune("model=tiny", "data=texts", "steps=1", "eval_batches=0", f"output_dir={tmp_path}/run", *words)
    numerics = seen[0]["plan"]["numerics"]
    assert (numerics["kernels"], numerics["fused_lora"], numerics["attention"]) == (True, True, "math")
    assert any(row["fused"] and row["kind"] == "lora" for row in seen[0]["kernels"]["modules"])


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (["--kernels", "true", "--fused-lora", "auto"], {"kernels": True, "fused_lora": "auto"}),
        (["--attention", "none"], {"attention": None}),
        (["--attention", "cudnn", "--kernels", "False"], {"attention": "cudnn", "kernels": False}),
    ],
)
def test_the_comparison_has_a_flag_for_each(words, options):
    found = vars(compare.parser().parse_args(words))
    assert {name: found[name] for name in compare.NAMED if name in found} == options


def test_launches_of_a_step_are_counted():
    names = {
        "cuda_runtime": ["cudaLaunchKernel"] * 4 + ["cudaGraphLaunch", "cudaMemcpyAsync", "cudaEventRecord"],
        "cuda_driver": ["cuLaunchKernelEx"] * 2,
        "kernel": ["k"] * 10,
        "cpu_op": ["aten::mm"],
    }
    trace = {"traceEvents": [{"cat": kind, "name": name} for kind, some in names.items() for name in some]}
    assert measure.launches(trace, 2)["launches_per_step"] == {
        "kernel_launches": 3.0, "graph_launches": 0.5, "copy_launches": 0.5, "kernels": 5.0,
    }  # fmt: skip
