"""The command line of `verl-prefix plan`; what is wrong with it is said before config, model or torch are read."""

import importlib.util
import math
import os
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from verl_prefix.files import parse_json
from verl_prefix.tools.ab.runs import read_run
from verl_prefix.tools.simulate.hardware import read_hardware

CONFIG_PATH, CONFIG_NAME = "config", "ppo_trainer"  # verl's own, where the training command names none
# verl's timing -> the pass that it holds.
TIMINGS = {"timing_s/update_actor": "update", "timing_s/old_log_prob": "old", "timing_s/ref": "ref"}
CRITIC_TIMINGS = {"timing_s/values": "values", "timing_s/update_critic": "critic"}
MAIN = re.compile(
    r"(.*/)?verl[./](trainer[./]main_ppo\w*?|experimental[./](?:fully_async_policy[./]fully_async_main|"
    r"one_step_off_policy[./]main_ppo))(\.py)?"
)
LOGARITHM = "DEVIATION of the logarithm, as in 2400,0.4"
MOST_TURNS = 1000
LEFTOVERS = ("$@", "${@}", "$*")  # of a script whose last line is pasted


class PlanError(ValueError):
    """The command cannot be planned; the message says what to change."""


class Unsupported(PlanError):
    """What the command runs is not supported, whatever its other options are."""


def override_words(words: list[str]) -> list[str]:
    """The overrides of a training command, whatever starts it, or of nothing but them.

    Raises:
        PlanError: a word is no override.
    """
    start = next((i + 1 for i, word in enumerate(words) if MAIN.fullmatch(word)), 0)
    kept = [word for word in words[start:] if word.strip("\\ \t\n") and word not in LEFTOVERS]
    for word in kept:
        if word.startswith(("-", "=")) or not ("=" in word or word.startswith("~")):
            raise PlanError(
                f"{word!r} is no Hydra override (key=value) and no script that is here; give the overrides of the "
                "training command, or the whole command: python3 -m verl.trainer.main_ppo key=value ..."
            )
    return kept


def verls_folder() -> Path | None:
    """The folder of verl, which is found and not imported, without links; None: it is not installed."""
    verl = importlib.util.find_spec("verl")
    return None if verl is None or verl.origin is None else Path(verl.origin).resolve().parent


def config_of(words: list[str], path: str | None, name: str | None) -> tuple[str, str]:
    """Folder, as seen from verl/trainer, and name of the config of a training command: those that its module hands to
    Hydra, where it gives no `path` or `name` of its own."""
    module = next((match[2] for word in words if (match := MAIN.fullmatch(word))), "trainer.main_ppo")
    home = verls_folder() or Path()
    file = home / (module.replace(".", "/") + ".py")
    text = file.read_text() if file.is_file() else ""
    decorated = re.search(r'@hydra\.main\(config_path="(.+?)", config_name="(.+?)"', text)
    named = decorated.groups() if decorated else (CONFIG_PATH, CONFIG_NAME)
    folder = os.path.realpath(file.parent / (path or named[0]))
    return os.path.relpath(folder, home / "trainer"), name or named[1]


class Turns(NamedTuple):
    """A session of so many turns, and tokens of each: thoughts that later prompts leave out, what is said, and what a
    tool answers."""

    turns: int = 1
    thinking: int = 0
    say: int = 0
    tool: int = 0


class Rollout(NamedTuple):
    """A line of a file of verl's rollout dumps."""

    file: str
    uid: str
    prompt: str
    response: str


def read_dumps(path: str) -> list[Rollout]:
    """The rollouts of a folder of verl's dumps, or of one of its files.

    Raises:
        PlanError: the files are not what verl writes, or hold none.
    """
    files, rollouts = sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [Path(path)], list[Rollout]()
    try:
        for file in files:
            rows = map(parse_json, file.read_text().splitlines())
            rollouts += [Rollout(file.name, str(x.get("uid", "")), x.get("input", ""), x["output"]) for x in rows]
        if odd := next((text for row in rollouts for text in row[2:] if not isinstance(text, str)), None):
            raise TypeError(f"{odd!r} is no text")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = f"{type(error).__name__}: {error}"
        raise PlanError(f"{path} is not what trainer.rollout_data_dir writes ({wrong})") from None
    if not rollouts:
        raise PlanError(f"{path} holds no rollouts")
    return rollouts


def spread(spec: str, option: str = "--response-lengths", forms: str = "MEAN, MEAN,STD, or a folder of rollout dumps",
           default: float = 0.5) -> tuple[float, float]:  # fmt: skip
    """Mean and spread of lengths, "MEAN,STD"; without STD it is `default` times the mean.

    Raises:
        PlanError: the specification is none.
    """
    try:
        mean, std = (float(x) for x in (spec.split(",") if "," in spec else (spec, float(spec) * default)))
    except ValueError:
        raise PlanError(f"{option} {spec!r}: write {forms}") from None
    if not (1 <= mean < math.inf and 0 <= std < math.inf):
        raise PlanError(f"{option} {spec!r}: write a mean of at least 1 and a finite spread of at least 0")
    return mean, std


def prompt_spread(spec: str) -> tuple[float, float]:
    """Mean of prompt lengths and the deviation of their logarithm, 0 where none is given; see `spread`."""
    mean, deviation = spread(spec, "--prompt-lengths", f"MEAN or MEAN,{LOGARITHM}", default=0.0)
    if deviation > 3:  # a deviation in tokens
        raise PlanError(f"--prompt-lengths {spec!r}: write MEAN,{LOGARITHM}, at most 3")
    return mean, deviation


