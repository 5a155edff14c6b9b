"""Weights that are not plain: adapters (LoRA), quantised ones, and ones that are loaded again."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.vllm.checkpoint import write_checkpoint
from tests.vllm.engine import Oracle, prompts, running

pytestmark = pytest.mark.no_cover  # tracing makes interpreted kernels several times slower

PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
"""Of a GDN layer; vLLM joins the first two, and the two after."""


def write_adapter(folder: Path, checkpoint: Path, seed: int, rank: int = 8) -> dict[str, torch.Tensor]:
    """Writes an adapter of all projections of GDN layers; returns what it adds to each weight."""
    rng = torch.Generator().manual_seed(seed)
    tensors, added = {}, {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if ".linear_attn." in name and name.split(".")[-2] in PROJECTIONS:
            down = (torch.randn(rank, weight.shape[1], generator=rng) * 0.1).bfloat16()
            up = (torch.randn(weight.shape[0], rank, generator=rng) * 0.1).bfloat16()
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
            added[name] = up.float() @ down.float()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": PROJECTIONS, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return added


def test_adapters_of_the_projections(checkpoint, tmp_path: Path) -> None:
    """Two adapters in one batch. vLLM for CPUs runs a request without one as if it had the last, so there is none."""
    from vllm.lora.request import LoRARequest

    adapters = []
    for number in (1, 2):
        oracle = Oracle(checkpoint)
        weights = oracle.model.state_dict()
        for name, added in write_adapter(tmp_path / str(number), checkpoint, number).items():
            weights[name] += added
        adapters.append((oracle, LoRARequest(f"a{number}", number, str(tmp_path / str(number)))))
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    # Adapters of the head fail on a CPU when vLLM speculates, with or without TreeWY.
    targets = ["in_proj_qkvz", "in_proj_ba", "out_proj"]
    some = prompts(4, 5, 40, 3)
    with running(checkpoint, "deferred", lora_target_modules=targets, **settings) as engine:
        layer = next(iter(engine.runner.model_state.layers.values()))
        assert {type(getattr(layer, name)).__name__ for name in targets} == {
            "MergedColumnParallelLinearWithLoRA",
            "RowParallelLinearWithLoRA",
        }
        names = [engine.add(prompt, 24, lora=adapters[i % 2][1]) for i, prompt in enumerate(some)]
        engine.run()
        assert engine.drafts()[1] > 0
    for i, (name, prompt) in enumerate(zip(names, some, strict=True)):
        mine, other = adapters[i % 2][0], adapters[1 - i % 2][0]
        mine.check(prompt, engine.emitted[name])
        assert other.deficits(prompt, engine.emitted[name]).max() > 0.5


def write_int8(folder: Path, checkpoint: Path) -> Path:
    """The checkpoint with its GDN layers' projections in int8, a scale per channel; and what that means in bf16."""
    plain, tensors = {}, {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        plain[name] = tensors[name] = weight
        if ".linear_attn." in name and name.split(".")[-2] in PROJECTIONS:
            scale = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
            tensors[name] = (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
            tensors[f"{name}_scale"] = scale
            plain[name] = (tensors[name].float() * scale.float()).bfloat16()
    for name, weights in (("int8", tensors), ("plain", plain)):
        shutil.copytree(checkpoint, folder / name)
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    per_channel = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    per_token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": per_channel, "input_activations": per_token}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.*", "re:mtp.*", "re:.*conv1d.*"],
    }
    (folder / "int8" / "config.json").write_text(json.dumps(config))
    return folder / "int8"


def test_projections_in_int8(checkpoint, tmp_path: Path) -> None:
    quantised = write_int8(tmp_path, checkpoint)
    oracle, some = Oracle(tmp_path / "plain"), prompts(4, 5, 40, 3)
    with running(quantised, "deferred") as engine:
        layer = next(iter(engine.runner.model_state.layers.values()))
        for name in ("in_proj_qkvz", "in_proj_ba", "out_proj"):
            assert type(getattr(layer, name).scheme).__name__ == "CompressedTensorsW8A8Int8"
        for prompt, text in zip(some, engine.generate(some, 20), strict=True):
            oracle.check(prompt, text)
        assert engine.drafts()[1] > 0


def test_weights_are_loaded_again(checkpoint, oracle: Oracle, tmp_path: Path) -> None:
    """Into the same tensors, which captured graphs read; other weights, and the first ones again."""
    other = write_checkpoint(tmp_path, noise=0.5, seed=1)
    some = prompts(2, 5, 40, 3)
    with running(checkpoint, "deferred") as engine:
        layers = engine.runner.model_state.layers.values()
        addresses = [[part.data_ptr() for part in layer.params if torch.is_tensor(part)] for layer in layers]
        for folder, judge in ((other, Oracle(other)), (checkpoint, oracle)):
            engine.executor.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            for prompt, text in zip(some, engine.generate(some, 16), strict=True):
                judge.check(prompt, text)
        assert addresses == [[part.data_ptr() for part in layer.params if torch.is_tensor(part)] for layer in layers]
