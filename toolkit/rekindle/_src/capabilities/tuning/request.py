"""The options of a training, checked."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rekindle._src.core.options import Real, Whole, Word
from rekindle.errors import InvalidRequest

if TYPE_CHECKING:
    from optax import GradientTransformation

LossName = Literal["next", "dpo", "ipo", "grpo"]
VariantName = Literal["dapo", "grpo", "dr_grpo"]
Reward = Callable[[Any, str], float]  # of a prompt, as it was passed, and a completion's text
LOSSES = ("next", "dpo", "ipo", "grpo")
VARIANTS = ("dapo", "grpo", "dr_grpo")
MOST_STEPS, MOST_RANK, MOST_BATCH, MOST_LENGTH = 10_000_000, 4096, 4096, 1 << 17
MOST_TARGETS = 1000
_RATES = {"next": 2e-4, "dpo": 2e-5, "ipo": 2e-5, "grpo": 1e-4}
_RENAMED = {
    "learning_rate": ("lr", "step_size"),
    "steps": ("max_steps", "iters", "num_steps"),
    "batch": ("batch_size", "per_device_train_batch_size"),
    "max_length": ("max_seq_length", "max_seq_len", "cutoff_len", "context_length"),
    "rank": ("r", "lora_r", "lora_rank"),
    "alpha": ("lora_alpha",),
    "targets": ("target_modules", "lora_target"),
    "reward": ("reward_funcs", "reward_fn", "reward_function"),
    "generations": ("num_generations", "group_size", "n"),
    "max_tokens": ("max_completion_length", "max_new_tokens"),
    "every": ("logging_steps", "eval_steps", "save_steps"),
}
FOREIGN: dict[str, str] = {  # options of transformers, PEFT, TRL and others, and what to write
    **{theirs: f"Use {ours} with the same value" for ours, names in _RENAMED.items() for theirs in names},
    **dict.fromkeys(
        ("epochs", "num_epochs", "num_train_epochs"), "Use steps: an epoch is len(data) / batch of them"),
    **dict.fromkeys(
        ("dataset", "train_dataset", "texts", "examples", "prompts"),
        "Pass the data second and without a name: a list of texts, (prompt, completion) pairs or chats"),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization", "bf16", "fp16"),
        "Leave it out: weights stay as the session holds them, such as open(…, quantize='int4')"),
    **dict.fromkeys(
        ("output_dir", "save_path"), 'Leave it out: await session.save_adapter("mine", folder) writes it for PEFT'),
    **dict.fromkeys(
        ("optim", "weight_decay", "warmup_steps", "warmup_ratio", "lr_scheduler_type"),
        "Use optimizer with one of Optax, such as optax.adamw(1e-4, weight_decay=0.01)"),
    **dict.fromkeys(
        ("lora_dropout", "dropout", "use_dora", "modules_to_save"), "Leave it out: it is not implemented"),
    "gradient_accumulation_steps": "Use batch with all examples of a step: it is cut where the memory asks for it",
    **dict.fromkeys(("report", "callbacks"), "Read run.history, or show run at the end of a cell"),
    **dict.fromkeys(("quiet", "verbose"), "Leave it out here; open(…, quiet=True) shows no bars"),
}  # fmt: skip


def _targets(name: str, value: object, error: type[InvalidRequest]) -> str | tuple[str, ...]:
    """Accept "all", or modules' names."""
    fix = 'Pass "all", or a list such as ["q_proj", "v_proj"]'
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not 0 < len(value) <= MOST_TARGETS:
        raise error(name, value, "is not a list of modules", fix)
    for one in value:
        if not isinstance(one, str):
            raise error(name, one, "is not a module's name", fix)
    return tuple(value)


def _function(name: str, value: object, error: type[InvalidRequest]) -> object:
    if not callable(value) or isinstance(value, type):
        raise error(name, value, "is not a function", "Pass one of a prompt and a completion's text")
    return value


def _optimizer(name: str, value: object, error: type[InvalidRequest]) -> object:
    for method in ("init", "update"):
        if not isinstance(getattr(value, method, None), types.FunctionType | types.MethodType):
            raise error(name, value, "is not an optimiser of Optax", "Pass one such as optax.adamw(1e-4)")
    return value


def _text(name: str, value: object, error: type[InvalidRequest]) -> object:
    if not isinstance(value, str) or not value:
        raise error(name, value, "is not a prompt", "Pass a text")
    return value


_CHECKS: Mapping[str, Any] = {  # functions of a name, a value and the error to raise
    "loss": Word(LOSSES),
    "reward": _function,
    "variant": Word(VARIANTS),
    "rank": Whole(1, MOST_RANK),
    "alpha": Real(0.0, above=True, fix="Pass alpha=16.0"),
    "targets": _targets,
    "steps": Whole(1, MOST_STEPS),
    "batch": Whole(1, MOST_BATCH),
    "learning_rate": Real(0.0, above=True, fix="Pass learning_rate=2e-4"),
    "max_length": Whole(2, MOST_LENGTH),
    "beta": Real(0.0, fix="Pass beta=0.1"),
    "clip": Real(0.0, 1.0, above=True, fix="Pass clip=0.2"),
    "generations": Whole(2, MOST_BATCH),
    "max_tokens": Whole(1, MOST_LENGTH),
    "seed": Whole(0, (1 << 63) - 1),
    "probe": _text,
    "every": Whole(1, MOST_STEPS),
    "optimizer": _optimizer,
}
_OPTIONAL = ("reward", "alpha", "learning_rate", "beta", "probe", "optimizer")


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """The options of `session.tune`."""

    loss: LossName = "next"
    reward: Reward | None = None
    variant: VariantName = "dapo"
    rank: int = 16
    alpha: float | None = None
    targets: str | Sequence[str] = "all"
    steps: int = 200
    batch: int = 8
    learning_rate: float | None = None
    max_length: int = 1024
    beta: float | None = None
    clip: float = 0.2
    generations: int = 8
    max_tokens: int = 128
    seed: int = 0
    probe: str | None = None
    every: int = 20
    optimizer: GradientTransformation | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, check(name, value, InvalidRequest))
        if self.loss == "grpo" and self.reward is None:
            fix = "Pass reward=lambda prompt, text: float(len(text.split()) == 3)"
            raise InvalidRequest("reward", None, 'is needed by loss="grpo"', fix)
        if self.loss != "grpo" and self.reward is not None:
            raise InvalidRequest("reward", self.reward, f"has no use with loss={self.loss!r}", 'Pass loss="grpo"')
        if self.loss == "ipo" and self.beta == 0:
            raise InvalidRequest("beta", self.beta, 'must be above 0 with loss="ipo"', "Pass beta=0.1")

    @property
    def scale(self) -> float:
        """The factor of the products: alpha divided by the rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    @property
    def rate(self) -> float:
        """The highest learning rate."""
        return _RATES[self.loss] if self.learning_rate is None else self.learning_rate

    @property
    def strength(self) -> float:
        """The weight of the reference model in a loss."""
        if self.beta is not None:
            return self.beta
        return 0.0 if self.loss == "grpo" else 0.1

    @property
    def causes(self) -> list[str]:
        """The options in a training's key: another value of one of them begins a new training."""
        left_out = ("probe", "every", "reward", "optimizer")  # functions have no lasting name
        return [f"{name}={value!r}" for name, value in vars(self).items() if name not in left_out]
