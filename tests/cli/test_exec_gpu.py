"""kvant exec with a program that lists GPUs: the flags that exec adds, and its messages.

The program is a script that prints a list of devices, or else its arguments.
"""

import re
import struct
import unittest

from test_cli_exec import ADDED, OK, USAGE, Case, gguf
from testing import PLUGIN, program, run

CARD = "AMD Radeon RX 7900 XTX (RADV NAVI31)"
VULKAN = f"Vulkan0: {CARD} [kvant] (24560 MiB, 24000 MiB free)"
KVANT = "KVANT: compressed KV cache (kvant VERSION) in system memory (64000 MiB, 60000 MiB free)"
NAMED = ["--device", "Vulkan0"]
REST = ["-fa", "on"]


@unittest.skipUnless(PLUGIN, "the plug-in is not built")
class Gpus(Case):
    def program(self, *devices, name="llama-server", rest='printf "%s\\n" "$@"'):
        """Prints its arguments, or the devices if it is asked for them."""
        lines = "".join(f"  {device}\n" for device in devices)
        return program(
            self.folder,
            name,
            'for word; do if [ "$word" = --list-devices ]; then\n'
            f"cat <<'END'\nAvailable devices:\n{lines}END\nexit; fi; done\n{rest}",
        )

    def given(self, *words, listed=(VULKAN, KVANT), name="llama-server", **more):
        """Words after -m MODEL: the arguments that the program gets there, and exec's messages."""
        out, said = self.exec(self.program(*listed, name=name), "-m", self.model(), *words, **more)
        return out[2:], said


