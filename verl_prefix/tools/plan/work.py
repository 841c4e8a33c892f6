"""Rows that `verl-prefix plan` prices: by data and response lengths, by numbers of turns, or as a run dumped them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, tee
from random import Random
from typing import Any

from omegaconf import OmegaConf, open_dict

from verl_prefix.auto.shape import ModelShape
from verl_prefix.config.driver import has_critic, is_v1
from verl_prefix.config.engines import copies_of, slices_of
from verl_prefix.models.messages import end_tokens
from verl_prefix.tools.plan.compose import (
    Asked,
    data_ranks,
    micro_batches,
    prompts_of_step,
    read_messages,
)
from verl_prefix.tools.plan.options import PlanError, Turns, prompt_spread, spread
from verl_prefix.tools.plan.predict import SEED, MicroBatch, Sizes, Step, drawn_steps
from verl_prefix.tools.plan.training_command import MAX_PROMPTS, Prompt, read_prompts
from verl_prefix.tools.plan.turns import Dump, TokenStep, made_up, of_dump, token_step


def response_lengths(asked: Asked, tokenizer: Any) -> tuple[Iterator[int], list[str]]:
    """Endless draws, the same in every run, and which spread nobody asked for. They are of a normal distribution
    (`options.spread`), cut to 1 to data.max_response_length, or of the responses of the rollouts. Where nothing is said
    the mean is half of the longest response: rows of one length would hide what a trainer's row order costs."""
    draw, longest, spec = Random(SEED), asked.config.data.max_response_length, asked.options.response_lengths
    if asked.rollouts:
        texts = [rollout.response for rollout in asked.rollouts]
        # A finished response also has its end token.
        lengths = [min(len(ids) + 1, longest) for ids in tokenizer(texts, add_special_tokens=False).input_ids]
        return (draw.choice(lengths) for _ in count()), [
            f"of {spec} only the lengths of {len(lengths)} responses are used: no uid there is of a session with "
            "several rows (uid_session_turn, as verl's v1 trainer writes it)"
        ]
    mean, std = spread(spec or str(max(1, longest / 2)))
    # A draw may be infinite where STD is huge.
    draws = (round(min(longest, max(1, draw.gauss(mean, std)))) for _ in count())
    if spec and "," in spec:
        return draws, []
    return draws, [
        f"response lengths are drawn around {mean:g} tokens with a deviation of {std:g}, from 1 to {longest} (data."
        "max_response_length); --response-lengths MEAN,STD or a folder of trainer.rollout_data_dir says what yours are"
    ]


def drawn_prompts(spec: str, longest: int) -> tuple[list[Prompt], int]:
    """Prompts of lengths that `spec` says, the same in every run, which share no token, and how many are over
    `longest`."""
    draw, (mean, deviation) = Random(SEED), prompt_spread(spec)
    middle = math.log(mean) - deviation**2 / 2
    lengths = [max(1, round(math.exp(min(50, draw.gauss(middle, deviation))))) for _ in range(MAX_PROMPTS)]
    kept = [length for length in lengths if length <= longest]
    return [Prompt(n, ids=range(i << 20, (i << 20) + n)) for i, n in enumerate(kept)], len(lengths) - len(kept)


@dataclass(frozen=True)
class Work:
    """What is priced.

    Attributes:
        steps: training steps. with_tokens: one by which values of prefix.trees compare; None where prompts have images,
            or groups are left out.
        priced: prompts of a step. prompts, responses: lengths of rows. overlong: prompts that are left out.
        turns: rows of a session, on average; 0: each session is one row, as verl's loops return by default.
        assumed: what nobody asked for, in words.
    """

    steps: Sequence[Step]
    with_tokens: TokenStep | None
    priced: int
    prompts: list[int]
    responses: list[int]
    overlong: int
    turns: float
    assumed: list[str]

    @property
    def updates(self) -> int:
        """Updates of a step, of all its prompts."""
        size = self.steps[0].size
        return round(size.mini_batches * size.prompts / self.priced)


def read_work(asked: Asked, size: Sizes, shape: ModelShape, tokenizer: Any, dump: Dump | None) -> Work:
    """The training steps of a command. dump: rows of turns of its rollouts.

    Raises:
        PlanError: see `read_messages` and `read_prompts`; or turns come with images.
    """
    config, options = asked.config, asked.options
    mini_batch_rows = config.actor_rollout_ref.actor.ppo_mini_batch_size * size.rollouts
    if dump:
        step, overlong = of_dump(size, shape, dump, mini_batch_rows), 0
        assumed = [
            f"{sum(map(len, dump.uids))} rows of {len(dump.uids)} prompts in {options.response_lengths}, tokenized "
            "again without the special tokens that verl's dumps leave out, and cut where prompts part"
        ]
    else:
        if (spec := options.prompt_lengths) is not None:
            prompts, overlong = drawn_prompts(spec, config.data.max_prompt_length)
        else:
            prompts, overlong = read_prompts(config, asked.messages or read_messages(config), tokenizer)
        is_text, ends = all(prompt.ids for prompt in prompts), end_tokens(tokenizer) if tokenizer else set()
        if (turns := options.session) is None:
            draws, assumed = response_lengths(asked, tokenizer)
            draws, again = tee(draws)
            sample = list(islice(draws, 2000))
            whole = is_text and not options.dead_groups  # which the step by tokens does not leave out
            one = made_up(size, shape, prompts, ends, Turns(), again, mini_batch_rows) if whole else None
            padding = padded_rows(config) - size.prompts * size.rollouts
            steps = drawn_steps(size, shape, prompts, draws, padding, options.dead_groups)
            lengths = [prompt.tokens for prompt in prompts]
            if options.dead_groups:
                assumed.append(f"{options.dead_groups:.0%} of groups have no advantage, and updates leave them out")
            return Work(steps, one, size.prompts, lengths, sample, overlong, 0.0, assumed)
        if not is_text:
            raise PlanError("--turns is for prompts of text alone, and some have images or videos; leave it out")
        step = made_up(size, shape, prompts, ends, turns, iter(()), mini_batch_rows)
        assumed = [f"every session has {turns.turns} turns, all of these lengths"]
    real = [row for row in step.rows if row.uid is not None]
    priced = len({row.uid for row in real})
    if (known := len(dump.uids) if dump else priced) < size.prompts:
        assumed.append(f"{known} prompts stand for the {size.prompts} of a step")
    sessions = len({(row.uid, row.session) for row in real})
    lens, of_responses = [len(row.prompt) for row in real], [len(row.response) for row in real]
    step = replace(step, over=config.actor_rollout_ref.actor.prefix.trees)
    return Work([step], step, priced, lens, of_responses, overlong, len(real) / sessions, assumed)


