"""The tiers: what a converted checkpoint holds, as data over the configuration (K3.md §2, §8, §15).

Layout of a converted folder (safetensors shards ``model-00001-of-000NN.safetensors``, an index, ``config.json``, and
the tokenizer, processor and generation files of the source). Names are the source's, prefix ``language_model.``,
``vision_tower.`` or ``mm_projector.`` included, with these exceptions, which stock mlx-lm and mlx-vlm read as they are:

- Routed experts are stacked, one tensor for a whole layer, in the order of the layer's plan, else of their numbers.
  ``…block_sparse_moe.switch_mlp.{gate,down,up}_proj.*`` are the source's ``experts.{e}.{w1,w2,w3}``.
  mxfp4: ``.weight`` U32 [E, out, in/8], the packed bytes as little-endian words, and ``.scales`` U8 [E, out, in/32],
  both byte for byte the source's. Affine: ``.weight`` U32 [E, out, in·bits/32], ``.scales`` and ``.biases`` BF16
  [E, out, in/group].
- A quantized linear map keeps its name: ``.weight`` U32 [out, in·bits/32], ``.scales`` and ``.biases`` BF16
  [out, in/group]. So do ``embed_tokens`` and ``lm_head``.
- A quantized ``kv_b_proj`` [H·(nope + v), c] is written as the two maps that the loaders make of it anyway:
  ``embed_q`` [H, c, nope], its key rows transposed head by head, and ``unembed_out`` [H, v, c], its value rows. The
  loaders would otherwise quantize it a second time, along another axis. Unquantized it stays ``kv_b_proj``.

Affine codes, scales and biases are those of ``mx.quantize`` on the CPU for the float32 weights; scales and biases are
then rounded to bfloat16, the dtype of the other weights, which is what the loaders expect. Everything else, and
everything in NEVER_QUANTIZED, is copied byte for byte with its shape and dtype.

A group that does not divide a width: for the routed experts the conversion is refused, before anything is written; any
other linear map stays bf16, which the loaders accept because ``config.json`` names every quantized module. Dense (bf16)
source experts are refused by tier mxfp4, which copies bytes, and quantized by the others.

``config.json`` has ``quantization`` and, the same, ``quantization_config``: the experts' settings as default, and one
entry per quantized module under the *loaders'* module path (``…mlp.switch_mlp.gate_proj``, ``…mlp.gate``, KDA's three
projections as one ``…self_attn.qkv_proj``). See ``port/output_config.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

from reference.checkpoint import ExpertFormat, Row, expert_rows, tensor_rows
from reference.config import K3Config
from reference.errors import InputError

Plan = Mapping[int, Sequence[int]]
"""0-based layer -> the experts it keeps, in their new order; every MoE layer has its entry."""

BYTES = {"BF16": 2, "F32": 4, "U8": 1, "U32": 4}
WORD_BITS = 32


@dataclass(frozen=True)
class Format:
    """How the weights of a matrix are coded: groups of ``group_size`` consecutive inputs of one row share a scale."""

    mode: Literal["mxfp4", "affine"]
    bits: int
    group_size: int


@dataclass(frozen=True)
class Tier:
    """What is done to the routed experts, to the router, and to every other linear map; None leaves bf16."""

    name: str
    experts: Format
    linears: Format | None = None
    router: Format | None = None
    nonexpert_bits: int | None = None


MXFP4 = Format("mxfp4", 4, 32)
AFFINE2, AFFINE3, AFFINE4, AFFINE8 = (Format("affine", bits, 64) for bits in (2, 3, 4, 8))
TIERS = {
    tier.name: tier
    for tier in (
        Tier("mxfp4", MXFP4),
        Tier("3bit", AFFINE3, linears=AFFINE4, router=AFFINE8),
        Tier("mixed2", AFFINE2),
        Tier("2bit", AFFINE2, linears=AFFINE4, router=AFFINE8),
    )
}

LINEARS = re.compile(
    r"language_model\.(lm_head|model\.embed_tokens"
    r"|model\.layers\.\d+\.(self_attn\.(q|k|v|g|o|f_a|f_b|b|g_a|g_b|q_a|q_b|kv_b)_proj|self_attn\.kv_a_proj_with_mqa"
    r"|(mlp|block_sparse_moe\.shared_experts)\.(gate|up|down)_proj"
    r"|block_sparse_moe\.routed_expert_(down|up)_proj))\.weight"
)
"""The linear maps that a tier may quantize; beside the routed experts and the router, and nothing else."""
ROUTER = re.compile(r"language_model\.model\.layers\.\d+\.block_sparse_moe\.gate\.weight")
CORRECTION_BIAS = ".e_score_correction_bias"
EXPERT_ROWS = (".block_sparse_moe.gate.weight", CORRECTION_BIAS)
"""Endings of the tensors that have one row per expert, so that a plan renumbers their rows."""
NEVER_QUANTIZED = re.compile(
    r".*(norm\d?|_conv1d|_res_proj)\.weight|.*\.(A_log|dt_bias|e_score_correction_bias)|(vision_tower|mm_projector)\..*"
)
EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class OutputTensor(NamedTuple):
    """One tensor of a converted folder; ``dtype`` is the safetensors name: BF16, F32, U8 or U32."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


