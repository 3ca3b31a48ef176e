import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_models import json_events, save_tiny_model, write_texts
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from trainstream.cli import app, loop, models, output, storage
from trainstream.cli.storage import STATE_FILE, checkpoints, read_state

QUICK = ["seq_len=16", "batch_size=2", "dtype=fp32", "threads=1", "device=cpu", "lr=5e-3", "eval_batches=2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    save_tiny_model(root / "tiny", chat=True)
    write_texts(root / "texts")
    return root


@pytest.fixture(autouse=True)
def _here(place, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.chdir(place)
    yield
    torch.set_num_threads(threads)


def invoke(*words):
    return CliRunner().invoke(app, ["finetune", *words])


def quick(*words):
    """Return the words, after those of QUICK that they do not replace."""
    given = {word.split("=")[0] for word in words}
    return [*[word for word in QUICK if word.split("=")[0] not in given], *words]


def finetune(*words):
    """Run with --json; return the events."""
    result = invoke("--json", "--debug", *quick(*words))
    assert result.exit_code == 0, result.stderr
    return json_events(result.stdout)


def last(events, kind):
    return [event for event in events if event["event"] == kind][-1]


def weights(folder):
    (path,) = folder.glob("*model.safetensors")
    return load_file(path)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------------ results


def test_lora_on_an_nf4_base_learns_and_says_so(place, tmp_path):
    events = finetune("model=tiny", "data=texts", "steps=40", f"output_dir={tmp_path}/run", "log_steps=20")
    kinds = [event["event"] for event in events]
    assert kinds == ["start", "plan", "eval", "step", "checkpoint", "step", "eval", "result"]
    start, result = events[0], events[-1]
    assert (start["model"], start["quantize"], start["dtype"], start["device"]) == (
        "tiny",
        "nf4",
        "float32",
        "cpu",
    )
    assert result["loss_after"] < result["loss_before"] - 0.1
    assert result["perplexity_after"] == pytest.approx(
        torch.tensor(result["loss_after"]).exp().item(), rel=1e-4
    )
    assert result["steps"] == 40
    assert result["tokens"] == 40 * 2 * 16
    assert result["tokens_per_s"] > 0
    assert result["peak_ram_bytes"] > 1e8
    assert result["trained_parameters"] == start["trained_parameters"]
    assert set(last(events, "step")["tiers"]) >= {"device", "host", "disk"}
    assert json.loads((tmp_path / "run/result.json").read_text())["loss_after"] == result["loss_after"]
    config = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(place / "tiny")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "adapter",
        "checkpoint-20",
        "events.jsonl",
        "result.json",
    ]


def test_people_get_a_summary_and_how_to_go_on(tmp_path):
    result = invoke(
        *QUICK, "model=tiny", "data=texts", "steps=2", f"output_dir={tmp_path}/run", "log_steps=1"
    )
    assert result.exit_code == 0, result.stderr
    for words in (
        "held-out loss",
        "tokens/s",
        "RAM",
        "parameters, 2 steps",
        "adapter",
        "PeftModel.from_pretrained",
    ):
        assert words in result.stdout
    assert "step 2/2  loss" in result.stderr
    assert "compute: float32 (as asked)" in result.stderr
    assert (
        "the adapter was trained and measured on the nf4-decoded base; export_decoded_base=DIR"
        in result.stdout
    )


def test_a_saved_decoded_base_needs_no_warning_and_paths_are_absolute(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    words = (f"model={place}/tiny", f"data={place}/texts", "steps=1", "output_dir=run")
    shown = ok(invoke(*QUICK, *words, "export_decoded_base=base"))
    assert "decoded base" in shown
    assert "trained and measured" not in shown
    assert f"PeftModel.from_pretrained(base, '{tmp_path}/run/adapter')" in shown


def test_counts_are_said_as_they_are(tmp_path):
    result = invoke(
        *quick("model=tiny", "data=texts", "steps=1", "eval_batches=1", f"output_dir={tmp_path}/run")
    )
    result_file = json.loads((tmp_path / "run/result.json").read_text())
    measured, available = result_file["held_out_rows_measured"], result_file["held_out_rows"]
    assert measured == 2 < available
    assert f"2 of {available} rows, evenly spread" in result.stderr
    assert f"2 of {available} rows, evenly spread" in result.stdout
    base = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained("tiny").parameters())
    assert f"model: tiny, {base / 1e6:.1f} M parameters" in result.stderr
    start = finetune("model=tiny", "data=texts", "steps=1", f"output_dir={tmp_path}/b")[0]
    assert start["base_parameters"] == base
    assert start["total_parameters"] == base + start["trained_parameters"]


def test_a_dtype_nobody_asked_for_is_not_called_asked_for(tmp_path):
    words = (
        "model=tiny",
        "data=texts",
        "steps=2",
        "save_steps=1",
        "dtype=auto",
        f"output_dir={tmp_path}/run",
    )
    finetune(*words)
    again = invoke(f"resume={tmp_path}/run")
    assert again.exit_code == 0, again.stderr
    assert "(as asked)" not in again.stderr
    assert "(as before the run was resumed)" in again.stderr


def test_full_fine_tune_saves_a_model(tmp_path):
    events = finetune("model=tiny", "data=texts", "method=full", "steps=4", f"output_dir={tmp_path}/run")
    assert last(events, "result")["saved"] == f"{tmp_path}/run/model"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    assert sum(p.numel() for p in loaded.parameters()) == events[0]["trained_parameters"]
    assert (tmp_path / "run/model/tokenizer.json").is_file()


def test_int8_dialogues_epochs_and_separate_held_out_data(place, tmp_path):
    lines = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(5)]
    for i in range(5):
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"yes {i}"}]
        lines.append({"messages": turns})
    lines.append({"prompt": "x" * 99, "completion": "never reached"})
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    events = finetune(
        "model=tiny", f"data={tmp_path}/d.jsonl", f"eval_data={place}/texts/text0.txt", "quantize=int8",
        "epochs=2", "seq_len=32", "accumulation_steps=2", f"output_dir={tmp_path}/run", "scheduler=linear",
        "max_grad_norm=0",
    )  # fmt: skip
    assert (events[0]["train_rows"], events[0]["total_steps"], events[0]["quantize"]) == (10, 5, "int8")


