"""A converted folder as a model: the port's modules with quantized weights in place of bf16 ones (K3.md §8, §15).

Sums are float32 as everywhere in the port: MLX's CPU kernels sum in the dtype of x, so x goes in as float32, and
scales and biases, stored in bfloat16, are float32 in memory, which is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from port.cache import DTYPES
from port.linear import wide
from port.model import K3Model
from port.moe import LatentMoE
from port.output_config import Conversion, read_conversion
from port.prune import kept_counts
from port.tiers import ROUTER, Format, Output, OutputTensor
from port.weights import to_mlx
from reference.errors import InputError
from reference.headers import FETCH_AGAIN, INDEX, Stored, check_total_size, read_indexed
from reference.mxfp4 import NAN_SCALE
from reference.shards import NUMPY_DTYPES, check_values
from reference.taps import name_modules

STORED = NUMPY_DTYPES | {"U32": np.dtype("<u4")}


class AffineLinear(nn.Module):
    """``y = W x`` with W in affine groups; ``dtype`` is the model's.

    ``codes`` uint32 [out, in·bits/32], ``scales`` and ``biases`` float32 [out, in/group].
    """

    def __init__(self, format: Format, arrays: Mapping[str, mx.array], dtype: mx.Dtype) -> None:
        super().__init__()
        self.codes, self.scales, self.biases = arrays["weight"], wide(arrays["scales"]), wide(arrays["biases"])
        self.format, self.dtype = asdict(format), dtype

    @property
    def weight(self) -> mx.array:
        """The matrix that this stands for, [out, in] in the model's dtype."""
        return mx.dequantize(self.codes, self.scales, self.biases, **self.format).astype(self.dtype)

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] -> [..., out], in x's dtype."""
        y = mx.quantized_matmul(wide(x), self.codes, self.scales, self.biases, transpose=True, **self.format)
        return y.astype(x.dtype)


class AffineStack(AffineLinear):
    """``y = W x``, each row with the matrix of its own expert; the arrays of AffineLinear with a first axis [E]."""

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """x [N, 1 or k, in], chosen [N, k] < E -> [N, k, out], in x's dtype."""
        x_wide, chosen = wide(x)[..., None, :], chosen.astype(mx.uint32)
        matrices = self.codes, self.scales, self.biases
        y = mx.gather_qmm(x_wide, *matrices, rhs_indices=chosen, transpose=True, **self.format)
        return y[..., 0, :].astype(x.dtype)


class AffineEmbedding(AffineLinear):
    """One row per token id out of a table in affine groups."""

    def __call__(self, input_ids: mx.array) -> mx.array:
        """int [B, T] -> [B, T, dim]; the ids must have been checked."""
        rows = (self.codes[input_ids], self.scales[input_ids], self.biases[input_ids])
        return mx.dequantize(*rows, **self.format).astype(self.dtype)


class WideLinear(nn.Module):
    """``y = W x`` with a dequantized float32 ``weight`` [out, in] in a model of any dtype."""

    def __init__(self, weight: mx.array) -> None:
        super().__init__()
        self.weight = weight

    def __call__(self, x: mx.array) -> mx.array:
        return (wide(x) @ self.weight.T).astype(x.dtype)


class ConvertedReader:
    """A converted folder whose headers have been checked against what its configuration says it must hold."""

    def __init__(self, folder: str | Path) -> None:
        self.folder, index = Path(folder), Path(folder) / INDEX
        self.conversion: Conversion = read_conversion(folder)
        self.outputs = self.conversion.outputs()
        self._stored, content = read_indexed(self.folder, index)
        check_against_outputs(self._stored, self.outputs, index)
        check_total_size(content, self._stored, index)

    def read(self, tensor: OutputTensor) -> mx.array:
        """One tensor as it is stored; InputError if a value is not finite."""
        stored = self._stored[tensor.name]
        array = np.memmap(stored.file, np.uint8, "r", stored.begin, stored.end - stored.begin)
        array = array.view(STORED[tensor.dtype]).reshape(tensor.shape)
        check_values(array, tensor.name, stored.file)
        if tensor.dtype == "U8" and (array == NAN_SCALE).any():
            raise InputError(stored.file, tensor.name, "E8M0 scales below 255, which is NaN", NAN_SCALE, FETCH_AGAIN)
        return to_mlx(array)

    def arrays(self, output: Output, module: int = 0) -> dict[str, mx.array]:
        """weight, scales and, where affine, biases of one of the modules of a quantized output."""
        count = len(output.tensors) // len(output.quantized)
        tensors = output.tensors[module * count : (module + 1) * count]
        return {tensor.name.rsplit(".", 1)[1]: self.read(tensor) for tensor in tensors}


