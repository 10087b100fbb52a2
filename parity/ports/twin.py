"""The adapter that the reference and the MLX port share: same file, class and function names, another library.

It drives the twins through their modules; all arithmetic is theirs.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from parity.arrays import cast
from parity.protocol import VISION_KINDS, Capabilities, ModuleCall, Segments, Step, Taps, Unsupported
from parity.quantities import TEXT_MODEL
from reference.config import K3Config
from reference.taps import Recorder, recording, tap

FUNCTIONS = frozenset(
    {
        "norm.rms_norm",
        "activation.situ_glu",
        "activation.silu_glu",
        "short_conv.short_conv",
        "kda.l2_normalize",
        "kda.scaled_query",
        "kda.write_strength",
        "kda.log_decay",
        "kda.recurrent_kda",
        "kda_chunk.chunked_kda",
        "kda.gated_output_norm",
        "attn_res.mix",
        "moe.routing_scores",
        "moe.limit_to_groups",
        "moe.select_experts",
        "moe.routing_weights",
        "saliency.output_norms",
        "saliency.expert_sums",
        "saliency.expert_counts",
    }
)
FORMS = {"kda": ("chunked", "recurrent"), "mla": ("plain", "absorbed")}


class Library:
    """What differs between torch and MLX: arrays in, arrays out, and the mode to compute in."""

    def to_array(self, array: np.ndarray) -> Any:
        """The library's array of the same dtype and values."""
        raise NotImplementedError

    def to_numpy(self, array: Any) -> np.ndarray:
        raise NotImplementedError

    def computing(self) -> AbstractContextManager:
        raise NotImplementedError

    def compute(self, arrays: Iterable[Any]) -> None:
        """Compute what is not computed yet, all at once."""

    def versions(self) -> dict[str, str]:
        raise NotImplementedError


class TwinSession:
    """A loaded model of one of the twins."""

    def __init__(self, port: TwinPort, model: Any, config: K3Config, dtype: str) -> None:
        self.port, self.model, self.text, self.dtype = port, model, config.text_config, dtype

    def run(self, steps: Sequence[Step], imposed: Sequence[Mapping[str, np.ndarray]] | None = None) -> list[Taps]:
        library, results = self.port.library, []
        cache = None
        with library.computing():
            for number, step in enumerate(steps):
                given = {name: library.to_array(value) for name, value in (imposed[number] if imposed else {}).items()}
                if cache is None:
                    batch = (step.input_ids if step.inputs_embeds is None else step.inputs_embeds).shape[0]
                    cache = self.new_cache(batch)
                with recording(Recorder(given)) as recorder:
                    self.model(
                        input_ids=self._array(step.input_ids),
                        inputs_embeds=self._array(step.inputs_embeds),
                        attention_mask=self._array(step.mask),
                        cache=cache,
                    )
                    results.append(self._taps(recorder))
        return results

    def new_cache(self, batch: int) -> Any:
        return self.port.module("cache").new_cache(self.text, batch, self.dtype)

    def module(self, call: ModuleCall) -> Taps:
        library = self.port.library
        inputs = {name: self._array(value) for name, value in call.inputs.items()}
        imposed = {}
        if call.imposed is not None:
            imposed[f"{TEXT_MODEL}layers.{call.layer}.router.indices"] = library.to_array(call.imposed)
        with library.computing(), recording(Recorder(imposed)) as recorder:
            self._call(call, inputs)
            return self._taps(recorder)

    def vision(self, pixel_values: np.ndarray, grid_thws: np.ndarray) -> Taps:
        pixels, grids = self._array(pixel_values), self._array(grid_thws)
        with self.port.library.computing(), recording(Recorder()) as recorder:
            self.model.image_features(pixels, grids)
            return self._taps(recorder)

    def multimodal(self, input_ids, attention_mask, pixel_values, grid_thws, imposed=None) -> Taps:
        library = self.port.library
        given = {name: library.to_array(value) for name, value in (imposed or {}).items()}
        with library.computing(), recording(Recorder(given)) as recorder:
            self.model(
                input_ids=self._array(input_ids),
                attention_mask=self._array(attention_mask),
                pixel_values=self._array(pixel_values),
                grid_thws=self._array(grid_thws),
            )
            return self._taps(recorder)

    def use_form(self, module: str, form: str) -> None:
        if form not in FORMS.get(module, ()):
            raise Unsupported(f"form {form!r} of {module}")
        for layer in self.model.language_model.model.layers:
            is_kda = hasattr(layer.self_attn, "A_log")
            if is_kda == (module == "kda"):
                layer.self_attn.form = form

    def _call(self, call: ModuleCall, inputs: dict[str, Any]) -> None:
        if call.kind in VISION_KINDS:
            self._vision_call(call, inputs)
            return
        text_model = self.model.language_model.model
        layer = None if call.layer is None else text_model.layers[call.layer]
        if call.kind == "embed":
            text_model.embed(inputs["input_ids"])
        elif call.kind == "attention_input":
            layer.attention_input(inputs["prefix_sum"], list(inputs["blocks"]))
        elif call.kind == "self_attn":
            layer.attend(inputs["input"], inputs.get("mask"), None)
        elif call.kind == "mlp_input":
            layer.mlp_input(inputs["prefix_sum"], list(inputs["blocks"]))
        elif call.kind == "mlp":
            layer.feed_forward(inputs["input"])
        elif call.kind == "output":
            text_model.output(inputs["prefix_sum"], list(inputs["blocks"]))
        elif call.kind == "lm_head":
            tap(self.model, "logits", self.model.language_model.lm_head(inputs["hidden"]))

    def _vision_call(self, call: ModuleCall, inputs: dict[str, Any]) -> None:
        tower = self.model.vision_tower
        if call.kind == "projector":
            self.model.mm_projector(inputs["input"])
            return
        patches = inputs["pixel_values" if call.kind == "patch_embed" else "input"]
        checked = self.port.module("vision_position").checked_grids
        grids = checked(inputs["grid_thws"], patches.shape[0], tower.config)
        if call.kind == "patch_embed":
            tower.patch_embed(patches, grids)
        elif call.kind == "vision_block":
            tower.encoder.blocks[call.layer](patches, grids, tower.encoder.turns(patches, grids))
        else:
            tower.finish(patches, grids)

    def _array(self, value: np.ndarray | None) -> Any:
        return None if value is None else self.port.library.to_array(cast(value, self.dtype))

    def _taps(self, recorder: Recorder) -> Taps:
        self.port.library.compute(recorder.values.values())
        return {golden_name(name): self.port.library.to_numpy(value) for name, value in recorder.values.items()}


