"""The weights of a GPT-2 in host memory: out of a checkpoint folder, or random ones of the same shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .config import Config, UnsupportedModel

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Linear:
    """y = x @ weight.T + bias: `weight` is (N, K), `bias` (N,)."""

    weight: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True)
class Norm:
    """y = normalised x * weight + bias, both (C,)."""

    weight: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True)
class Layer:
    """One block, its parts named as in the checkpoint: attention (c_attn, c_proj), feed-forward (c_fc, mlp_proj)."""

    ln_1: Norm
    c_attn: Linear
    c_proj: Linear
    ln_2: Norm
    c_fc: Linear
    mlp_proj: Linear


@dataclass(frozen=True)
class Weights:
    """All of a GPT-2, float32: `wte` (vocabulary, C) is also the LM head, `wpe` (positions, C)."""

    config: Config
    wte: np.ndarray
    wpe: np.ndarray
    layers: tuple[Layer, ...]
    ln_f: Norm


_PREFIX = "transformer."


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors. Weights of its "Conv1D" layers are (K, N)."""
    width, inner = config.n_embd, config.inner
    layer = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, width),
        "mlp.c_proj.bias": (width,),
    }
    names = {"wte.weight": (config.vocab_size, width), "wpe.weight": (config.n_positions, width)}
    names |= {f"h.{i}.{name}": shape for i in range(config.n_layer) for name, shape in layer.items()}
    return names | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def from_tensors(config: Config, tensors: Mapping[str, np.ndarray]) -> Weights:
    """Weights out of a checkpoint's tensors by name, with or without "transformer." in front.

    Raises:
        UnsupportedModel: a tensor is missing or has another shape than `config` says.
    """
    found: dict[str, np.ndarray] = {}
    for name, shape in shapes(config).items():
        tensor = tensors.get(name, tensors.get(_PREFIX + name))
        if tensor is None:
            raise UnsupportedModel(f"the checkpoint has no tensor {name} (nor {_PREFIX}{name})")
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(f"{name} has the shape {tuple(tensor.shape)}; config.json says {shape}")
        found[name] = np.asarray(tensor).astype(np.float32)

    def norm(name: str) -> Norm:
        return Norm(found[f"{name}.weight"], found[f"{name}.bias"])

    def linear(name: str) -> Linear:
        return Linear(np.ascontiguousarray(found[f"{name}.weight"].T), found[f"{name}.bias"])

    layers = tuple(
        Layer(
            norm(f"h.{i}.ln_1"),
            linear(f"h.{i}.attn.c_attn"),
            linear(f"h.{i}.attn.c_proj"),
            norm(f"h.{i}.ln_2"),
            linear(f"h.{i}.mlp.c_fc"),
            linear(f"h.{i}.mlp.c_proj"),
        )
        for i in range(config.n_layer)
    )
    return Weights(config, found["wte.weight"], found["wpe.weight"], layers, norm("ln_f"))


def random_tensors(config: Config, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Tensors by checkpoint name, drawn as GPT-2 is initialised: N(0, 0.02), the layers before a residual sum smaller.

    Biases and gains, which begin at 0 and 1, are drawn too: a kernel that forgot one would not show otherwise.
    """
    tensors = {}
    for name, shape in shapes(config).items():
        deviation = 0.02 / np.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 0.02
        tensor = deviation * rng.standard_normal(shape, np.float32)
        if ".ln_" in name and name.endswith("weight") or name == "ln_f.weight":
            tensor += 1
        tensors[name] = tensor.astype(np.float32)
    return tensors


def random_weights(config: Config, seed: int = 0) -> Weights:
    """Weights of `config`'s shape that know nothing, the same for the same seed."""
    return from_tensors(config, random_tensors(config, np.random.default_rng(seed)))


def from_folder(config: Config, folder: str | Path) -> Weights:
    """The weights of a checkpoint folder: model.safetensors, or the parts that its index names.

    Raises:
        ImportError: the package safetensors is not installed.
        FileNotFoundError: no such file in the folder.
        UnsupportedModel: as `from_tensors`.
    """
    folder = Path(folder)
    index = folder / _INDEX
    files = [_FILE]
    if index.exists() and not (folder / _FILE).exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors: dict[str, np.ndarray] = {}
    for name in files:
        if not (folder / name).exists():
            raise FileNotFoundError(
                f"{folder / name}: not there. Checkpoints of other formats have to be saved as safetensors first"
            )
        tensors |= _read(folder / name)
    return from_tensors(config, tensors)


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        from safetensors.numpy import load_file
    except ImportError as error:
        raise ImportError("reading a checkpoint takes the package safetensors: pip install numba-tma[gpt2]") from error
    return load_file(path)