Kind = Literal["copy", "stack", "quantize_experts", "quantize", "quantize_kv_b"]


@dataclass(frozen=True)
class Output:
    """The tensors that are written together, what they are made of, and how.

    ``kind``  "copy": the source tensor's bytes, or of its first axis the rows in ``experts`` alone;
    "stack": the experts' packed bytes, then their scale bytes, each in one tensor;
    "quantize_experts": every expert dequantized, quantized to ``format`` and stacked;
    "quantize": a bf16 matrix, or its rows in ``experts``, quantized to ``format``;
    "quantize_kv_b": a bf16 ``kv_b_proj`` taken apart into ``embed_q`` and ``unembed_out``, both quantized.

    ``source`` is the source tensor's name, for experts the name without ``.weight…`` and with ``{expert}`` for the
    number; ``shape`` the source's logical shape, [out, in] of one expert; ``experts`` the numbers of the experts in
    their new order, None where no axis counts experts or all rows stay. ``quantized`` lists the loaders' module paths
    whose settings are ``format``.
    """

    kind: Kind
    source: str
    shape: tuple[int, ...]
    tensors: tuple[OutputTensor, ...]
    format: Format | None = None
    experts: tuple[int, ...] | None = None
    quantized: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def tier_named(name: str, nonexpert_bits: int | None = None) -> Tier:
    """The tier, the rest of it in 8 bits if asked; InputError for a combination that is not on offer."""
    if name not in TIERS:
        raise InputError("--tier", "tier", f"one of {', '.join(TIERS)}", repr(name), "choose one of them")
    tier = TIERS[name]
    if nonexpert_bits is None:
        return tier
    if nonexpert_bits != AFFINE8.bits:
        raise InputError("--nonexpert-bits", "bits", "8", nonexpert_bits, "pass 8, or leave it out")
    if tier.linears is not None:
        expected = "a tier that leaves the rest in bf16"
        raise InputError("--nonexpert-bits", "tier", expected, name, "use it with mxfp4 or mixed2")
    return replace(tier, linears=AFFINE8, router=AFFINE8, nonexpert_bits=AFFINE8.bits)


def outputs(
    config: K3Config, expert_format: ExpertFormat, tier: Tier, plan: Plan | None = None, source: object = "config"
) -> Iterator[Output]:
    """Everything that a conversion writes, in the order in which it is written.

    Derived from the configuration of the source alone. ``plan`` must have been checked (``port/prune.py``). Raises
    InputError, naming ``source`` and the field, where the tier cannot hold the experts.
    """
    check_experts(config, expert_format, tier, source)
    moe_layer, text = 0, config.text_config
    for prefixes, rows in tensor_rows(config, expert_format):
        if match := re.match(r"language_model\.model\.layers\.(\d+)\.", prefixes[0]):
            moe_layer = int(match[1])
        keep = tuple(plan[moe_layer]) if plan is not None and moe_layer in plan else None
        if ".experts." in prefixes[0]:
            yield from expert_outputs(prefixes[0], tier, expert_rows(text, "dense"), keep or range(text.num_experts))
            continue
        for name, shape, dtype in rows:
            yield row_output(config, (prefixes[0] + name, shape, dtype), tier, keep)


def check_experts(config: K3Config, expert_format: ExpertFormat, tier: Tier, source: object) -> None:
    """Raise InputError unless the tier can hold the routed experts, if there are any."""
    text = config.text_config
    if not any(text.is_moe(layer) for layer in range(text.num_hidden_layers)):
        return
    if tier.experts.mode == "mxfp4" and expert_format == "dense":
        expected = "MXFP4 experts, whose bytes tier mxfp4 copies"
        raise InputError(source, "experts", expected, "dense ones", "choose a tier that quantizes")
    latent = "routed_expert_hidden_size" if text.routed_expert_hidden_size else "hidden_size"
    for field, width in ((latent, text.latent_size), ("moe_intermediate_size", text.moe_intermediate_size)):
        if width % tier.experts.group_size:
            expected = f"a multiple of {tier.experts.group_size}, the group of tier {tier.name}'s experts"
            mend = "choose tier mxfp4, whose group is 32" if expert_format == "mxfp4" else "change the width"
            raise InputError(source, f"text_config.{field}", expected, width, mend)


