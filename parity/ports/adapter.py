"""What an adapter for someone else's port needs: to run its modules one at a time and to see what they compute.

The port is not changed. ``TreeSession`` answers every question of the protocol by running a module, a layer, or the
whole model, with the modules around the wanted one answering what they are told (parity/ports/watch.py). A port is a
``TreePort`` that says where its modules are and how to call them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from parity.arrays import cast
from parity.ports.twin import Library
from parity.ports.watch import Watch
from parity.protocol import VISION_KINDS, Capabilities, ModuleCall, Step, Taps, Unsupported
from parity.quantities import TEXT_MODEL, layer_of
from reference.config import K3Config

PARTS: dict[str, tuple[str, ...]] = {
    "embed": ("embed_tokens.output",),
    "attention_input": ("self_attn.input",),
    "mlp_input": ("mlp.input",),
    "output": ("norm.output",),
    "lm_head": ("logits",),
    "patch_embed": ("patch_embed.output",),
    "vision_merge": ("tower.output",),
    "projector": ("projector.output",),
}
"""The taps of one kind of module call; self_attn, mlp and vision_block show all that belongs to them."""


def belongs(tap: str, call: ModuleCall) -> bool:
    """Whether a tap is among those that come back from ``call``."""
    if call.kind in PARTS:
        return tap.endswith(PARTS[call.kind])
    if call.kind == "vision_block":
        return tap.startswith(f"encoder.blocks.{call.layer}.")
    name = tap.removeprefix(f"{TEXT_MODEL}layers.{call.layer}.")
    if call.kind == "self_attn":
        return name.startswith("self_attn.") and name != "self_attn.input"
    return name.startswith(("router.", "moe.")) or name == "mlp.output"


class TreeSession:
    """A loaded model of a port made of modules."""

    def __init__(self, port: TreePort, model: Any, config: K3Config, dtype: str) -> None:
        self.port, self.model, self.text, self.config, self.dtype = port, model, config.text_config, config, dtype
        self.library, self._unseen = port.library, frozenset()

    @property
    def taps(self) -> frozenset[str] | None:
        """What the last computation on this checkpoint could show; it may be less than the port shows elsewhere."""
        shown = self.port.shown(self.text)
        return None if shown is None else shown - self._unseen

    def run(self, steps: Sequence[Step], imposed: Sequence[Mapping[str, np.ndarray]] | None = None) -> list[Taps]:
        results = []
        with self.library.computing():
            mask = whole_mask(steps)
            if mask is not None and "padded" not in self.port.capabilities().runs:
                raise Unsupported(f"{self.port.name} is told nothing of padding")
            self._unseen, cache = frozenset(), self.port.new_cache(self.model, mask)
            for number, step in enumerate(steps):
                watch = self.new_watch(imposed[number] if imposed else {})
                with watch.active():
                    self.port.feed(self.model, self.array(step.input_ids), self.array(step.inputs_embeds), cache)
                self._unseen |= watch.unseen
                results.append(self.numpy(watch.taps))
        return [self.seen(taps) for taps in results]

    def seen(self, taps: Taps) -> Taps:
        """Without what this computation does not let see."""
        return {name: array for name, array in taps.items() if layer_of(name)[1] not in self._unseen}

    def module(self, call: ModuleCall) -> Taps:
        given = {} if call.imposed is None else {f"{TEXT_MODEL}layers.{call.layer}.router.indices": call.imposed}
        inputs, watch = {name: self.array(value) for name, value in call.inputs.items()}, self.new_watch(given)
        with self.library.computing():
            compute = self.calling(call, inputs, watch)
            with watch.active():
                compute()
            self._unseen = frozenset(watch.unseen)
            return self.seen(self.numpy({tap: value for tap, value in watch.taps.items() if belongs(tap, call)}))

    def calling(self, call: ModuleCall, inputs: dict[str, Any], watch: Watch) -> Callable[[], Any]:
        """What to run for one module of the text tower; the modules around it are told their answers here."""
        port, model, layer = self.port, self.model, call.layer
        if call.kind == "embed":
            return lambda: port.embed_tokens(model)(inputs["input_ids"])
        if call.kind == "self_attn":
            return lambda: port.attend(model, layer, inputs["input"])
        if call.kind == "mlp":
            return lambda: port.feed_forward(model, layer, inputs["input"])
        if call.kind == "lm_head":
            return lambda: port.lm_head(model)(inputs["hidden"])
        if call.kind in VISION_KINDS:
            return self.calling_vision(call, inputs, watch)
        prefix_sum, blocks = inputs["prefix_sum"], list(inputs["blocks"])
        if call.kind == "attention_input":
            return lambda: port.run_layer(model, layer, prefix_sum, blocks)
        if call.kind == "mlp_input":
            return self._mlp_input(layer, prefix_sum, blocks, watch)
        for module in port.layers(model):
            watch.answer(module, port.layer_result(model, prefix_sum, blocks))
        ids = self.array(np.zeros(prefix_sum.shape[:2], np.int64))
        return lambda: port.feed(model, ids, None, None)

    def calling_vision(self, call: ModuleCall, inputs: dict[str, Any], watch: Watch) -> Callable[[], Any]:
        """What to run for one module of the vision tower."""
        raise Unsupported(f"{self.port.name} has no vision tower")

    def _mlp_input(self, layer: int, prefix_sum: Any, blocks: list[Any], watch: Watch) -> Callable[[], Any]:
        """Attention answers what makes the prefix sum after it the given one: all of it, or nothing on top (§6)."""
        size, attention = self.text.attn_res_block_size, self.port.attention(self.model, layer)
        starts = bool(size) and layer % size == 0
        watch.answer(attention, prefix_sum if starts else prefix_sum * 0)
        before = blocks.pop() if starts else prefix_sum
        return lambda: self.port.run_layer(self.model, layer, before, blocks)

    def new_watch(self, imposed: Mapping[str, np.ndarray]) -> Watch:
        watch = Watch({name: self.library.to_array(value) for name, value in imposed.items()})
        self.port.watch(self.model, self.text, watch)
        return watch

    def array(self, value: np.ndarray | None) -> Any:
        return None if value is None else self.library.to_array(cast(value, self.dtype))

    def numpy(self, taps: Mapping[str, Any]) -> Taps:
        return {
            name: np.concatenate([self.library.to_numpy(part) for part in value])
            if isinstance(value, list)
            else self.library.to_numpy(value)
            for name, value in taps.items()
        }

    def vision(self, pixel_values: np.ndarray, grid_thws: np.ndarray) -> Taps:
        raise Unsupported(f"{self.port.name} has no vision tower")

    def multimodal(self, input_ids, attention_mask, pixel_values, grid_thws, imposed=None) -> Taps:
        raise Unsupported(f"{self.port.name} takes no pictures")

    def use_form(self, module: str, form: str) -> None:
        raise Unsupported(f"form {form!r} of {module}")


def whole_mask(steps: Sequence[Step]) -> np.ndarray | None:
    """[B, T] of all steps together, True at real tokens; None where nothing is padded."""
    if all(step.mask is None for step in steps):
        return None
    rows = next(step.mask.shape[0] for step in steps if step.mask is not None)
    return np.concatenate(
        [np.ones((rows, step.tokens), bool) if step.mask is None else step.mask.astype(bool) for step in steps], axis=1
    )


def padding_of(mask: np.ndarray) -> tuple[list[int], list[int]]:
    """([left paddings], [right paddings]) of a mask whose real tokens are together; Unsupported where they are not."""
    left, right = mask.argmax(axis=1), mask[:, ::-1].argmax(axis=1)
    if ((mask.shape[1] - left - right) != mask.sum(axis=1)).any():
        raise Unsupported("padding between real tokens")
    return left.tolist(), right.tolist()


class TreePort:
    """A port made of modules: a subclass says how to load it, where its modules are, and how to call them."""

    name: ClassVar[str]
    library: Library
    session: ClassVar[type[TreeSession]] = TreeSession

    def capabilities(self) -> Capabilities:
        raise NotImplementedError

    def versions(self) -> dict[str, str]:
        raise NotImplementedError

    def load(self, folder: Path, config: K3Config, dtype: str) -> Any:
        """The model, or Unsupported where the port refuses the configuration."""
        raise NotImplementedError

    def watch(self, model: Any, text: Any, watch: Watch) -> None:
        """Say which modules and functions show which taps."""
        raise NotImplementedError

    def shown(self, text: Any) -> frozenset[str] | None:
        return self.capabilities().taps

    def layers(self, model: Any) -> Sequence[Any]:
        """By the checkpoint's names, like the embedding and the head, unless the port calls them otherwise."""
        return model.language_model.model.layers

    def attention(self, model: Any, layer: int) -> Any:
        return self.layers(model)[layer].self_attn

    def attend(self, model: Any, layer: int, x: Any) -> None:
        """Attention of one layer over x [B, T, hidden], without padding or cache."""
        raise NotImplementedError

    def feed_forward(self, model: Any, layer: int, x: Any) -> None:
        self.layers(model)[layer].mlp(x)

    def run_layer(self, model: Any, layer: int, prefix_sum: Any, blocks: list[Any]) -> None:
        raise NotImplementedError

    def layer_result(self, model: Any, prefix_sum: Any, blocks: list[Any]) -> Any:
        """What a layer gives back when its prefix sum and blocks are these."""
        return prefix_sum

    def new_cache(self, model: Any, mask: np.ndarray | None) -> Any:
        """A cache for tokens with this mask [B, T], None if none is padded; Unsupported where it cannot be told."""
        raise NotImplementedError

    def feed(self, model: Any, input_ids: Any, inputs_embeds: Any, cache: Any) -> None:
        raise NotImplementedError

    def embed_tokens(self, model: Any) -> Any:
        return model.language_model.model.embed_tokens

    def lm_head(self, model: Any) -> Any:
        return model.language_model.lm_head

    def open(self, checkpoint: Path, dtype: str) -> TreeSession:
        config = K3Config.from_file(checkpoint)
        return self.session(self, self.load(checkpoint, config, dtype), config, dtype)

    def tensor_names(self, config: Mapping[str, Any], expert_format: str) -> set[str]:
        raise Unsupported(f"{self.name} has no list of the tensors it reads; its loader is strict")

    def call(self, function: str, arrays, settings) -> tuple[np.ndarray, ...]:
        raise Unsupported(function)
