"""Every setting of a run, with its type and its check. `brx config show PRESET` prints them
all.

If the paper states a value (appendix "Experimental Details"), it is the default.
"""

import math
import os
import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from brx.config.user_code import code_sha256, name_without_folder
from brx.errors import counted

USER_CODE = r"^([\w.]+|.+\.py):\w+$"  # `FILE.py:NAME` or `package.module:NAME`
VOCABULARY_SIZES = {"bytes": 256, "gpt2": 50257}
RECORDED = "recorded:"  # before the method's name of a run that `brx.record` wrote


CODE_SECTIONS = (("model",), ("optimizer",), ("pipeline", "delay"))
"""Sections that may name a user's code. `code_sha256` identifies its file, and `facts` holds what
readers of the run need to know about it."""


def refuse(is_wrong: object, message: str) -> None:
    """ValueError if `is_wrong`. pydantic reports it together with the key's place."""
    if is_wrong:
        raise ValueError(message)


def one_name_for_one_file(name: str) -> str:
    """`FILE.py:NAME` with the file's path in its shortest form; other names as they are."""
    file, _, attribute = name.rpartition(":")
    return f"{os.path.normpath(file)}:{attribute}" if file.endswith(".py") else name


class Section(BaseModel):
    """A part of the configuration: unknown keys and wrong types are errors, fields are
    read-only."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # or an infinite option of a user's own would become null
        serialize_by_alias=True,
    )

    def beyond_defaults(self) -> dict[str, Any]:
        """The settings that are not defaults, as JSON has them."""
        return self.model_dump(mode="json", exclude_defaults=True)


def check_free_values(values: Any, where: str) -> None:
    """ValueError for a value of a user's own option that config.yaml would not give back as it is.

    YAML has dates, sets and bytes, too, but only by a tag (`!!timestamp`)."""
    if isinstance(values, dict):
        for key, value in values.items():
            refuse(not isinstance(key, str), f"{where}: {key!r} as a key must be a text ('{key}')")
            check_free_values(value, f"{where}.{key}")
    elif isinstance(values, list | tuple):
        for value in values:
            check_free_values(value, where)
    elif isinstance(values, float):
        refuse(math.isnan(values), f"{where} must be a number, got nan")
    else:
        kinds = "a number, a text, true, false, null, a list or a mapping"
        is_plain = values is None or isinstance(values, bool | int | str)
        refuse(not is_plain, f"{where} must be {kinds}, got {type(values).__name__}")


class MoEConfig(Section):
    """Mixture of experts in nanoMoE's shape, in place of some blocks' MLP."""

    experts: int = Field(8, ge=2)
    """Number of expert MLPs in a mixture layer."""
    top_k: int = Field(2, ge=1)
    """Number of experts that each token is sent to."""
    every: int = Field(2, ge=1)
    """Distance between two blocks with a mixture (1: all blocks; 2: blocks 1, 3, 5, ...)."""
    load_balance_weight: float = Field(0.01, ge=0)
    """Weight of the load-balancing loss (Switch Transformer, arXiv:2101.03961, equation 4)."""
    router_z_weight: float = Field(0.001, ge=0)
    """Weight of the router z-loss (ST-MoE, arXiv:2202.08906, equation 5)."""

    def is_in_block(self, index: int) -> bool:
        return index % self.every == self.every - 1

    @model_validator(mode="after")
    def _top_k_exists(self) -> Self:
        refuse(
            self.top_k > self.experts,
            f"top_k must be at most experts ({self.experts}), got {self.top_k}",
        )
        return self


class ModelSection(Section):
    """What all models have, whatever their blocks are; the vocabulary follows from
    `data.tokenizer`."""

    name: str = Field(alias="class")
    """The model's class: `gpt`, `llama`, or one of your own (docs/models.md)."""
    blocks: int = Field(32, ge=1, le=10_000)
    """Number of blocks; a stage holds at least one."""
    width: int = Field(384, ge=1, le=1_000_000)
    """Dimension d of the stream (examples, tokens, d) from block to block."""
    sequence_length: int = Field(512, ge=1)
    """Tokens in one training example."""

    @property
    def in_words(self) -> str:
        """The model in a few words, for tables and figures."""
        return f"{counted(self.blocks, 'block')}, d {self.width}"

    def options(self) -> dict[str, Any]:
        """The arguments of the class's constructor, besides the size of the vocabulary."""
        known = {
            key: getattr(self, key)
            for key in type(self).model_fields
            if key not in ("name", "code_sha256", "facts")
        }
        return known | (self.model_extra or {})

    def shrunk(self, width: int) -> "ModelSection":
        """A small model whose parameters have the same names, for a trial of a method."""
        raise NotImplementedError


def check_mixture(moe: MoEConfig | None, blocks: int) -> None:
    every = moe.every if moe else 1
    refuse(every > blocks, f"moe.every must be at most blocks ({blocks}), got {every}")