@pytest.mark.parametrize("method", ["lora", "full"])
def test_paged_weights_give_the_same_losses(tmp_path, method):
    words = ("model=tiny", "data=texts", "steps=6", "log_steps=1", f"method={method}")
    resident = finetune(*words, f"output_dir={tmp_path}/a")
    paging = ("wrap.param_offload=true", "wrap.recompute=true", f"wrap.disk_offload={tmp_path}")
    paged = finetune(*words, f"output_dir={tmp_path}/b", *paging)
    losses = [[e["loss"] for e in events if e["event"] == "step"] for events in (resident, paged)]
    assert losses[0] == losses[1]
    assert last(resident, "result")["loss_after"] == last(paged, "result")["loss_after"]
    assert last(paged, "step")["tiers"]["disk"] > 0
    gc.collect()
    assert not list(tmp_path.glob("trainstream-*"))  # the files went with the model


def test_a_single_document_holds_out_its_last_rows(place, tmp_path):
    events = finetune("model=tiny", "data=texts/text0.txt", "steps=1", f"output_dir={tmp_path}/run")
    assert events[0]["held_out_rows"] >= 1
    events = finetune(
        "model=tiny", "data=texts/text0.txt", "steps=1", "eval_batches=0", f"output_dir={tmp_path}/b"
    )
    assert last(events, "result")["loss_before"] is None


def test_the_default_folder_is_named_by_model_and_time(monkeypatch, tmp_path, place):
    monkeypatch.chdir(tmp_path)
    events = finetune(f"model={place}/tiny", f"data={place}/texts", "steps=1")
    assert re.fullmatch(r"runs/tiny-\d{8}-\d{6}/adapter", last(events, "result")["saved"])


def test_built_in_data_and_default_steps(monkeypatch, tmp_path, place):
    monkeypatch.setattr("trainstream.cli.data.BUILT_IN_BYTES", 30_000)
    monkeypatch.setattr("trainstream.cli.finetune.BUILT_IN_STEPS", 2)
    events = finetune("model=tiny", f"output_dir={tmp_path}/run")
    assert events[0]["total_steps"] == 2


# ------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize("kind", ["lora", "full", "full bf16"])
def test_a_resumed_run_is_bit_identical(tmp_path, kind):
    words = [
        "model=tiny",
        "data=texts",
        "steps=6",
        "save_steps=3",
        f"output_dir={tmp_path}/run",
        "log_steps=2",
    ]
    words += {"lora": ["dropout=0.3", "accumulation_steps=2"], "full": ["method=full"]}.get(
        kind, ["method=full", "dtype=bf16"]
    )
    events = finetune(*words)
    result_folder = Path(last(events, "result")["saved"])
    expected = weights(result_folder)
    shutil.rmtree(result_folder)
    again = json_events(ok(invoke("--json", "resume=latest", f"output_dir={tmp_path}/run")))
    assert equal(weights(result_folder), expected)
    for key in ("loss_before", "loss_after", "steps"):
        assert last(again, "result")[key] == last(events, "result")[key]
    assert again[0]["step"] == 3
    assert [e["loss"] for e in again if e["event"] == "step"][-1] == last(events, "step")["loss"]


