"""A llama.cpp that has Vulkan, with kvant exec and without: weights on Vulkan0, caches compressed.

KVANT_VULKAN is a folder of llama.cpp's programs and libraries with Vulkan. The folder of
`fetch.py vulkan` has a driver, too: Mesa's lavapipe computes on the CPU and stands for a GPU.
"""

import os
import pathlib
import re
import subprocess
import sys
import unittest

from testing import MODEL, PLUGIN, run, temporary_folder

FOLDER = pathlib.Path(os.environ.get("KVANT_VULKAN", ""))
RUNTIME = FOLDER / "bin" if (FOLDER / "bin").is_dir() else FOLDER
OK = 0


def variables():
    """run() passes none of GGML's variables. Without GGML_VK_VISIBLE_DEVICES, ggml does not use a
    driver that computes on the CPU. The driver's threads wait by spinning, so it gets one.
    """
    given = {name: value for name, value in os.environ.items() if name.startswith("GGML_VK")}
    mesa = FOLDER / "mesa"
    if not mesa.is_dir():
        return given
    return {
        "GGML_VK_VISIBLE_DEVICES": "0",
        "LP_NUM_THREADS": "1",
        "LD_LIBRARY_PATH": str(mesa),
        "VK_DRIVER_FILES": str(mesa / "lvp.json"),
        "VK_ICD_FILENAMES": str(mesa / "lvp.json"),
        "MESA_SHADER_CACHE_DIR": str(FOLDER / "shaders"),
    }


def stock(program, *words, **more):
    return subprocess.run(
        [RUNTIME / program, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **variables(), **more},
        timeout=1500,
    )


def listed():
    if not os.environ.get("KVANT_VULKAN"):
        return []
    done = stock("llama-bench", "--list-devices")
    return re.findall(r"^  (Vulkan\d+):", done.stdout, re.MULTILINE)


def sizes(text, what):
    """Size of each kind of buffer, in MiB."""
    found = re.findall(rf"(\S+) +{what} buffer size = +([\d.]+) MiB", text)
    return {name: float(size) for name, size in found}


def splits(text):
    """The parts of the graph of the last decoded token: (device, bytes that it gets)."""
    graphs = [[]]
    for number, device, inputs in re.findall(r"## SPLIT #(\d+): (\S+) # (.*)", text):
        if number == "0":
            graphs.append([])
        units = {"": 1, "K": 1024, "M": 1024**2}
        handed = re.findall(r"\( *(\d+)([KM]?)\)", inputs)
        graphs[-1].append((device, sum(int(n) * units[unit] for n, unit in handed), inputs))
    return graphs[-1]


