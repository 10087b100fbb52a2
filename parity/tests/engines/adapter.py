"""A whole adapter, as for someone else's port: this project's MLX model, seen from outside, by its modules alone."""

from parity.ports.adapter import TreePort
from parity.ports.mlx import Mlx
from parity.protocol import TEXT_KINDS, Capabilities
from port.cache import new_cache
from port.weights import load_model

TEXT = "language_model.model."
PARTS = ("self_attn.input", "self_attn.output", "mlp.input", "mlp.output", "output")


class Outside(TreePort):
    name, library = "outside", Mlx()

    def capabilities(self):
        taps = frozenset({*PARTS, f"{TEXT}embed_tokens.output", f"{TEXT}norm.output", "logits"})
        return Capabilities(("float32", "bfloat16"), ("prefill", "decode"), TEXT_KINDS, taps=taps)

    def versions(self):
        return self.library.versions()

    def load(self, folder, config, dtype):
        return load_model(folder, dtype)

    def attend(self, model, layer, x):
        self.attention(model, layer)(x, None, None)

    def feed_forward(self, model, layer, x):
        self.layers(model)[layer].feed_forward(x)

    def run_layer(self, model, layer, prefix_sum, blocks):
        self.layers(model)[layer](prefix_sum, blocks)

    def layer_result(self, model, prefix_sum, blocks):
        return prefix_sum, blocks

    def new_cache(self, model, mask):
        return {}

    def feed(self, model, input_ids, inputs_embeds, cache):
        rows, dtype = input_ids.shape[0], str(self.embed_tokens(model).weight.dtype).removeprefix("mlx.core.")
        fresh = new_cache(model.language_model.model.text_config, rows, dtype)
        model.language_model(input_ids, None, None, fresh if cache is None else cache.setdefault("it", fresh))

    def watch(self, model, text, watch):
        tower = model.language_model.model
        watch.result(tower.embed_tokens, f"{TEXT}embed_tokens.output")
        watch.result(tower.norm, f"{TEXT}norm.output")
        watch.result(model.language_model.lm_head, "logits")
        for number, layer in enumerate(tower.layers):
            mlp = layer.block_sparse_moe if layer.is_moe else layer.mlp
            modules = (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, mlp)
            for module, part in zip(modules, PARTS, strict=False):
                watch.result(module, f"{TEXT}layers.{number}.{part}")
            watch.result(layer, f"{TEXT}layers.{number}.output", lambda result: result[0])


PORT = Outside()