class GPTConfig(ModelSection):
    """nanoGPT's blocks: LayerNorm, learned positions, an MLP with a GELU, biases."""

    name: Literal["gpt"] = Field("gpt", alias="class")
    """`gpt` (LayerNorm, learned positions, GELU), `llama`, or FILE.py:CLASS of your own."""
    blocks: int = Field(32, ge=1, le=10_000)
    """Number of Transformer blocks."""
    width: int = Field(384, ge=1, le=1_000_000)
    """Embedding dimension d."""
    heads: int = Field(6, ge=1)
    """Number of attention heads; divides `width`."""
    sequence_length: int = Field(512, ge=1)
    """Tokens in one training example."""
    moe: MoEConfig | None = None
    """Mixture of experts; null for a dense model."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(self.width % self.heads, f"heads must divide width ({self.width}), got {self.heads}")
        check_mixture(self.moe, self.blocks)
        return self

    @property
    def in_words(self) -> str:
        mixture = f", {self.moe.experts} experts" if self.moe else ""
        return super().in_words + mixture

    def shrunk(self, width: int) -> "GPTConfig":
        small = {"width": min(width, self.width), "heads": 1, "sequence_length": 4}
        return self.model_copy(update=small)


class RopeScalingConfig(Section):
    """Llama 3.1's slower turns of the positions that are longer than the training's context."""

    factor: float = Field(8.0, gt=0)
    """The slowest waves become slower by this factor."""
    low_frequency: float = Field(1.0, ge=0)
    """Waves with fewer turns in the original context are slowed down by `factor`."""
    high_frequency: float = Field(4.0, gt=0)
    """Waves with more turns stay as they are."""
    original_sequence_length: int = Field(8192, ge=1)
    """The original context, in tokens."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        refuse(
            self.high_frequency <= self.low_frequency,
            f"high_frequency must be above low_frequency ({self.low_frequency}), got "
            f"{self.high_frequency}",
        )
        return self


class LlamaConfig(ModelSection):
    """Llama's blocks: RMSNorm, rotary positions, a gated MLP, grouped-query attention, no bias."""

    name: Literal["llama"] = Field(alias="class")
    """The model's class."""
    heads: int = Field(6, ge=1)
    """Number of attention heads; divides `width` into an even head width."""
    kv_heads: int | None = Field(None, ge=1)
    """Number of heads for keys and values (grouped-query attention); divides `heads`, null for the
    same number."""
    hidden: int | None = Field(None, ge=1)
    """Hidden width of the MLP; null for 8/3 of `width`, rounded up to a multiple of 8: about as
    many weights as in an MLP of two matrices and 4 times the width."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary positions' wavelengths."""
    rope_scaling: RopeScalingConfig | None = None
    """Llama 3.1's scaling of the positions; null for none."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square in RMSNorm."""
    tied: bool = False
    """Let head and embedding share their matrix; needs `pipeline.stages: 1`."""
    moe: MoEConfig | None = None
    """Mixture of gated experts; null for a dense model."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        width, heads = self.width, self.heads
        refuse(width % heads, f"heads must divide width ({width}), got {heads}")
        refuse(
            width // heads % 2,
            f"heads must divide width ({width}) into an even head width, got {width // heads}",
        )
        kv_heads = self.kv_heads or heads
        refuse(heads % kv_heads, f"kv_heads must divide heads ({heads}), got {kv_heads}")
        check_mixture(self.moe, self.blocks)
        return self

    def options(self) -> dict[str, Any]:
        chosen = {
            "kv_heads": self.kv_heads or self.heads,
            "hidden": self.hidden or 8 * math.ceil(self.width / 3),
        }
        return super().options() | chosen

    @property
    def in_words(self) -> str:
        mixture = f", {self.moe.experts} experts" if self.moe else ""
        return f"llama, {super().in_words}{mixture}"

    def shrunk(self, width: int) -> "LlamaConfig":
        width = max(2, min(width, self.width) // 2 * 2)
        small = {"width": width, "heads": 1, "kv_heads": 1, "hidden": 2 * width}
        return self.model_copy(update=small | {"sequence_length": 4, "tied": False})


class ModelFacts(Section):
    """What readers need to know of a user's own model, noted when the run trains."""

    num_parameters: int = Field(ge=0)
    """Parameters of the whole model."""
    num_in_blocks: int = Field(ge=0)
    """Parameters of the blocks, without embedding and head."""


