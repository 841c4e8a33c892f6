"""Files that a user names, broken at random: one line that says so, nothing written, or they are read.

    FUZZ_FILES=1000 .venv/bin/python -m pytest tests/package/test_bad_files.py

draws so many of each kind (in make test 30, always the same). What a command reads by itself is called as the command
calls it: `cli.main` turns these errors into its exit code.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

import hypothesis.strategies as st
import pyarrow
import pyarrow.parquet
import pytest
import torch
from broken_files import LONG, broken, changed, files, fuzzed, lines_of, put
from hypothesis import example, given, settings
from omegaconf import OmegaConf
from safetensors.torch import save

from verl_prefix import cli
from verl_prefix.testing import write_tiny_model
from verl_prefix.tools.ab.options import Options
from verl_prefix.tools.ab.source import Source, synthetic_manifest, synthetic_rows
from verl_prefix.tools.bench.measure import resume
from verl_prefix.tools.plan.compose import read_messages
from verl_prefix.tools.plan.options import override_words, read_dumps, shares
from verl_prefix.tools.plan.script import expanded
from verl_prefix.trace import MANIFEST, SCHEMA, step_path

ROOT = Path(__file__).resolve().parents[2]


def command(*words: object) -> int:
    """The exit code of `verl-prefix`: where it is 2, one line says why, and the folder is as it was."""
    said, code = io.StringIO(), None
    before = files(Path.cwd())
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as error:  # of argparse
            code = error.code
    lines = [line for line in said.getvalue().splitlines() if not line.startswith("note: ")]
    if code == 2:
        assert len(lines) == 1 and lines[0].startswith(f"verl-prefix {words[0]}: "), said.getvalue()
        assert files(Path.cwd()) == before
    assert not list(Path.cwd().rglob("*.part"))
    return code


def refused_or_read(read, *arguments) -> None:
    """What `cli.main` makes exit code 2, or nothing, is raised."""
    before = files(Path.cwd())
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(ValueError, OSError):
        read(*arguments)
    assert files(Path.cwd()) == before


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty folder to be in. Without plots but in a long run: they take a second each."""
    monkeypatch.chdir(tmp_path)
    if not LONG:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def one_row() -> dict:
    report = json.loads((ROOT / "examples/results/bench_cpu.json").read_text())
    report["rows"] = report["rows"][:1]
    return report


STEPS = [
    {"step": step, "data": {
        "timing_s/step": 9.0, "timing_s/update_actor": 4.0, "timing_s/old_log_prob": 1.0, "actor/grad_norm": 0.5,
        "actor/entropy": 1.5, "response_length/mean": 20.0, "prompt_length/mean": 90.0, "critic/score/mean": 0.1,
        "actor/ppo_kl": 0.0, "actor/pg_loss": 0.1,
    }} for step in (1, 2)
]  # fmt: skip
DUMP = [{"uid": f"u{i // 2}", "input": "what", "output": "that", "step": 1, "score": 0.5} for i in range(4)]
ROWS = [
    {"prompt": [{"role": "user", "content": f"what {i}"}], "extra_info": {"index": i}, "images": []} for i in range(3)
]
SCRIPT = """set -x
MODEL=${MODEL:-/no/model}
ARGS=(data.train_batch_size=8 "actor_rollout_ref.model.path=$MODEL")
if [ -n "$NOTHING" ]; then exit 1; fi
for i in 1 2; do echo "run $i"; done
python3 -m verl.trainer.main_ppo "${ARGS[@]}" trainer.nnodes=1 $@ > log 2>&1
"""


def test_reports_of_bench():
    report = one_row()

    @fuzzed
    @given(broken(json.dumps(report).encode(), [report]), st.sampled_from(["", "page.md", "other.md"]))
    @example(("value", json.dumps(report | {"versions": None}).encode()), "")
    @example(("value", json.dumps(report | {"rows": [[]]}).encode()), "")
    @example(("value", json.dumps(report | {"device": 1, "rows": []}).encode()), "")
    @example(("value", json.dumps(report).encode()), "other.md")
    @example(("deep", b"DEEP"), "page.md")
    def run(drawn, into):
        for path in Path.cwd().iterdir():
            if path.name.startswith("bench.") and path.name != "bench.json":
                path.unlink()
        Path("page.md").write_text("<!-- bench -->\n<!-- /bench -->\n")
        Path("other.md").write_text("no marks\n")
        put(Path("bench.json"), *drawn)
        code = command("bench", "--render", "bench.json", *(["--into", into] if into else []))
        assert code == 2 if into == "other.md" else code in (0, 2)
        refused_or_read(resume, report, Path("bench.json"))

    run()