def check_against_outputs(stored: Mapping[str, Stored], outputs: list[Output], index: Path) -> None:
    """Exactly the tensors that ``outputs`` ask for, each with its shape and dtype; raises InputError."""
    expected = {tensor.name: tensor for output in outputs for tensor in output.tensors}
    mend = "convert the checkpoint again"
    for name in sorted(expected.keys() - stored.keys()):
        raise InputError(index, name, "the tensor that config.json asks for", "nothing", mend)
    for name in sorted(stored.keys() - expected.keys()):
        raise InputError(stored[name].file, name, "only tensors that config.json asks for", "this one too", mend)
    for name, tensor in expected.items():
        found = stored[name]
        if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
            wanted, has = f"{tensor.dtype} {list(tensor.shape)}", f"{found.dtype} {list(found.shape)}"
            raise InputError(found.file, name, wanted, has, mend)


def dequantized(arrays: Mapping[str, mx.array], format: Format) -> mx.array:
    """float32 [..., out, in]."""
    return mx.dequantize(arrays["weight"], wide(arrays["scales"]), wide(arrays["biases"]), **asdict(format))


def kv_b_weight(reader: ConvertedReader, output: Output) -> mx.array:
    """``embed_q`` [H, c, nope] and ``unembed_out`` [H, v, c] as one float32 ``kv_b_proj`` [H·(nope + v), c]."""
    keys, values = (dequantized(reader.arrays(output, part), output.format) for part in (0, 1))
    return mx.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(output.shape)


def load_converted(folder: str | Path, dtype: str) -> K3Model:
    """The model of a converted folder, in eval mode, its quantized modules quantized; ``dtype`` as for load_model.

    Raises InputError, in one line naming file and tensor, for everything that is wrong with the folder.
    """
    reader = ConvertedReader(folder)
    model, parameters = empty_model(reader.conversion), {}
    for output in reader.outputs:
        path = output.source.removesuffix(".weight").replace("{expert}.", "")
        if output.kind == "copy":
            array = reader.read(output.tensors[0])
            parameters[output.source] = array.astype(DTYPES[dtype]) if array.dtype == mx.bfloat16 else array
        elif output.kind == "stack":
            arrays = reader.arrays(output)
            parameters |= {f"{path}.weight_packed": arrays["weight"], f"{path}.weight_scale": arrays["scales"]}
        elif ROUTER.fullmatch(output.source):
            # The router multiplies in float32 whatever the model's dtype is.
            parameters[output.source] = dequantized(reader.arrays(output), output.format)
        else:
            module = quantized_module(reader, output, DTYPES[dtype])
            model.update_modules(tree_unflatten([(path, module)]))
            parameters |= {f"{path}.{name}": array for name, array in tree_flatten(module.parameters())}
    assign(model, parameters)
    name_modules(model)
    return model.eval()


def empty_model(conversion: Conversion) -> K3Model:
    """The model of the pruned configuration, unset; where a plan is uneven, each layer with its own experts."""
    counts = kept_counts(conversion.config, conversion.plan)
    text = conversion.config.text_config
    text = text.model_copy(update={"num_experts": max(counts.values(), default=text.num_experts)})
    expert_format = "mxfp4" if conversion.tier.experts.mode == "mxfp4" else "dense"
    model = K3Model(conversion.config.model_copy(update={"text_config": text}), expert_format)
    for layer, count in counts.items():
        if count != text.num_experts:
            own = text.model_copy(update={"num_experts": count})
            model.language_model.model.layers[layer].block_sparse_moe = LatentMoE(own, expert_format)
    return model


def quantized_module(reader: ConvertedReader, output: Output, dtype: mx.Dtype) -> nn.Module:
    """What takes the place of the port's own module; ``kv_b_proj``, stored in two parts, is dequantized."""
    if output.kind == "quantize_kv_b":
        return WideLinear(kv_b_weight(reader, output))
    kinds = {"quantize_experts": AffineStack, "quantize": AffineLinear}
    kind = AffineEmbedding if output.source.endswith(".embed_tokens.weight") else kinds[output.kind]
    return kind(output.format, reader.arrays(output), dtype)


def assign(model: K3Model, parameters: Mapping[str, mx.array]) -> None:
    """Give ``model`` all its parameters; ValueError unless they are exactly those it has, in their shapes."""
    shapes = {name: array.shape for name, array in tree_flatten(model.parameters())}
    given = {name: array.shape for name, array in parameters.items()}
    if shapes != given:
        wrong = min(name for name in shapes.keys() | given.keys() if shapes.get(name) != given.get(name))
        raise ValueError(f"{wrong}: shape {shapes.get(wrong)} in the model, {given.get(wrong)} in the folder")
    model.update(tree_unflatten(list(parameters.items())))
