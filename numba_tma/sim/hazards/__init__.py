"""Hazards: what goes on here and may go wrong on a GPU, found from what orders what and not from this run's luck."""

from .rules import RULES, Rule
from .tracker import Tracker

__all__ = ["RULES", "Rule", "Tracker"]
