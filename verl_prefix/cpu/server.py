"""transformers' `generate` as a server of single requests: batches, shared prefixes, reproducible samples.

Waiting requests run as batches: every distinct prefix goes through the model once, left-padded, and its KV cache is
copied to the samples of its prompt before `generate` decodes.

Sampling is reproducible. The k-th request for a prompt under one weight version and one set of sampling parameters
draws from a generator that is seeded with (rollout.seed, weight version, parameters, prompt, k). What it draws depends
neither on other requests nor on the batch it lands in; logits do to rounding, so a token changes only where two lead
by less than that. Requests for one prompt are numbered as they arrive, so arrival order can permute them.

Log-probs are those of verl's vLLM rollout with `logprobs_mode=processed_logprobs`: of the distribution that was sampled
from, after temperature, top-k and top-p; of the plain softmax where temperature is 0 (greedy).
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from verl.utils import normalize_token_ids
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.model import get_hf_auto_model_class
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from verl_prefix.cpu.prompts import Prompt, pad_left, read_prompt

# How long the queue must be quiet before a batch starts: a group arrives as n calls.
SETTLE_SECONDS = 0.02


@dataclass(frozen=True)
class Sampling:
    """Settings that the requests of one batch share."""

    temperature: float
    top_p: float
    top_k: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Request:
    """One sample of one prompt; ``future`` takes its ``(token_ids, log_probs)``."""

    prompt: Prompt
    max_tokens: int
    sampling: Sampling
    seed: int
    future: asyncio.Future


class Sampler:
    """Chooses one token per row by the Gumbel-max trick with the row's own numbers, and records its log-prob.

    Rounding hardly moves such a choice: logits that were off by 1e-5 changed no token of 4,000. Where a uniform number
    was looked up in the CDF of a vocabulary of 49k, they changed 7 in 1,000.

    `generate` runs in greedy mode and takes the only finite score, because `torch.multinomial` has one generator for
    the whole batch.
    """

    def __init__(self, requests: list[Request], input_len: int) -> None:
        sampling = requests[0].sampling
        self.greedy = sampling.temperature < 1e-5  # vLLM draws the line there too
        self.warpers = LogitsProcessorList()  # in vLLM's order
        if not self.greedy and sampling.temperature != 1.0:
            self.warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if not self.greedy and sampling.top_k > 0:
            self.warpers.append(TopKLogitsWarper(sampling.top_k))
        if not self.greedy and sampling.top_p < 1.0:
            self.warpers.append(TopPLogitsWarper(sampling.top_p))
        self.input_len = input_len
        self.max_tokens = torch.tensor([request.max_tokens for request in requests])
        self.generators = [torch.Generator().manual_seed(request.seed) for request in requests]
        self.log_probs: list[torch.Tensor] = []

    def choose(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores [B, V] that are 0 at the chosen token and -inf elsewhere."""
        log_probs = self.warpers(input_ids, scores).log_softmax(dim=-1)
        if self.greedy:
            tokens = log_probs.argmax(dim=-1, keepdim=True)
        else:
            waits = torch.empty_like(log_probs)
            for row, generator in zip(waits, self.generators, strict=True):
                row.exponential_(generator=generator)
            tokens = (log_probs - waits.log()).argmax(dim=-1, keepdim=True)
        self.log_probs.append(log_probs.gather(1, tokens))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)

    def done(self, input_ids: torch.Tensor, _scores: None) -> torch.Tensor:
        """Return for each row [B] whether it has its max_tokens."""
        return input_ids.shape[1] - self.input_len >= self.max_tokens


