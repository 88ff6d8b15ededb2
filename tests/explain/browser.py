"""A real browser (QtWebEngine, Chromium) that carries out steps and prints what came of them, as a program of its own.

It reads from its standard input a JSON object: `dark`, and `steps`, each one of
    {"open": file, "size": [width, height]}      load a page
    {"js": expression}                            its value is the step's result
    {"keys": ["Tab", "Down", …]}                  pressed one after another, names as in Qt.Key
    {"click": selector}                           a press of the mouse in the middle of an element
    {"point": selector}                           the mouse moves there
    {"picture": file}                             what the window shows, as PNG
and prints the steps' results as a JSON list, with what the page wrote to its console as "console" at the end.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any


def main() -> None:
    wanted = json.load(sys.stdin)
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    # Blink counts the dark scheme as 0, the light one as 1. The sandbox needs rights that a container seldom gives.
    flags = f"--no-sandbox --disable-gpu --blink-settings=preferredColorScheme={0 if wanted.get('dark') else 1}"
    flags += " --force-prefers-reduced-motion"  # or a line moves on while the mouse is on its way to it
    os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", flags)
    os.environ.setdefault("QT_QUICK_BACKEND", "software")

    from PySide6.QtCore import QEventLoop, QPoint, Qt, QTimer, QUrl
    from PySide6.QtTest import QTest
    from PySide6.QtWebEngineCore import QWebEnginePage
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    console: list[str] = []

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level, message, line, source):
            console.append(f"{line}: {message}")

    application = QApplication(sys.argv[:1])
    view = QWebEngineView()
    page = Page(view)
    view.setPage(page)

    def wait(start: Any, seconds: float = 30) -> Any:
        """Run the event loop until `start`'s callback was called; its argument."""
        loop, results = QEventLoop(), []
        QTimer.singleShot(int(seconds * 1000), loop.quit)
        start(lambda value=None: (results.append(value), loop.quit()))
        if not results:
            loop.exec()
        if not results:
            raise TimeoutError("the browser did not answer")
        return results[0]

    def pause(milliseconds: int) -> None:
        wait(lambda done: QTimer.singleShot(milliseconds, done))

    def value(expression: str) -> Any:
        return json.loads(wait(lambda done: page.runJavaScript(f"JSON.stringify({expression})", 0, done)) or "null")

    def middle(selector: str) -> QPoint:
        text = json.dumps(selector)
        box = value(
            f"(() => {{ const e = document.querySelector({text}); e.scrollIntoView({{block: 'center', behavior: "
            f"'instant'}}); const b = e.getBoundingClientRect(); return [b.x + Math.min(b.width / 2, 90), b.y + "
            f"b.height / 2]; }})()"
        )
        return QPoint(*map(round, box))

    def arrive(event: str, cause: Any) -> None:
        """Do something that causes an event, and wait until the page has it: it comes from another process."""
        seen = f"(window.seen ??= {{}}).{event}"
        value(f"({seen} ??= (addEventListener({event!r}, () => {seen}++, true), 0))")
        before = value(seen)
        cause()
        for _ in range(300):
            pause(20)
            if value(seen) > before:
                return
        raise TimeoutError(f"no {event} reached the page")

    def carry_out(step: dict[str, Any]) -> Any:
        if "open" in step:
            view.resize(*step["size"])
            view.show()
            loaded = wait(lambda done: (page.loadFinished.connect(done), page.load(QUrl.fromLocalFile(step["open"]))))
            page.loadFinished.disconnect()
            view.setFocus()
            pause(150)
            return loaded
        if "js" in step:
            return value(step["js"])
        if "keys" in step:
            for name in step["keys"]:
                arrive("keydown", functools.partial(QTest.keyClick, view.focusProxy(), getattr(Qt.Key, f"Key_{name}")))
        elif "click" in step:
            place = middle(step["click"])
            arrive("click", lambda: QTest.mouseClick(view.focusProxy(), Qt.MouseButton.LeftButton, pos=place))
        elif "point" in step:
            place = middle(step["point"])
            arrive("pointermove", lambda: QTest.mouseMove(view.focusProxy(), place))
        elif "picture" in step:
            pause(500)  # until scrolling has come to rest and the window is drawn
            view.grab().save(step["picture"])
        return None

    results = [carry_out(step) for step in wanted["steps"]]
    print(json.dumps([*results, {"console": console}]))
    sys.stdout.flush()
    page.deleteLater()
    application.quit()
    os._exit(0)  # Chromium's processes need no orderly end, and may take long over one


if __name__ == "__main__":
    main()
