"""scripts/fetch.py without a network: the cache, damaged downloads, missing programs."""

import hashlib
import http.server
import os
import pathlib
import platform
import subprocess
import sys
import tarfile
import tempfile
import threading
import unittest
import unittest.mock
import zipfile

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import fetch  # noqa: E402
import fetch_python  # noqa: E402

RUNTIME = fetch.RUNTIMES.get(platform.machine(), fetch.RUNTIMES["x86_64"])


class Fetch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.cache = self.root / "cache"
        self.bin = self.root / "bin"
        self.bin.mkdir()

    def run_fetch(self, *arguments, **environment):
        """Runs with a PATH that has only the programs that a test put into self.bin."""
        env = {
            "PATH": str(self.bin),
            "KVANT_CACHE": str(self.cache),
            "HOME": str(self.root),
            **environment,
        }
        return subprocess.run(
            [sys.executable, "-B", SCRIPTS / "fetch.py", *arguments],
            capture_output=True,
            text=True,
            env=env,
            timeout=60,
        )

    def leftovers(self):
        return (
            [path for path in self.cache.rglob("*") if path.is_file()]
            if self.cache.exists()
            else []
        )

    def test_what_is_cached_is_found_without_network_or_programs(self):
        model = self.cache / "models" / fetch.MODELS["smollm2"][0]
        runtime = self.cache / f"runtime-{fetch.LLAMA_VERSION}"
        headers = self.cache / f"headers-{fetch.LLAMA_VERSION}"
        model.parent.mkdir(parents=True)
        model.write_text("model")
        torch = self.cache / fetch_python.torch_folder()
        vulkan = self.cache / f"vulkan-{fetch.LLAMA_VERSION}"
        for folder in (runtime, headers, torch, vulkan):
            folder.mkdir()
        python = torch / "bin" / "python"
        for what, path in (
            ("model", model),
            ("runtime x86_64", runtime),
            ("headers", headers),
            ("vulkan", vulkan),
            ("torch", python),
        ):
            done = self.run_fetch(*what.split())
            self.assertEqual((done.returncode, done.stdout, done.stderr), (0, f"{path}\n", ""))

    def test_without_a_wheel_of_pytorch(self):
        """pip finds no package. The hint names the packages that it must find, and no partial
        environment is left.
        """
        done = self.run_fetch(
            "torch", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(self.root), PIP_CONFIG_FILE=os.devnull
        )
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("installing Python packages failed", done.stderr)
        self.assertIn(f"hint: pip must find torch=={fetch.TORCH}, the CPU build", done.stderr)
        self.assertEqual(self.leftovers(), [])

    def test_text_is_made_from_this_python(self):
        done = self.run_fetch("text")
        self.assertEqual(done.returncode, 0, done.stderr)
        text = pathlib.Path(done.stdout.strip()).read_text(encoding="utf-8")
        self.assertGreater(len(text), 300_000)
        again = self.run_fetch("text")
        self.assertEqual(again.stdout, done.stdout)

    def test_missing_git_is_named_with_its_package(self):
        done = self.run_fetch("headers")
        self.assertEqual(done.returncode, 1)
        self.assertIn("apt-get install git", done.stderr)

    def serve(self, folder):
        """A registry that serves files of the folder on a port of this machine."""

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *arguments):
                super().__init__(*arguments, directory=str(folder))

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return f"http://127.0.0.1:{server.server_port}/"

    def test_npm_itself_is_not_needed(self):
        name, version, _ = RUNTIME
        package = self.root / "registry" / name / "-" / f"{name.split('/')[-1]}-{version}.tgz"
        package.parent.mkdir(parents=True)
        package.write_text("another package")
        registry = self.serve(self.root / "registry")
        done = self.run_fetch("runtime", npm_config_registry=registry)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn(f"has SHA-256 {hashlib.sha256(b'another package').hexdigest()}", done.stderr)
        package.unlink()
        done = self.run_fetch("runtime", npm_config_registry=registry)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn(f"download of {registry}{name}/-/", done.stderr)
        self.assertIn("not found", done.stderr)
        self.assertEqual(self.leftovers(), [])

    def fake_npm(self, body):
        path = self.bin / "npm"
        # The destination is the argument after --pack-destination.
        path.write_text(
            '#!/bin/sh\nwhile [ "$1" != --pack-destination ]; do shift; done\n' + body + "\n"
        )
        path.chmod(0o755)

    def test_a_damaged_download_is_refused_and_leaves_nothing(self):
        self.fake_npm('echo damaged > "$2/archive.tgz"')
        done = self.run_fetch("runtime")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("SHA-256", done.stderr)
        self.assertIn(RUNTIME[2], done.stderr)
        self.assertEqual(self.leftovers(), [])

    def test_the_runtime_is_the_one_of_the_machine_that_is_named(self):
        """The failing download names the package. A machine without a package is refused."""
        self.fake_npm("exit 7")
        for machine, package in fetch.RUNTIMES.items():
            done = self.run_fetch("runtime", machine)
            self.assertIn(f"download of {package[0]} failed", done.stderr)
        self.assertEqual(len({package[2] for package in fetch.RUNTIMES.values()}), 4)
        done = self.run_fetch("runtime", "riscv64")
        self.assertEqual((done.returncode, done.stdout), (2, ""))

    def test_a_machine_without_pinned_packages_is_refused(self):
        with unittest.mock.patch("platform.machine", lambda: "riscv64"):
            for fetched in (fetch.fetch_runtime, fetch.fetch_zig):
                with unittest.mock.patch.dict(os.environ, KVANT_CACHE=str(self.cache)):
                    with self.assertRaisesRegex(fetch.FetchError, "x86_64 and aarch64, this is"):
                        fetched()

    def test_a_failed_download_says_so_and_leaves_nothing(self):
        self.fake_npm("exit 7")
        done = self.run_fetch("runtime")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("npm returned 7", done.stderr)
        self.assertEqual(self.leftovers(), [])

    def test_cache_that_cannot_be_made(self):
        self.cache.write_text("a file")
        done = self.run_fetch("text")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("KVANT_CACHE", done.stderr)

    def test_a_good_download_is_unpacked_and_published(self):
        archive = self.root / "good.tgz"
        library = self.root / "libllama.so"
        library.write_bytes(b"library")
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(library, "package/bins/linux-x64/libllama.so")
        sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
        os.environ["KVANT_CACHE"] = str(self.cache)
        self.addCleanup(os.environ.pop, "KVANT_CACHE")
        path = os.environ["PATH"]
        self.fake_npm(f'cp "{archive}" "$2/archive.tgz"')
        try:
            fetch.RUNTIMES[platform.machine()] = (RUNTIME[0], RUNTIME[1], sha256)
            os.environ["PATH"] = f"{self.bin}:{path}"
            folder = fetch.fetch_runtime()
        finally:
            fetch.RUNTIMES[platform.machine()], os.environ["PATH"] = RUNTIME, path
        self.assertEqual((folder / "libllama.so").read_bytes(), b"library")
        self.assertEqual([entry.name for entry in self.cache.iterdir()], [folder.name])

    def test_libraries_of_a_wheel_lie_in_one_folder(self):
        wheel = self.root / "a.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in ("a/libllama.so", "a/lib/libggml.so.0", "a/__init__.py", "../libescape.so"):
                archive.writestr(name, name)
        fetch.unpack_libraries(wheel, self.root / "made")
        names = sorted(path.name for path in (self.root / "made").iterdir())
        self.assertEqual(names, ["libescape.so", "libggml.so.0", "libllama.so"])
        self.assertFalse((self.root / "libescape.so").exists())


if __name__ == "__main__":
    unittest.main()