class OwnModelConfig(ModelSection):
    """A model of the user's own (docs/models.md); further keys are options of its class."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(alias="class", pattern=USER_CODE)
    """`FILE.py:NAME` or `package.module:NAME` of a torch.nn.Module with embed, blocks, head."""
    code_sha256: str | None = None
    """SHA-256 of the model's file, filled in by brx: an edited model is another run. Null for
    packages."""
    facts: ModelFacts | None = None
    """Filled in by brx when the run trains."""

    @field_validator("name")
    @classmethod
    def _one_name_for_one_file(cls, name: str) -> str:
        return one_name_for_one_file(name)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        options = self.model_extra or {}
        refuse(
            "vocabulary_size" in options,
            "vocabulary_size: leave it out; brx takes it from the tokenizer",
        )
        for key, value in options.items():
            check_free_values(value, key)
        # The settings of an old run have a fingerprint already, so they can be read when the file
        # is long gone or has changed.
        if self.code_sha256 is None:
            object.__setattr__(self, "code_sha256", code_sha256(self.name, "class: "))
        return self

    def shrunk(self, width: int) -> GPTConfig:
        """A small GPT with as many blocks: only the user knows how to make this model smaller."""
        return GPTConfig(
            blocks=self.blocks, width=min(width, self.width), heads=1, sequence_length=4
        )

    @property
    def in_words(self) -> str:
        options = [f"{key} {value}" for key, value in (self.model_extra or {}).items()]
        return ", ".join([name_without_folder(self.name), super().in_words, *options])


DEFAULT_MODEL = "gpt"
"""The class of a model whose section names none."""


def model_tag(value: Any) -> str:
    """The tag of the section that describes a model, given the section, a mapping or the class's
    name: `own` for `FILE.py:CLASS`."""
    if isinstance(value, dict):
        name = value.get("class", DEFAULT_MODEL)
    else:
        name = getattr(value, "name", value)
    return "own" if isinstance(name, str) and ":" in name else str(name)


ModelConfig = Annotated[
    Annotated[GPTConfig, Tag("gpt")]
    | Annotated[LlamaConfig, Tag("llama")]
    | Annotated[OwnModelConfig, Tag("own")],
    Discriminator(model_tag),
]


class DataConfig(Section):
    """Where the tokens come from. The token files are made on first use and then reused."""

    source: str = Field("packages", min_length=1)
    """`packages` (sources of pinned ones), a path or glob (.txt, .jsonl, .parquet, folder), a
    folder of prepared token files, or a Hugging Face name. Folders and globs leave out hidden files
    and follow links."""
    tokenizer: Literal["bytes", "gpt2", "own"] = "bytes"
    """`bytes` (vocabulary 256), `gpt2` (byte-pair encoding, vocabulary 50257), or `own`: `source`
    is a folder of tokens that another program made (docs/how-to.md)."""
    vocabulary: int | None = Field(None, ge=1, le=2**32)
    """Number of different ids of the tokenizer `own`; null for the others."""
    tokens: int | None = Field(None, ge=1, le=10**15)
    """Stop preparing after this many training tokens; null takes all there are (needs a finite
    source)."""
    validation_fraction: float = Field(0.1, gt=0, lt=1)
    """Share of the documents held out, chosen by a seeded hash of the document."""
    split_seed: int = Field(0, ge=0)
    """Seed of that hash."""
    sample_fraction: float = Field(1.0, gt=0, le=1)
    """Share of the documents that are used at all, by another seeded hash; the whole source is read
    nevertheless."""
    sample_seed: int = Field(0, ge=0)
    """Seed of that hash."""
    text_field: str = "text"
    """The field that holds a document in .jsonl, .parquet and Hugging Face datasets."""
    max_epochs: float = Field(1.0, gt=0)
    """How often a run may read the training tokens; one that would read them more often is refused,
    with the number that it needs."""
    directory: str = Field("data", pattern=r"^[^\x00]+$")
    """Folder for prepared token files; `~` is the home folder, here and in every other path."""

    @model_validator(mode="after")
    def _vocabulary_is_known(self) -> Self:
        is_own = self.tokenizer == "own"
        refuse(
            is_own and self.vocabulary is None,
            "vocabulary must be the number of different ids with tokenizer own, got null",
        )
        refuse(
            not is_own and self.vocabulary is not None,
            f"vocabulary must be null with tokenizer {self.tokenizer}, got {self.vocabulary}",
        )
        return self

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary or VOCABULARY_SIZES[self.tokenizer]


class DelayFacts(Section):
    """What readers need to know of a delay function, noted when the run trains: readers do not call
    it."""

    largest: list[Annotated[int, Field(ge=0)]]
    """Per stage, the largest delay in micro-batches."""
    mean: list[Annotated[float, Field(ge=0)]]
    """Per stage, the mean delay in micro-batches once the pipeline has filled."""


class DelayLike(Section):
    """Few stages under the delays of a deeper pipeline: `{like: 32}`."""

    like: int = Field(ge=1)
    """P' of that pipeline: tau_k = round((P' - 1) (P - 1 - k) / (P - 1))."""


class DelayCode(Section):
    """A delay function of a user's own (docs/semantics.md)."""

    function: str = Field(pattern=USER_CODE)
    """`FILE.py:NAME` or `package.module:NAME`."""
    code_sha256: str | None = None
    """SHA-256 of its file, filled in by brx: an edited function is another run. Null for
    packages."""
    facts: DelayFacts | None = None
    """Filled in by brx when the run trains."""