def test_metrics_of_runs():
    @fuzzed
    @given(broken(lines_of(STEPS), STEPS))
    @example(("loop", b""))
    @example(("deep", b"DEEP"))
    @example(("value", b'{"step": 1e999, "data": {"timing_s/step": 1}}'))
    @example(("value", b'{"step": 1, "data": {"timing_s/step": 0}}'))
    @example(("value", b'{"step": 1, "data": {"timing_s/step": 1%s}}' % (b"0" * 400)))
    def run(drawn):
        Path("stock.jsonl").write_bytes(lines_of(STEPS))
        put(Path("ours.jsonl"), *drawn)
        assert command("ab", "--runs", "stock.jsonl", "ours.jsonl", "--force") in (0, 1, 2, 3)
        refused_or_read(shares, "ours.jsonl")

    run()


def test_events_of_runs():
    @fuzzed
    @given(broken(bytes(range(64)) * 4))
    def run(drawn):
        Path("run").mkdir(exist_ok=True)
        put(Path("run/events.out.tfevents.1"), *drawn)
        assert command("ab", "--runs", "run", "missing.jsonl") == 2

    run()


def test_dumps_of_rollouts():
    @fuzzed
    @given(broken(lines_of(DUMP), DUMP))
    @example(("deep", b"DEEP"))
    @example(("value", b'{"output": 1}'))
    def run(drawn):
        Path("dumps").mkdir(exist_ok=True)
        put(Path("dumps/1.jsonl"), *drawn)
        for path in ("dumps", "dumps/1.jsonl"):
            refused_or_read(read_dumps, path)

    run()


def _parquet(rows: list) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl", "train.json"])
def test_training_data(name):
    whole = {"train.parquet": _parquet(ROWS), "train.jsonl": lines_of(ROWS), "train.json": json.dumps(ROWS).encode()}
    values = {"train.parquet": None, "train.jsonl": ROWS, "train.json": [ROWS]}
    keys = {"prompt_key": "prompt", "image_key": "images", "video_key": "videos"}
    config = OmegaConf.create({"data": {"train_files": name} | keys})

    @st.composite
    def of_another_schema(draw):
        with contextlib.suppress(pyarrow.ArrowException, OverflowError, UnicodeEncodeError):
            return "bytes", _parquet([changed(draw, row, gone=False) for row in ROWS])
        return "missing", b""

    @fuzzed
    @given(broken(whole[name], values[name]) | (of_another_schema() if name == "train.parquet" else st.nothing()))
    @example(("deep", b"DEEP"))
    @example(("value", b'{"prompt": ""}\n{"prompt": []}'))
    @example(("value", b'[{"prompt": 1}, null]'))
    @example(("value", b'{"prompt": 1%s}' % (b"0" * 30)))
    def run(drawn):
        put(Path(name), *drawn)
        refused_or_read(read_messages, config)

    run()


def test_scripts():
    odd = ["'", '"', "$(", "<<E", "done", "}", "\\", "$'\\''", 'echo "main_ppo \'"', "\udcff", "\0", "["]
    pieces = SCRIPT.splitlines() + odd

    @fuzzed
    @given(broken(SCRIPT.encode()), st.lists(st.sampled_from(pieces), max_size=8), st.booleans())
    def run(drawn, words, mixed):
        kind, content = drawn
        content = "\n".join(words).encode(errors="surrogateescape") if mixed else content
        put(Path("run.sh"), kind, content)
        refused_or_read(lambda: override_words(expanded(["run.sh"])))

    run()


@pytest.mark.parametrize("line", [b"echo 'main_ppo \xff'", b"echo main_ppo\0", b"x='main_ppo\n+ \"'", b"''"])
def test_a_script_with_odd_bytes_is_read_on(line):
    Path("run.sh").write_bytes(line + b"\npython3 -m verl.trainer.main_ppo a=1\n")
    assert override_words(expanded(["run.sh"])) == ["a=1"]


