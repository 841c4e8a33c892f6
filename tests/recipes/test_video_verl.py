"""What prepare.py writes, as verl's own dataset reads and decodes it; no training."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

pytest.importorskip("qwen_vl_utils")

import av  # noqa: E402
from verl.utils.dataset.rl_dataset import RLHFDataset  # noqa: E402
from verl.utils.tokenizer import hf_processor, hf_tokenizer  # noqa: E402

from verl_prefix.testing import write_tiny_vlm  # noqa: E402

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "video_rlvr"


def recipe(script: str, *args: object) -> None:
    environment = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, RECIPE / script, *map(str, args)], check=True, timeout=300, env=environment)


@pytest.mark.more
@pytest.mark.parametrize(("max_frames", "frames"), [(16, 10), (6, 6)])
def test_verl_decodes_every_row_at_the_rate_and_size_that_it_carries(tmp_path, max_frames, frames):
    recipe("make_clips.py", "--output", tmp_path, "--clips", 2, "--stills", 1, "--size", 96)
    recipe(
        "prepare.py", "--input", tmp_path / "questions.json", "--output", tmp_path / "data", "--long", "sample",
        "--max-frames", max_frames, "--min-pixels", 64, "--max-pixels", 2304, "--image-max-pixels", 2304,
    )  # fmt: skip
    model = write_tiny_vlm(tmp_path / "model", family="qwen2_5_vl")
    config = OmegaConf.create(
        {
            "cache_dir": str(tmp_path / "cache"), "max_prompt_length": 1024, "filter_overlong_prompts": True,
            "filter_overlong_prompts_workers": None,  # none is forked: after threads of OpenMP it would hang
        }
    )  # fmt: skip
    dataset = RLHFDataset(str(tmp_path / "data" / "train.parquet"), hf_tokenizer(model), config, hf_processor(model))
    assert len(dataset) == 11  # verl drops what it cannot decode
    for i in range(len(dataset)):
        row = dataset[i]
        (message,) = row["raw_prompt"]
        medium, text = message["content"]
        assert text["type"] == "text" and "<answer>" in text["text"]
        images, videos, _ = RLHFDataset._process_multi_modal_info(row["raw_prompt"], 4, config)
        if medium["type"] == "image":
            (image,) = images
            assert videos is None and image.size == (48, 48)
            continue
        ((video, metadata),) = videos
        assert images is None and video.shape == (frames, 3, 48, 48)
        with av.open(medium["video"]) as container:
            whole = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        assert metadata["total_num_frames"] == len(whole) == 40
        # 96 x 96 pixels in squares of four, against verl's 48 x 48.
        squares = whole[metadata["frames_indices"]].reshape(frames, 48, 2, 48, 2, 3).mean(axis=(2, 4))
        assert np.abs(squares - video.permute(0, 2, 3, 1).numpy()).mean() < 4
