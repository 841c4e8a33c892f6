"""An update of Megatron's engine, recorded, and replayed by `verl-prefix ab` on FSDP2's."""

import json

import pytest
import torch
from engines import _loss

pytest.importorskip("megatron.core")

from megatron_engines import batch_of, engine, write_megatron_model  # noqa: E402

from verl_prefix import cli  # noqa: E402
from verl_prefix.tools.ab import command as ab  # noqa: E402

LAYOUTS = {"dp2": {}, "tp2_sp": {"tp": 2, "sp": True}, "pp2": {"pipeline_model_parallel_size": 2}}


def _record(path: str, folder: str, layout: str) -> float | None:
    from verl_prefix.backends.megatron import PrefixMegatronEngine

    prefix = {"schedule": "packed", "trace_dir": folder, "verify": "off"}
    built = engine(PrefixMegatronEngine, path, prefix=prefix, **LAYOUTS[layout])
    with built.train_mode(disable_auto_offload=True):
        output = built.train_batch(batch_of(built, (built.get_data_parallel_rank(),), {}), _loss({}))
    return output["metrics"].get("grad_norm")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "tp2_sp" else pytest.mark.more) for name in LAYOUTS]
)
def test_a_trace_of_megatron_is_replayed_on_fsdp2(ranks, spawn, tmp_path, monkeypatch, layout):
    model = write_megatron_model(tmp_path / "model", "qwen3")
    norm, *_ = filter(None, ranks(2)(_record, model, str(tmp_path / "trace"), layout))
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    monkeypatch.setattr(ab, "draw", lambda *_: False)
    words = ("--arms", "packed", "--dtype", "fp32", "--truth-steps", "1", "--ranks", "1")
    assert cli.main(["ab", "--trace", str(tmp_path / "trace"), *words, "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["holds"] and len(report["steps"]) == 1
    replayed = report["steps"][0]["arms"]["stock"]["values"]["grad_norm"]
    assert replayed == pytest.approx(norm, rel=1e-5)
