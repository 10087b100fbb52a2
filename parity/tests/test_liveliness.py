"""No dead tensor, no dead field: the synthetic checkpoints behind the reference (fixtures/liveliness.py)."""

from __future__ import annotations

import re
import shutil
from functools import cache

import numpy as np
import pytest
import torch

from fixtures.build import cached, write_json
from fixtures.catalogue import CATALOGUE
from fixtures.inputs import multimodal_inputs, text_inputs, vision_inputs
from fixtures.liveliness import FLIPS, dead_fields, dead_tensors, inert, movement, movements
from fixtures.values import tensor
from reference import moe
from reference.checkpoint import tensor_specs
from reference.kda import KimiDeltaAttention
from reference.taps import Recorder, recording
from reference.weights import load_model, to_torch

TEXT = "language_model."


def torch_inputs(arrays):
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def logits(model, entry):
    return model(input_ids=torch.from_numpy(text_inputs(entry)["input_ids"]))


def features(model, entry):
    return model.image_features(**torch_inputs(vision_inputs(entry)))[0]


def multimodal_logits(model, entry):
    """Of the real positions alone: [tokens, vocab]."""
    with recording(Recorder()) as recorder:
        result = model(**torch_inputs(multimodal_inputs(entry)))
    return result[recorder.values["attention_mask"] == 1]


RUNS = {"text": logits, "vision": features, "multimodal": multimodal_logits}
"""What a run of each reach gives: (model, entry) -> tensor."""


def specs_of(entry, text):
    """Name -> spec of the text tower's tensors, or of the other ones."""
    specs = tensor_specs(entry.parsed, entry.expert_format)
    return {spec.name: spec for spec in specs if spec.name.startswith(TEXT) == text}


class Run:
    """The reference over one entry's own inputs, its tensors replaced and put back."""

    def __init__(self, name, reach):
        self.entry, self.output = CATALOGUE[name], RUNS[reach]
        self.model = load_model(cached(self.entry))
        self.state = self.model.state_dict()

    def __call__(self, changes):
        original = {name: self.state[name].clone() for name in changes}
        for name, array in changes.items():
            self.state[name].copy_(to_torch(array))
        result = self.run(changes).numpy()
        for name, value in original.items():
            self.state[name].copy_(value)
        return result

    def run(self, changes):
        return self.output(self.model, self.entry)

    def dead(self, specs):
        return dead_tensors(specs.values(), lambda name: tensor(0, specs[name], self.entry.parsed), self)


class TextRun(Run):
    """The text tower, re-run from the first layer that a replaced tensor belongs to."""

    def __init__(self, name):
        super().__init__(name, "text")
        self.text = self.model.language_model.model
        for layer in self.text.layers:
            if isinstance(layer.self_attn, KimiDeltaAttention):
                layer.self_attn.form = "recurrent"  # the quicker one on few tokens
        self.ids = torch.from_numpy(text_inputs(self.entry)["input_ids"])
        self.before = self.passing(0, (self.text.embed(self.ids), []))

    def passing(self, first, state):
        """What enters each layer from ``first`` on, and at last what leaves the last one."""
        states = [state]
        for layer in self.text.layers[first:]:
            states.append(layer(*states[-1]))
        return states

    def run(self, changes):
        first = min((self.first_layer(name) for name in changes), default=len(self.text.layers))
        state = self.before[first] if first else (self.text.embed(self.ids), [])
        return self.model.language_model.lm_head(self.text.output(*self.passing(first, state)[-1]))

    def first_layer(self, name):
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer:
            return int(layer[1])
        return 0 if "embed_tokens" in name else len(self.text.layers)


text_run = cache(TextRun)


@pytest.fixture
def decode_once(monkeypatch):
    """Experts are decoded anew only where their bytes changed: decoding is most of a run's time."""
    decode, known = moe.decode_mxfp4, {}

    def remembered(packed, scale, dtype):
        key = (packed.data_ptr(), packed._version, scale.data_ptr(), scale._version, dtype)
        if key not in known:
            known[key] = decode(packed, scale, dtype)
        return known[key]

    monkeypatch.setattr(moe, "decode_mxfp4", remembered)