def _token_ids(*ids: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the union of token ids, sorted."""
    union: set[int] = set()
    for item in ids:
        union |= set() if item is None else {item} if isinstance(item, int) else set(item)
    return tuple(sorted(union))


class HFServer:
    """The server. It is a plain class, so that tests need no Ray; `HFReplica` makes it a Ray actor."""

    def __init__(self, config: RolloutConfig, model_config: DictConfig | HFModelConfig) -> None:
        """Load the model from ``model_config.local_path`` in ``config.dtype``; threads are OMP_NUM_THREADS."""
        model_config = omega_conf_to_dataclass(model_config)
        self.config = config
        self.model = get_hf_auto_model_class(model_config.hf_config).from_pretrained(
            model_config.local_path,
            config=model_config.hf_config,
            dtype=PrecisionType.to_dtype(config.dtype),
            trust_remote_code=model_config.trust_remote_code,
        )
        if "varlen" in self.model.config._attn_implementation:  # of packed rows, in training: it has no KV cache
            self.model.set_attn_implementation("sdpa")
        self.processor = model_config.processor
        self.eos_ids = _token_ids(model_config.tokenizer.eos_token_id, self.model.generation_config.eos_token_id)
        # generate() fills what it is not told from here: a checkpoint's repetition_penalty must not reach training.
        self.model.generation_config = GenerationConfig()
        limits = (config.max_model_len, self.model.config.get_text_config().max_position_embeddings)
        self.max_model_len = min(limit for limit in limits if limit is not None)
        self.version: int | None = None
        self.seen: Counter[tuple[Prompt, Sampling]] = Counter()
        self.waiting: list[Request] = []
        self.worker: asyncio.Task | None = None
        self.idle = asyncio.Lock()
        self.running = asyncio.Event()
        self.running.set()
        # Names that the weight update under way has not brought yet; None between updates.
        self.missing: set[str] | None = None

    def ping(self) -> None:
        """Return once the actor is up; what its constructor raises comes back here."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Sample one response, as verl's vLLM server does (vllm_rollout/vllm_async_server.py).

        Raises:
            ValueError: prompt and response do not fit the model, or a parameter or medium is not supported.
        """
        if names := [name for name, value in kwargs.items() if value]:
            raise ValueError(f"rollout.name=hf reads text, images and videos only, and the request has {names}")
        prompt = read_prompt(
            normalize_token_ids(prompt_ids), self.processor, images=image_data, videos=video_data,
            processor_kwargs=mm_processor_kwargs,
        )  # fmt: skip
        params = dict(sampling_params)
        with_log_probs = params.pop("logprobs", False)
        max_tokens, sampling = self._parse(params, len(prompt))
        k = self.seen[prompt, sampling]
        self.seen[prompt, sampling] += 1
        key = repr((self.config.seed, self.version, sampling, prompt.tokens, k)).encode()
        seed = int.from_bytes(hashlib.blake2b(key + prompt.digest, digest_size=7).digest(), "big")
        future = asyncio.get_running_loop().create_future()
        self.waiting.append(Request(prompt, max_tokens, sampling=sampling, seed=seed, future=future))
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self._work())
        token_ids, log_probs = await future
        is_whole = len(token_ids) == max_tokens or token_ids[-1] in sampling.stop_ids
        return TokenOutput(
            token_ids=token_ids,
            log_probs=log_probs if with_log_probs else None,
            stop_reason="completed" if is_whole else "aborted",
            extra_fields={"global_steps": self.version},
        )

    def _parse(self, params: dict[str, Any], prompt_len: int) -> tuple[int, Sampling]:
        """Return max_tokens and the sampling parameters, which ``params`` is emptied of."""
        config = self.config
        default = min(config.response_length, config.prompt_length + config.response_length - prompt_len)
        max_tokens = params.pop("max_tokens", params.pop("max_new_tokens", default))
        if prompt_len == 0 or max_tokens < 1 or prompt_len + max_tokens > self.max_model_len:
            raise ValueError(
                f"a prompt of {prompt_len} tokens and a response of {max_tokens} do not fit the model's "
                f"{self.max_model_len} positions (both must be at least 1 token); lower data.max_prompt_length or "
                "data.max_response_length"
            )
        eos_ids = () if params.pop("ignore_eos", config.ignore_eos) else self.eos_ids
        stop_ids = _token_ids(params.pop("stop_token_ids", None), eos_ids)
        temperature = float(params.pop("temperature", 1.0))
        top_p, top_k = float(params.pop("top_p", 1.0)), int(params.pop("top_k", -1))
        if params.pop("repetition_penalty", 1.0) != 1.0 or params:
            raise ValueError(
                f"sampling parameters {sorted(params) or 'repetition_penalty'} are not supported by rollout.name=hf; "
                "use temperature, top_p, top_k, max_tokens, stop_token_ids and ignore_eos"
            )
        return max_tokens, Sampling(temperature, top_p, top_k, stop_ids)

    async def _work(self) -> None:
        """Run batches until nobody waits; what a batch raises goes to its own requests."""
        while self.waiting:
            arrived = 0
            while arrived < len(self.waiting) < self.config.max_num_seqs:
                arrived = len(self.waiting)
                await asyncio.sleep(SETTLE_SECONDS)
            await self.running.wait()
            async with self.idle:
                batch = self._take()
                (result,) = await asyncio.gather(asyncio.to_thread(self._generate, batch), return_exceptions=True)
            for i, request in enumerate(batch):
                if request.future.cancelled():
                    continue
                if isinstance(result, BaseException):
                    request.future.set_exception(result)
                else:
                    request.future.set_result(result[i])

    def _take(self) -> list[Request]:
        """Take at most max_num_seqs requests with one set of sampling parameters, whole groups where they fit."""
        sampling, limit = self.waiting[0].sampling, self.config.max_num_seqs
        order = {prompt: i for i, prompt in enumerate(dict.fromkeys(request.prompt for request in self.waiting))}
        alike = (request for request in self.waiting if request.sampling == sampling)
        ready = sorted(alike, key=lambda request: order[request.prompt])
        batch = ready[:limit]
        cut = batch[-1].prompt
        if len(ready) > limit and ready[limit].prompt == cut != batch[0].prompt:
            batch = [request for request in batch if request.prompt != cut]
        self.waiting = [request for request in self.waiting if request not in batch]
        return batch

    @torch.inference_mode()
    def _generate(self, batch: list[Request]) -> list[tuple[list[int], list[float]]]:
        """Decode a batch to its (token_ids, log_probs): all but the last prompt token once per distinct prompt."""
        prompts = list(dict.fromkeys(request.prompt for request in batch))
        input_len = max(map(len, prompts))
        ids = pad_left([torch.tensor(prompt.tokens) for prompt in prompts], input_len)
        mask = pad_left([torch.ones(len(prompt), dtype=torch.int64) for prompt in prompts], input_len)
        positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
        if prompts[0].positions is not None:
            positions = pad_left([p.positions for p in prompts if p.positions is not None], input_len)
        cache = None
        rows = torch.tensor([prompts.index(request.prompt) for request in batch])
        if input_len > 1:
            names = dict.fromkeys(name for prompt in prompts for name in prompt.pixels)
            pixels = {name: torch.cat([p.pixels[name] for p in prompts if name in p.pixels]) for name in names}
            cache = self.model(
                ids[:, :-1],
                attention_mask=mask[:, :-1],
                position_ids=positions[..., :-1],
                use_cache=True,
                logits_to_keep=1,
                **pixels,
            ).past_key_values
            cache.reorder_cache(rows)  # recurrent layers have no batch_select_indices
        sampler = Sampler(batch, input_len)
        stop_ids = batch[0].sampling.stop_ids
        output = self.model.generate(
            ids[rows],
            attention_mask=mask[rows],
            position_ids=positions[..., rows, :],
            past_key_values=cache,
            logits_processor=LogitsProcessorList([sampler.choose]),
            stopping_criteria=StoppingCriteriaList([sampler.done, self._is_paused]),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=int(sampler.max_tokens.max()),
                eos_token_id=list(stop_ids) or None,
                pad_token_id=0,
            ),
        )[:, input_len:].tolist()
        log_probs = torch.cat(sampler.log_probs, dim=1).tolist()
        results = []
        for tokens, row_log_probs, request in zip(output, log_probs, batch, strict=True):
            ends = [i + 1 for i, token in enumerate(tokens) if token in stop_ids]
            length = min([request.max_tokens, *ends])
            results.append((tokens[:length], row_log_probs[:length]))
        return results

    def _is_paused(self, input_ids: torch.Tensor, _scores: None) -> torch.Tensor:
        return torch.full((len(input_ids),), not self.running.is_set())

    def pause(self) -> None:
        """End the batch that runs, with the tokens that it has; none starts until `resume`."""
        self.running.clear()

    def resume(self) -> None:
        """Go on."""
        self.running.set()

    async def update_weights(self, bucket: list[tuple[str, torch.Tensor]], last: bool, version: int | None) -> None:
        """Copy some parameters; from the first to the last bucket no batch runs, nor after an error.

        Args:
            bucket: full tensors under the names of the model's state dict.
            version: the weight version (verl's global_steps) that holds after the last bucket.

        Raises:
            RuntimeError: a name is not in the model, a shape differs, or, at the last bucket, a parameter is missing.
        """
        own = self.model.state_dict(keep_vars=True)
        if self.missing is None:
            await self.idle.acquire()
            self.missing = set(own)
        if unexpected := [name for name, _ in bucket if name not in own]:
            raise RuntimeError(f"the actor sent parameters that the rollout model does not have: {unexpected}")
        self.model.load_state_dict(dict(bucket), strict=False)
        # A tied lm_head is one tensor with two names: either name loads it.
        loaded = {id(own[name]) for name, _ in bucket}
        self.missing -= {name for name, tensor in own.items() if id(tensor) in loaded}
        if not last:
            return
        if self.missing:
            raise RuntimeError(f"the actor did not send these parameters of the rollout model: {sorted(self.missing)}")
        self.missing = None
        self.version = version
        self.seen.clear()
        self.idle.release()
