"""Python beside PTX beside SASS: what a kernel became, line by line, with no GPU.

    from numba_tma.explain import explain, write_page

    explanation = explain("kv_stream.tma")
    write_page("kv_stream.tma.html", explanation)

`scripts/explain.py` is this as a command; docs/reading.md says how to read what it writes.
"""

from .explanation import Coverage, Explanation
from .page import page, write_page
from .targets import TargetError, explain
from .terminal import comparison, text

__all__ = ["Coverage", "Explanation", "TargetError", "comparison", "explain", "page", "text", "write_page"]
