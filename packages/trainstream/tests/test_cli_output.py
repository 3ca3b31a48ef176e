import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainstream.cli import output
from trainstream.cli.storage import STATE_FILE
from ts_core.errors import OptionError, StateError, StorageError


def test_the_free_space_is_that_of_the_nearest_folder(tmp_path):
    with pytest.raises(StorageError, match=r"cannot write .*/a/b: full \([1-9].* free there\)"):  # noqa: SIM117
        with output.storage_errors(tmp_path / "a/b"):
            raise OSError("full")
    with pytest.raises(StorageError, match="os error 28"), output.storage_errors(tmp_path):
        raise Exception("No space left on device (os error 28)")
    with pytest.raises(RuntimeError, match="ours"), output.storage_errors(tmp_path):
        raise RuntimeError("ours")


def test_a_lock_file_of_a_dead_process_does_not_hold(tmp_path):
    (tmp_path / output.LOCK_FILE).write_text("1\n")
    with output.claim(tmp_path, resuming=False):
        assert (tmp_path / output.LOCK_FILE).read_text() == f"{os.getpid()}\n"
    assert not list(tmp_path.iterdir())


@given(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.sampled_from([OSError, PermissionError]))
def test_storage_errors_name_path_and_reason(name, kind):
    says = f"cannot write /nowhere/{name}: because"
    with pytest.raises(StorageError, match=says), output.storage_errors(Path("/nowhere") / name):
        raise kind("because")


def test_a_folder_is_free_again_after_a_run_whatever_it_left(tmp_path):
    folder = tmp_path / "a/b"
    with output.claim(folder, resuming=False):
        with pytest.raises(StateError, match="another run"), output.claim(folder, resuming=True):
            pass
        (folder / "kept").write_text("x")
    assert [path.name for path in folder.iterdir()] == ["kept"]
    with output.claim(folder, resuming=False):
        pass
    with pytest.raises(ZeroDivisionError), output.claim(tmp_path / "c/d", resuming=False):
        raise ZeroDivisionError
    assert not (tmp_path / "c").exists()


def test_a_finished_run_with_checkpoints_can_be_gone_on_with(tmp_path):
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / STATE_FILE).write_text("{}")
    with pytest.raises(OptionError, match=f"resume={tmp_path}"), output.claim(tmp_path, resuming=False):
        pass
