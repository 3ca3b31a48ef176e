import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainstream.cli import settings as module
from trainstream.cli.settings import (
    ALIASES,
    Settings,
    describe,
    from_words,
    merge,
    parse_scalar,
    parse_word,
    read_config,
)
from ts_core.errors import OptionError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("none", None), ("NULL", None), ("", None), ("true", True), ("Off", False), ("7", 7), ("-3", -3),
        ("2e-4", 2e-4), (".5", 0.5), ("20GiB", "20GiB"), ("[0, 1]", [0, 1]), ("[]", []), ("a=b", "a=b"),
    ],
)  # fmt: skip
def test_words_become_values(text, value):
    assert parse_scalar(text) == value
    assert type(parse_scalar(text)) is type(value)


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False)))
def test_scalars_survive_being_written(value):
    assert parse_scalar(str(value)) == value


@given(st.text())
def test_any_text_is_some_value(text):
    parse_scalar(text)


@given(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), st.text())
def test_words_split_at_the_first_equals_sign(key, value):
    assert parse_word(f"{key}={value}") == (key, value)


@given(st.text().filter(lambda text: "=" not in text))
def test_words_without_equals_sign_are_refused(text):
    with pytest.raises(OptionError, match="key=value"):
        parse_word(text)


def test_dashes_in_keys_mean_underscores():
    assert parse_word("batch-size=2") == ("batch_size", "2")


def test_both_spellings_set_the_same_thing():
    for alias, name in ALIASES.items():
        value = {
            "model": "m",
            "lr_scheduler_type": "linear",
            "dtype": "fp32",
            "packing": "true",
            "held_out": "0.5",
            "resume_from_checkpoint": "d",
        }.get(
            name,
            "0.5" if name in ("learning_rate", "lora_dropout", "warmup_ratio", "num_train_epochs") else "3",
        )
        assert merge({alias: value}) == merge({name: value})


def test_one_thing_given_twice_is_refused():
    with pytest.raises(OptionError, match=r"lr.*same thing|learning_rate.*same thing"):
        merge({"lr": 1e-3, "learning_rate": 1e-4})


def test_later_sources_win():
    assert merge({"lr": "1e-3", "steps": 5}, {"learning_rate": "2e-4"}).learning_rate == 2e-4


@pytest.mark.parametrize(
    ("key", "near"), [("learnig_rate", "learning_rate"), ("step", "steps"), ("batchsize", "batch_size")]
)
def test_unknown_keys_list_the_near_ones(key, near):
    with pytest.raises(OptionError, match=near):
        merge({key: 1})


def test_an_unknown_key_far_from_all_lists_everything():
    with pytest.raises(OptionError, match=r"known keys: model, data"):
        merge({"zzzzqqqq": 1})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", "0"), ("lr", "fast"), ("steps", "0"), ("steps", "1.5"), ("method", "dora"),
        ("quantize", "fp9"),
        ("dtype", "fp16"), ("dropout", "1.5"), ("seq_len", "1"), ("batch_size", "0"), ("model", ""),
        ("data", []), ("data", [1]), ("data", 3), ("model", ["a"]), ("trust_remote_code", "maybe"),
        ("scheduler", "polynomial"), ("eval_batches", "-1"), ("threads", "0"), ("wrap", "fast"),
        ("max_grad_norm", "-1"),
    ],
)  # fmt: skip
def test_values_outside_the_accepted_ones_are_refused(key, value):
    with pytest.raises(OptionError, match=key if key != "wrap" else "wrap"):
        merge({key: value})


def test_a_codec_for_a_full_fine_tune_is_refused():
    with pytest.raises(OptionError, match="frozen"):
        merge({"method": "full", "quantize": "nf4"})
    assert merge({"method": "full", "quantize": "none"}).quantize == "none"


def test_wrap_options_are_collected():
    made = merge({"wrap": {"threads": 2}}, {"wrap.optimizer_mode": "cpu", "wrap.param_offload": "[0, 1]"})
    assert made.wrap == {"threads": 2, "optimizer_mode": "cpu", "param_offload": [0, 1]}


_VALUES = st.fixed_dictionaries(
    {},
    optional={
        "learning_rate": st.floats(1e-8, 1.0),
        "max_steps": st.one_of(st.none(), st.integers(1, 10**9)),
        "lora_r": st.integers(1, 512),
        "lora_dropout": st.floats(0, 1),
        "data": st.lists(st.from_regex(r"[a-z/.*]{1,9}", fullmatch=True), min_size=1, max_size=3),
        "method": st.sampled_from(["lora", "full"]),
        "dtype": st.sampled_from(["auto", "bfloat16", "float32"]),
        "max_grad_norm": st.one_of(st.none(), st.floats(0, 100)),
        "wrap": st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), st.integers(), max_size=3),
    },
)


@given(_VALUES)
def test_settings_survive_a_checkpoint(values):
    made = merge(values)
    assert Settings.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_config_file_and_words(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "learning_rate: 1e-4\nper_device_train_batch_size: 2\nwrap:\n  threads: 1\nquantize: null\n"
    )
    made, explicit = from_words([str(path), "lr=3e-4", "data=a.txt,b.txt"])
    assert (made.learning_rate, made.per_device_train_batch_size, made.quantize) == (3e-4, 2, None)
    assert made.data == ("a.txt", "b.txt")
    assert made.wrap == {"threads": 1}
    assert explicit["learning_rate"] == "3e-4"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("- a\n- b\n", "found list"),
        ("a: [1\n", "not valid YAML"),
        (None, "cannot read"),
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("{}", "is empty"),
    ],
)
def test_bad_config_files_are_named(tmp_path, content, says):
    path = tmp_path / "job.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(OptionError, match=says) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_words_that_contradict_are_refused(tmp_path):
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("lr: 1e-3\n")
    with pytest.raises(OptionError, match="two config files"):
        from_words([str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")])
    with pytest.raises(OptionError, match="twice"):
        from_words(["lr=1e-3", "lr=1e-4"])


def test_every_key_is_described():
    text = describe()
    assert all(name in text for name in [*ALIASES, *module._FIELDS])
