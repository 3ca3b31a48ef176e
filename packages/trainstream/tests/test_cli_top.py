"""`trainstream top`: one look, a job that goes on, one that ended or died, and files that are none."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from event_files import GIB, made_up, step_line, write
from typer.testing import CliRunner

from trainstream.cli import app
from ts_core.lines import LineFile

top = importlib.import_module("trainstream.cli.top")  # the command is a function of the same name
NO_PROCESS = (1 << 22) + 1  # above the largest number that Linux gives


def look(*words):
    return CliRunner().invoke(app, ["top", *map(str, words)])


def test_one_look_as_json(tmp_path):
    path = write(tmp_path / "events.jsonl", made_up(ended=False))
    result = look(path, "--once", "--json")
    assert result.exit_code == 0
    now = json.loads(result.stdout)
    assert (now["event"], now["state"], now["step"]) == ("top", "running", 12)
    assert now["tiers"] == {"device": 2.0 * GIB, "peer": 0.0, "host": 6.0 * GIB, "disk": 0.0}
    assert now["budgets"]["device"] == 4 * GIB
    assert (now["step_s"], now["tokens_per_s"]) == (0.5, 1024.0)
    assert now["moved_per_s"]["h2d_bytes"] == 40 * GIB
    assert now["stall_share"] == pytest.approx({"optimizer": 0.1, "weights": 0.2})
    assert (now["limiter"], now["share_of_bound"], now["loss"]) == ("h2d", 0.9, 2.5)
    assert now["blocks"] == {"tier": {"host": 2}, "policy": {"keep": 2}}


def test_one_look_for_people_steers_no_terminal(tmp_path):
    result = look(write(tmp_path / "events.jsonl", made_up(ended=False)), "--once")
    assert result.exit_code == 0
    assert "device   [################................] 2.00 GiB of 4.00 GiB" in result.stdout
    assert "limiter h2d" in result.stdout
    assert "h2d 42.95 GB/s" in result.stdout
    assert "\x1b" not in result.stdout  # one is in an event
    assert "peer" not in result.stdout


@pytest.mark.parametrize(("ended", "pid", "state"), [(True, None, "ended"), (False, NO_PROCESS, "stopped")])
def test_watching_ends_with_the_job(tmp_path, ended, pid, state):
    result = look(write(tmp_path / "events.jsonl", made_up(ended=ended, pid=pid)), "--json")
    assert result.exit_code == 0
    (now,) = map(json.loads, result.stdout.splitlines())
    assert now["state"] == state


def test_another_machines_job_is_not_declared_dead(tmp_path):
    lines = made_up(ended=False, pid=NO_PROCESS)
    lines[0]["host"] = "elsewhere"
    assert (
        json.loads(look(write(tmp_path / "e.jsonl", lines), "--once", "--json").stdout)["state"] == "unknown"
    )


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = write(tmp_path / "events.jsonl", made_up(steps=500, ended=False))
    watched = top.Watched(path)
    run = watched.look()
    assert len(run.steps) == 64
    with LineFile(path) as file:
        file.write(step_line(501))
    assert watched.look() is run
    assert run.steps[-1]["step"] == 501


@pytest.mark.parametrize(
    ("make", "says"), [(lambda p: None, "does not exist"), (lambda p: p.touch(), "no run yet")]
)
def test_what_is_no_run_is_exit_code_2(tmp_path, make, says):
    make(tmp_path / "events.jsonl")
    result = look(tmp_path / "events.jsonl", "--once")
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_real_job_is_watched_until_it_ends(tmp_path):
    """The watcher is started before the job's second step, as a user would in another terminal."""
    path = write(tmp_path / "runs" / "one" / "events.jsonl", made_up(steps=1, ended=False))
    command = [sys.executable, "-m", "trainstream.cli", "top", "--json", "--interval", "0.1"]
    watcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert json.loads(watcher.stdout.readline())["step"] == 1
        with LineFile(path) as file:
            file.write(step_line(2))
            file.write({"event": "end", "run": "r1", "time": time.time(), "step": 2})
        looks = [json.loads(line) for line in watcher.stdout]
        assert (looks[-1]["state"], looks[-1]["step"]) == ("ended", 2)
        assert watcher.wait(timeout=60) == 0
    finally:
        watcher.kill()
        watcher.stdout.close()
        watcher.wait()


def test_ctrl_c_ends_the_watching_well(tmp_path, monkeypatch):
    path = write(tmp_path / "events.jsonl", made_up(ended=False))
    monkeypatch.setattr(top.time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGINT))
    assert look(path).exit_code == 0