KEYS = [
    "data", "data.train_files", "data.prompt_key", "data.image_key", "data.max_prompt_length", "data.train_batch_size",
    "data.max_response_length", "actor_rollout_ref", "trainer", "trainer.nnodes", "trainer.n_gpus_per_node",
    "model_engine", "algorithm", *(f"actor_rollout_ref.{key}" for key in (
        "actor", "model", "rollout", "ref", "model.path", "model.lora", "model.lora_rank", "model.tokenizer_path",
        "rollout.n", "rollout.log_prob_use_dynamic_bsz", "actor.ppo_mini_batch_size", "actor.use_dynamic_bsz",
        "actor.fsdp_config", "actor.ulysses_sequence_parallel_size", "actor.ppo_max_token_len_per_gpu", "actor.prefix",
        "actor._target_", "actor.prefix.trees", "actor.fsdp_config.ulysses_sequence_parallel_size",
    )),
]  # fmt: skip
WORDS = ["null", "0", "-1", "2", "abc", "[1]", "{a:1}", "${nothing}", "true", "", "'", "???", "9" * 30, "1e999", "a\nb"]


def test_overrides():
    @settings(fuzzed, max_examples=LONG // 5 or 5)
    @given(st.lists(st.tuples(st.sampled_from(["", "+", "++", "~"]), st.sampled_from(KEYS), st.sampled_from(WORDS)),
                    min_size=1, max_size=3))  # fmt: skip
    @example([("~", "actor_rollout_ref.rollout", "")])
    @example([("", "actor_rollout_ref", "null")])
    @example([("", "actor_rollout_ref", "${nothing}")])
    def run(drawn):
        Path("train.jsonl").write_bytes(lines_of(ROWS))
        words = ["data.train_files=train.jsonl", "actor_rollout_ref.model.path=/no/model", "data.train_batch_size=8"]
        words += ["actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.n_gpus_per_node=8"]
        words += [prefix + key + (f"={value}" if prefix != "~" else "") for prefix, key, value in drawn]
        assert command("plan", *words) == 2

    run()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("file", ["manifest", "flags", "tensors"])
def test_traces(file, model):
    shape, folder = (9, 4, 2, 1), Path("trace")
    rows = synthetic_rows(shape, vocab_size=50, seed=0)
    manifest = {"schema": SCHEMA, "world_size": 1, **synthetic_manifest(shape)}
    manifest["model"] = {"path": model, "local_path": model, "fingerprint": None, **manifest["model"]}
    flags = {"uids": rows.uids, "flags": rows.flags}
    tensors = {name: pair[0] for name, pair in rows.jagged.items()}
    tensors |= {f"{name}/lengths": pair[1] for name, pair in rows.jagged.items()}
    tensors["old_log_probs"] = tensors["advantages"].clone()
    tensors["old_log_probs/lengths"] = tensors["advantages/lengths"].clone()
    paths = {"manifest": folder / MANIFEST, "flags": step_path(folder, 0, 0)}
    paths["tensors"] = paths["flags"].with_suffix(".safetensors")
    paths["flags"].parent.mkdir(parents=True)
    whole = {"manifest": json.dumps(manifest).encode(), "flags": json.dumps(flags).encode(), "tensors": save(tensors)}
    for name, path in paths.items():
        path.write_bytes(whole[name])
    Source(Options(trace="trace"))  # whole, it is read
    values = {"manifest": [manifest], "flags": [flags], "tensors": None}

    def with_another(name, odd):
        tensor = tensors[name]
        others = [
            torch.zeros(()), torch.zeros(0), torch.full((2,), -5), torch.full((2,), 2**62), torch.ones(4, 2),
            tensor.double(), tensor.bool(),
        ]  # fmt: skip
        return "bytes", save(tensors | {name: others[odd]})

    other_tensors = st.builds(with_another, st.sampled_from(sorted(tensors)), st.integers(0, 6))

    @fuzzed
    @given(broken(whole[file], values[file]) | (other_tensors if file == "tensors" else st.nothing()))
    @example(("deep", b"DEEP"))
    @example(("value", json.dumps(manifest | {"optimizer": {"lr_scheduler_type": ""}}).encode()))
    @example(with_another("responses/lengths", 1))
    def run(drawn):
        put(paths[file], *drawn)
        refused_or_read(Source, Options(trace="trace"))

    run()
