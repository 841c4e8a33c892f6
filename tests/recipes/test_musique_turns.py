"""The loop of the MuSiQue recipe that makes a row per turn, as verl's registry makes it. The server is the mocked edge:
it says what the test has written down. tests/engine/test_turns_run.py trains on the loop's rows.
"""

import asyncio
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import hydra
import numpy as np
import pytest
from musique import RECIPE
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap, ToolListWrap
from verl.tools.tool_registry import load_all_tools
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from verl_prefix.testing import write_tiny_model
from verl_prefix.tools.plan.compose import compose_config

QUESTION = {"role": "user", "content": "Which lake does the river of Oslo flow into?"}
PARAGRAPHS = ["Oslo\nOslo lies on the Akerselva.", "Akerselva\nThe Akerselva flows into Lake Mjosa."]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Oslo"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=search>\n<parameter=query>\nOslo\n</parameter>\n</function>\n</tool_call>"
BAD_CALL = '<tool_call>\n{"name": "search", "arguments": \n</tool_call>'
ANSWER = "<answer>Lake Mjosa</answer>"
# Qwen3's, as far as these messages go: with the tools in front.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}"
    "{% if opens %}<think>\n{% endif %}{% endif %}"
)
MODULES = ("reward", "search_tool", "search_turns")  # the other recipe has some of these names too


class Server:
    """Says the texts one after the other, and with `routes` where a mixture's tokens went, as vLLM counts them."""

    def __init__(self, tokenizer: Any, texts: list[str], routes: bool = False) -> None:
        self.tokenizer, self.texts, self.calls, self.routes = tokenizer, iter(texts), list[dict[str, Any]](), routes

    async def generate(self, **call: Any) -> TokenOutput:
        self.calls.append(call)
        tokens = self.tokenizer.encode(next(self.texts), add_special_tokens=False)
        fields = {"global_steps": 3, "min_global_steps": 3, "max_global_steps": 3}
        log_probs = [-float(n) for n in range(len(tokens))] if call["sampling_params"]["logprobs"] else None
        went = np.arange(4 * (len(call["prompt_ids"]) + len(tokens) - 1)).reshape(-1, 2, 2) if self.routes else None
        return TokenOutput(token_ids=tokens, log_probs=log_probs, routed_experts=went, extra_fields=fields)


def whole_routes(rows: list[AgentLoopOutput]) -> bool:
    """Whether each row has the server's routes, as verl puts them: of its last token there are none."""
    found = [(row.as_dict()["routed_experts"], len(row.prompt_ids) + len(row.response_ids)) for row in rows]
    return all(routes[:-1].flatten().tolist() == [*range(4 * n - 4)] and len(routes) == n for routes, n in found)