class Named(Gpus):
    def test_the_gpus_that_are_listed(self):
        for name in ("Vulkan0", "ROCm0", "SYCL0", "MTL0", "Metal", "CANN0", "MUSA0", "GPUOpenCL"):
            for memory in (" (8192 MiB, 8000 MiB free)", ""):
                words, said = self.given(listed=[f"{name}: A card [kvant]{memory}", KVANT])
                self.assertEqual(words, ["--device", name, *REST])
                self.assertEqual(
                    said,
                    f"kvant: weights on {name} (A card), the compressed cache in the computer's "
                    "memory, where kvant computes attention. With --device KVANT the weights stay "
                    "there, too\n",
                )
        self.assertEqual(self.given(options=["--quiet"]), ([*NAMED, *REST], ""))

    def test_behind_another_program(self):
        server, model = self.program(VULKAN, KVANT), self.model()
        words, _ = self.exec("nice", server, "-m", model, "-ngl", "99", "-nkvo")
        self.assertEqual(words, [*NAMED, *REST, "-m", str(model), "-ngl", "99"])
        llama = self.program(VULKAN, KVANT, name="llama")
        words, _ = self.exec("nice", llama, "serve", "-m", model)
        self.assertEqual(words, ["serve", *NAMED, *REST, "-m", str(model)])

    def test_integrated_gpus(self):
        """llama.cpp uses them only without another GPU."""
        small = "Vulkan0: Small [kvant, integrated] (64000 MiB, 60000 MiB free)"
        large = "Vulkan1: Large [kvant] (8000 MiB, 8000 MiB free)"
        for listed, name in (([small], "Vulkan0"), ([small, large], "Vulkan1")):
            words, said = self.given(listed=[*listed, KVANT])
            self.assertEqual(words, ["--device", name, *REST])
            self.assertEqual("Small" in said, name == "Vulkan0")

    def test_several_gpus(self):
        listed = [f"Vulkan{n}: Card [kvant] (8000 MiB, 8000 MiB free)" for n in range(3)]
        self.assertEqual(self.given(listed=[*listed, KVANT])[0][1], "Vulkan0,Vulkan1,Vulkan2")
        words, _ = self.given(listed=[*listed, KVANT], name="llama-bench")
        self.assertEqual(words[1], "Vulkan0/Vulkan1/Vulkan2")

    def test_one_card_of_two_back_ends(self):
        """ROCm0 may be the same card as Vulkan0."""
        listed = [f"{name}0: A card [kvant] (400 MiB, 400 MiB free)" for name in ("Vulkan", "ROCm")]
        words, said = self.given(listed=[*listed, KVANT])
        self.assertEqual(words, [*NAMED, *REST])
        self.assertNotIn("ROCm0", said)

    def test_what_llama_cpp_decides_itself(self):
        for given in (
            ["-ngl", "99"],
            ["-ngl", "all"],
            ["-ngl", "auto"],
            ["-ngl", "-1"],
            ["-ngl", "31"],
            ["-md", "draft"],
            ["--mmproj", "x.gguf"],
            ["-cmoe"],
            ["-sm", "layer"],
            ["-ts", "1"],
            ["-ot", "exps=CPU"],
            ["-ot", "exps=CPU", "-ngl", "4"],
            ["-fitt", "512"],
        ):
            self.assertEqual(self.given(*given)[0], [*given, *NAMED, *REST])
        server = self.program(VULKAN, KVANT)
        for words in (["-hf", "owner/model"], ["--models-dir", "."], ["-hf", "model", "-ngl", "4"]):
            self.assertEqual(self.exec(server, *words)[0], [*words, *NAMED, *REST])

    def test_the_cache_in_the_computers_memory(self):
        """kvant's cache is in the computer's memory anyway. With -nkvo llama.cpp would not ask
        kvant for a cache.
        """
        for name in ("-nkvo", "--no-kv-offload", "--no_kv_offload"):
            words, said = self.given(name)
            self.assertEqual(words, [*NAMED, *REST])
            self.assertIn("; -nkvo is left out, because", said)
            self.assertEqual(said.count("\n"), 1)
        words, said = self.given("-nkvo", "-kvo")
        self.assertEqual(words, ["-kvo", *NAMED, *REST])
        self.assertNotIn("-nkvo", said)
        for value, passed in (("0", "0"), ("1", "0"), ("0,1", "0,1")):
            words, said = self.given("-nkvo", value, name="llama-bench")
            self.assertEqual(words, ["-nkvo", passed, *NAMED, *REST])
            self.assertEqual("with -nkvo no layer has kvant's cache" in said, value == "0,1")

    def test_a_device_is_given(self):
        for given, environment in (
            (["--device", "Vulkan0"], {}),
            (["-dev", "Vulkan0"], {}),
            ([], {"LLAMA_ARG_DEVICE": "Vulkan0"}),
        ):
            self.assertEqual(self.given(*given, **environment), ([*given, *REST], ""))
        words, said = self.given("--device", "Vulkan7")
        self.assertEqual(words, ["--device", "Vulkan7", *REST])
        self.assertIn("the device is set to 'Vulkan7', so the cache will not be kvant's", said)
        words, said = self.given("--device", "KVANT,Vulkan0")
        self.assertEqual((words, said), (["--device", "KVANT,Vulkan0", "-ngl", "99", *REST], ""))
        words, said = self.given("--device", "KVANT")
        self.assertEqual(words, ["--device", "KVANT", "-ngl", "99", *REST])
        self.assertIn("because --device KVANT holds only the cache. Not used: Vulkan0 (AMD", said)


