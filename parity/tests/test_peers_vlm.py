"""mlx-vlm's Kimi K3, another port, beside ours: pictures, token ids, and a whole model with a picture in the prompt.

mlx-vlm 0.7.10 differs in three places, each shown below: its vision norms have an eps of 2^-7 where the authors' code
computes with 1.19e-7; its loader replaces the checkpoint's image processor by one with the release's settings; and
without a configured background it drops the alpha channel instead of compositing.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fixtures import tokenizer_files
from fixtures.build import cached
from fixtures.catalogue import entry
from parity.checks.chat import OWN
from parity.metrics import relative_rms
from parity.true_width.vision import picture
from reference.chat import encode_conversation
from reference.image_processor import ImageProcessor, MediaConfig
from reference.tokenizer import Tokenizer

pytestmark = pytest.mark.peers

SIZES = ((1, 1), (14, 14), (27, 29), (28, 28), (45, 31), (224, 224), (611, 437), (1, 200), (3000, 9), (1280, 720))
MODES = ("RGB", "L", "P", "RGBA", "LA", "P transparent")
BACKGROUNDS = ("white", "gray", "black", "chessboard")
RELEASED = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "in_patch_limit": 65536,
    "patch_limit_on_one_side": 512,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "fixed_output_tokens": None,
}
THEIR_EPS = 2**-7
WIDTH, HEIGHT, TEXT = 45, 31, "Hello world, 你好 123"


@pytest.fixture(scope="module", autouse=True)
def mlx_vlm():
    """Imported when the first test runs, not when tests are collected: it takes seconds."""
    return pytest.importorskip("mlx_vlm")


def in_mode(mode: str, width: int, height: int) -> Image.Image:
    """The synthetic picture in a colour mode of Pillow's; alpha runs from 0 to 255."""
    image = Image.fromarray(picture(width, height))
    if mode == "P transparent":
        image = image.quantize(16)
        image.info["transparency"] = int(np.asarray(image)[0, 0])
        return image
    if mode in ("RGBA", "LA"):
        image = image.convert(mode)
        row, column = np.ogrid[:height, :width]
        image.putalpha(Image.fromarray(((11 * row + 7 * column) % 256).astype(np.uint8)))
        return image
    return image.convert(mode)


def processors(**more: object):
    """mlx-vlm's image processor and ours with the released settings and these."""
    from mlx_vlm.models.kimi_k3 import ImageProcessor as Theirs

    return Theirs(**more), ImageProcessor(MediaConfig.from_dict({**RELEASED, **more}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(len(SIZES)))
@pytest.mark.parametrize("stage", ["before_resize", "after_resize"])
def test_pixel_values_are_equal(mode: str, number: int, stage: str):
    background = BACKGROUNDS[number % len(BACKGROUNDS)]
    theirs, ours = processors(transparent_bg_config={"pattern": background}, transparent_bg_fill_stage=stage)
    image = in_mode(mode, *SIZES[number])
    expected = theirs([image])
    found = ours.batch([image])
    assert found.grid_thws.tolist() == np.array(expected["grid_thws"]).tolist()
    np.testing.assert_array_equal(found.pixel_values, np.array(expected["pixel_values"]))


def test_without_a_background_mlx_vlm_drops_the_alpha_channel():
    """Ours composites onto white; what lies under full transparency is never meant to be seen."""
    theirs, ours = processors()
    image = in_mode("RGBA", 56, 56)
    expected = np.array(theirs([image])["pixel_values"])
    np.testing.assert_array_equal(expected, ours.pixel_values(image.convert("RGB")))
    assert relative_rms(ours.pixel_values(image), expected) > 0.1


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory):
    """(mlx-vlm's, ours) for a small vocabulary and for one with the released block of 256 special ids."""
    pairs = []
    for size in (320, 2048):
        folder = tmp_path_factory.mktemp(f"tokenizer-{size}")
        tokenizer_files.write(folder, size)
        pairs.append((their_processor(folder).tokenizer, Tokenizer.from_folder(folder)))
    return pairs


def their_processor(folder: Path):
    from mlx_vlm.models.kimi_k3 import Processor

    return Processor.from_pretrained(str(folder))


PIECES = st.sampled_from(
    [*tokenizer_files.WORDS, "<|open|>", "<|media_pad|>", "[BOS]", "don't", "I'LL", "x²", "Ⅷ", "ǅ", "\u3000", "\u200b"]
)
CORPUS = st.lists(PIECES | st.text(max_size=6), max_size=12).map("".join)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(text=CORPUS)
def test_token_ids_are_equal(tokenizers, text: str):
    for theirs, ours in tokenizers:
        plain = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text) == plain
        markup = theirs.encode(text, add_special_tokens=False, split_special_tokens=False)
        assert ours.encode_segments([(text, True)]) == markup


