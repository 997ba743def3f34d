"""Only the files of a layer know an operating system: src/base/os.h says what the library needs of
it, host.h what the plug-in needs, and tools/os.h what the command needs. Elsewhere no file includes
a header of a system, and no #if asks which system it is."""

import pathlib
import re
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# {folder: its files that may know a system}
LAYERS = {
    "include": (),
    "src": tuple(f"src/base/{name}" for name in ("os.h", "os_posix.c", "os_windows.c")),
    "integrations/llama.cpp": tuple(
        f"integrations/llama.cpp/host_{name}.c"
        for name in ("posix", "windows", "linux_imports", "hints")
    ),
    "tools": tuple(
        f"tools/{name}"
        for name in (
            "os.h",
            "os_posix.c",
            "os_windows.c",
            "machine_linux.c",
            "exec_watch_linux.c",
            "exec_scan_linux.c",
        )
    ),
}

# Headers that compilers for every system have: C11, instructions of processors, POSIX threads,
# getopt_long.
C11 = """assert complex ctype errno fenv float inttypes iso646 limits locale math setjmp signal
stdalign stdarg stdatomic stdbool stddef stdint stdio stdlib stdnoreturn string tgmath threads time
uchar wchar wctype""".split()
OTHERS = ("arm_neon", "cpuid", "getopt", "immintrin", "pthread", "semaphore")
EVERYWHERE = {f"{name}.h" for name in (*C11, *OTHERS)}
OURS = re.compile(r"kvant/|cuda|llama|ggml|gguf|mma\.h|type_traits|cstd")
INCLUDE = re.compile(r"^ *# *include *<([^>]+)>")
SYSTEM = re.compile(r"^ *# *(?:el)?if.*\b(_WIN32|_WIN64|__APPLE__|__linux__|__unix__|__\w+BSD__)\b")
# Names that need such a header, and macros that show them.
SHOWN = re.compile(r"^ *# *define +(_GNU_SOURCE|_DEFAULT_SOURCE|_DARWIN_C_SOURCE)\b")


def faults(root):
    for folder, layer in LAYERS.items():
        for path in sorted((root / folder).rglob("*.[ch]")):
            name = str(path.relative_to(root))
            if name in layer:
                continue
            belongs = f"belongs into {' or '.join(layer) or 'a layer'}"
            for number, line in enumerate(path.read_text().splitlines(), 1):
                header = INCLUDE.match(line)
                if header and header[1] not in EVERYWHERE and not OURS.match(header[1]):
                    yield f"{name}:{number}: {header[1]} {belongs}"
                asked = SYSTEM.match(line) or SHOWN.match(line)
                if asked:
                    yield f"{name}:{number}: {asked[1]} {belongs}"


class Systems(unittest.TestCase):
    def test_only_layers_know_a_system(self):
        for folder, layer in LAYERS.items():
            self.assertGreater(len(list((ROOT / folder).rglob("*.[ch]"))), 10, folder)
            for name in layer:
                self.assertTrue((ROOT / name).is_file(), name)
        self.assertEqual(list(faults(ROOT)), [])

    def test_a_system_is_found(self):
        lines = ("#include <unistd.h>", "# include <sys/mman.h>", "#if defined(__linux__)")
        lines += ("#elif defined(_WIN32)", "#ifdef __APPLE__", "#define _GNU_SOURCE 1")
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name) / "src" / "base"
            folder.mkdir(parents=True)
            for text in ("\n".join(lines), "#include <string.h>\n#if defined(__aarch64__)"):
                (folder / "file.c").write_text(text)
                (folder / "os_posix.c").write_text("#include <unistd.h>")
                expected = len(lines) if "unistd" in text else 0
                self.assertEqual(len(list(faults(pathlib.Path(name)))), expected)


if __name__ == "__main__":
    unittest.main()