DelayName = Literal["pipeline", "2bw"]


def check_delay(value: Any) -> Any:
    """Refuse a value that is not a delay profile, with one message for all its forms."""
    if isinstance(value, str) and re.fullmatch(USER_CODE, value):
        value = {"function": value}
    if _is_delay_code(value):
        sha256 = value.get("code_sha256") or code_sha256(str(value["function"]))
        return {**value, "code_sha256": sha256}
    if isinstance(value, DelayCode | DelayLike) or value in get_args(DelayName):
        return value
    if isinstance(value, dict):
        is_profile = list(value) == ["like"] and _is_whole(value["like"], least=1)
    elif isinstance(value, list):
        is_profile = bool(value) and all(_is_whole(number, least=0) for number in value)
    else:
        is_profile = _is_whole(value, least=0)
    if is_profile:
        return value
    raise ValueError(
        f"delay must be {', '.join(get_args(DelayName))}, a whole number from 0, a list of them "
        f"with one per stage, {{like: P}}, or FILE.py:NAME, got {value!r}"
    )


def _is_delay_code(value: Any) -> bool:
    """Whether a value names a delay function, with no other keys than `DelayCode` has."""
    if not isinstance(value, dict) or not value.keys() <= DelayCode.model_fields.keys():
        return False
    return re.fullmatch(USER_CODE, str(value.get("function"))) is not None


def _is_whole(number: Any, *, least: int) -> bool:
    # Not `isinstance`: bool is a subclass of int, and must be refused.
    return type(number) is int and number >= least


class PipelineConfig(Section):
    """The pipeline: how many stages there are, how old their weights, and how many devices
    carry them."""

    stages: int = Field(1, ge=1)
    """P, the number of stages."""
    delay: Annotated[
        DelayName | int | list[int] | DelayLike | DelayCode, BeforeValidator(check_delay)
    ] = "pipeline"
    """tau_k of stage k (from 0) in micro-batches: `pipeline` (P - 1 - k), a number, a list of one
    per stage, `2bw` (M), `{like: 32}` (of 32 stages, spread over P), or your own function,
    FILE.py:NAME, of (stage, P, micro-batch, seed)."""
    accumulation: int = Field(1, ge=1)
    """M, the micro-batches (of `training.batch_size` examples each) whose mean gradient makes one
    update."""
    stash: Literal["exact", "none", "predict"] = "exact"
    """What the backward pass sees: exactly the forward's weights, the newest weights, or PipeMare's
    prediction."""
    forecast: Literal["last-update", "average-update"] | None = None
    """Run both passes at w + tau d, where the weights are expected to be when the update comes; d
    is the last update (SpecTrain, arXiv:1809.02839), or the bias-corrected average of the updates
    with decay 0.9. null: at w itself."""
    error_feedback: float = Field(0.0, ge=0)
    """c of error feedback (arXiv:2606.30634), w(t) = w(t-1) + u(t) + c (u(t) - u(t-1)) with the
    method's update u(t): it makes up for what the last update lacked. For delays of one update;
    stages without delay have none. 0: none."""
    devices: int = Field(1, ge=1)
    """R, the number of processes (one device each); the trajectory does not depend on it."""
    balance: Literal["count", "time"] = "count"
    """Share stages among devices by their number, or by measured time."""
    recompute: bool = False
    """Recompute each block's activations in the backward pass instead of keeping them."""
    rings: Literal["device", "host"] = "device"
    """Where older weight versions are kept; `host`: in pinned memory, those in use are fetched
    ahead of time."""
    timeout_s: float = Field(300.0, gt=0, le=1e6)
    """Seconds without an answer after which a device counts as lost."""
    cut: list[str] | None = None
    """The parameters of each stage, as beginnings of their names; only `record` writes this, for a
    loop of your own. brx cuts its own models by blocks."""

    @property
    def delay_text(self) -> str:
        """The delay profile in a word: pipeline, 2bw, 7, like 32, 0-4-0 for a list, or
        delays.py:jitter."""
        if isinstance(self.delay, DelayCode):
            return name_without_folder(self.delay.function)
        if isinstance(self.delay, DelayLike):
            return f"like {self.delay.like}"
        return "-".join(map(str, self.delay)) if isinstance(self.delay, list) else str(self.delay)

    @model_validator(mode="after")
    def _delay_fits_stages(self) -> Self:
        stages, delay = self.stages, self.delay
        if isinstance(delay, list):
            refuse(
                len(delay) != stages,
                f"delay must have one entry per stage ({stages}), got {len(delay)}",
            )
        if isinstance(delay, DelayCode) and delay.facts is not None:
            facts = delay.facts
            refuse(
                not len(facts.largest) == len(facts.mean) == stages,
                f"delay.facts must have one entry per stage ({stages}); leave them out",
            )
        if isinstance(delay, DelayLike):
            refuse(
                stages == 1 and delay.like > 1,
                f"delay: like: {delay.like} needs at least 2 stages, got 1",
            )
        return self

    @model_validator(mode="after")
    def _devices_fit(self) -> Self:
        refuse(
            self.devices > self.stages,
            f"devices must be at most stages ({self.stages}), got {self.devices}",
        )
        refuse(
            isinstance(self.delay, DelayCode) and self.devices > 1,
            f"delay: a function of your own needs devices: 1 (got {self.devices})",
        )
        return self

    @model_validator(mode="after")
    def _stash_fits(self) -> Self:
        if self.stash == "exact":
            return self
        needs = f"needs stash: exact (got {self.stash})"
        refuse(
            self.forecast is not None,
            f"forecast {needs}: forward and backward pass see the same prediction",
        )
        refuse(
            self.recompute,
            f"recompute {needs}: recomputing from newer weights is another algorithm",
        )
        return self