def golden_name(tap: str) -> str:
    """The tower's taps go by short names: golden/README.md."""
    renamed = {"vision_tower.output": "tower.output", "mm_projector.output": "projector.output"}
    return renamed.get(tap, tap.removeprefix("vision_tower."))


class TwinPort:
    """``reference`` or ``port`` as a port under test."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    converted: ClassVar[bool] = False

    def __init__(self, name: str, package: str, library: Library) -> None:
        self.name, self.package, self.library = name, package, library

    def module(self, name: str) -> Any:
        return importlib.import_module(f"{self.package}.{name}")

    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=self.dtypes, functions=FUNCTIONS, forms=FORMS, converted=self.converted)

    def versions(self) -> dict[str, str]:
        where = Path(importlib.import_module(self.package).__file__).parent
        return self.library.versions() | {"python": platform.python_version(), self.package: str(where)}

    def tensor_names(self, config: Mapping[str, Any], expert_format: str) -> set[str]:
        return set(self.module("weights").expected_names(K3Config.from_dict(dict(config)), expert_format))

    def open(self, checkpoint: Path, dtype: str) -> TwinSession:
        model = self.module("weights").load_model(checkpoint, dtype)
        return TwinSession(self, model, K3Config.from_file(checkpoint), dtype)

    def picture(self, file: bytes, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The released image processor; the two twins share it, since it has no tensor library in it."""
        module = importlib.import_module("reference.image_processor")
        processor = module.ImageProcessor(module.MediaConfig.from_dict(settings))
        image = module.open_picture(file)
        return {
            "pixel_values": processor.pixel_values(image),
            "tokens": processor.resize_plan(*image.size).token_count,
            "prompt": processor.prompt(*image.size),
        }

    def chat(self, call: Mapping[str, Any]) -> list[tuple[str, bool]]:
        """The chat encoding, shared like the image processor."""
        return importlib.import_module("reference.chat").encode_conversation(**call)

    def tokenize(self, folder: Path, segments: Segments) -> list[int]:
        """The tokenizer, shared too."""
        return importlib.import_module("reference.tokenizer").Tokenizer.from_folder(folder).encode_segments(segments)

    def call(
        self, function: str, arrays: Mapping[str, np.ndarray | None], settings: Mapping[str, Any]
    ) -> tuple[np.ndarray, ...]:
        module, _, name = function.partition(".")
        if function not in FUNCTIONS:
            raise Unsupported(function)
        with self.library.computing():
            given = {key: None if value is None else self.library.to_array(value) for key, value in arrays.items()}
            result = getattr(self.module(module), name)(**given, **settings)
            results = result if isinstance(result, tuple) else (result,)
            return tuple(self.library.to_numpy(array) for array in results)