def shares(spec: str | None) -> dict[str, float]:
    """Share of a stock step that each pass takes: from "update=0.5,old=0.1,ref=0.1", or from a stock run's metrics.

    Raises:
        PlanError, or ValueError of `tools.ab.runs.read_run`: neither of these.
    """
    if spec is None:
        return {}
    timings = TIMINGS | CRITIC_TIMINGS
    if "=" not in spec or os.path.isfile(spec):
        steps = list(read_run(spec).values())
        whole = statistics.median(step["timing_s/step"] for step in steps)
        parts = {name: statistics.median(step.get(timing, 0.0) for step in steps) for timing, name in timings.items()}
        if not (whole > 0 and all(0 <= part <= whole for part in parts.values())):
            raise PlanError(f"--shares {spec}: a step takes {whole} s, and its passes {parts}; name another run")
        return {name: part / whole for name, part in parts.items()}
    try:
        pairs = [(name, float(value)) for name, value in (pair.split("=") for pair in spec.split(","))]
    except ValueError:
        pairs = []
    given = dict(pairs)
    fit = all(0 <= share <= 1 for share in given.values()) and sum(given.values()) <= 1
    if not given or len(given) < len(pairs) or set(given) - set(timings.values()) or not fit:
        raise PlanError(
            f"--shares {spec!r}: write update=0.5,old=0.1,ref=0.1, and of a critic values=0.1,critic=0.2 (0 to 1 each, "
            "at most 1 together), or a stock run's file"
        )
    return given


@dataclass
class Options:
    """The command line; None where nothing is said.

    Attributes:
        words: of the training command; `overrides`: its overrides.
        config_path, config_name: as asked. config: folder and name of its config, see `compose.compose_config`.
        response_lengths: see `spread`, or verl's rollout dumps. prompt_lengths: see `prompt_spread`. fit: GiB of a GPU.
        session: by turns, thinking, say and tool; None: sessions have one turn, or are dumped.
        parts: by shares, see the function `shares`. dead_groups: the share of groups without advantage.

    Raises:
        ValueError: an option cannot be, or does not go with another.
    """

    words: list[str]
    config_path: str | None = None
    config_name: str | None = None
    response_lengths: str | None = None
    prompt_lengths: str | None = None
    turns: int | None = None
    thinking: int | None = None
    say: int | None = None
    tool: int | None = None
    shares: str | None = None
    gpu: str = "h100"
    simulate: bool = False
    fit: float | None = None
    dead_groups: float = 0.0
    overrides: list[str] = field(init=False)
    config: tuple[str, str] = field(init=False)
    session: Turns | None = field(init=False)
    parts: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        if self.fit and not self.simulate:
            raise ValueError("--fit is for a simulation; add --simulate")
        if not 0 <= self.dead_groups < 1:
            raise ValueError(f"--dead-groups {self.dead_groups:g}: write a share from 0 to below 1, as in 0.4")
        read_hardware(self.gpu)
        self.overrides, self.parts = override_words(self.words), shares(self.shares)
        self.config = config_of(self.words, self.config_path, self.config_name)
        if self.response_lengths and not self.has_dump:
            spread(self.response_lengths)
        self.session = self._session()
        if self.session and self.response_lengths:
            raise ValueError("--response-lengths and --turns both say how long responses are; remove one of them")

    @property
    def has_dump(self) -> bool:
        """True where --response-lengths names verl's rollout dumps."""
        spec = self.response_lengths
        return bool(spec and not re.fullmatch(r"[\d.,]+", spec) and Path(spec).exists())

    def _session(self) -> Turns | None:
        tokens = {"--thinking": self.thinking, "--say": self.say, "--tool": self.tool}
        if self.turns is None:
            if given := [name for name, value in tokens.items() if value is not None]:
                raise PlanError(f"{given[0]} is of sessions of several turns; add --turns 10, or another number")
            return None
        if self.turns > MOST_TURNS:
            raise PlanError(f"--turns {self.turns}: give a number of at most {MOST_TURNS}")
        if missing := [name for name, value in tokens.items() if value is None]:
            raise PlanError(
                f"--turns {self.turns}: add {', '.join(missing)}, tokens of each turn, as in --turns 10 --thinking 300 "
                "--say 100 --tool 400"
            )
        return Turns(self.turns, self.thinking or 0, self.say or 0, self.tool or 0)

    def check_lengths(self, longest_prompt: int, longest: int) -> None:
        """Raises PlanError where prompts or responses are longer than data.max_{prompt,response}_length."""
        if self.prompt_lengths and prompt_spread(self.prompt_lengths)[0] > longest_prompt:
            raise PlanError(f"--prompt-lengths {self.prompt_lengths} is over data.max_prompt_length={longest_prompt}")
        if self.session and (length := self.session.thinking + self.session.say) > longest:
            raise PlanError(
                f"--thinking {self.thinking} --say {self.say}: responses of {length} tokens are over "
                f"data.max_response_length={longest}; raise it"
            )
        spec = self.response_lengths
        if spec and not self.has_dump and spread(spec)[0] > longest:
            raise PlanError(
                f"--response-lengths {spec!r}: write a mean of 1 to {longest} tokens (data.max_response_length; raise "
                "it for more)"
            )
