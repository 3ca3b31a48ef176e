"""`trainstream report`: the summary, the page (parsed, and run in a browser if there is one), the trace."""

import gzip
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from event_files import GIB, made_up, step_line, torch_trace, write
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from trainstream import _charts, _page, _perfetto, _runs, _timeline
from trainstream.cli import app

VOID = {"meta", "link", "br", "img", "input", "hr"}
#: Tags whose end may be left out.
OPTIONAL = {"th", "td", "tr", "li", "p"}


class Strict(html.parser.HTMLParser):
    """Checks that tags are nested, and collects what a page holds."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        while self.open and self.open[-1] != tag and self.open[-1] in OPTIONAL:
            self.open.pop()
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(text):
    found = Strict()
    found.feed(text)
    found.close()
    assert found.open == []
    return found


def report(*words):
    return CliRunner().invoke(app, ["report", *map(str, words)])


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "run" / "events.jsonl", made_up())
    (tmp_path / "run" / "trace.json.gz").write_bytes(gzip.compress(json.dumps(torch_trace()).encode()))
    return tmp_path / "run"


def test_json_sums_the_run_up(folder):
    result = report(folder, "--json")
    assert result.exit_code == 0
    event = json.loads(result.stdout)
    assert event["event"] == "report"
    assert (event["steps"], event["state"]) == (12, "ended")
    assert (event["step_s"], event["tokens_per_s"]) == (0.5, 1024.0)
    assert (event["limiter"], event["share_of_bound"]) == ("h2d", 0.9)
    assert event["peaks"]["device_peak_bytes"] == 3 * GIB
    assert event["moved"]["h2d_bytes"] == 12 * 20 * GIB
    assert event["stall_s"] == pytest.approx({"optimizer": 0.6, "weights": 1.2})
    assert [row["what"].split(":")[0] for row in event["predicted"]] == ["device", "host"]
    assert [row["error"] for row in event["predicted"]] == [0.0, 0.0]
    assert event["blocks"][0]["fills"] == 99
    assert event["timeline"]["decode_s"] == pytest.approx(10e-6)
    assert event["timeline"]["fetch_s"] == pytest.approx(3e-6)
    assert any("nf4" in line for line in event["would_help"])


def test_people_get_a_summary_and_how_to_get_a_page(folder):
    result = report(folder)
    assert result.exit_code == 0
    assert "limiter    h2d" in result.stdout
    assert "90 % of it" in result.stdout
    assert f"trainstream report {folder} --html" in result.stdout


def test_a_forecast_is_set_beside_what_was_measured(folder, tmp_path):
    forecast = {"step_s": 0.4, "device_bytes": 3 * GIB, "host_bytes": 7 * GIB, "disk_bytes": 0}
    (tmp_path / "plan.json").write_text(json.dumps({"event": "plan", "prediction": forecast}))
    event = json.loads(report(folder, "--plan", tmp_path / "plan.json", "--json").stdout)
    rows = {row["what"]: row for row in event["predicted"]}
    assert rows["forecast: step time"]["error"] == pytest.approx(-0.2)
    assert rows["forecast: device peak"]["error"] == 0.0
    assert rows["forecast: host"]["measured"] == 7 * GIB  # above what the process held before
    (tmp_path / "plan.json").write_text("[]")
    assert report(folder, "--plan", tmp_path / "plan.json").exit_code == 2


def step_rows(events, *words):
    found = json.loads(report(events, *words, "--json").stdout)["predicted"]
    return {row["what"]: row for row in found if "step time" in row["what"]}


@pytest.mark.parametrize(("tokens", "shown"), [(512, True), (500, True), (2048, False), (64, False)])
def test_the_step_time_of_the_plan_is_compared_with_steps_of_as_many_tokens(tmp_path, tokens, shown):
    lines = made_up()
    (plan,) = [line["plan"] for line in lines if line["event"] == "plan"]
    plan["predicted"] |= {"step_s": 0.4, "tokens": tokens}
    rows = step_rows(write(tmp_path / "events.jsonl", lines))
    assert list(rows) == (["step time"] if shown else [])
    if shown:
        assert rows["step time"] == {
            "what": "step time", "predicted": 0.4, "measured": 0.5, "unit": "s", "error": pytest.approx(-0.2),
        }  # fmt: skip


def test_the_step_time_is_not_compared_where_nobody_told_of_tokens(tmp_path):
    lines = made_up()
    for line in lines:
        if line["event"] == "plan":
            line["plan"]["predicted"] |= {"step_s": 0.4, "tokens": 512}
        line.pop("tokens", None)
    assert step_rows(write(tmp_path / "events.jsonl", lines)) == {}


@pytest.mark.parametrize(("rate", "shown"), [(1280.0, True), (5120.0, False)])
def test_a_forecast_of_other_tokens_is_not_compared(folder, tmp_path, rate, shown):
    forecast = {"step_s": 0.4, "tokens_per_s": rate, "device_bytes": 3 * GIB}
    (tmp_path / "plan.json").write_text(json.dumps({"event": "plan", "prediction": forecast}))
    rows = step_rows(folder, "--plan", tmp_path / "plan.json")
    assert list(rows) == (["forecast: step time"] if shown else [])


def test_the_page_stands_alone_and_nothing_in_it_is_taken_for_markup(folder, tmp_path):
    result = report(folder, "--html", tmp_path / "out" / "r.html")
    assert result.exit_code == 0, result.stderr
    text = (tmp_path / "out" / "r.html").read_text()
    page = parsed(text)
    assert not {"link", "img", "iframe", "i-never"} & set(page.tags)
    assert page.tags.count("script") == 2
    assert not [name for name, _ in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert not re.search(r"https?://(?!ui\.perfetto\.dev)", text)
    for raw in ("<b>model", "<script>alert", "<i>done"):
        assert raw not in text
    assert "a <b>model</b>" in "".join(page.text)
    data = re.search(r"id=summary>(.*?)</script>", text, re.S)[1]
    assert json.loads(data)["limiter"] == "h2d"
    for heading in (
        "What limits a step",
        "Memory by tier",
        "Timeline",
        "Predicted against measured",
        "Blocks",
    ):
        assert f"<h2>{heading}</h2>" in text
    assert (tmp_path / "out" / "r.html").stat().st_mode & 0o044 == 0o044 & ~_umask()
    assert len(list((tmp_path / "out").iterdir())) == 1


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


PROBE = """<script>
addEventListener("error", e => { document.title = "ERROR " + e.message; });
const chart = document.querySelector("figure.chart svg"), box = chart.getBoundingClientRect();
const middle = {clientX: box.left + box.width / 2, clientY: box.top + 9};
chart.dispatchEvent(new PointerEvent("pointermove", middle));
const head = [...document.querySelectorAll(".sortable th button")].find(b => b.textContent === "fills");
head.click(); head.click();
const zoom = document.querySelector(".zoom"), before = zoom.getAttribute("viewBox");
zoom.dispatchEvent(new WheelEvent("wheel", {deltaY: -1, clientX: 600, cancelable: true}));
const told = {
  chart: chart.parentNode.querySelector("output").textContent,
  rows: [...document.querySelectorAll(".sortable tbody tr")].map(r => r.cells[0].textContent),
  zoomed: before !== zoom.getAttribute("viewBox"),
  drawn: document.querySelectorAll("figure path.area").length,
  wide: document.documentElement.scrollWidth <= innerWidth,
};
zoom.dispatchEvent(new MouseEvent("dblclick"));
told.back = before === zoom.getAttribute("viewBox");
const pre = document.createElement("pre"); pre.id = "told"; pre.textContent = JSON.stringify(told);
document.body.append(pre);
</script></body>"""
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_the_script_works_in_a_browser(folder, tmp_path):
    page = tmp_path / "r.html"
    report(folder, "--html", page)
    page.write_text(page.read_text().replace("</body>", PROBE))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,800"]
    data = f"--user-data-dir={tmp_path}/profile"
    done = subprocess.run(
        [*command, data, "--virtual-time-budget=2000", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = json.loads(html.unescape(re.search(r'id="told">(.*?)</pre>', done.stdout, re.S)[1]))
    assert "ERROR" not in done.stdout.partition("</title>")[0]
    assert re.match(r"\d.*: device 2.00 GiB, host 6.00 GiB$", told["chart"])
    assert told["rows"] == ["layers.0", "layers.1"]  # 99 fills before 20
    assert told["zoomed"]
    assert told["back"]
    assert told["wide"]
    assert told["drawn"] == 2


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript engine here")
def test_the_script_parses():
    script = _page.__file__.replace("_page.py", "assets/report.js")
    assert subprocess.run(["node", "--check", script], check=False).returncode == 0


def test_the_trace_keeps_the_profilers_events_and_adds_the_runs(folder, tmp_path):
    assert report(folder, "--trace", tmp_path / "t.json").exit_code == 0
    trace = json.loads((tmp_path / "t.json").read_text())
    events = trace["traceEvents"]
    assert events[: len(torch_trace()["traceEvents"])] == torch_trace()["traceEvents"]
    ours = [event for event in events if event.get("cat") == "ts_step"]
    assert [event["name"] for event in ours] == [f"step {n}" for n in range(1, 13)]
    # A step that ended at 1001 s and took 0.5 s; the profiler counts from 990 s.
    assert (ours[0]["ts"], ours[0]["dur"]) == (10.5e6, 0.5e6)
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert "bytes by tier" in counters
    assert any(event["ph"] == "i" for event in events)


def test_a_trace_alone_is_drawn(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(torch_trace()))
    result = report(tmp_path / "t.json", "--html", tmp_path / "r.html")
    assert result.exit_code == 0, result.stderr
    assert "Who works when" in (tmp_path / "r.html").read_text()
    assert "2 steps of" in report(tmp_path / "t.json").stdout


def test_the_newest_run_of_a_folder_is_taken_and_the_latest_of_a_file(tmp_path):
    old = write(tmp_path / "old" / "events.jsonl", made_up(name="old"))
    os.utime(old, (1, 1))
    again = [{**line, "run": "r2"} for line in made_up(name="newer", steps=3)]
    write(tmp_path / "new" / "events.jsonl", [*made_up(name="new"), *again])
    event = json.loads(report(tmp_path, "--json").stdout)
    assert (event["run"]["model"], event["steps"], event["earlier_runs"]) == ("newer", 3, 1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda place: None, "does not exist"),
        (lambda place: place.mkdir(), "holds no events.jsonl"),
        (lambda place: place.write_text("no run\n{}\n"), "is no event file"),
    ],
)
def test_what_is_no_run_is_one_line_and_exit_code_2(tmp_path, make, says):
    make(tmp_path / "it")
    result = report(tmp_path / "it")
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("data", [b"{}", b"\x1f\x8bxx", b"no json"])
def test_a_broken_trace_is_named(folder, data):
    (folder / "trace.json.gz").write_bytes(data)
    result = report(folder)
    assert result.exit_code == 2
    assert "trace.json.gz" in result.stderr


def test_a_page_that_cannot_be_written_leaves_the_old_one(folder, tmp_path):
    (tmp_path / "file").write_text("kept")
    result = report(folder, "--html", tmp_path / "file" / "r.html")
    assert result.exit_code == 2
    assert "cannot write" in result.stderr
    assert (tmp_path / "file").read_text() == "kept"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from([*step_line(1), "plan", "blocks", "text", "loss", "pid", "host", "rates", "options"])
KINDS = st.sampled_from(["run", "note", "plan", "step", "loss", "blocks", "end", "what"])


@given(st.lists(st.tuples(KINDS, st.dictionaries(KEYS, VALUES, max_size=6)), max_size=6))
def test_whatever_a_file_holds_a_page_is_written(lines):
    run = _runs.Run()
    for kind, data in lines:
        run.add({**data, "event": kind})
    summary = _runs.summarize(run)
    json.dumps(summary, default=str)
    parsed(_page.page(summary, run, None))
    json.dumps(_perfetto.chrome_trace(run), default=str)


@given(st.floats(-1e12, 1e12), st.floats(0, 1e12), st.booleans())
def test_ticks_are_few_and_inside(low, span, binary):
    found = _charts.ticks(low, low + span, binary=binary)
    assert len(found) <= 6
    slack = max(abs(low), span) * 1e-9
    assert all(low - slack <= tick <= low + span + slack for tick in found)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=3000))
def test_thinning_keeps_the_largest(values):
    xs, (kept,) = _charts.thin(range(len(values)), [_charts.Series("a", "b", values)])
    assert len(xs) == len(kept.values) <= 600
    assert max(kept.values) == max(values)
    assert xs[-1] == len(values) - 1


def test_decode_is_a_lane_of_its_own():
    found = _timeline.lanes_of(torch_trace())
    assert found.decode == [(42_000, 52_000), (142_000, 152_000)]
    assert _timeline.subtract(found.compute, found.decode) == [(10_000, 40_000), (110_000, 140_000)]
    assert found.fetch == [(2_000, 5_000), (102_000, 105_000)]


def test_as_a_new_user_would(tmp_path):
    """No run yet, in a real process: the message says how to get one."""
    done = subprocess.run(
        [sys.executable, "-m", "trainstream.cli", "report"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "runs does not exist" in done.stderr
    assert "TRAINSTREAM_EVENTS" in done.stderr
