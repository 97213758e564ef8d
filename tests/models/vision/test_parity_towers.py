"""Encoders of pictures against transformers' own, on random weights: several sizes, several pictures in a bucket."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.towers import MODELS, SmallEncoder, config_of, random_picture, random_tensor
from rekindle._src.models.vision.inputs import ImagePatches

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers deprecates as it likes
TOLERANCE = 1e-4


class Theirs(NamedTuple):
    """Transformers' encoder: its weights by their names in a checkpoint, and what it says of a picture."""

    state: dict[str, NDArray[Any]]
    run: Callable[[ImagePatches], tuple[NDArray[Any], list[NDArray[Any]]]]  # tokens and levels


def randomised(seed: int = 3, **modules: Any) -> dict[str, NDArray[Any]]:
    """Fill modules with random numbers; return these under the modules' names."""
    rng, state = np.random.default_rng(seed), {}
    for prefix, module in modules.items():
        module.eval()
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point() and not name.endswith("inv_freq"):
                values = torch.from_numpy(np.asarray(random_tensor(f"{prefix}.{name}", tensor.shape, rng)))
                tensor.copy_(values)
                state[f"{prefix.replace('__', '.')}.{name}"] = values.numpy()
    return state


def parts(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    model = copy.deepcopy(MODELS[name])
    return model, {**model["vision_config"], "attn_implementation": "eager"}


def qwen(name: str) -> Theirs:
    if name == "qwen3_vl":
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig as Config
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel as Model
    else:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig as Config
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel as Model
    tower = Model(Config(**parts(name)[1]))
    state = randomised(model__visual=tower)

    def run(picture: ImagePatches) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        output = tower(torch.from_numpy(picture.patches), grid_thw=torch.tensor([[1, *picture.grid]]))
        levels = getattr(output, "deepstack_features", None) or []
        return output.pooler_output.numpy(), [level.numpy() for level in levels]

    return Theirs(state, run)


def xy(picture: ImagePatches) -> Any:
    rows, columns = np.divmod(np.arange(picture.grid.patches), picture.grid.columns)
    return torch.from_numpy(np.stack([columns, rows], axis=-1)[None])


def gemma4(name: str) -> Theirs:
    from transformers.models.gemma4 import modeling_gemma4 as module
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig, Gemma4VisionConfig

    model, options = parts(name)
    config = Gemma4VisionConfig(**options)
    tower = module.Gemma4VisionModel(config)
    embedder = module.Gemma4MultimodalEmbedder(config, Gemma4TextConfig(**model["text_config"]))
    state = randomised(model__vision_tower=tower, model__embed_vision=embedder)

    def run(picture: ImagePatches) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        output = tower(torch.from_numpy(picture.patches)[None], xy(picture))
        return embedder(output.last_hidden_state).numpy(), []

    return Theirs(state, run)


def gemma4_unified(name: str) -> Theirs:
    from transformers.models.gemma4_unified import modeling_gemma4_unified as module
    from transformers.models.gemma4_unified.configuration_gemma4_unified import (
        Gemma4UnifiedTextConfig,
        Gemma4UnifiedVisionConfig,
    )

    model, options = parts(name)
    embedder = module.Gemma4UnifiedVisionEmbedder(
        Gemma4UnifiedVisionConfig(**options), Gemma4UnifiedTextConfig(**model["text_config"])
    )
    state = randomised(model__embed_vision=embedder)

    def run(picture: ImagePatches) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        return embedder(torch.from_numpy(picture.patches)[None], xy(picture)).pooler_output[0].numpy(), []

    return Theirs(state, run)


def pixels(picture: ImagePatches, size: int) -> Any:
    """The picture [1, channels, height, width] that such patches are cut from."""
    rows, columns = picture.grid
    cut = picture.patches.reshape(rows, columns, 3, size, size).transpose(2, 0, 3, 1, 4)
    return torch.from_numpy(np.ascontiguousarray(cut.reshape(1, 3, rows * size, columns * size)))


def idefics3(name: str) -> Theirs:
    """Its pixel shuffle takes square pictures only."""
    if name == "smolvlm":
        from transformers.models.smolvlm.configuration_smolvlm import SmolVLMConfig as Config
        from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector as Connector
        from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionTransformer as Tower
    else:
        from transformers.models.idefics3.configuration_idefics3 import Idefics3Config as Config
        from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector as Connector
        from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer as Tower
    model, _ = parts(name)
    text = {"model_type": "llama", "num_attention_heads": 2, **model["text_config"]}
    config = Config(vision_config=model["vision_config"], text_config=text, scale_factor=model["scale_factor"])
    tower, connector = Tower._from_config(config.vision_config), Connector(config)
    state = randomised(model__vision_model=tower, model__connector=connector)

    def run(picture: ImagePatches) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        hidden = tower(pixels(picture, config.vision_config.patch_size)).last_hidden_state
        return connector(hidden)[0].numpy(), []

    return Theirs(state, run)


def gemma3(name: str) -> Theirs:
    from transformers.models.gemma3.configuration_gemma3 import Gemma3Config
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector
    from transformers.models.siglip.modeling_siglip import SiglipVisionModel

    model, options = parts(name)
    config = Gemma3Config(
        vision_config={"model_type": "siglip_vision_model", **options, "vision_use_head": True},
        text_config=model["text_config"], mm_tokens_per_image=model["mm_tokens_per_image"],
    )  # fmt: skip
    tower, projector = SiglipVisionModel(config.vision_config), Gemma3MultiModalProjector(config)
    state = randomised(vision_tower__vision_model=tower, multi_modal_projector=projector)

    def run(picture: ImagePatches) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        hidden = tower(pixels(picture, config.vision_config.patch_size)).last_hidden_state
        return projector(hidden)[0].numpy(), []

    return Theirs(state, run)


def lfm2_vl(name: str) -> Theirs:
    from transformers.models.lfm2_vl.configuration_lfm2_vl import Lfm2VlConfig
    from transformers.models.lfm2_vl.modeling_lfm2_vl import Lfm2VlModel

    model, options = parts(name)
    text = {
        "model_type": "lfm2", **model["text_config"], "num_hidden_layers": 1, "vocab_size": 8, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 16, "layer_types": ["full_attention"],
    }  # fmt: skip
    own = {key: value for key, value in model.items() if key.startswith(("projector", "downsample"))}
    vision = {"model_type": "siglip2_vision_model", **options, "vision_use_head": False}
    whole = Lfm2VlModel(Lfm2VlConfig(vision_config=vision, text_config=text, **own))
    state = randomised(model__vision_tower=whole.vision_tower, model__multi_modal_projector=whole.multi_modal_projector)

    def run(picture: ImagePatches) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        output = whole.get_image_features(
            torch.from_numpy(picture.patches)[None],
            spatial_shapes=torch.tensor([list(picture.grid)]),
            pixel_attention_mask=torch.ones((1, picture.grid.patches), dtype=torch.long),
        )
        return output.pooler_output[0].numpy(), []

    return Theirs(state, run)


Sizes = Sequence[tuple[int, int]]
OF_TWO: Sizes = ((2, 2), (4, 10), (12, 2), (6, 6))
OF_THREE: Sizes = ((3, 3), (3, 12), (9, 6))
CASES: dict[str, tuple[Callable[[str], Theirs], Sizes]] = {
    "qwen3_vl": (qwen, (*OF_TWO, (14, 18))),
    "qwen3_5": (qwen, OF_TWO),
    "gemma4": (gemma4, OF_THREE),
    "gemma4-clipped": (gemma4, OF_THREE),
    "gemma4_unified": (gemma4_unified, ((1, 1), (5, 3), (1, 7))),
    "smolvlm": (idefics3, ((6, 6), (2, 2), (4, 4), (8, 8))),
    "idefics3": (idefics3, ((6, 6), (3, 3), (9, 9))),
    "gemma3": (gemma3, ((6, 6), (6, 6))),
    "lfm2_vl": (lfm2_vl, (*OF_TWO, (14, 18))),
    "lfm2_vl-plain": (lfm2_vl, OF_THREE),
}


def test_every_small_encoder_is_compared() -> None:
    assert CASES.keys() == MODELS.keys()


@pytest.mark.parametrize("name", CASES)
def test_encoders_compute_what_transformers_does(name: str) -> None:
    """Each picture alone, and all of them in one bucket with padding."""
    make, sizes = CASES[name]
    with torch.no_grad():
        theirs = make(name)
        pictures = [random_picture(config_of(name), *size, seed=at) for at, size in enumerate(sizes)]
        expected = [theirs.run(picture) for picture in pictures]
    ours = SmallEncoder(config_of(name), theirs.state)
    bucket = sum(picture.grid.patches for picture in pictures) + 5 * ours.config.patches_of_token
    for picture, (tokens, levels) in zip(pictures, expected, strict=True):
        alone, alone_levels = ours([picture], bucket)
        assert np.abs(tokens).max() > 0.1, "a comparison of zeros"
        np.testing.assert_allclose(alone, tokens, atol=TOLERANCE)
        assert len(levels) == len(alone_levels) == len(ours.config.deepstack)
        for one, other in zip(alone_levels, levels, strict=True):
            np.testing.assert_allclose(one, other, atol=TOLERANCE)
    together, together_levels = ours(pictures, bucket)
    np.testing.assert_allclose(together, np.concatenate([tokens for tokens, _ in expected]), atol=TOLERANCE)
    for number, level in enumerate(together_levels):
        np.testing.assert_allclose(level, np.concatenate([levels[number] for _, levels in expected]), atol=TOLERANCE)