def expert_outputs(prefix: str, tier: Tier, rows: Sequence[Row], experts: Sequence[int]) -> Iterator[Output]:
    """The three stacks of one layer; ``prefix`` is that of any of its experts, ``rows`` the dense shapes of one."""
    moe = prefix.split("experts.")[0]
    mxfp4 = tier.experts.mode == "mxfp4"
    for name, shape, _ in rows:
        part = name.split(".")[0]
        module = f"{moe}switch_mlp.{EXPERT_NAMES[part]}"
        yield Output(
            "stack" if mxfp4 else "quantize_experts",
            f"{moe}experts.{{expert}}.{part}",
            shape,
            coded(module, (len(experts), *shape), tier.experts),
            tier.experts,
            tuple(experts),
            (loader_path(module),),
        )


def row_output(config: K3Config, row: Row, tier: Tier, keep: tuple[int, ...] | None) -> Output:
    """What becomes of one tensor that is no routed expert's."""
    name, shape, dtype = row
    keep = keep if name.endswith(EXPERT_ROWS) else None
    kept_shape = shape if keep is None else (len(keep), *shape[1:])
    module, format = name.removesuffix(".weight"), format_of(name, tier)
    if format is not None and name.endswith(".kv_b_proj.weight"):
        parts = {module.replace("kv_b_proj", part): size for part, size in kv_b_parts(config).items()}
        if not any(size[-1] % format.group_size for size in parts.values()):
            tensors = tuple(tensor for part, size in parts.items() for tensor in coded(part, size, format))
            return Output("quantize_kv_b", name, shape, tensors, format, None, tuple(parts))
    elif format is not None and shape[-1] % format.group_size == 0:
        return Output("quantize", name, shape, coded(module, kept_shape, format), format, keep, (loader_path(module),))
    return Output("copy", name, shape, (OutputTensor(name, kept_shape, dtype),), None, keep)


def format_of(name: str, tier: Tier) -> Format | None:
    """How the tier codes a tensor that is no routed expert's, if a group divides its width; None leaves it as it is."""
    if ROUTER.fullmatch(name):
        return tier.router
    return tier.linears if LINEARS.fullmatch(name) else None


def kv_b_parts(config: K3Config) -> dict[str, tuple[int, ...]]:
    """The two maps that ``kv_b_proj`` consists of: per head the key rows, transposed, and the value rows."""
    text = config.text_config
    heads, rank = text.num_attention_heads, text.kv_lora_rank
    return {"embed_q": (heads, rank, text.qk_nope_head_dim), "unembed_out": (heads, text.v_head_dim, rank)}


def coded(module: str, shape: tuple[int, ...], format: Format) -> tuple[OutputTensor, ...]:
    """The tensors that hold a matrix or stack of them, ``shape`` [..., out, in], in ``format``."""
    *rows, inner = shape
    groups = (*rows, inner // format.group_size)
    weight = OutputTensor(f"{module}.weight", (*rows, inner * format.bits // WORD_BITS), "U32")
    if format.mode == "mxfp4":
        return weight, OutputTensor(f"{module}.scales", groups, "U8")
    return weight, OutputTensor(f"{module}.scales", groups, "BF16"), OutputTensor(f"{module}.biases", groups, "BF16")


def loader_path(module: str) -> str:
    """The path under which mlx-lm and mlx-vlm know a module of the output: there the MoE is ``mlp``.

    Not of KDA's q, k and v, which they join to one: see ``quantized_modules``.
    """
    return module.replace(".block_sparse_moe.", ".mlp.")


def quantized_modules(config: K3Config, written: Sequence[Output]) -> dict[str, Format]:
    """Loaders' module path -> its settings, for every quantized module of these outputs."""
    modules = {}
    for output in written:
        for path in output.quantized:
            layer = re.match(r"language_model\.model\.layers\.(\d+)\.self_attn\.[qkv]_proj$", path)
            if layer and config.text_config.is_kda(int(layer[1])):
                path = re.sub(r"[qkv]_proj$", "qkv_proj", path)
            modules[path] = output.format
    return modules