CONVERSATIONS = json.loads(OWN.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_conversations_give_the_same_segments(name: str):
    """Tool results that no id matches among them: they name themselves before their position does."""
    from mlx_vlm.models.kimi_k3.encoding_k3 import build_chat_segments

    call = CONVERSATIONS[name]
    theirs = [(segment.text, segment.allow_special) for segment in build_chat_segments(**call)]
    assert encode_conversation(**call) == theirs


@pytest.fixture(scope="module")
def folder() -> Path:
    return cached(entry("mini"))


def test_mlx_vlm_loads_a_whole_folder_and_forgets_its_image_settings(folder: Path):
    """``load`` puts a default image processor in place of the checkpoint's: patches of 14 where the tower has 4."""
    from mlx_vlm import load

    model, processor = load(str(folder))
    ours = ImageProcessor.from_folder(folder)
    assert model.config.vision_config.patch_size == ours.config.patch_size == 4
    assert their_processor(folder).image_processor.patch_size == 4
    assert processor.image_processor.patch_size == RELEASED["patch_size"]


@pytest.fixture(scope="module")
def their_run(folder: Path) -> dict[str, np.ndarray]:
    """mlx-vlm, weights in float32, on a picture and a prompt: inputs, tower output, features, logits."""
    import mlx.core as mx
    from mlx_vlm.utils import load_model

    model, processor = load_model(folder), their_processor(folder)
    model.set_dtype(mx.float32)
    image = Image.fromarray(picture(WIDTH, HEIGHT))
    given = processor(images=[image], text=ImageProcessor.from_folder(folder).prompt(WIDTH, HEIGHT) + TEXT)
    tower = model.vision_tower(given["pixel_values"].transpose(0, 2, 3, 1), grid_thws=given["grid_thws"])
    logits = model(given["input_ids"], given["pixel_values"], grid_thws=given["grid_thws"])
    results = {**given, "tower.output": tower, "projector.output": model.mm_projector(tower)}
    results |= {"logits": getattr(logits, "logits", logits)}
    return {name: np.array(value) for name, value in results.items()}


def our_run(folder: Path, vision_eps: float | None) -> dict[str, np.ndarray]:
    """The reference in float32 on the same picture and prompt; ``vision_eps`` replaces the tower's own."""
    import torch

    from reference.taps import Recorder, recording
    from reference.vision import VISION_NORM_EPS, VisionNorm
    from reference.weights import load_model

    model = load_model(folder)
    norms = [module for module in model.vision_tower.modules() if isinstance(module, VisionNorm)]
    assert norms and all(norm.eps == VISION_NORM_EPS for norm in norms)
    for norm in norms:
        norm.eps = norm.eps if vision_eps is None else vision_eps
    processor = ImageProcessor.from_folder(folder)
    pixels, grids, (prompt,) = processor.batch([picture(WIDTH, HEIGHT)])
    ids = Tokenizer.from_folder(folder).encode_segments([(prompt, True), (TEXT, False)])
    arrays = {"input_ids": np.array([ids]), "pixel_values": pixels, "grid_thws": grids}
    with torch.inference_mode(), recording(Recorder()) as recorder:
        model(**{name: torch.from_numpy(array) for name, array in arrays.items()})
    renamed = {"tower.output": "vision_tower.output", "projector.output": "mm_projector.output", "logits": "logits"}
    return arrays | {name: recorder.values[tap].numpy() for name, tap in renamed.items()}


def test_inputs_are_the_same_once_each_placeholder_is_repeated(folder: Path, their_run):
    ours = our_run(folder, None)
    np.testing.assert_array_equal(ours["pixel_values"], their_run["pixel_values"])
    np.testing.assert_array_equal(ours["grid_thws"], their_run["grid_thws"])
    placeholder, rows = entry("mini").parsed.media_placeholder_token_id, len(ours["projector.output"])
    repeats = np.where(ours["input_ids"][0] == placeholder, rows, 1)
    np.testing.assert_array_equal(np.repeat(ours["input_ids"][0], repeats), their_run["input_ids"][0])


def test_the_vision_eps_is_all_that_mlx_vlm_computes_differently(folder: Path, their_run):
    """Measured in float32: 2e-2 and at the logits 0.4, where experts change; 6e-7 and 1e-5 with its eps put in ours."""
    as_released, with_theirs = our_run(folder, None), our_run(folder, THEIR_EPS)
    for name, allowed in {"tower.output": 3e-6, "projector.output": 3e-6, "logits": 1e-4}.items():
        near = relative_rms(their_run[name], with_theirs[name])
        far = relative_rms(their_run[name], as_released[name])
        assert near <= allowed, name
        assert far > 1e-2 and far > 1000 * near, name
