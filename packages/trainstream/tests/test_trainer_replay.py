"""The Trainer owns its micro-batches: where memory runs out, one runs again and nobody notices."""

import pytest
import torch
from test_trainer import arguments, build, random_rows

from trainstream.cli import loop
from trainstream.integrations.huggingface import TrainStreamTrainer, wrap_hf
from ts_core import headroom, memory
from ts_core.errors import DoesNotFitError

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


def train(folder, fail, **options):
    model = build(attention_dropout=0.2)
    calls, raised = [0], [0]

    def reach(*_):
        calls[0] += model.training
        if model.training and calls[0] in fail:
            raised[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.model.layers[1].mlp.register_forward_pre_hook(reach)
    changes = {"max_steps": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3, "seed": 3}
    trainer = TrainStreamTrainer(
        model=model,
        args=arguments(folder, **changes),
        train_dataset=random_rows(8),
        trainstream=options,
    )
    trainer.train()
    logs = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    events = model._trainstream_session.events.events
    return logs, weights, raised[0], [line for line in events if "out of memory" in line]


@pytest.mark.parametrize("chunked", [True, False])
def test_a_micro_batch_runs_again_and_nothing_differs(chunked, tmp_path):
    expected = train(tmp_path, (), chunked_loss=chunked)
    # A forward pass is one call, and two where the block recomputes: in the second micro-batch of step 2.
    got = train(tmp_path, (4, 12), chunked_loss=chunked)
    assert (expected[2], got[2]) == (0, 2)
    assert len(got[3]) == 2
    assert got[0] == expected[0]
    for name, t in expected[1].items():
        assert torch.equal(got[1][name], t), name


def test_evaluation_refuses_before_the_kernel_ends_the_process(tmp_path, monkeypatch):
    rows = random_rows(4)
    trainer = TrainStreamTrainer(
        model=build(),
        args=arguments(tmp_path),
        eval_dataset=rows,
        compute_metrics=lambda prediction: {"rows": len(prediction.predictions)},
    )
    assert trainer.evaluate()["eval_rows"] == 4
    poor = memory.HostBudget(64 << 30, 1 << 20, None, "a test")
    monkeypatch.setattr(memory, "host_budget", lambda *a, **k: poor)
    monkeypatch.setattr(headroom, "_SHARE", 0)
    with pytest.raises(DoesNotFitError, match=r"\[evaluate\] .*eval_accumulation_steps"):
        trainer.evaluate()


def test_the_loop_of_finetune_runs_a_micro_batch_again(monkeypatch):
    model, _ = wrap_hf(build(), None, lr=1e-2)
    rows = torch.stack([row["input_ids"] for row in random_rows(2)])
    micro, items = {"input_ids": rows, "labels": rows}, 16
    expected = loop._micro_batch(model, micro, items, 8, torch.device("cpu"))
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    real, calls = loop.chunked_loss, []

    def short_of_memory(*args):
        calls.append(1)
        loss = real(*args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    monkeypatch.setattr(loop, "chunked_loss", short_of_memory)
    assert torch.equal(loop._micro_batch(model, micro, items, 8, torch.device("cpu")), expected)
    assert len(calls) == 2
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, grads[name]), name