Decay = Annotated[float, Field(ge=0, lt=1)]
"""How much of a moving average stays at each step."""


class OptimizerSection(Section):
    """What all methods share (appendix "Experimental Details")."""

    lr: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""


class MatrixOptimizerSection(OptimizerSection):
    """What the methods share that are for matrices, with AdamW for the rest."""

    rest_lr: float | None = Field(None, gt=0)
    """Peak learning rate of the rest (embeddings, head, router, biases, norms); null for `lr`."""


class PipeDreamConfig(OptimizerSection):
    """AdamW on delayed gradients (PipeDream)."""

    method: Literal["pipedream"] = "pipedream"


class PipeDreamLRConfig(OptimizerSection):
    """AdamW with learning rates lowered by delay early in training (PipeMare T1,
    arXiv:1910.05124)."""

    method: Literal["pipedream-lr"]
    annealing_fraction: float = Field(0.028, gt=0, le=1)
    """T_c / T: the share of the iterations during which a stage's learning rate is lowered."""


class NesterovConfig(OptimizerSection):
    """NAdam with a long momentum (arXiv:2505.01099)."""

    method: Literal["nesterov"]
    beta1: float = Field(0.99, ge=0, lt=1)
    """Decay of the first moment."""
    momentum_decay: float = Field(0.004, ge=0)
    """NAdam's momentum decay."""


RefreshSchedule = Literal[
    "uniform", "stage-aware", "reversed", "stage-aware-exact", "reversed-exact"
]


PRECISIONS = ("rotation_precision", "covariance_precision")
"""The settings of basis rotation that say how exactly a product is computed."""
FP32_ON_A_CPU = ("auto", "highest")
"""Values of these that tell no runs apart. On a CPU they are the same; on a GPU they differ in
rounding, as devices do."""


class BasisRotationConfig(MatrixOptimizerSection):
    """Adam in the Hessian's Kronecker eigenbasis (the paper's algorithms 1 and 2)."""

    method: Literal["basis-rotation"]
    source: Literal["2nd", "1st"] = "2nd"
    """Curvature source: `2nd` covariances of the gradient, `1st` the momentum."""
    geometry: Literal["bilateral", "unilateral"] = "bilateral"
    """Rotate both sides of a matrix, or only the smaller one."""
    frequency: int = Field(10, ge=1)
    """Iterations between refreshes of the basis."""
    first_refresh: int = Field(2, ge=2)
    """The update that gives the first basis, whatever `frequency` is; until then the steps are
    AdamW's."""
    refresh_schedule: RefreshSchedule = "uniform"
    """Refreshes are shared among stages evenly, by delay, or against it; the exact rules spend as
    much as `uniform`."""
    covariance: Literal["step", "refresh", "interval"] = "step"
    """Which gradients enter the covariances: all (step), those at refreshes (refresh, algorithm 2
    as printed), or those at refreshes weighted for the whole interval (interval)."""
    rotation_precision: Literal["auto", "highest", "tf32", "bf16"] = "auto"
    """Products of the rotations: fp32 (highest), TF32, or bf16 in two parts (16 bits), faster on a
    GPU's matrix units. `auto`: TF32 on CUDA, fp32 elsewhere."""
    covariance_precision: Literal["auto", "highest", "tf32"] = "auto"
    """Products of the covariances: fp32 or TF32; their averages stay in fp32. `auto`: TF32 on CUDA,
    fp32 elsewhere. TF32 needs `source: 2nd`."""
    staggered: bool = False
    """Refresh a share of the matrices at each step, for even step times (not the paper's
    algorithm)."""
    as_published: bool = False
    """Compute what the authors' implementation does where that differs from the paper's text
    (docs/methods.md)."""

    @model_validator(mode="after")
    def _as_published_decides(self) -> Self:
        refuse(
            self.source == "1st" and self.covariance_precision == "tf32",
            "covariance_precision needs source 2nd: 1st keeps no covariances",
        )
        is_default = (
            self.covariance == "step"
            and self.rotation_precision in FP32_ON_A_CPU
            and self.covariance_precision in FP32_ON_A_CPU
            and self.first_refresh == 2
        )
        refuse(
            self.as_published and not is_default,
            "as_published has its own covariance, rotation_precision, covariance_precision and "
            "first_refresh: leave them out",
        )
        return self

    def beyond_defaults(self) -> dict[str, Any]:
        chosen = super().beyond_defaults()
        for key in PRECISIONS:
            if chosen.get(key) in FP32_ON_A_CPU:
                del chosen[key]
        return chosen


