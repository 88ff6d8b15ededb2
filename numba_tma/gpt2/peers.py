"""What the model is compared and measured with: PyTorch, on the same weights.

`transformers_model` is the definition. `TorchGpt2` is what one would write to be fast with PyTorch: no more operations
than needed, scaled_dot_product_attention, a cache of fixed size, so that a decoding step can be captured into a graph.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np

from .config import Config
from .weights import Weights, random_weights


def compiler_missing() -> str | None:
    """Why torch.compile cannot work here, or None."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "torch.compile needs a C compiler, and there is none"
    return None


def transformers_model(weights: Weights, dtype: str = "float32", device: str = "cuda") -> Any:
    """transformers' GPT2LMHeadModel with these weights.

    Raises:
        ImportError: torch or transformers is not installed.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = weights.config
    described = GPT2Config(
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        n_positions=config.n_positions,
        vocab_size=config.vocab_size,
        n_inner=config.n_inner,
        layer_norm_epsilon=config.layer_norm_epsilon,
        bos_token_id=config.eos_token_id,
        eos_token_id=config.eos_token_id,
        attn_implementation="sdpa",
    )
    with torch.device(device):  # where its own initial weights are drawn, which on a CPU takes seconds
        made = GPT2LMHeadModel(described)
    state = {"wte.weight": weights.wte, "wpe.weight": weights.wpe}
    for i, layer in enumerate(weights.layers):
        for name, norm in (("ln_1", layer.ln_1), ("ln_2", layer.ln_2)):
            state |= {f"h.{i}.{name}.weight": norm.weight, f"h.{i}.{name}.bias": norm.bias}
        linears = {"attn.c_attn": layer.c_attn, "attn.c_proj": layer.c_proj}
        linears |= {"mlp.c_fc": layer.c_fc, "mlp.c_proj": layer.mlp_proj}
        for name, linear in linears.items():
            state |= {f"h.{i}.{name}.weight": linear.weight.T, f"h.{i}.{name}.bias": linear.bias}
    state |= {"ln_f.weight": weights.ln_f.weight, "ln_f.bias": weights.ln_f.bias}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in state.items()}
    made.transformer.load_state_dict(tensors)
    made.tie_weights()
    return made.to(dtype=getattr(torch, dtype)).eval()


class TorchGpt2:
    """GPT-2 in bfloat16 with PyTorch's own operations: `prefill` and `step` on a cache of fixed size."""

    def __init__(self, weights: Weights, batch: int, positions: int) -> None:
        import torch

        def tensor(array: np.ndarray) -> Any:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device="cuda", dtype=torch.bfloat16)

        config: Config = weights.config
        self.config, self.batch, self.positions = config, batch, positions
        self.wte, self.wpe = tensor(weights.wte), tensor(weights.wpe)
        self.layers = [
            [tensor(x) for part in vars(layer).values() for x in (part.weight, part.bias)] for layer in weights.layers
        ]
        self.ln_f = tensor(weights.ln_f.weight), tensor(weights.ln_f.bias)
        # Arrays of their own for each layer: torch.compile would copy one for all whenever a part of it is written.
        shape = (batch, config.n_head, positions, config.head_dim)
        self.keys, self.values = (
            [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(config.n_layer)] for _ in range(2)
        )
        self.token = torch.zeros(batch, dtype=torch.long, device="cuda")
        self.length = torch.zeros((), dtype=torch.long, device="cuda")

    def prefill(self, tokens: Any, every: bool) -> Any:
        """Logits of all positions of `tokens` (batch, S), or of the last; the cache is filled."""
        import torch

        length = tokens.shape[1]
        x = self.wte[tokens] + self.wpe[:length]

        def attend(i: int, q: Any, k: Any, v: Any) -> Any:
            self.keys[i][:, :, :length].copy_(k)
            self.values[i][:, :, :length].copy_(v)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        x = self._layers(x, attend)
        return self._head(x if every else x[:, -1])

    def step(self) -> None:
        """Take `token` at position `length`, and choose the next; every shape is fixed."""
        import torch

        place = self.length.view(1)
        x = (self.wte[self.token] + self.wpe.index_select(0, place))[:, None]
        seen = (torch.arange(self.positions, device="cuda") <= self.length).view(1, 1, 1, -1)

        def attend(i: int, q: Any, k: Any, v: Any) -> Any:
            self.keys[i].index_copy_(2, place, k)
            self.values[i].index_copy_(2, place, v)
            return torch.nn.functional.scaled_dot_product_attention(q, self.keys[i], self.values[i], attn_mask=seen)

        logits = self._head(self._layers(x, attend)[:, 0])
        self.token.copy_(logits.argmax(-1))
        self.length.add_(1)

    def _layers(self, x: Any, attend: Any) -> Any:
        from torch.nn import functional

        width, epsilon = self.config.n_embd, self.config.layer_norm_epsilon
        batch, length = x.shape[:2]
        for i, (g1, s1, wa, ba, wp, bp, g2, s2, wf, bf, wm, bm) in enumerate(self.layers):
            qkv = functional.linear(functional.layer_norm(x, (width,), g1, s1, epsilon), wa, ba)
            q, k, v = qkv.view(batch, length, 3, self.config.n_head, -1).permute(2, 0, 3, 1, 4)
            mixed = attend(i, q, k, v).transpose(1, 2).reshape(batch, length, width)
            x = x + functional.linear(mixed, wp, bp)
            hidden = functional.linear(functional.layer_norm(x, (width,), g2, s2, epsilon), wf, bf)
            x = x + functional.linear(functional.gelu(hidden, approximate="tanh"), wm, bm)
        return functional.layer_norm(x, (width,), *self.ln_f, epsilon)

    def _head(self, x: Any) -> Any:
        from torch.nn import functional

        return functional.linear(x, self.wte)


def prefill_calls(peer: TorchGpt2, tokens: Any, compiled: bool) -> dict[str, Callable[[], Any]]:
    """Prefills of `tokens` (batch, S): with the "last" logits of a sequence, and with "all" of them."""
    import torch

    call = torch.compile(peer.prefill, dynamic=False) if compiled else peer.prefill
    return {"last": lambda: call(tokens, False), "all": lambda: call(tokens, True)}


def step_call(peer: TorchGpt2, compiled: bool) -> Callable[[], Any]:
    """A decoding step."""
    import torch

    return torch.compile(peer.step, dynamic=False) if compiled else peer.step


def warm_compiler(config: Config, batch: int, positions: int, which: str) -> None:
    """Have torch.compile's kernels of a prefill ("last", "all") or a "step" in its cache on disk. What it compiled for
    one process it finds there in another, so this one may run beside whatever compiles something else."""
    import torch

    peer = TorchGpt2(random_weights(config), batch, positions)
    tokens = torch.zeros((batch, positions), dtype=torch.long, device="cuda")
    call = step_call(peer, True) if which == "step" else prefill_calls(peer, tokens, True)[which]
    with torch.inference_mode():
        call()
    torch.cuda.synchronize()
