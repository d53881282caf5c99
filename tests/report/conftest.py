"""A headless Chromium, driven through its DevTools pipe: no driver and no further library is needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: Seconds after which a browser that does not answer is given up.
PATIENCE = 60


class Browser:
    """One page of a Chromium, and everything that its console said."""

    def __init__(self, program: str, profile: Path) -> None:
        from_us, self._to_browser = os.pipe()
        self._from_browser, to_us = os.pipe()
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
        # The pipe's two ends are file descriptors 3 and 4 of the browser, whatever their numbers are here.
        text = [program, *options, "--hide-scrollbars", f"--user-data-dir={profile}", "about:blank"]
        line = f'exec "$@" 3<&{from_us} 4>&{to_us}'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "bash", *text], pass_fds=(from_us, to_us), stdout=-3, stderr=-3
        )
        os.close(from_us)
        os.close(to_us)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self._ask("Target.createTarget", {"url": "about:blank"}, session=None)["targetId"]
        attached = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True}, session=None)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to_browser)
        os.close(self._from_browser)

    def ask(self, method: str, **parameters: Any) -> Any:
        return self._ask(method, parameters, self._session)

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of that size, and wait until its charts are drawn."""
        self.complaints.clear()
        self.requests.clear()
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.prefer(dark)
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("document.documentElement?.dataset.drawn === 'true'")

    def prefer(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, promises awaited."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.run(expression):
            assert time.monotonic() < end, f"{expression} never came true; the console said {self.complaints}"
            time.sleep(0.02)

    def press(self, key: str) -> None:
        """A key on whatever has the focus."""
        text = {"Enter": "\r", "Space": " "}[key]
        code = {"Enter": 13, "Space": 32}[key]
        event = {"key": text if key == "Space" else key, "code": key, "windowsVirtualKeyCode": code}
        self.ask("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **event)

    def screenshot(self, file: Path) -> None:
        """The whole page as a picture, for people."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _ask(self, method: str, parameters: dict[str, Any], session: str | None) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)

    def _next(self) -> Any:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from_browser], [], [], PATIENCE)
            assert ready, f"the browser has not answered for {PATIENCE} seconds"
            received = os.read(self._from_browser, 1 << 20)
            assert received, "the browser has ended"
            self._buffer += received
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        content = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(content["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if content["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(content["args"]))
            case "Log.entryAdded" if content["entry"]["level"] in ("error", "warning"):
                self.complaints.append(content["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(content["request"]["url"])


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = next((result for name in NAMES if (result := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"needs a Chromium, and none of {', '.join(NAMES)} is installed")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