Play = Callable[..., tuple[list[AgentLoopOutput], Server]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_model(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.name = str(folder)
    return tokenizer


@pytest.fixture
def play(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    """Runs a session in which the server says these texts, and returns its rows and the server."""
    monkeypatch.syspath_prepend(str(RECIPE))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)

    def run(
        texts: list[str], *overrides: str, logprobs: bool = True, routes: bool = False
    ) -> tuple[list[AgentLoopOutput], Server]:
        rollout = "actor_rollout_ref.rollout"
        config = compose_config(
            "ppo_trainer",
            [f"actor_rollout_ref.model.path={tokenizer.name}", "data.max_prompt_length=2000", f"{rollout}.name=vllm",
             "data.max_response_length=200", f"{rollout}.multi_turn.tool_config_path={RECIPE / 'search_tool.yaml'}",
             f"{rollout}.multi_turn.max_assistant_turns=5", *overrides],
        )  # fmt: skip
        (entry,) = OmegaConf.load(RECIPE / "search_turns.yaml")
        assert entry.name == "search_turns"
        tools = load_all_tools(str(RECIPE / "search_tool.yaml"), None)
        server = Server(tokenizer, texts, routes)

        async def session() -> list[AgentLoopOutput]:
            loop = hydra.utils.instantiate(
                entry, trainer_config=DictConfigWrap(config), server_manager=server, tokenizer=tokenizer,
                processor=None, hf_model_type="qwen3", dataset_cls=RLHFDataset,
                data_config=DictConfigWrap(config.data), tools=ToolListWrap(tools),
            )  # fmt: skip
            # As AgentLoopWorkerTQ._run_agent_loop calls it: with the row's fields.
            return await loop.run(
                {"temperature": 1.0, "logprobs": logprobs}, raw_prompt=[QUESTION], uid="u", session_id=1,
                tools_kwargs={"search": {"create_kwargs": {"paragraphs": PARAGRAPHS}}}, extra_info={},
            )  # fmt: skip

        return asyncio.run(session()), server

    yield run
    for name in MODULES:
        sys.modules.pop(name, None)


def test_a_row_per_turn_whose_history_has_no_thoughts(play, tokenizer):
    said = [
        f"<think>First {CALL} the town.</think>\n\n{CALL}<|im_end|>", f"<think>hm</think>{BAD_CALL}<|im_end|>",
        f"{ANSWER}<|im_end|>",
    ]  # fmt: skip
    rows, server = play(said)
    hint = sys.modules["search_turns"].HINT
    history = [
        QUESTION, {"role": "assistant", "content": CALL}, {"role": "tool", "content": PARAGRAPHS[0]},
        {"role": "assistant", "content": BAD_CALL}, {"role": "user", "content": hint},
    ]  # fmt: skip
    for row, call, text, seen in zip(rows, server.calls, said, (1, 3, 5), strict=True):
        prompt = tokenizer.decode(row.prompt_ids)
        shown = tokenizer.apply_chat_template(history[:seen], tools=[{}], add_generation_prompt=True, tokenize=False)
        assert prompt.split("<|im_end|>", 1)[1] == shown.split("<|im_end|>", 1)[1] and "paragraphs that share" in prompt
        assert tokenizer.decode(row.response_ids) == text and row.response_mask == [1] * len(row.response_ids)
        assert row.response_logprobs == [-float(n) for n in range(len(row.response_ids))]
        assert call["prompt_ids"] == row.prompt_ids and call["sampling_params"]["max_tokens"] == 200
    assert len({call["request_id"] for call in server.calls}) == 1  # one server has the session's prefix cache
    assert [row.num_turns for row in rows] == [2, 4, 6]
    counts = {"overlong": 0, "astray": 1, "empty": 0}
    for row in rows:
        assert row.extra_fields == counts | {"global_steps": 3, "min_global_steps": 3, "max_global_steps": 3}
    assert len({id(row.extra_fields) for row in rows}) == 3
    assert len({tuple(sorted(row.as_dict())) for row in rows}) == 1
    score = sys.modules["reward"].compute_score
    assert score("musique", said[-1], ["Lake Mjosa"], rows[-1].extra_fields) == {
        "score": 1.0, "acc": 1.0, "f1": 1.0, "format": 1.0, "overlong": 0.0, "astray": 1.0, "empty": 0.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "override", "turns", "counted"),
    [
        ([ANSWER], "", 1, {}),
        ([CALL] * 9, "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3", 3, {}),
        (["I", "do", "not", "know"], "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4", 4, {"astray": 3}),
        (["<think>where, where", ANSWER], "", 2, {"astray": 1}),  # the budget ended the thought
        ([f"<think>{ANSWER}?</think>{CALL}", ANSWER], "", 2, {}),
        ([CALL] * 9, "data.max_prompt_length=600", None, {"overlong": 1}),
        ([CALL, CALL, ""], "", 2, {"empty": 1}),
        ([""], "", 1, {"empty": 1}),
    ],
    ids=["one turn", "all turns", "never a call", "cut thought", "thought answer", "overlong", "empty turn", "empty"],
)
def test_every_session_keeps_its_rows_and_says_how_it_ended(play, tokenizer, said, override, turns, counted):
    rows, _ = play(said, *filter(None, [override]))
    assert len(rows) == turns if turns else 1 < len(rows) < 5
    for row in rows:
        assert {"overlong": 0, "astray": 0, "empty": 0} | counted == {
            name: row.extra_fields[name] for name in ("overlong", "astray", "empty")
        }
        assert len(row.response_ids) == len(row.response_mask) == len(row.response_logprobs) > 0
    if said == [""]:
        assert (rows[0].response_ids, rows[0].response_mask) == ([tokenizer.eos_token_id], [0])
    assert len({tuple(sorted(row.as_dict())) for row in rows}) == 1


def test_a_histories_end_is_the_prompt_length(play):
    """The longest history that has room is computed, and one token less ends the session before it."""
    longest = max(len(row.prompt_ids) for row in play([CALL] * 3 + [ANSWER])[0])
    assert len(play([CALL] * 3 + [ANSWER], f"data.max_prompt_length={longest}")[0]) == 4
    assert len(play([CALL] * 3 + [ANSWER], f"data.max_prompt_length={longest - 1}")[0]) == 3


def test_without_log_probs_there_are_none(play):
    assert [row.response_logprobs for row in play([CALL, ANSWER], logprobs=False)[0]] == [None, None]
    assert play([""], logprobs=False)[0][0].response_logprobs is None


def test_routes_of_the_rollout_are_in_every_row(play):
    replay = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    for said in ([CALL, ANSWER], [CALL, ""]):
        rows, server = play(said, replay, routes=True)
        assert whole_routes(rows) and len(rows) == len(list(filter(None, said))) and len(server.calls) == 2
    (row,), _ = play([""], replay, routes=True)
    assert len(row.as_dict()["routed_experts"]) == len(row.prompt_ids) + 1
    assert play([""], replay)[0] == [], "a row without would take them from the whole batch"


def test_a_thought_that_the_prompt_opens_is_no_answer(play):
    opens = "+data.apply_chat_template_kwargs.opens=True"
    said = [f"where, where: {ANSWER}", f"{CALL}?</think>{CALL}", f"yes</think>{ANSWER}"]
    rows, _ = play(said, opens)
    assert len(rows) == 3 and rows[0].extra_fields["astray"] == 1, "the budget ended the first"
    assert len(play([ANSWER])[0]) == 1


def test_calls_as_qwen3_5_writes_them_are_read_by_its_parser(play, tokenizer):
    rows, _ = play([XML_CALL, ANSWER], "actor_rollout_ref.rollout.multi_turn.format=qwen3_coder")
    assert PARAGRAPHS[0] in tokenizer.decode(rows[1].prompt_ids) and rows[0].extra_fields["astray"] == 0
    assert play([XML_CALL, ANSWER])[0][0].extra_fields["astray"] == 1


def test_template_options_reach_every_turn(play, tokenizer):
    rows, _ = play([CALL, ANSWER], "+data.apply_chat_template_kwargs.enable_thinking=False")
    assert all(tokenizer.decode(row.prompt_ids).endswith("assistant\n<think></think>") for row in rows)


def test_what_no_session_can_do_is_an_error(play):
    with pytest.raises(ValueError, match=r"data.max_prompt_length=20; raise it, or set data.filter_overlong_prompts"):
        play([ANSWER], "data.max_prompt_length=20")
    with pytest.raises(Exception, match="max_assistant_turns=None: set the most turns"):
        play([ANSWER], "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=null")


def test_the_loop_of_the_page_of_algorithms_makes_a_row_per_turn(tokenizer):
    page = (RECIPE.parents[1] / "verl_prefix" / "config" / "algorithms.md").read_text()
    (code,) = re.findall(r"```python\n(.+?)```", page, flags=re.S)

    async def environment(said: str) -> str | None:
        return None if said == ANSWER else PARAGRAPHS[0]

    names: dict[str, Any] = {"environment": environment}
    exec(code, names)
    key, model = "actor_rollout_ref.rollout", f"actor_rollout_ref.model.path={tokenizer.name}"
    config = compose_config("ppo_trainer", [model, f"{key}.name=vllm", f"{key}.multi_turn.max_assistant_turns=5"])
    server = Server(tokenizer, ["Oslo?", ANSWER], routes=True)

    async def session() -> list[AgentLoopOutput]:
        loop = names["MyLoop"](
            DictConfigWrap(config), server, tokenizer, None, RLHFDataset, DictConfigWrap(config.data), "qwen3"
        )
        return await loop.run({"logprobs": True}, raw_prompt=[QUESTION], uid="u")

    rows = asyncio.run(session())
    history = [QUESTION, {"role": "assistant", "content": "Oslo?"}, {"role": "user", "content": PARAGRAPHS[0]}]
    shown = [tokenizer.apply_chat_template(history[:n], add_generation_prompt=True, tokenize=False) for n in (1, 3)]
    assert [tokenizer.decode(row.prompt_ids) for row in rows] == shown and [row.num_turns for row in rows] == [2, 4]
    assert [tokenizer.decode(row.response_ids) for row in rows] == ["Oslo?", ANSWER] and whole_routes(rows)
