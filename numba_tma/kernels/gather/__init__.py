"""Gathering: what a copy engine that knows four and five dimensions saves of address arithmetic."""
