"""What is compiled beforehand: all that prefills, steps and retrieval launch."""

from __future__ import annotations

from numba_tma.gpt2 import precompile
from numba_tma.gpt2.config import Config

CONFIG = Config(n_layer=3, n_head=2, n_embd=64, n_positions=48, vocab_size=211)
CONTEXTS = ((2, 12, 0, 0), (2, 12, 0, 4), (2, 6, 16, 0))


def test_what_is_launched_is_listed_and_compiles(simulated):
    launches = precompile._launches(CONFIG, CONTEXTS)
    numbers = {launch.kernel.__name__: number for number, launch in enumerate(launches)}
    prefill = {"gpt2_embed", "gpt2_normalise", "gemm_tuned", "gpt2_linear", "gpt2_append"}
    assert prefill | {"gpt2_decode_attention", "gpt2_move"} < set(numbers)
    assert any(name.startswith("attention") for name in numbers)
    assert precompile._compile(CONFIG, CONTEXTS, numbers["gpt2_append"]) == "gpt2_append"