@pytest.mark.parametrize("name", ["mini", "kimi-linear", "dense-experts"])
def test_no_text_tensor_is_dead(name, decode_once):
    run = text_run(name)
    whole = logits(run.model, run.entry).numpy()
    np.testing.assert_array_equal(run({}), whole)
    assert run.dead(specs_of(run.entry, text=True)) == []
    np.testing.assert_array_equal(run({}), whole)


@pytest.mark.parametrize("name", ["mini", "vision-heads", "vision-positions", "vision-window"])
def test_no_vision_tensor_is_dead(name):
    run = Run(name, "vision")
    specs = specs_of(run.entry, text=False)
    assert len(specs) == 6 + 6 * run.entry.parsed.vision_config.vt_num_hidden_layers
    assert run.dead(specs) == []


def test_vision_tensors_reach_the_logits(decode_once):
    run = Run("vision-positions", "multimodal")
    assert run.dead(specs_of(run.entry, text=False)) == []


def test_inert_tensors_move_nothing():
    run = text_run("mini")
    specs = {name: spec for name, spec in specs_of(run.entry, text=True).items() if inert(name)}
    moved = movements(specs.values(), lambda name: tensor(0, specs[name], run.entry.parsed), run)
    assert len(moved) == 2 and set(moved.values()) == {0.0}


@pytest.mark.parametrize("name", ["mini", "kimi-linear", "dense-experts"])
def test_every_expert_is_chosen(name):
    with recording(Recorder()) as recorder:
        logits(text_run(name).model, CATALOGUE[name])
    chosen = [value for name, value in recorder.values.items() if name.endswith("router.indices")]
    assert chosen
    for indices in chosen:
        assert len(np.unique(indices.numpy())) == CATALOGUE[name].parsed.text_config.num_experts


def test_groups_and_biases_decide():
    entry = CATALOGUE["groups"]
    model = load_model(cached(entry))
    with recording(Recorder()) as recorder:
        logits(model, entry)
    path = "language_model.model.layers.2."
    scores = recorder.values[path + "router.scores"].numpy()
    allowed = np.isfinite(scores)
    assert (allowed.sum(1) == 8).all() and (scores[allowed] < 0).all()
    gate, x = model.get_submodule(path + "block_sparse_moe.gate"), recorder.values[path + "mlp.input"].flatten(0, 1)
    unbiased = torch.sigmoid(x @ gate.weight.T)
    chosen = recorder.values[path + "router.indices"]
    without_groups = (unbiased + gate.e_score_correction_bias).topk(4).indices.sort(-1).values
    without_bias = unbiased.topk(4).indices.sort(-1).values
    assert (without_groups != chosen).any(-1).float().mean() > 0.2
    assert (without_bias != chosen).any(-1).float().mean() > 0.2


def test_biases_below_bfloat16_decide():
    run = text_run("mini")
    name = "language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
    rounded = run.state[name].bfloat16().float().numpy()
    assert movement(run({}), run({name: rounded})) > 0.01


def test_pictures_move_the_text_that_follows_them():
    """Each item of the multimodal prompt, made grey, moves the last logits of its own row and of no other."""
    entry = CATALOGUE["mini"]
    model, inputs = load_model(cached(entry)), torch_inputs(multimodal_inputs(entry))
    before = model(**inputs)[:, -1].numpy()
    ends = inputs["grid_thws"].prod(-1).cumsum(0).tolist()
    for row, (start, end) in zip((0, 0, 1), zip([0, *ends], ends, strict=False), strict=True):
        grey = inputs["pixel_values"].clone()
        grey[start:end] = 0
        after = model(**inputs | {"pixel_values": grey})[:, -1].numpy()
        moved = [movement(*logits) for logits in zip(before, after, strict=True)]
        assert moved[row] > 0.01 and sorted(moved)[:2] == [0, 0]


@pytest.mark.parametrize("reach, name", sorted({(flip.reach, flip.entry) for flip in FLIPS}))
def test_no_field_is_dead(reach, name, tmp_path):
    entry = CATALOGUE[name]
    folder = tmp_path / name
    shutil.copytree(cached(entry), folder)

    def run_or_error(config):
        write_json(folder / "config.json", config)
        return RUNS[reach](load_model(folder), entry).numpy()

    flips = [flip for flip in FLIPS if (flip.reach, flip.entry) == (reach, name)]
    assert dead_fields(entry.config, run_or_error, flips) == []