class Split(Gpus):
    """Layers whose weights stay on the CPU go to the device KVANT, which has their caches."""

    def test_fewer_layers_on_the_gpu(self):
        """-ngl counts the output."""
        some = ["--device", "KVANT,Vulkan0", "-ts", "26.5,4.5"]
        for name in ("-ngl", "--gpu-layers", "--n_gpu_layers"):
            words, said = self.given(name, "4")
            self.assertEqual(words, [name, "99", *some, *REST])
            self.assertIn("weights of 3 of 30 layers on Vulkan0", said)
            self.assertNotIn("do not fit", said)
        words = self.given(LLAMA_ARG_N_GPU_LAYERS="4")[0]
        self.assertEqual(words, [*some, "-ngl", "99", *REST])
        words, said = self.given("-ngl", "1")
        self.assertEqual(words, ["-ngl", "99", *some[:3], "29.5,1.5", *REST])
        self.assertIn("weights of 0 of 30 layers on Vulkan0", said)

    def test_no_layer_on_the_gpu(self):
        """Vulkan0 stays a device, because llama.cpp computes prompts there even then."""
        for name, between in (("llama-server", ","), ("llama-bench", "/")):
            words, said = self.given("-ngl", "0", name=name)
            flags = ["--device", f"KVANT{between}Vulkan0", "-ts", f"1{between}0"]
            self.assertEqual(words, ["-ngl", "99", *flags, *REST])
            self.assertIn("weights and the compressed cache in the computer's memory", said)
            self.assertEqual(said.count("\n"), 1)

    def test_a_model_in_parts(self):
        server = self.program("Vulkan0: A card [kvant] (1000 MiB, 1000 MiB free)", KVANT)
        for part, data in ((1, gguf(30)), (2, b""), (3, b"")):
            path = self.folder / f"m-0000{part}-of-00003.gguf"
            path.write_bytes(data)
            with open(path, "r+b") as file:
                file.truncate(620 << 20)  # 31 layers with the output, of 60 MiB each
        words, said = self.exec(server, "-m", self.folder / "m-00001-of-00003.gguf")
        self.assertIn(
            "weights of 12 of 30 layers on Vulkan0 (A card) (more do not fit its free memory), ",
            said,
        )
        self.assertEqual(words[2:6], ["--device", "KVANT,Vulkan0", "-ts", "17.5,13.5"])

    def test_what_does_not_fit_stays_on_the_cpu(self):
        """31 layers with the output, of 64 MiB each. A fifth of a GPU's memory stays free."""
        model = self.model(size=31 * 64 << 20)
        for free, devices, shares in (
            ((3200,), "Vulkan0", None),
            ((0,), "Vulkan0", None),
            ((1600, 1600), "Vulkan0,Vulkan1", None),
            ((400,), "KVANT,Vulkan0", "25.5,5.5"),
            ((400, 240), "KVANT,Vulkan0,Vulkan1", "23.5,4,3.5"),
            ((400, 64), "KVANT,Vulkan0", "25.5,5.5"),
            ((64,), "KVANT,Vulkan0", "29.5,1.5"),
        ):
            listed = (
                f"Vulkan{n}: Card [kvant] ({m} MiB, {m} MiB free)" for n, m in enumerate(free)
            )
            words, said = self.exec(self.program(*listed, KVANT), "-m", model)
            flags = ["-ts", shares, "-ngl", "99"] if shares else []
            self.assertEqual(words[2:], ["--device", devices, *flags, *REST])
            self.assertEqual("more do not fit" in said, shares is not None)

    def test_other_models_take_memory_of_the_first_gpu(self):
        """A GPU of 950 MiB has room for the output and 10 layers; another model takes the room of 3
        layers.
        """
        model, other = self.model(size=31 * 64 << 20), self.model(size=192 << 20, name="other.gguf")
        server = self.program("Vulkan0: Card [kvant] (950 MiB, 950 MiB free)", KVANT)
        for more, n in (([], 10), (["-md", other], 7), (["--mmproj", other], 7)):
            said = self.exec(server, "-m", model, *more)[1]
            self.assertIn(f"weights of {n} of 30 layers", said, more)

    def test_llama_bench(self):
        """It runs once for each value of a list. Then kvant has only the layers on the GPU."""
        for given in (["-ngl", "10,20"], ["-ngl", "0-30+10"], ["-ngl", "9", "-ngl", "8"],
                      ["-ngl", "9", "-m", "other"]):  # fmt: skip
            words, _ = self.given(*given, name="llama-bench")
            self.assertEqual(words, [*given, *NAMED, *REST])

    def test_models_whose_layers_are_not_known(self):
        server, model = self.program(VULKAN, KVANT), self.folder / "model.gguf"
        good = gguf(30)
        start = good.index(struct.pack("<IIQ", 9, 8, 300))
        for bad in [good[:n] for n in [0, 3, *range(4, len(good), 401), len(good) - 1]] + [
            b"GGML" + good[4:],
            good[:4] + struct.pack("<I", 1) + good[8:],
            gguf(0),
            gguf(2**32 - 1),
            gguf(3).replace(b"llama.b", b"other.b"),
            *(
                good[:start] + struct.pack("<IIQ", 9, kind, n) + good[start + 16 :]
                for kind in (8, 10, 9, 99)
                for n in (2**61, 2**63, 2**64 - 1)
            ),
        ]:
            model.write_bytes(bad)
            out, _ = self.exec(server, "-m", model, "-ngl", "4")
            self.assertEqual(out[2:], ["-ngl", "4", *NAMED, *REST])


