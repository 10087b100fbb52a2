"""mlx-vlm's Kimi K3 as a port under test: text, pictures, the image processor and the chat encoding."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from parity.ports.adapter import TreeSession
from parity.ports.mlx_text import LATENT_MOE, SHOWN, MlxText, as_released, set_dtype
from parity.ports.watch import Watch
from parity.protocol import KINDS, Capabilities, ModuleCall, Taps, Unsupported

VISION = {"patch_embed.output", "encoder.blocks.attention", "encoder.blocks.output", "tower.output", "projector.output"}


class PictureSession(TreeSession):
    """The tower takes items one after another; the merge takes one placeholder per feature."""

    def vision(self, pixel_values: np.ndarray, grid_thws: np.ndarray) -> Taps:
        return self._watched({}, lambda: self._features(self.array(pixel_values), grid_thws))

    def calling_vision(self, call: ModuleCall, inputs: dict[str, Any], watch: Watch) -> Callable[[], Any]:
        """One block, or the end of the tower, is run with the modules before it giving back what they get."""
        tower = self.model.vision_tower
        if call.kind == "projector":
            return lambda: self.model.mm_projector(inputs["input"])
        grids = call.inputs["grid_thws"].tolist()
        if call.kind == "patch_embed":
            return lambda: tower.patch_embed(channels_last(inputs["pixel_values"]), grids)
        for number, block in enumerate(tower.encoder.blocks):
            if call.kind == "vision_merge" or number != call.layer:
                watch.skip(block)
        watch.skip(tower.patch_embed)
        return lambda: tower(inputs["input"], grid_thws=grids)

    def multimodal(self, input_ids, attention_mask, pixel_values, grid_thws, imposed=None) -> Taps:
        """Placeholders are repeated as the package's own processor does, and the padding is told to the caches."""
        counts = [int(h * w) // int(np.prod(self.config.vision_config.merge_kernel_size)) for _, h, w in grid_thws]
        placeholder = self.config.media_placeholder_token_id
        ids, mask = repeated(input_ids, attention_mask.astype(bool), placeholder, counts, self.config.pad_token_id)

        def compute(watch: Watch) -> None:
            given = self.model.get_input_embeddings(self.array(ids), self.array(pixel_values), grid_thws=grid_thws)
            watch.keep("merged_embeds", given.inputs_embeds)
            cache = self.port.new_cache(self.model, None if mask.all() else mask)
            self.port.feed(self.model, self.array(ids), given.inputs_embeds, cache)

        return self._watched(imposed or {}, compute, watched=True)

    def _features(self, pixels: Any, grids: np.ndarray) -> Any:
        return self.model.mm_projector(self.model.vision_tower(channels_last(pixels), grid_thws=grids.tolist()))

    def _watched(self, imposed: Mapping[str, np.ndarray], compute: Callable, watched: bool = False) -> Taps:
        watch = self.new_watch(imposed)
        with self.library.computing(), watch.active():
            compute(watch) if watched else compute()
            return self.numpy(watch.taps)


def channels_last(pixels: Any) -> Any:
    return pixels.transpose(0, 2, 3, 1)


def repeated(
    ids: np.ndarray, mask: np.ndarray, placeholder: int, counts: list[int], pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """(ids, mask) [B, T'] with each placeholder as often as its item has features, padded on the side it was."""
    left, rows = bool(mask[:, -1].all()), []
    remaining = iter(counts)
    for row, real in zip(ids, mask, strict=True):
        repeats = [next(remaining) if token == placeholder else 1 for token in row[real]]
        rows.append(np.repeat(row[real], repeats))
    length = max(map(len, rows))
    padded, real = np.full((len(rows), length), pad, np.int64), np.zeros((len(rows), length), bool)
    for number, row in enumerate(rows):
        here = slice(length - len(row), None) if left else slice(0, len(row))
        padded[number, here], real[number, here] = row, True
    return padded, real


class MlxVlm(MlxText):
    """Opened by mlx-vlm's own loader; float32 casts what it loaded, bfloat16 is what it loads."""

    name, select, session = "mlx_vlm", "group_expert_select", PictureSession
    package = cached_property(lambda self: importlib.import_module("mlx_vlm.models.kimi_k3"))
    language = cached_property(lambda self: importlib.import_module("mlx_vlm.models.kimi_k3.language"))
    delta = cached_property(lambda self: importlib.import_module("mlx_vlm.models.gated_delta"))
    caches = cached_property(lambda self: importlib.import_module("mlx_vlm.models.cache"))

    def capabilities(self) -> Capabilities:
        taps = SHOWN | LATENT_MOE | VISION | {"merged_embeds"}
        return Capabilities(("float32", "bfloat16"), kinds=KINDS, taps=taps)

    def shown(self, text: Any) -> frozenset[str]:
        return super().shown(text) | VISION | {"merged_embeds"}

    def versions(self) -> dict[str, str]:
        return self.library.versions() | {"mlx-vlm": version("mlx-vlm")}

    def load(self, folder: Path, config: Any, dtype: str) -> Any:
        from mlx_vlm.utils import load_model

        try:
            with as_released(folder) as complete:
                model = load_model(complete)
        except ValueError as refusal:
            if str(refusal).startswith("Unsupported"):
                raise Unsupported(f"mlx-vlm refuses this configuration: {refusal}") from None
            raise
        return set_dtype(model, dtype)

    def feed(self, model: Any, input_ids: Any, inputs_embeds: Any, cache: Any) -> None:
        model.language_model(input_ids, inputs_embeds=inputs_embeds, cache=cache)

    def watch(self, model: Any, text: Any, watch: Watch) -> None:
        super().watch(model, text, watch)
        tower = model.vision_tower
        watch.result(tower.patch_embed, "patch_embed.output")
        watch.result(tower, "tower.output")
        watch.result(model.mm_projector, "projector.output")
        for number, block in enumerate(tower.encoder.blocks):
            watch.parts(block, f"encoder.blocks.{number}.output")
            watch.parts(block.wo, f"encoder.blocks.{number}.attention", of_input=True)

    def picture(self, file: bytes, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The package repeats the placeholder in the prompt, once per feature; with one it is the release's prompt."""
        from PIL import Image

        window = np.broadcast_to(settings["merge_kernel_size"], 2).tolist()  # the file has one number for both sides
        processor = self.package.ImageProcessor(**{**settings, "merge_kernel_size": window})
        image = Image.open(BytesIO(file))
        done = processor([image])
        tokens = int(np.prod(done["grid_thws"][0].tolist())) // int(np.prod(processor.merge_kernel_size))
        prompt = self.package.Processor.make_image_prompt(processor, *image.size, 1)
        return {"pixel_values": np.array(done["pixel_values"]), "tokens": tokens, "prompt": prompt}

    def chat(self, call: Mapping[str, Any]) -> list[tuple[str, bool]]:
        encoding = importlib.import_module("mlx_vlm.models.kimi_k3.encoding_k3")
        return [(segment.text, segment.allow_special) for segment in encoding.build_chat_segments(**call)]


PORT = MlxVlm()
