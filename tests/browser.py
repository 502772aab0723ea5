"""A real browser for tests: Debian's chromium without a window, over the DevTools protocol.

The protocol runs over two pipes, which the browser finds as file descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 60.0  # seconds for one answer


class Browser:
    """One page of one browser; what its scripts complain about is in `complaints`.

    >>> with Browser(tmp_path) as browser:
    ...     browser.open(page)
    ...     browser.run("document.title")
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def put_pipes() -> None:
            high = [os.dup(fd) for fd in (theirs_in, theirs_out)]  # neither is 3 or 4 now
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
        self._process = subprocess.Popen(
            [CHROMIUM, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            preexec_fn=put_pipes,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._rest, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            self._session = ""
            self._send("Browser.close", {})
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    # -- the protocol --------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer."""
        number = self._send(method, params)
        while True:
            message = self._receive()
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        return self._number

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], PATIENCE)
            chunk = os.read(self._in, 1 << 20) if ready else b""
            assert chunk, "the browser does not answer"
            self._rest += chunk
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method", ""), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    # -- what a person does --------------------------------------------------------------------

    def window(self, width: int, height: int, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, still])

    def open(self, page: Path) -> None:
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.until("document.readyState === 'complete' && location.protocol === 'file:'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.run(condition):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.02)

    def place(self, selector: str) -> tuple[float, float]:
        """The middle of an element, scrolled into view."""
        box = self.run(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one.scrollIntoView({block: 'center', inline: 'center'});"
            "const box = one.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        return box[0], box[1]

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def click(self, selector: str, times: int = 1) -> None:
        x, y = self.place(selector)
        self.mouse("Moved", x, y)
        for count in range(1, times + 1):
            self.mouse("Pressed", x, y, button="left", clickCount=count)
            self.mouse("Released", x, y, button="left", clickCount=count)

    def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        text = {"text": "\r"} if key == "Enter" else text
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def photograph(self, path: Path, selector: str | None = None) -> None:
        """A picture of the window, scrolled to an element."""
        if selector is not None:
            self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView()")
        picture = self.call("Page.captureScreenshot", format="png")["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(picture))

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")