class DelayCompensationConfig(OptimizerSection):
    """AdamW on gradients corrected to first order for the weights' change (arXiv:1609.08326)."""

    method: Literal["delay-compensation"]
    compensation: float = Field(0.5, ge=0, le=1)
    """lambda in g + lambda g*g*(w_now - w_used), with the backward pass's weights w_used. The paper
    tries 0.04 to 1.0."""


class SoapConfig(MatrixOptimizerSection):
    """SOAP (arXiv:2409.11321) on the matrices of attention and MLP, AdamW on the rest."""

    method: Literal["soap"]
    frequency: int = Field(10, ge=1)
    """Iterations between updates of the preconditioner's eigenbasis."""


class MuonConfig(MatrixOptimizerSection):
    """Muon on the matrices of attention and MLP, AdamW on the rest."""

    method: Literal["muon"]
    momentum: float = Field(0.95, ge=0, lt=1)
    """Muon's momentum; `beta1` and `beta2` belong to the AdamW of the rest."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of a step on (m, n): 0.2 sqrt(max(m, n)), for AdamW's rates (arXiv:2502.16982), or
    sqrt(max(1, m / n))."""


class ScionConfig(Section):
    """Scion (arXiv:2502.07529): a step of fixed size in a norm chosen for each kind of
    parameter."""

    method: Literal["scion"]
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate; the length of a step is this times the radius."""
    momentum: float = Field(0.1, gt=0, le=1)
    """Weight of the newest gradient in Scion's average."""
    scale: float = Field(50.0, gt=0)
    """Radius for the matrices of attention and MLP, in the spectral norm (the authors' value for
    nanoGPT)."""
    rest_scale: float = Field(3000.0, gt=0)
    """Radius for embeddings, head and router, under the sign rule (the authors' value for nanoGPT).
    """
    vector_scale: float = Field(1.0, gt=0)
    """Radius for biases and norms, in the root mean square; the authors' nanoGPT has none of them.
    """
    constrained: bool = True
    """Stay within the radius by w <- (1 - lr) w, as Scion does; false is the unconstrained Scion.
    """


class LionConfig(MatrixOptimizerSection):
    """Lion (arXiv:2302.06675), sign descent, on the matrices of attention and MLP, AdamW on the
    rest."""

    method: Literal["lion"]
    lion_betas: list[Decay] = Field([0.9, 0.99], min_length=2, max_length=2)
    """Weight of the momentum in a step, and decay of the momentum; `beta1` and `beta2` belong to
    the AdamW of the rest."""


class AdanConfig(Section):
    """Adan (arXiv:2208.06677) on all parameters."""

    method: Literal["adan"]
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    betas: list[Decay] = Field([0.98, 0.92, 0.99], min_length=3, max_length=3)
    """Decays of the first moment, of the mean difference between successive gradients, and of the
    second moment, as in the authors' code; their paper writes 1 minus them."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled and implicit: w <- w / (1 + lr weight_decay)."""


class MethodFacts(Section):
    """What readers need to know of a user's own method, noted when the run trains."""

    kind: Literal["method", "optimizer"]
    """A `brx.methods.method.Method`, or a `torch.optim.Optimizer`."""
    summary: str
    """What the method says about itself."""
    corrects_gradients: bool
    """Whether it changes gradients before they are averaged."""
    forecasts: bool
    """Whether it predicts the weights that passes use."""
    optimizers: list[str]
    """The optimizers of a device by their class, each with its number of parameter groups: `AdamW
    (4 groups)`."""


