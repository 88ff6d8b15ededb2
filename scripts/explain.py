#!/usr/bin/env python
"""Show Python beside the PTX and the SASS that it became: PROBLEM.VARIANT of the suite, or FILE.py[:KERNEL].

Writes one HTML page that needs nothing else, or text. No GPU is needed, and nothing is run. The exit status is 0, or 2
where there is no such kernel or it does not compile.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import sys
import webbrowser
from pathlib import Path
from typing import Any

from numba_tma import explain
from numba_tma.check import CheckError
from numba_tma.compile import DEFAULT_ARCH, CompileError


def option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as Python writes it."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}: NAME=VALUE is expected, such as stages=3")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def main(arguments: list[str] | None = None) -> int:
    """Explain one kernel, or two beside each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", help="PROBLEM.VARIANT, FILE.py or FILE.py:KERNEL")
    parser.add_argument("--diff", metavar="OTHER", help="show another kernel beside it, as a step that builds on it")
    parser.add_argument("--text", action="store_true", help="print text instead of writing a page")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page to write (default: KERNEL.html here)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("--arch", default=DEFAULT_ARCH, help=f"architecture to compile for (default {DEFAULT_ARCH})")
    parser.add_argument(
        "--option",
        type=option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the variants, such as stages=3 or 'tile=(16, 128)'; may be repeated",
    )
    parser.add_argument(
        "--arguments", default="arguments", metavar="FUNCTION", help="makes the arguments of a file's kernel"
    )
    options = parser.parse_args(arguments)
    try:
        found = [
            explain.explain(name, arch=options.arch, options=dict(options.option), arguments=options.arguments)
            for name in (options.kernel, options.diff)
            if name is not None
        ]
        if options.text:
            colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
            width = shutil.get_terminal_size((160, 24)).columns
            shown = (
                explain.comparison(*found, colour=colour)
                if options.diff
                else explain.text(found[0], width=width, colour=colour)
            )
        else:
            name = "_".join(side.title.replace(".py", "") for side in found)
            output = options.output or Path(re.sub(r"[^\w.]+", "-", name) + ".html")
            explain.write_page(output, *found)
    except (explain.TargetError, CheckError, CompileError, OSError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    if options.text:
        try:
            print(shown, end="", flush=True)
        except BrokenPipeError:  # a pager that was left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    print(output)
    if options.open:
        webbrowser.open(output.resolve().as_uri())
    return 0


if __name__ == "__main__":
    sys.exit(main())