@unittest.skipUnless(listed(), "needs a llama.cpp that lists Vulkan0: KVANT_VULKAN")
class Vulkan(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = temporary_folder(cls.addClassCleanup)
        tiny = pathlib.Path(__file__).parent.parent / "integration" / "tiny_models.py"
        subprocess.run([sys.executable, "-B", tiny, cls.folder], check=True)

    def exec(self, program, *words, options=(), **more):
        given = {**variables(), **more}
        done = run(
            "exec", *options, "--", RUNTIME / program, *words, timeout=1500, **given, code=OK
        )
        return done

    def bench(self, name, *words):
        return ["-m", f"{self.folder}/{name}.gguf", "-p", "8", "-n", "2", "-r", "1", "-v", *words]

    def test_weights_on_the_gpu_and_every_layers_cache(self):
        for name in ("llama", "gemma3", "llama80"):
            placed = []
            for given in ([], ["-ngl", "3"]):
                said = self.exec("llama-bench", *self.bench(name, *given)).stderr
                part = " of 2 of 4 layers" if given else ""
                self.assertIn(f"kvant: weights{part} on Vulkan0 (", said)
                self.assertIn(" 4 of 4 layers", said)
                self.assertEqual(set(sizes(said, "KV")), {"KVANT"})
                placed.append(sizes(said, "model")["Vulkan0"])
            output = 0.25  # MiB; the 3 of -ngl are the output and two of four layers
            self.assertAlmostEqual(placed[0] - output, 2 * (placed[1] - output), delta=0.05)
            file = self.folder / f"{name}.gguf"
            self.assertGreater(placed[0], 0.9 * file.stat().st_size / 2**20)

    def test_other_ways_to_keep_the_cache_off_the_gpu(self):
        """-nkvo leaves weights on the GPU, -ngl 0 leaves none there. All caches are compressed with
        both.
        """
        for given, on_gpu in ((["-nkvo", "1"], True), (["-ngl", "0"], False)):
            said = self.exec("llama-bench", *self.bench("llama", *given)).stderr
            self.assertIn(" 4 of 4 layers", said)
            self.assertEqual(set(sizes(said, "KV")), {"KVANT"})
            self.assertEqual(sizes(said, "model").get("Vulkan0", 0) > 6, on_gpu)

    def test_without_exec_and_without_flags(self):
        """The plug-in's path is enough. llama.cpp leaves out the device KVANT, and turns flash
        attention on. With fewer layers on the GPU, the other layers keep llama.cpp's cache.
        """
        said = stock("llama-bench", *self.bench("llama"), GGML_BACKEND_PATH=PLUGIN).stderr
        self.assertIn(" 4 of 4 layers", said)
        self.assertNotIn("using device KVANT", said)
        self.assertIn("Flash Attention enabled", said)
        self.assertIn("splits = 2,", said)
        self.assertEqual(set(sizes(said, "KV")), {"KVANT"})
        self.assertGreater(sizes(said, "model")["Vulkan0"], 6)
        words = self.bench("llama", "-ngl", "3", "-fa", "1")
        said = stock("llama-bench", *words, GGML_BACKEND_PATH=PLUGIN).stderr
        self.assertIn("warning: only 2 of 4 layers have a compressed cache", said)
        self.assertEqual(set(sizes(said, "KV")), {"KVANT", "CPU"})
        said = stock("llama-bench", *words, GGML_BACKEND_PATH=PLUGIN, KVANT_GPU="0").stderr
        self.assertIn("using device KVANT", said)

    def test_splits_and_bytes_of_a_token(self):
        """With -nkvo, llama.cpp copies its whole cache to the GPU. With kvant the scheduler sees no
        other device, and hands only a token's inputs to the GPU. The program llama-bench has no
        option for a longer context, so -d fills it.
        """
        handed = []
        for depth in ("0", "300"):
            words = self.bench("llama", "-p", "0", "-d", depth)
            debug = {"GGML_SCHED_DEBUG": "2"}
            ours = splits(self.exec("llama-bench", *words, **debug).stderr)
            theirs = splits(stock("llama-bench", *words, "-nkvo", "1", "-fa", "1", **debug).stderr)
            self.assertGreater(len(theirs), 4)
            self.assertEqual([device for device, _, _ in ours], ["CPU", "Vulkan0"])
            self.assertFalse([inputs for _, _, inputs in ours if "cache_" in inputs])
            self.assertTrue([inputs for _, _, inputs in theirs if "cache_k" in inputs])
            handed.append([sum(n for _, n, _ in graph) for graph in (ours, theirs)])
        self.assertLess(abs(handed[1][0] - handed[0][0]), 16 * 1024)  # only the mask of the cells
        self.assertGreater(handed[1][1], 1.8 * handed[0][1])  # 512 cells, not 256

    def test_two_gpus(self):
        """Both names stand for the same driver. Each has its layers, and KVANT all caches."""
        said = self.exec(
            "llama-bench", *self.bench("llama", "-ts", "1/1"), GGML_VK_VISIBLE_DEVICES="0,0"
        ).stderr
        self.assertIn(" 4 of 4 layers", said)
        for name in ("Vulkan0", "Vulkan1"):
            self.assertGreater(sizes(said, "model")[name], 1)
        self.assertEqual(set(sizes(said, "KV")), {"KVANT"})

    @unittest.skipUnless(MODEL, "needs a model")
    def test_the_model_answers(self):
        """The driver compiles shaders for half a minute. --fit counts no cache on the GPU, where
        llama.cpp's own cache would take 180 MiB.
        """
        words = "-no-cnv -n 2 --temp 0 -c 8192 -v -p".split()
        done = self.exec("llama-completion", "-m", MODEL, *words, "The capital of France is")
        self.assertIn(" Paris", done.stdout)
        self.assertIn(" 30 of 30 layers", done.stderr)
        self.assertGreater(sizes(done.stderr, "model")["Vulkan0"], 90)
        self.assertIn("successfully fit params to free device memory", done.stderr)
        planned = re.search(r"Vulkan0 \(.*= +(\d+) \+ +(\d+) \+ +(\d+)\)", done.stderr)
        self.assertGreater(int(planned[1]), 90)
        self.assertEqual(int(planned[2]), 0)

    @unittest.skipUnless(MODEL, "needs a model")
    def test_a_program_that_a_script_starts(self):
        """A script gets no flags, and its server is not asked for devices. llama.cpp puts the
        weights on the GPU all the same.
        """
        words = f'"{RUNTIME}/llama-completion" -no-cnv -n 1 --temp 0 -c 512 -v -p x -m'
        given = variables()
        done = run("exec", "--", "sh", "-c", f"{words} '{MODEL}'", timeout=1500, **given, code=OK)
        self.assertIn("LLAMA_ARG_OVERRIDE_TENSOR=none=CPU LLAMA_ARG_N_GPU_LAYERS=99", done.stderr)
        self.assertIn(" 30 of 30 layers", done.stderr)
        filled = {name for name, size in sizes(done.stderr, "KV").items() if size}
        self.assertEqual(filled, {"KVANT"})
        self.assertGreater(sizes(done.stderr, "model")["Vulkan0"], 90)


if __name__ == "__main__":
    unittest.main()