class CustomConfig(Section):
    """A method of the user's own, or any torch optimizer, by its import path."""

    method: str = Field(pattern=USER_CODE)
    """`FILE.py:NAME` or `package.module:NAME` of a brx.methods.method.Method or a
    torch.optim.Optimizer."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its constructor, other than params and lr."""
    code_sha256: str | None = None
    """SHA-256 of the method's file, filled in by brx: an edited method is another run. Null for
    packages."""
    facts: MethodFacts | None = None
    """Filled in by brx when the run trains."""

    @field_validator("method")
    @classmethod
    def _one_name_for_one_file(cls, method: str) -> str:
        return one_name_for_one_file(method)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for key, does in (("params", "brx does"), ("lr", "set optimizer.lr")):
            refuse(key in self.arguments, f"arguments must not hold {key}: {does}")
        if not self.method.startswith(RECORDED):  # `record` writes what JSON has a form for
            check_free_values(self.arguments, "arguments")
        # The settings of an old run have a fingerprint already, so they can be read when the file
        # is long gone or has changed.
        if self.code_sha256 is None:
            object.__setattr__(self, "code_sha256", code_sha256(self.method, "method: "))
        return self


def method_tag(value: Any) -> str:
    """The tag of the section that describes a method, given the section, a mapping or the method's
    name: `custom` for `package.module:Class`."""
    if isinstance(value, dict):
        method = value.get("method", "pipedream")
    else:
        method = getattr(value, "method", value)
    return "custom" if isinstance(method, str) and ":" in method else str(method)


OptimizerConfig = Annotated[
    Annotated[PipeDreamConfig, Tag("pipedream")]
    | Annotated[PipeDreamLRConfig, Tag("pipedream-lr")]
    | Annotated[NesterovConfig, Tag("nesterov")]
    | Annotated[BasisRotationConfig, Tag("basis-rotation")]
    | Annotated[DelayCompensationConfig, Tag("delay-compensation")]
    | Annotated[SoapConfig, Tag("soap")]
    | Annotated[MuonConfig, Tag("muon")]
    | Annotated[ScionConfig, Tag("scion")]
    | Annotated[LionConfig, Tag("lion")]
    | Annotated[AdanConfig, Tag("adan")]
    | Annotated[CustomConfig, Tag("custom")],
    Discriminator(method_tag),
]


DURATION = r"(?=.)(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?"
UNIT_SECONDS = (86_400, 3_600, 60, 1)


def parse_duration(text: str) -> float:
    """The seconds of a duration such as `11h50m`, `90m`, `1d12h` or `45s`.

    Raises:
        ValueError: it is not a duration, or is zero (`0m`).
    """
    match = re.fullmatch(DURATION, text, re.ASCII)
    seconds = 0
    for number, unit in zip(match.groups() if match else (), UNIT_SECONDS, strict=False):
        seconds += int(number or 0) * unit
    refuse(
        seconds == 0, f"must be an iteration, or a time such as 11h50m, 90m or 1d12h; got {text!r}"
    )
    return float(seconds)


def check_stop_after(value: Any) -> Any:
    """Refuse a value that is neither an iteration nor a duration."""
    if isinstance(value, str):
        parse_duration(value)
    else:
        is_iteration = value is None or (type(value) is int and value >= 1)
        refuse(not is_iteration, f"must be an iteration from 1, or a time (11h50m), got {value!r}")
    return value


