"""An agent loop that searches as verl's tool agent does, and makes a row of every turn.

Each call renders the history anew with the chat template, without the thoughts of earlier turns: what is trained is
what the model saw, and a history grows by what was said and found alone. verl scores a session's last row, and all
rows of the session have its advantage.

`search_turns.yaml` names it, without verl's `@register`, whose entry would take the place of that file's.
"""

import re
from typing import Any
from uuid import uuid4

from reward import BLOCK, COUNTED
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

THOUGHT = re.compile(r"<think>(?:(?!</think>).)*$", re.DOTALL)  # that the turn's budget ended
HINT = (
    "There is neither a call that can be read nor an answer. Call a tool, or write the answer alone, in as few words "
    "as possible, between <answer> and </answer>."
)


class SearchTurns(ToolAgentLoop):
    """Of verl's tool agent the tools, the parser of calls, and what a wrong call is answered with.

    A session ends with an answer, after `multi_turn.max_assistant_turns`, or where its history has no room: it then
    keeps the rows that it has, since verl would lose all of them. What befell it is in every row's `extra_fields`,
    by the names of `reward.COUNTED`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.max_assistant_turns:
            raise ValueError(
                f"actor_rollout_ref.rollout.multi_turn.max_assistant_turns={self.max_assistant_turns}: set the most "
                "turns that a session may take, 5 for example"
            )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """Return a row per turn; none where a server that records routes (R3) aborted the first, and so has none.

        Raises:
            ValueError: the question alone is longer than a prompt may be.
        """
        messages, session = list(kwargs["raw_prompt"]), uuid4().hex
        sampling_params = sampling_params | {"max_tokens": self.response_length}
        rows: list[AgentLoopOutput] = []
        counted = dict.fromkeys(COUNTED, 0)
        while True:
            prompt = await self.loop.run_in_executor(None, self._rendered, messages)
            if len(prompt) > self.prompt_length:
                if not rows:
                    raise ValueError(
                        f"a question has {len(prompt)} tokens with the tools' schema, and data.max_prompt_length="
                        f"{self.prompt_length}; raise it, or set data.filter_overlong_prompts=True to skip such ones"
                    )
                counted["overlong"] = 1
                break
            out = await self.server_manager.generate(
                request_id=session, prompt_ids=prompt, sampling_params=sampling_params
            )
            counted["empty"] = int(not out.token_ids)
            # TransferQueue returns a field only if all rows of a batch have it, so one row without routes loses them.
            lacks_routes = self.rollout_config.enable_rollout_routing_replay and out.routed_experts is None
            if out.token_ids or not (rows or lacks_routes):
                rows.append(self._row(prompt, out, turn=len(rows) + 1))
            said = self._said(prompt, out.token_ids)
            if not out.token_ids or BLOCK.search(said) or len(rows) == self.max_assistant_turns:
                break
            ids = self.tokenizer.encode(said, add_special_tokens=False)
            _, calls = await self.tool_parser.extract_tool_calls(
                ids, [tool.tool_schema for tool in self.tools.values()]
            )
            calls = calls[: self.max_parallel_calls]
            messages.append({"role": "assistant", "content": said})
            for call in calls:
                found, _, _ = await self._call_tool(call, kwargs.get("tools_kwargs") or {}, agent_data=None)
                messages.append({"role": "tool", "content": found.text or ""})
            if not calls:
                counted["astray"] += 1
                messages.append({"role": "user", "content": HINT})
        for row in rows:
            row.extra_fields |= counted
        return rows

    def _rendered(self, messages: list[dict[str, str]]) -> list[int]:
        return self.tokenizer.apply_chat_template(
            messages, tools=self.tool_schemas, add_generation_prompt=True, tokenize=True, return_dict=False,
            **self.apply_chat_template_kwargs,
        )  # fmt: skip

    def _said(self, prompt: list[int], tokens: list[int]) -> str:
        """What was written behind the thoughts, which the prompt may open; nothing where the budget ended them."""
        opened = self.tokenizer.decode(prompt[-16:]).rstrip().endswith("<think>")
        text = "<think>" * opened + self.tokenizer.decode(tokens, skip_special_tokens=True)
        return THOUGHT.sub("", text).rpartition("</think>")[2].strip()

    def _row(self, prompt: list[int], out: Any, turn: int) -> AgentLoopOutput:
        """One call as verl takes it; of no response a masked token, since verl would lose the session."""
        empty = not out.token_ids
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[self.tokenizer.eos_token_id] if empty else out.token_ids,
            response_mask=[0] if empty else [1] * len(out.token_ids),
            response_logprobs=[0.0] if empty and out.log_probs is not None else out.log_probs,
            routed_experts=out.routed_experts,
            num_turns=2 * turn,
            metrics=AgentLoopMetrics(),
            extra_fields=dict(out.extra_fields),  # its own: verl writes into it
        )