class NotNamed(Gpus):
    """exec adds --device KVANT."""

    def test_nothing_changes_without_such_a_gpu(self):
        for listed in (
            [],
            [KVANT],
            ["BLAS: OpenBLAS (0 MiB, 0 MiB free)", KVANT],
            ["CUDA0: NVIDIA H100 (1 MiB, 1 MiB free)"],
            ["CUDA0: NVIDIA H100", "Vulkan0: NVIDIA H100"],
            [
                "CUDA0: NVIDIA H100",
                "Vulkan0: NVIDIA H100",
                "KVANT0: NVIDIA H100",
                "KVANT: NVIDIA H100",
            ],
        ):
            self.assertEqual(self.given(listed=listed), (ADDED, ""), listed)
            words, _ = self.given("-ngl", "7", "-nkvo", listed=listed)
            self.assertEqual(words, ["-ngl", "7", "-nkvo", "--device", "KVANT", "-fa", "on"])
        server = self.program(VULKAN, KVANT)
        for word in ("--help", "--version", "--list-devices"):
            self.assertEqual(self.exec(server, word)[1], "")

    def test_a_gpu_that_the_plugin_does_not_take(self):
        """KVANT_GPU is 0, or the GPU belongs to another computer."""
        for listed in (["Vulkan0: A card (1 MiB, 1 MiB free)", KVANT], ["RPC0: A card", KVANT]):
            words, said = self.given(listed=listed)
            self.assertEqual(words, ADDED)
            self.assertIn("because the plug-in does not keep the caches of the program's", said)
            self.assertIn(f"Not used: {listed[0][: listed[0].index(':')]} (A card)\n", said)

    def test_no_cache_for_kvant(self):
        for listed, words in (([KVANT], ADDED), ([KVANT, "KVANT0: Card"], ADDED)):
            said = self.given("-nkvo", listed=listed)[1]
            self.assertIn("with -nkvo no layer has kvant's cache", said)
            self.assertEqual("weights stay on the CPU in any case" in said, listed == [KVANT])
            said = self.given("-ngl", "0", listed=listed)[1]
            self.assertIn("with -ngl 0 no layer has kvant's cache", said)
        words, said = self.given(LLAMA_ARG_NO_KV_OFFLOAD="1")
        self.assertEqual(words, [*NAMED, *REST])
        self.assertIn("with -nkvo no layer has kvant's cache", said)
        self.assertIn("and unset LLAMA_ARG_KV_OFFLOAD", said)
        words, said = self.exec(self.program(VULKAN, KVANT), "-hf", "owner/model", "-ngl", "0")
        self.assertEqual(words, ["-hf", "owner/model", "-ngl", "0", *NAMED, *REST])
        self.assertIn("with -ngl 0 no layer has kvant's cache", said)