def ok(result):
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("mid_step", [False, True])
def test_ctrl_c_saves_and_the_printed_command_goes_on_exactly(monkeypatch, tmp_path, mid_step):
    common = ["model=tiny", "data=texts", "steps=5", "accumulation_steps=2", "dropout=0.3"]
    expected = weights(Path(last(finetune(*common, f"output_dir={tmp_path}/a"), "result")["saved"]))
    real, calls = loop.chunked_loss, []

    def interrupted(model, *args):
        if model.training:
            calls.append(1)
            if len(calls) == (5 if mid_step else 6):  # the first or the last micro-batch of step 3
                os.kill(os.getpid(), signal.SIGINT)
        return real(model, *args)

    monkeypatch.setattr(loop, "chunked_loss", interrupted)
    folder = tmp_path / "a b"
    result = invoke("--json", *QUICK, *common, f"output_dir={folder}")
    assert result.exit_code == 130, result.stderr
    event = json_events(result.stdout)[-1]
    assert event["event"] == "interrupted"
    assert event["step"] == (2 if mid_step else 3)
    assert event["resume"] == f"trainstream finetune resume='{folder}/checkpoint-{event['step']}'"
    assert event["resume"] in result.stderr
    monkeypatch.setattr(loop, "chunked_loss", real)
    words = [event["resume"].split(" ", 2)[2].replace("'", "")]
    events = json_events(ok(invoke("--json", *words)))
    assert equal(weights(Path(last(events, "result")["saved"])), expected)


def test_ctrl_c_before_the_first_step_saves_nothing(monkeypatch, tmp_path):
    real = loop.chunked_loss

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(loop, "chunked_loss", interrupted)
    result = invoke(*QUICK, "model=tiny", "data=texts", "steps=5", f"output_dir={tmp_path}/run")
    assert result.exit_code == 130
    assert "nothing to save" in result.stderr
    assert not (tmp_path / "run").exists()


def test_ctrl_c_in_the_last_evaluation_keeps_the_result(monkeypatch, tmp_path):
    real, seen = loop.chunked_loss, []

    def interrupted(model, *args):
        seen.append(model.training)
        if seen[-2:] == [True, False]:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(model, *args)

    monkeypatch.setattr(loop, "chunked_loss", interrupted)
    result = invoke(*QUICK, "model=tiny", "data=texts", "steps=2", f"output_dir={tmp_path}/run")
    assert result.exit_code == 143
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()


def test_ctrl_c_while_loading_is_said_plainly(monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "load_base", interrupted)
    result = invoke(*QUICK, "model=tiny", "data=texts")
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr


