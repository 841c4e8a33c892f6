"""An update of VeOmni's engine, recorded, and replayed by `verl-prefix ab` on FSDP2's."""

import json

import pytest
import torch
from engines import _batch, _loss
from torch.distributed import get_rank

pytest.importorskip("veomni")

from verl_prefix import cli  # noqa: E402
from verl_prefix.testing import write_tiny_model  # noqa: E402
from verl_prefix.tools.ab import command as ab  # noqa: E402


def _record(path: str, folder: str) -> float:
    from veomni_engines import _engine

    options = {"trace_dir": folder, "verify": "off"}
    engine = _engine("prefix_veomni", path, options)
    data = _batch(get_rank(), engine.model_config.hf_config.vocab_size, options)
    with engine.train_mode(disable_auto_offload=True):
        return engine.train_batch(data, _loss({}))["metrics"]["grad_norm"]


def test_a_trace_of_veomni_is_replayed_on_fsdp2(ranks, spawn, tmp_path, monkeypatch):
    model = write_tiny_model(tmp_path / "model", family="qwen3")
    (norm, _) = ranks(2)(_record, str(model), str(tmp_path / "trace"))
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    monkeypatch.setattr(ab, "draw", lambda *_: False)
    words = ("--arms", "packed", "--dtype", "fp32", "--truth-steps", "1", "--ranks", "1")
    assert cli.main(["ab", "--trace", str(tmp_path / "trace"), *words, "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["holds"] and len(report["steps"]) == 1
    replayed = report["steps"][0]["arms"]["stock"]["values"]["grad_norm"]
    assert replayed == pytest.approx(norm, rel=1e-5)
