"""What reporters are sent, and what the numbers mean."""

import pytest
import torch
from test_trainer import arguments, build, random_rows
from transformers import Trainer, TrainerCallback
from transformers.integrations import integration_utils

from trainstream.integrations import _metrics
from trainstream.integrations.huggingface import TrainStreamTrainer

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]
NUMBERS = {
    "ts_pinned_gb", "ts_host_state_gb", "ts_h2d_gb", "ts_d2h_gb", "ts_stall_s", "ts_peak_vram_gb",
    "ts_tokens_per_s", "ts_share_of_bound",
}  # fmt: skip


def reporter(base):
    class Reporter(base):
        def __init__(self):
            self.sent = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.sent.append(dict(logs))

    Reporter.__name__ = base.__name__
    return Reporter


@pytest.mark.parametrize(("service", "texts"), [("tensorboard", False), ("wandb", True)])
def test_report_to_gets_the_metrics_and_texts_only_where_they_are_taken(
    tmp_path, monkeypatch, service, texts
):
    known = integration_utils.INTEGRATION_TO_CALLBACK
    fake = reporter(type(known[service].__name__, (TrainerCallback,), {}))
    monkeypatch.setitem(known, service, fake)
    trainer = TrainStreamTrainer(
        model=build(),
        args=arguments(tmp_path, max_steps=3, report_to=[service]),
        train_dataset=random_rows(3),
    )
    trainer.train()
    (found,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, fake))
    steps = [logs for logs in found.sent if "loss" in logs]
    assert len(steps) == 3
    for logs in steps:
        assert logs.keys() >= NUMBERS
        assert ("ts_limiter" in logs) == texts
        assert all(isinstance(logs[name], float) for name in NUMBERS)
        assert texts or all(isinstance(value, (int, float)) for value in logs.values())
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in history] == [logs["loss"] for logs in steps]
    assert all(isinstance(entry["ts_limiter"], str) for entry in history)


def test_traffic_and_waiting_count_since_the_previous_log_and_memory_is_as_it_is(monkeypatch):
    stats = dict.fromkeys(("pinned_bytes", "host_state_bytes", "h2d_bytes", "d2h_bytes", "wait_s"), 0)
    optimizer = torch.optim.SGD([torch.zeros(1)])
    optimizer.stats = lambda: dict(stats)
    clock = iter([0.0, 2.0, 6.0])
    monkeypatch.setattr(_metrics.time, "perf_counter", lambda: next(clock))
    metrics = _metrics.LogMetrics(optimizer)
    stats.update(pinned_bytes=2e9, host_state_bytes=3e9, h2d_bytes=5e9, d2h_bytes=1e9, wait_s=0.25)
    metrics.count_tokens(100)
    first = metrics.take()
    stats.update(pinned_bytes=1e9, h2d_bytes=7e9, d2h_bytes=1e9, wait_s=0.5)
    metrics.count_tokens(100)
    second = metrics.take()
    names = ("ts_pinned_gb", "ts_host_state_gb", "ts_h2d_gb", "ts_d2h_gb", "ts_stall_s", "ts_tokens_per_s")
    assert [first[name] for name in names] == [2.0, 3.0, 5.0, 1.0, 0.25, 50.0]
    assert [second[name] for name in names] == [1.0, 3.0, 2.0, 0.0, 0.25, 25.0]


# torch._dynamo looks at the gradient of what is no leaf, itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model_trains_alike_whose_blocks_are_paged(tmp_path):
    paged = {"param_offload": True, "recompute": [0], "activation_offload": True, "min_offload_bytes": 0}
    found = {}
    for kind in ("stock", "paged"):
        cls, words = (Trainer, {}) if kind == "stock" else (TrainStreamTrainer, {"trainstream": paged})
        compiled = {} if kind == "stock" else {"torch_compile": True, "torch_compile_backend": "aot_eager"}
        trainer = cls(
            model=build(), args=arguments(tmp_path / kind, max_steps=4, **compiled),
            train_dataset=random_rows(4), eval_dataset=random_rows(2, seed=3), **words,
        )  # fmt: skip
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found[kind] = [*losses, trainer.evaluate()["eval_loss"]]
        trainer.save_model(str(tmp_path / kind / "saved"))
        found[kind, "weights"] = type(trainer.model).from_pretrained(tmp_path / kind / "saved").state_dict()
    torch._dynamo.reset()
    assert found["paged"] == pytest.approx(found["stock"], rel=1e-5)
    for name, weight in found["stock", "weights"].items():
        torch.testing.assert_close(found["paged", "weights"][name], weight, rtol=1e-4, atol=1e-5)
