"""Attention, step by step: read `ladder` first, then plain, warp_mma and what follows them."""