def start_process(folder, *words):
    command = [sys.executable, "-m", "trainstream.cli", "finetune", "--json", *QUICK]
    words = [
        "model=tiny",
        "data=texts",
        "log_steps=1",
        "save_steps=5",
        "steps=100000",
        f"output_dir={folder}",
        *words,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def wait_for(process, kind):
    for line in process.stdout:
        if json.loads(line)["event"] == kind:
            return
    raise AssertionError(process.stderr.read())


def test_sigint_in_a_real_process(tmp_path):
    process = start_process(tmp_path / "run")
    wait_for(process, "step")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    event = json_events(out)[-1]
    assert read_state(Path(event["checkpoint"])).data["step"] == event["step"]
    kept = {path.name for path in (tmp_path / "run").iterdir()} - {"events.jsonl"}
    assert all(name.startswith("checkpoint-") for name in kept)


@pytest.mark.parametrize("how", ["second Ctrl-C", "SIGKILL"])
def test_a_process_that_is_ended_at_once_leaves_complete_checkpoints(tmp_path, how):
    process = start_process(tmp_path / "run")
    wait_for(process, "checkpoint")
    if how == "SIGKILL":
        process.kill()
    else:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode in ((-9,) if how == "SIGKILL" else (130,))
    found = checkpoints(tmp_path / "run")
    assert found
    assert all(read_state(path).data["step"] >= 5 for path in found)
    with output.claim(tmp_path / "run", resuming=True):
        pass  # the lock went with the process


def test_what_a_resumed_run_may_change(place, tmp_path):
    finetune("model=tiny", "data=texts", "steps=4", "save_steps=2", f"output_dir={tmp_path}/run")
    checkpoint = f"resume={tmp_path}/run/checkpoint-2"
    for word, says in [
        ("lr=1e-4", "learning_rate"), ("model=other", "model"), ("seq_len=8", "max_length"),
        (f"output_dir={tmp_path}/other", "output_dir"),
    ]:  # fmt: skip
        refused = invoke(checkpoint, word)
        assert (refused.exit_code, says in refused.stderr) == (2, True), refused.stderr
    same = json_events(
        ok(invoke("--json", checkpoint, "lr=5e-3", "steps=3", "log_steps=1", "eval_batches=0"))
    )
    assert last(same, "result")["steps"] == 3
    done = json_events(ok(invoke("--json", checkpoint, "steps=2")))
    assert last(done, "result")["steps"] == 2


def test_a_resumed_run_checks_data_and_model(place, tmp_path):
    shutil.copytree(place / "texts", tmp_path / "texts")
    shutil.copytree(place / "tiny", tmp_path / "tiny")
    finetune(
        f"model={tmp_path}/tiny",
        f"data={tmp_path}/texts",
        "steps=3",
        "save_steps=2",
        f"output_dir={tmp_path}/run",
    )
    (tmp_path / "texts/text0.txt").write_text("something else entirely " * 30)
    refused = invoke(f"resume={tmp_path}/run")
    assert refused.exit_code == 2
    assert "training data" in refused.stderr
    shutil.copyfile(place / "texts/text0.txt", tmp_path / "texts/text0.txt")
    state = tmp_path / "run/checkpoint-2" / STATE_FILE
    content = json.loads(state.read_text())
    content["data"]["parameters"] = content["data"]["parameters"][:-1]
    state.write_text(json.dumps(content))
    refused = invoke(f"resume={tmp_path}/run")
    assert refused.exit_code == 2
    assert "parameters" in refused.stderr


# ------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["learnig_rate=1"], "did you mean learning_rate"),
        (["nonsense"], "key=value"),
        (["data=missing.txt"], "no such file"),
        (["data=empty.txt"], "no document"),
        (["data=short.txt"], "give no training row of 16 tokens"),
        (["model=weightless"], "weightless"),
        (["model=nowhere/at/all"], "nowhere"),
        (["model=texts/text0.txt"], "text0.txt"),
        (["resume=nowhere"], "no such folder"),
        (["resume=texts"], "no complete checkpoint"),
        (["wrap.lossless=true"], "lossless"),
        (["wrap.optimzer_mode=cpu"], "optimizer_mode"),
        (["wrap.lr=1"], "learning_rate"),
        (["--ram", "much"], "option ram: expected a number of bytes or a size"),
        (["--vram", "0"], "option vram: expected a size above 0"),
        (["ram=8GiB", "--ram", "8GiB"], "'ram' is given twice"),
        (["--disk", "-8GiB"], "option disk: expected a number of bytes or a size"),
        (["wrap.ram_budget=1GiB"], "give it as ram=..."),
        (["--ram", "1KiB"], "option ram=1.00 KiB: the loss takes"),
        (["--ram", "1MiB"], "loss_chunk_size=1024"),
        (["target_modules=nothing"], "target_modules"),
        (["device=tpu"], "device"),
        (["device=cuda:99"], "GPUs"),
        (["method=full", "quantize=nf4"], "frozen"),
        (["missing.yaml"], "missing.yaml"),
        (["threads=5000"], "4096"),
        (["export_decoded_base=texts"], "holds no model"),
    ],
)
def test_bad_input_is_one_clear_line(place, tmp_path, words, says):
    (place / "empty.txt").write_text("\n")
    (place / "short.txt").write_text("hi")
    shutil.copytree(place / "tiny", place / "weightless", dirs_exist_ok=True)
    (place / "weightless/model.safetensors").unlink()
    keys = {word.split("=")[0] for word in words}
    rest = [word for word in ("model=tiny", "data=texts", "steps=1") if word.split("=")[0] not in keys]
    result = invoke("--json", *quick(*rest, f"output_dir={tmp_path}/run", *words))
    assert result.exit_code == 2, (result.stderr, result.exception)
    error = json_events(result.stdout)[-1]
    assert error["event"] == "error"
    assert says in error["message"]
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("trainstream: ")]
    assert says in line
    assert "Traceback" not in result.stderr


