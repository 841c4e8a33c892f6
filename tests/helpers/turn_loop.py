"""An agent loop that renders the history anew for every call and returns a row per call: two to four turns, by what the
first answer is, so that a prompt's sessions are the same ones whatever the order in which they ask."""

from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


class TurnLoop(AgentLoopBase):
    """Named in a config by `_target_`: `@register` would replace that entry when this is imported."""

    async def run(self, sampling_params, **kwargs):
        messages, rows = list(kwargs["raw_prompt"]), []
        while not rows or len(rows) < 2 + sum(rows[0].response_ids) % 3:
            prompt = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            out = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt, sampling_params=sampling_params
            )
            rows.append(
                AgentLoopOutput(
                    prompt_ids=prompt, response_ids=out.token_ids, response_mask=[1] * len(out.token_ids),
                    response_logprobs=out.log_probs, num_turns=2 * len(rows) + 2, metrics=AgentLoopMetrics(),
                    extra_fields=dict(out.extra_fields),
                )
            )  # fmt: skip
            said = self.tokenizer.decode(out.token_ids, skip_special_tokens=True)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"Go on from {said[:20]}"}]
        return rows