class Cuda(Gpus):
    def test_several_gpus_of_cuda(self):
        listed = ["CUDA0: H100", "CUDA1: H200", "KVANT0: H100", "KVANT1: H200", "KVANT: H100"]
        words, said = self.given(listed=listed)
        self.assertEqual(words, ADDED)
        self.assertIn("--device KVANT is only KVANT0 (H100). Not used: KVANT1 (H200)\n", said)
        self.assertIn("hint: --device KVANT0,KVANT1 ", said)
        for given in (["--device", "KVANT0"], ["-sm", "none"]):
            self.assertEqual(self.given(*given, listed=listed)[1], "")
        listed = [VULKAN, "CUDA0: H100", "KVANT0: H100", "KVANT: H100"]
        words, said = self.given(listed=listed)
        self.assertEqual(words, ADDED)
        self.assertIn("Not used: Vulkan0 (AMD", said)
        self.assertIn("hint: --device KVANT0,Vulkan0 ", said)

    def test_cuda_without_kvants_library(self):
        """Without libkvant_cuda the cache is in the computer's memory, and weights on the GPU."""
        for more in ([], [VULKAN]):
            listed = ["CUDA0: H100 [kvant] (80000 MiB, 79000 MiB free)", *more, KVANT]
            words, said = self.given(listed=listed)
            self.assertEqual(words, ["--device", "CUDA0", *REST])
            self.assertIn("weights on CUDA0 (H100), the compressed cache in the computer's", said)

    def test_a_drafts_cache_type_on_a_gpu_whose_caches_are_kvants(self):
        """The plug-in would refuse the cache when the program creates it."""
        for listed, device, code in (
            ([VULKAN, KVANT], "Vulkan0", USAGE),
            ([VULKAN, KVANT], "none", OK),
            ([VULKAN.replace(" [kvant]", ""), KVANT], "Vulkan0", OK),
        ):
            words = ("-m", self.model(), "-ctkd", "q8_0", "-devd", device)
            done = run("exec", "--", self.program(*listed), *words)
            self.assertEqual(done.returncode, code, (listed, device, done.stderr))
            refused = "exec: -ctkd q8_0 chooses a cache of llama.cpp's own" in done.stderr
            self.assertEqual(refused, code == USAGE)

    def test_accel_claims_what_it_computes(self):
        claim, nothing = "attention on llama.cpp's own cache", "computes nothing"
        accel = "KVANT_ACCEL: attention over llama.cpp's own KV cache (0 MiB, 0 MiB free)"
        for listed, given, said, unsaid in (
            ([accel], [], claim, nothing),
            ([VULKAN, accel], [], f"{nothing} for layers on a GPU", claim),
            ([VULKAN, accel], ["-nkvo"], nothing, claim),
            ([VULKAN, accel], ["-ngl", "0"], claim, nothing),
            ([VULKAN, accel], ["--device", "none"], claim, nothing),
            (["CUDA0: H100", accel], [], nothing, claim),
            (
                ["CUDA0: H100", "KVANT0: H100"],
                ["-ctk", "q8_0", "-ctv", "q8_0"],
                "attention of decoded tokens on llama.cpp's own cache of q8_0, on the GPU",
                nothing,
            ),
            (["CUDA0: H100", "KVANT0: H100"], ["-ctk", "q8_0", "-ctv", "q4_0"], nothing, claim),
            (["CUDA0: H100", "KVANT0: H100"], [], nothing, claim),
        ):
            words, stderr = self.given(*given, listed=listed, options=["--accel"])
            self.assertIn(said, stderr, (listed, given))
            self.assertNotIn(unsaid, stderr, (listed, given))
            self.assertEqual("KVANT" in words, "KVANT0: H100" in listed)
            self.assertIsNone(re.search("-ts|-devd|KVANT,Vulkan0", " ".join(words)))
            quiet = self.given(*given, listed=listed, options=["--accel", "--quiet"])
            self.assertEqual(quiet[1], "")


if __name__ == "__main__":
    unittest.main()