def padded_rows(config: Any) -> int:
    """Rows of a step whose sessions have one, with the padding of verl's v1 trainers, which fill up mini-batches of
    actor and critic (`_get_required_batch_multiple`)."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    rows = prompts_of_step(config) * rollout.n
    if not is_v1(config):
        return rows
    mini_batches = [actor.ppo_mini_batch_size, *([config.critic.ppo_mini_batch_size] if has_critic(config) else [])]
    return rows + -rows % math.lcm(data_ranks(config), *(mini * rollout.n for mini in mini_batches))


def sizes(config: Any) -> Sizes:
    """The sizes of a training step, which `compose.check_batch` has let through."""
    roles = config.actor_rollout_ref
    actor, rollout = roles.actor, roles.rollout
    prompts, mini_batches = prompts_of_step(config), padded_rows(config) // (actor.ppo_mini_batch_size * rollout.n)
    shared, shared_by_ref = (slices_of(role, roles[role])[1] for role in ("actor", "ref"))
    keys = micro_batches(config)
    ref_in_actor = keys["ref"][0].startswith("actor_rollout_ref.rollout.")
    factors = {name: shared_by_ref if name == "ref" and not ref_in_actor else shared for name in keys}
    passes = {
        name: MicroBatch(value and value * factors[name]) if counts_tokens else MicroBatch(None, value or 1)
        for name, (_, value, counts_tokens) in keys.items()
    }
    if is_v1(config):  # an update of separate_async has one mini-batch
        whole = config.trainer.v1.trainer_mode.startswith(("prefix_", "separate_"))
    else:  # without balance_batch rows stay in order, and few prompts are torn
        whole = actor.use_prefix_grouper or not config.trainer.balance_batch
    exchange = actor.prefix.exchange != "off"
    return Sizes(
        prompts, rollout.n, mini_batches=mini_batches or 1, ranks=data_ranks(config), micro_batches=passes,
        ref_in_actor=ref_in_actor, whole=whole, by_prompts=actor.prefix.mini_batches == "prompts", exchange=exchange,
        slices=shared, ref_slices=shared_by_ref, tensor_ranks=copies_of(actor) // shared,
    )  # fmt: skip


def as_actor(config: Any) -> Any | None:
    """A config whose actor has the model, engine and budgets of this one's critic, so that old log-probs and update
    stand for value pass and update; None: there is none on FSDP2. verl's v1 trainers take one budget for both."""
    critic = config.critic
    if not has_critic(config) or "fsdp" not in critic:
        return None
    tokens = critic.get("ppo_infer_max_token_len_per_gpu", 32768)
    ours = {"use_dynamic_bsz": True, "ppo_mini_batch_size": critic.ppo_mini_batch_size}
    ours["ppo_max_token_len_per_gpu"] = tokens if is_v1(config) else critic.ppo_max_token_len_per_gpu
    engine, model = (OmegaConf.to_container(critic[name], resolve=True) for name in ("fsdp", "model"))
    other = OmegaConf.create(OmegaConf.to_container(config))
    with open_dict(other):
        roles = other.actor_rollout_ref
        roles.model, roles.actor.fsdp_config, roles.actor.ulysses_sequence_parallel_size = model, engine, 1
        other.critic.ppo_mini_batch_size = roles.actor.ppo_mini_batch_size  # the same rows fill both
        roles.actor.update(ours)
        roles.rollout.update({"log_prob_use_dynamic_bsz": True, "log_prob_max_token_len_per_gpu": tokens})
    return other


def counts_rows(config: Any, work: Work) -> bool:
    """True where a step makes more updates than its prompts are mini-batches: verl's are of rows."""
    mini, size = config.actor_rollout_ref.actor.ppo_mini_batch_size, work.steps[0].size
    of_turns = bool(work.turns) and is_v1(config) and not size.by_prompts
    return of_turns and mini <= size.prompts and size.mini_batches > -(-work.priced // mini)


def steps_of(work: Work, config: Any, size: Sizes) -> Sequence[Step]:
    """The steps of `work` under another config, that differs in nothing that makes other rows."""
    actor = config.actor_rollout_ref.actor
    over = actor.prefix.trees
    if work.with_tokens is None or not (work.turns or over == "batch"):
        return [replace(step, size=size) for step in work.steps]
    step = work.with_tokens
    if size.by_prompts == step.size.by_prompts:
        return [replace(step, size=replace(size, mini_batches=step.size.mini_batches), over=over)]
    real = [row for row in step.rows if row.uid is not None]
    return [replace(token_step(size, step.shape, real, actor.ppo_mini_batch_size * size.rollouts), over=over)]


def splits_groups(size: Sizes) -> bool:
    """True where the trainer may spread a prompt's rows over mini-batches."""
    return size.rollouts > 1 and size.mini_batches > 1 and not size.whole