def test_a_fault_of_ours_is_one_line_too_and_debug_shows_the_rest(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("broken\npipe")

    monkeypatch.setattr(models, "load_base", broken)
    result = invoke(*QUICK, "model=tiny", "data=texts")
    assert result.exit_code == 1
    assert "trainstream: RuntimeError: broken pipe (--debug shows the traceback)" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in invoke("--debug", *QUICK, "model=tiny").stderr


def test_a_full_disk_is_named(monkeypatch, tmp_path):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainstream.cli.finetune._folders.write_folder", full)
    result = invoke(
        *QUICK, "model=tiny", "data=texts", "steps=3", "save_steps=1", f"output_dir={tmp_path}/run"
    )
    assert result.exit_code == 2
    assert "No space left" in result.stderr
    assert f"{tmp_path}/run/checkpoint-1" in result.stderr


def test_a_full_disk_under_safetensors_is_named_too(monkeypatch, tmp_path):
    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(storage, "save_safetensors", full)
    result = invoke(
        *QUICK, "model=tiny", "data=texts", "steps=3", "save_steps=1", f"output_dir={tmp_path}/run"
    )
    assert result.exit_code == 2
    says = rf"cannot write {tmp_path}/run/checkpoint-1: .*No space.*\(\d.* free there\)"
    assert re.search(says, result.stderr)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def nothing_loads(monkeypatch):
    def loads(*args, **kwargs):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(models, "load_base", loads)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("folder", ["{}/file", "{}/file/below", "/proc/nowhere"])
def test_a_folder_that_cannot_be_written_is_found_first(tmp_path, folder):
    (tmp_path / "file").write_text("in the way")
    folder = folder.format(tmp_path)
    result = invoke(*QUICK, "model=tiny", "data=texts", f"output_dir={folder}")
    assert result.exit_code == 2, result.stderr
    assert f"cannot write {folder}" in result.stderr


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", None, "no such file"),
        ("a.txt", " \n", "there is no document in it"),
        ("a.jsonl", '{"text": "x"}\n{"text": 5}\n', 'line 2: "text" must be a string, given 5'),
        ("a.jsonl", '{"text": "x"}\n{"text\n', "line 2: not JSON"),
        ("a.jsonl", '{"txt": "x"}\n', "it has: txt"),
        ("a.txt", b"\xff\xfe", "not a UTF-8"),
    ],
)
@pytest.mark.parametrize("key", ["data", "eval_data"])
def test_faults_of_the_data_are_found_first(tmp_path, key, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    words = {"data": "texts", key: str(tmp_path / name)}
    words = [f"{name}={value}" for name, value in words.items()]
    result = invoke(*QUICK, "model=tiny", *words, f"output_dir={tmp_path}/run")
    assert result.exit_code == 2, result.stderr
    assert says in result.stderr
    assert str(tmp_path / name) in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("nothing_loads")
def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    folder = tmp_path / "run"
    with output.claim(folder, resuming=False):
        result = invoke(*QUICK, "model=tiny", "data=texts", f"output_dir={folder}")
        assert result.exit_code == 2
        assert f"another run is using {folder} (process {os.getpid()})" in result.stderr
        assert (folder / output.LOCK_FILE).is_file()
    assert not folder.exists()


@pytest.mark.usefixtures("nothing_loads")
def test_a_finished_result_is_not_overwritten(tmp_path):
    (tmp_path / "result.json").write_text("{}")
    result = invoke(*QUICK, "model=tiny", "data=texts", f"output_dir={tmp_path}")
    assert result.exit_code == 2
    assert "give another output_dir\n" in result.stderr  # there is nothing to go on from
    assert (tmp_path / "result.json").read_text() == "{}"
    with output.claim(tmp_path, resuming=True):
        pass


# ------------------------------------------------------------------------------------------- command


def test_version_keys_and_help():
    runner = CliRunner()
    assert re.match(r"trainstream \d", runner.invoke(app, ["--version"]).stdout)
    assert "learning_rate (lr)" in runner.invoke(app, ["finetune", "--keys"]).stdout
    assert "KEY=VALUE" in runner.invoke(app, ["finetune", "--help"]).stdout


def test_config_file_and_words_together(tmp_path):
    config = tmp_path / "job.yaml"
    config.write_text("model: tiny\ndata: [texts]\nmax_steps: 50\nwrap:\n  optimizer_mode: cpu\n")
    events = finetune(str(config), "steps=1", f"output_dir={tmp_path}/run")
    assert events[0]["total_steps"] == 1


def test_dtype_is_chosen_by_measuring(monkeypatch):
    seconds = {torch.bfloat16: 1.0, torch.float32: 1.5}
    monkeypatch.setattr(models, "_matmul_seconds", seconds.get)
    assert models.choose_dtype("auto", torch.device("cpu"))[0] == torch.bfloat16
    seconds[torch.float32] = 1.1
    assert models.choose_dtype("auto", torch.device("cpu"))[0] == torch.float32
    monkeypatch.undo()
    dtype, why = models.choose_dtype("auto", torch.device("cpu"))
    assert dtype in seconds
    assert "measured" in why
