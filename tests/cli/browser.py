"""A headless Chromium, controlled over its debugging pipe with JSON messages that end with a zero
byte.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile

PROGRAM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


class Browser:
    """One page. It keeps every network request and every complaint of the page."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="kvant-browser-")
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        # The program needs the pipe as file descriptors 3 (in) and 4 (out).
        shell = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        arguments = [
            *"--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage".split(),
            *"--no-first-run --hide-scrollbars --disable-background-networking".split(),
            *"--disable-component-update --disable-extensions".split(),
            "--remote-debugging-pipe",
            f"--user-data-dir={self.folder.name}",
            "about:blank",
        ]
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", str(to_read), str(from_write), PROGRAM, *arguments],
            pass_fds=(to_read, from_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(os.environ, DBUS_SESSION_BUS_ADDRESS="disabled:"),
        )
        os.close(to_read)
        os.close(from_write)
        self.to, self.out = os.fdopen(to_write, "wb"), os.fdopen(from_read, "rb")
        self.session, self.counter, self.rest = None, 0, b""
        self.requests, self.complaints, self.events = [], [], []
        target = next(
            t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"
        )
        self.session = self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def close(self):
        self.to.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.out.close()
        shutil.rmtree(self.folder.name, ignore_errors=True)

    def receive(self):
        while b"\0" not in self.rest:
            chunk = os.read(self.out.fileno(), 1 << 20)
            if not chunk:
                raise RuntimeError("the browser ended")
            self.rest += chunk
        message, self.rest = self.rest.split(b"\0", 1)
        message = json.loads(message)
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.complaints.append(parameters)
        elif method:
            self.events.append(method)
        return message

    def call(self, method, **parameters):
        self.counter += 1
        message = {"id": self.counter, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.to.write(json.dumps(message).encode() + b"\0")
        self.to.flush()
        while True:
            answer = self.receive()
            if answer.get("id") == self.counter:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, path):
        self.events.clear()
        self.call("Page.navigate", url=f"file://{path}")
        while "Page.loadEventFired" not in self.events:
            self.receive()
        self.settle()

    def settle(self):
        """Waits two frames: observers, which run between frames, draw the figures."""
        self.evaluate(
            "new Promise((done) => requestAnimationFrame("
            "() => requestAnimationFrame(() => setTimeout(done, 50))))"
        )

    def evaluate(self, expression):
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def look(self, width=1280, height=900, scheme="light", media="screen"):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            media=media,
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.settle()

    def press(self, key, code=None, text=None):
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=code or key,
                windowsVirtualKeyCode={"Tab": 9, "Enter": 13}.get(key, 0),
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def screenshot(self, path, whole=True):
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        with open(path, "wb") as file:
            file.write(base64.b64decode(picture["data"]))

    def accessible_nodes(self):
        return [
            node
            for node in self.call("Accessibility.getFullAXTree")["nodes"]
            if not node.get("ignored")
        ]
