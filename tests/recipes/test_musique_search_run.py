"""The multi-turn variant of the MuSiQue recipe through real verl, stock and ours: its tool agent searches, and both
arms take the same step. A tiny model that has learnt to call the tool; does not exercise vLLM or CUDA.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_prefix.testing import write_tiny_model

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "musique"
TOOLS = [OmegaConf.to_container(OmegaConf.load(RECIPE / "search_tool.yaml"))["tools"][0]["tool_schema"]]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "river"}}\n</tool_call><|im_end|>'
# As the tiny model's own, with tools in front.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARMS = {
    "stock": ["model_engine=dp", "actor_rollout_ref.actor.strategy=fsdp2", "actor_rollout_ref.ref.strategy=fsdp2"],
    "prefix": ["model_engine=prefix", "actor_rollout_ref.actor.prefix.schedule=phased"],
}


def recipe(script: str, *args: object) -> None:
    subprocess.run([sys.executable, RECIPE / script, *map(str, args)], check=True, timeout=300)


def write_calling_model(folder: Path, prompts: list[list[dict]], texts: list[str]) -> str:
    """A tiny model that answers every first turn with CALL, nearly always."""
    path = write_tiny_model(folder, texts=[*texts, CALL] * 2, vocab_size=2048)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    call = torch.tensor(tokenizer.encode(CALL, add_special_tokens=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        rendered = tokenizer.apply_chat_template(
            prompts[step % len(prompts)], tools=TOOLS, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids = torch.cat([rendered["input_ids"][0], call])[None]
        loss = torch.nn.functional.cross_entropy(model(ids).logits[0, -len(call) - 1 : -1], call)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.02, float(loss)
    model.save_pretrained(path)
    return path


@pytest.mark.ray
@pytest.mark.full
def test_two_steps_of_a_searching_agent_and_step_1_is_stocks(tmp_path, train, monkeypatch):
    questions = tmp_path / "questions.jsonl"
    recipe("make_questions.py", "--output", questions, "--num", 16, "--seed", 1)
    recipe("prepare.py", "--input", questions, "--output", tmp_path, "--max-paragraphs", 4, "--val-size", 4, "--search")
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    paragraphs = [row["extra_info"]["tools_kwargs"]["search"]["create_kwargs"]["paragraphs"] for row in rows]
    texts = [json.dumps(TOOLS), *(row["prompt"][0]["content"] for row in rows), *sum(paragraphs, [])]
    model = write_calling_model(tmp_path / "model", [row["prompt"] for row in rows], texts)
    monkeypatch.setenv("PYTHONPATH", f"{RECIPE}:{os.environ.get('PYTHONPATH', '')}")
    turns = "actor_rollout_ref.rollout.multi_turn"
    found, outputs = {}, {}
    for arm, engine in ARMS.items():
        shutil.rmtree(tmp_path / "rollouts", ignore_errors=True)
        found[arm], _ = train(
            RECIPE, model, "data.max_prompt_length=1024", "data.max_response_length=256", "data.shuffle=false",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096", "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.entropy_coeff=0.01", "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.rollout.seed=7", "algorithm.adv_estimator=grpo", f"{turns}.enable=True",
            f"{turns}.format=hermes", f"{turns}.max_assistant_turns=3", f"{turns}.max_tool_response_length=300",
            f"{turns}.tool_config_path={RECIPE / 'search_tool.yaml'}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
            "reward.custom_reward_function.path=pkg://verl_prefix.testing",
            "reward.custom_reward_function.name=letter_share", *engine, config="ppo_trainer",
        )  # fmt: skip
        files = sorted((tmp_path / "rollouts").glob("*.jsonl"))
        outputs[arm] = [json.loads(line)["output"] for file in files for line in file.read_text().splitlines()]
    for first in (outputs["stock"][:12], outputs["prefix"][:12]):
        assert sum("<tool_call>" in text and any(p[:40] in text for p in sum(paragraphs, [])) for text in first) >= 9
    stock, prefix = found["stock"], found["prefix"]
    for step in prefix:
        step = {name.removeprefix("actor/"): value for name, value in step.items()}
        prompt, response = step["prompt_length/mean"], step["response_length/mean"]
        assert step["prefix/reuse_fraction"] == pytest.approx(2 / 3 * prompt / (prompt + response), rel=0.05)
        assert step["prefix/groups"] == 4 and step["prefix/recomputed_tokens"] == 0 and step["prefix/waves"] > 0
        assert step["training/rollout_probs_diff_max"] < 1e-5
    assert stock[0]["actor/grad_norm"] > 0.01, "a step whose rewards are all equal compares nothing"
    for name in ("critic/score/mean", "response_length/mean", "num_turns/mean", "actor/entropy", "actor/kl_loss",
                 "actor/grad_norm", "actor/pg_loss"):  # fmt: skip
        assert prefix[0][name] == pytest.approx(stock[0][name], rel=5e-6, abs=5e-6), name
    assert stock[0]["num_turns/mean"] > 3
