from __future__ import annotations

from fixtures.catalogue import entry
from parity.quantities import computed_order, inputs_agree, quantity

TEXT = entry("mini").parsed.text_config
L0, L2 = "language_model.model.layers.0.", "language_model.model.layers.2."


def test_output_of_attention_belongs_to_the_kind_of_the_layer():
    assert TEXT.is_kda(0) and not TEXT.is_kda(2)
    assert quantity(TEXT, L0 + "self_attn.output").module == "kda.output"
    assert quantity(TEXT, L2 + "self_attn.output").module == "mla.output"


def test_taps_sort_by_when_they_are_computed():
    taps = [
        "logits",
        L2 + "mlp.input",
        L0 + "output",
        L0 + "self_attn.core",
        "language_model.model.embed_tokens.output",
    ]
    assert sorted(taps, key=lambda tap: computed_order(TEXT, tap)) == [taps[i] for i in (4, 3, 2, 1, 0)]


def test_blame_follows_what_a_quantity_is_computed_from():
    core, output = L0 + "self_attn.core", L0 + "self_attn.output"
    assert inputs_agree(TEXT, core, [])
    assert not inputs_agree(TEXT, core, [L0 + "self_attn.log_decay"])
    assert not inputs_agree(TEXT, output, [L0 + "self_attn.log_decay"])
    assert inputs_agree(TEXT, L2 + "self_attn.latent", [L2 + "self_attn.query"])
    assert inputs_agree(TEXT, core, [L2 + "self_attn.query", "language_model.model.layers.1.self_attn.log_decay"])