class TrainingConfig(Section):
    """The budget, the schedule, and what is written on the way."""

    iterations: int = Field(250_000, ge=1, le=10**12)
    """T, the length of the learning-rate schedule in iterations (one update each)."""
    stop_after: Annotated[int | str | None, BeforeValidator(check_stop_after)] = None
    """Stop after this iteration of the schedule, or save and end a session after a time (11h50m);
    null runs it to its end."""
    batch_size: int = Field(8, ge=1)
    """Examples in a micro-batch."""
    warmup_fraction: float = Field(0.012, ge=0, lt=1)
    """Share of the iterations with a linearly rising learning rate."""
    final_lr_fraction: float = Field(0.1, ge=0, le=1)
    """The learning rate at the end of the cosine, relative to the peak."""
    clip: float = Field(1.0, gt=0, allow_inf_nan=True)
    """Largest gradient norm of a stage; each stage is clipped by its own norm. `.inf` clips
    nothing."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights, the order of the data, an optimizer's random numbers, and a
    delay function of your own."""
    for_tuning: bool = False
    """The run only serves to choose settings: no table, figure or slowdown reports it (`brx sweep`
    sets it, for `choose.seed`)."""
    validation_every: int = Field(1000, ge=1)
    """Iterations between validations."""
    validation_examples: int = Field(200, ge=1)
    """Examples of the fixed validation set."""
    checkpoint_every: int = Field(1000, ge=1)
    """Iterations between checkpoints; there is always one at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many of the newest checkpoints stay on disk."""
    keep_at: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Iterations whose checkpoints also stay on disk, whatever `checkpoint_every` is: for analyses
    midway."""
    log_every: int = Field(10, ge=1)
    """Iterations between writes of the metrics (and, on a GPU, between waits for it)."""

    @model_validator(mode="after")
    def _within_schedule(self) -> Self:
        limit = f"must be at most iterations ({self.iterations})"
        refuse(
            self.last_iteration > self.iterations,
            f"stop_after {limit}, got {self.last_iteration}",
        )
        last_kept = max(self.keep_at, default=0)
        refuse(last_kept > self.iterations, f"keep_at {limit}, got {last_kept}")
        return self

    @property
    def last_iteration(self) -> int:
        return self.stop_after if isinstance(self.stop_after, int) else self.iterations

    @property
    def session_seconds(self) -> float:
        """Seconds after which a session of the run saves and ends; infinite without a limit."""
        return parse_duration(self.stop_after) if isinstance(self.stop_after, str) else math.inf


class CheckpointConfig(Section):
    """How checkpoints are written; when, and how many stay, is said in `training`."""

    background: bool = True
    """Go on training while a checkpoint is written. Needs host memory for a copy of weights, rings
    and optimizer state; `false` waits for the disk instead."""
    rings: bool = True
    """Save the older weight versions, too. Without them checkpoints are small, but a run that
    resumes from one begins with the newest weights in place of older ones, and its losses differ.
    """


class RuntimeConfig(Section):
    """How the computation is carried out; nothing here is meant to change a result beyond
    rounding."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute; `auto` takes CUDA or else the CPU."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """`bf16` runs matrix products under autocast; weights and optimizer state stay in fp32."""
    compile: Literal[False, True, "whole"] = False
    """Compile the Transformer block with torch.compile, and on a GPU the elementwise part of basis
    rotation's step. `whole` compiles all stages as one graph instead (one device): small models
    train faster; the more blocks, the longer it takes to compile."""
    graphs: bool = False
    """Record iterations as CUDA graphs and replay them (CUDA only): both passes are one launch, a
    step of basis rotation another. On several devices it records the steps only."""
    deterministic: bool = False
    """Use only deterministic kernels (on a GPU: slower)."""
    share_gpus: bool = False
    """Let several ranks of a machine compute on one GPU; their messages go through host memory."""
    threads: int | None = Field(None, ge=1, le=4096)
    """CPU threads of each process; null leaves torch's default, divided among the devices."""


class LoggingConfig(Section):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = False
    """Write TensorBoard event files into the run folder (extra: tensorboard)."""
    wandb: str | None = None
    """Weights & Biases project to log to; null for none (extra: wandb)."""
    trackio: str | None = None
    """Trackio project to log to, a board on this machine (`trackio show`); null for none (extra:
    trackio)."""
    staleness_every: int | None = Field(None, ge=1)
    """Iterations between measurements of what delay does to gradients, updates and bases (`brx plot
    staleness`); null for none."""
    update_norms: bool = True
    """At log points, the norm of each stage's update; needs room for a copy of the weights in these
    iterations."""


class RunConfig(Section):
    """One training run, complete: the same file gives the same run."""

    model: ModelConfig = GPTConfig()
    data: DataConfig = DataConfig()
    pipeline: PipelineConfig = PipelineConfig()
    optimizer: OptimizerConfig = PipeDreamConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    # The last section in every file that brx has written, by which `read_settings` finds files that
    # were cut off. New sections stand before it.
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        devices, stages, blocks = self.pipeline.devices, self.pipeline.stages, self.model.blocks
        refuse(
            self.logging.staleness_every is not None and devices > 1,
            f"logging.staleness_every needs pipeline.devices 1 (got {devices}), where the "
            f"trajectory is the same: a fresh gradient is one of all stages' newest weights",
        )
        refuse(
            self.pipeline.cut is not None and not self.is_recorded,
            "pipeline.cut: leave it out; only `record` writes it, and brx cuts its own models by "
            "blocks",
        )
        compiles_whole = self.runtime.compile == "whole"
        refuse(
            compiles_whole and devices > 1,
            f"runtime.compile: whole needs pipeline.devices 1 (got {devices}); true compiles each"
            " block, and the trajectory is the same on any number of devices",
        )
        refuse(
            compiles_whole and getattr(self.model, "moe", None) is not None,
            "runtime.compile: whole takes no mixture of experts (model.moe): experts are not"
            " compiled; true compiles the rest of each block",
        )
        refuse(
            stages > 1 and isinstance(self.model, LlamaConfig) and self.model.tied,
            f"model.tied needs pipeline.stages 1 (got {stages}): a weight belongs to one stage",
        )
        refuse(
            stages > blocks and not self.is_recorded,
            f"pipeline.stages must be at most model.blocks ({blocks}), got {stages}: a stage holds "
            f"at least one block",
        )
        return self

    @property
    def is_recorded(self) -> bool:
        """Whether `record` wrote the run from a user's loop; then only the settings that are set
        are known."""
        return self.optimizer.method.startswith(RECORDED)

    @property
    def tokens_per_update(self) -> int:
        return self.pipeline.accumulation * self.training.batch_size * self.model.sequence_length
