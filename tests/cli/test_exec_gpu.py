"""kvant exec with a program that lists GPUs: the flags that exec adds, and its messages.

The program is a script that prints a list of devices, or else its arguments.
"""

import re
import struct
import unittest

from test_cli_exec import ADDED, Case, gguf
from testing import PLUGIN, program

CARD = "AMD Radeon RX 7900 XTX (RADV NAVI31)"
VULKAN = f"Vulkan0: {CARD} (24560 MiB, 24000 MiB free)"
KVANT = "KVANT: compressed KV cache (kvant VERSION) in system memory (64000 MiB, 60000 MiB free)"
REST = ["-ngl", "99", "-fa", "on"]
ALL = "blk\\..*=Vulkan0"
PLACED = ["--device", "KVANT,Vulkan0", "-ts", "29.5,1.5", "-ot", ALL]
HINT = f"--device KVANT,Vulkan0 -ts 29.5,1.5 -ot '{ALL}'"


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


class Added(Gpus):
    def test_weights_go_to_the_gpu_that_is_listed(self):
        for name, buffers in (
            ("Vulkan0", "Vulkan0"),
            ("ROCm0", "ROCm0"),
            ("SYCL0", "SYCL0"),
            ("MTL0", "MTL0"),
            ("Metal", "Metal"),
            ("CANN0", "CANN0"),
            ("MUSA0", "MUSA0"),
            ("GPUOpenCL", "OpenCL"),
        ):
            flags = ["--device", f"KVANT,{name}", "-ts", "29.5,1.5", "-ot", f"blk\\..*={buffers}"]
            for listed in (
                [f"{name}: A card (8192 MiB, 8000 MiB free)", KVANT],
                [f"{name}: A card"],
            ):
                words, said = self.given(listed=listed)
                self.assertEqual(words, [*flags, *REST])
                self.assertEqual(
                    said,
                    f"kvant: weights on {name} (A card), the compressed cache in the computer's "
                    "memory, where kvant computes attention. With --device KVANT the weights stay "
                    "there, too\n",
                )
        self.assertEqual(self.given(options=["--quiet"]), ([*PLACED, *REST], ""))

    def test_behind_another_program(self):
        server, model = self.program(VULKAN, KVANT), self.model()
        words, _ = self.exec("nice", server, "-m", model, "-ngl", "99", "-nkvo")
        self.assertEqual(words, [*PLACED, "-fa", "on", "-m", str(model), "-ngl", "99"])
        llama = self.program(VULKAN, KVANT, name="llama")
        words, _ = self.exec("nice", llama, "serve", "-m", model)
        self.assertEqual(words, ["serve", *PLACED, *REST, "-m", str(model)])

    def test_a_model_in_parts(self):
        server = self.program("Vulkan0: A card (1000 MiB, 1000 MiB free)", KVANT)
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
        layers = "|".join(str(n) for n in range(18, 30))
        self.assertEqual(words[7], f"blk\\.({layers})\\.=Vulkan0")

    def test_what_does_not_fit_stays_on_the_cpu(self):
        """31 layers with the output, of 64 MiB each. A fifth of a GPU's memory stays free."""
        model = self.model(size=31 * 64 << 20)
        layers = "|".join(str(n) for n in range(30))
        both = ["KVANT,Vulkan0,Vulkan1", "29.5,1.5,0"]
        one = ["KVANT,Vulkan0", "29.5,1.5"]
        for free, flags in (
            ((3200,), [*one, ALL]),
            ((400,), [*one, "blk\\.(26|27|28|29)\\.=Vulkan0"]),
            ((400, 240), [*both, "blk\\.(24|25|26|27)\\.=Vulkan0,blk\\.(28|29)\\.=Vulkan1"]),
            (
                (1600, 1600),
                [
                    *both,
                    f"blk\\.({layers[: layers.index('|19')]})\\.=Vulkan0,"
                    f"blk\\.({layers[layers.index('19') :]})\\.=Vulkan1",
                ],
            ),
            ((3200, 3200), [*one, ALL]),
            ((0,), [*one, ALL]),
        ):
            listed = (f"Vulkan{n}: Card ({m} MiB, {m} MiB free)" for n, m in enumerate(free))
            words, said = self.exec(self.program(*listed, KVANT), "-m", model)
            self.assertEqual(words[2:8:2], ["--device", "-ts", "-ot"])
            self.assertEqual(words[3:9:2], flags)
            self.assertEqual("Vulkan1 (Card)" in said, flags[0] == both[0])

    def test_other_models_take_memory_of_the_first_gpu(self):
        """A GPU of 950 MiB has room for the output and 10 layers; another model takes the room of 3
        layers.
        """
        model, other = self.model(size=31 * 64 << 20), self.model(size=192 << 20, name="other.gguf")
        server = self.program("Vulkan0: Card (950 MiB, 950 MiB free)", KVANT)
        for more, n in (([], 10), (["-md", other], 7), (["--mmproj", other], 7),
                        (["-md", other, "-devd", "none"], 10)):  # fmt: skip
            said = self.exec(server, "-m", model, *more)[1]
            self.assertIn(f"weights of {n} of 30 layers", said, more)

    def test_one_card_of_two_back_ends(self):
        """31 layers of 64 MiB do not fit into 400 MiB. ROCm0 may be the same card as Vulkan0."""
        server = self.program(
            *(f"{name}0: A card (400 MiB, 400 MiB free)" for name in ("Vulkan", "ROCm")), KVANT
        )
        words, said = self.exec(server, "-m", self.model(size=31 * 64 << 20))
        self.assertEqual(words[3], "KVANT,Vulkan0")
        self.assertNotIn("ROCm0", said)

    def test_fewer_layers_on_the_gpu(self):
        """-ngl counts the output, and kvant needs all layers' caches, so the program gets 99."""
        some = [*PLACED[:5], "blk\\.(27|28|29)\\.=Vulkan0"]
        for name in ("-ngl", "--gpu-layers", "--n_gpu_layers"):
            words, said = self.given(name, "4")
            self.assertEqual(words, [name, "99", *some, "-fa", "on"])
            self.assertIn("weights of 3 of 30 layers on Vulkan0", said)
            self.assertNotIn("do not fit", said)
        words = self.given(LLAMA_ARG_N_GPU_LAYERS="4")[0]
        self.assertEqual(words, [*some, "-ngl", "99", "-fa", "on"])
        for value in ("99", "all", "auto", "-1", "31"):
            words = self.given("-ngl", value)[0]
            self.assertEqual(words, ["-ngl", "99", *PLACED, "-fa", "on"])
        words, said = self.given("-ngl", "1")
        self.assertEqual(words, ["-ngl", "99", *PLACED[:4], "-fa", "on"])
        self.assertIn("the output's weights on Vulkan0", said)

    def test_no_layer_on_the_gpu(self):
        """Vulkan0 stays a device, because llama.cpp computes prompts there even then. The number of
        layers does not matter.
        """
        flags = ["--device", "KVANT,Vulkan0", "-ts", "1,0", "-fa", "on"]
        words, said = self.given("-ngl", "0")
        self.assertEqual(words, ["-ngl", "99", *flags])
        self.assertIn("weights and the compressed cache in the computer's memory", said)
        self.assertEqual(said.count("\n"), 1)
        words, _ = self.exec(self.program(VULKAN, KVANT), "-hf", "owner/model", "-ngl", "0")
        self.assertEqual(words, ["-hf", "owner/model", "-ngl", "99", *flags])

    def test_the_cache_in_the_computers_memory(self):
        """kvant's cache is in the computer's memory anyway. With -nkvo llama.cpp would not ask
        kvant for a cache.
        """
        for name in ("-nkvo", "--no-kv-offload", "--no_kv_offload"):
            words, said = self.given(name)
            self.assertEqual(words, [*PLACED, *REST])
            self.assertIn("; -nkvo is left out, because", said)
            self.assertEqual(said.count("\n"), 1)
        words, said = self.given("-nkvo", "-kvo")
        self.assertEqual(words, ["-kvo", *PLACED, *REST])
        self.assertNotIn("-nkvo", said)

    def test_a_model_that_sees(self):
        """The program computes on the first device, which KVANT would be. Not every version has
        -mmdev.
        """
        server = self.program(VULKAN, KVANT, rest='echo "$MTMD_BACKEND_DEVICE"')
        base = [server, "-m", self.model()]
        for more, environment, device in (
            (["--mmproj", "x.gguf"], {}, "Vulkan0"),
            ([], {"LLAMA_ARG_MMPROJ": "x.gguf"}, "Vulkan0"),
            ([], {}, ""),
            (["--mmproj", "x.gguf", "-mmdev", "none"], {}, ""),
            (["--mmproj", "x.gguf", "--no-mmproj-offload"], {}, ""),
            (["--mmproj", "x.gguf"], {"MTMD_BACKEND_DEVICE": "Vulkan7"}, "Vulkan7"),
            (["--mmproj", "x.gguf", "--device", "KVANT"], {}, ""),
        ):
            self.assertEqual(self.exec(*base, *more, **environment)[0], [device], more)

    def test_a_draft_model(self):
        """-ts suits only the number of the main model's layers."""
        for name in ("-md", "--model-draft", "-hfd", "--spec-draft-model"):
            words, said = self.given(name, "draft")
            self.assertEqual(words, [name, "draft", *PLACED, "-devd", "Vulkan0", *REST])
            self.assertIn("; the draft model and its f16 cache on Vulkan0. ", said)
        words, said = self.given("-md", "draft", "-devd", "none")
        self.assertEqual(words, ["-md", "draft", "-devd", "none", *PLACED, *REST])
        self.assertNotIn("draft model", said)

    def test_experts_on_the_cpu(self):
        """The first pattern that matches a tensor counts, so the user's patterns stand before
        exec's. Then exec does not know how much of the GPU a layer takes, and trusts the user's
        choice.
        """
        small = ["Vulkan0: Card (64 MiB, 64 MiB free)", KVANT]
        model = self.model(size=31 * 64 << 20)
        for more in (["-cmoe"], ["-ncmoe", "9"], ["--n-cpu-ffn", "9"]):
            words, _ = self.exec(self.program(*small), "-m", model, *more)
            self.assertEqual(words[2:], [*more, *PLACED, *REST])
            for before, listed in (
                (["nice"], [VULKAN, KVANT]),
                ([], [VULKAN, "Vulkan1: Card", KVANT]),
            ):
                words, said = self.exec(*before, self.program(*listed), "-m", model, *more)
                self.assertNotIn("-ot", words)
                self.assertIn(f"weights stay on the CPU: {more[0]} is given. Not used: Vul", said)

    def test_llama_bench(self):
        flags = ["--device", "KVANT/Vulkan0", "-ts", "29.5/1.5", "-ot", ALL]
        for given, words in (
            ([], [*flags, *REST]),
            (["-nkvo", "0"], ["-nkvo", "0", *flags, *REST]),
            (["-nkvo", "1"], ["-nkvo", "0", *flags, *REST]),
            (["-ngl", "99"], ["-ngl", "99", *flags, "-fa", "on"]),
            (["-ngl", "0"], ["-ngl", "99", *flags[:2], "-ts", "1/0", "-fa", "on"]),
            (["-ngl", "-1"], ["-ngl", "99", *flags, "-fa", "on"]),
        ):
            self.assertEqual(self.given(*given, name="llama-bench")[0], words, given)
        free = "(1600 MiB, 1600 MiB free)"
        bench = self.program(f"Vulkan0: A {free}", f"Vulkan1: B {free}", KVANT, name="llama-bench")
        words, said = self.exec(bench, "-m", self.model(size=31 * 64 << 20))
        self.assertEqual(words[3:6], ["KVANT/Vulkan0/Vulkan1", "-ts", "29.5/1.5/0"])
        self.assertRegex(words[7], r"^blk\\\.\(0\|[0-9|]*\)\\\.=Vulkan0;blk\\\.\(.*=Vulkan1$")
        self.assertIn("weights on Vulkan0 (A), Vulkan1 (B), the compressed cache", said)


class NotAdded(Gpus):
    """exec adds only --device KVANT, and a line gives the reason."""

    def refused(self, why, *words, left=ADDED, **more):
        out, said = self.given(*words, **more)
        self.assertEqual(out, [*words, *left])
        self.assertIn(f"weights stay on the CPU: {why}", said)
        self.assertIn(f"Not used: Vulkan0 ({CARD})\n  hint: weights ", said)
        self.assertEqual(said.count("\n"), 2)
        return said

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

    def test_models_whose_layers_are_not_known(self):
        server, model = self.program(VULKAN, KVANT), self.folder / "model.gguf"
        unknown = f"--device KVANT,Vulkan0 -ts N-0.5,1.5 -ot '{ALL}', where N is"
        for words in (["-hf", "owner/model"], ["--models-dir", "."]):
            out, said = self.exec(server, *words)
            self.assertEqual(out, [*words, *ADDED])
            self.assertIn("weights stay on the CPU: no -m names the model's file", said)
            self.assertIn(unknown, said)
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
            out, said = self.exec(server, "-m", model)
            self.assertEqual(out[2:], ADDED)
            self.assertIn(f"the number of layers cannot be read from {model}", said)
            self.assertIn(unknown, said)

    def test_options_that_place_weights(self):
        said = self.refused("-ts is given", "-ts", "1,1")
        self.assertTrue(said.endswith(f"{HINT}\n"), said)
        said = self.refused("-ot is given", "-ot", "exps=CPU")
        self.assertTrue(said.endswith(f" -ot 'exps=CPU,{ALL}'\n"), said)
        self.refused("LLAMA_ARG_TENSOR_SPLIT is given", LLAMA_ARG_TENSOR_SPLIT="1,1")
        for mode in ("row", "none", "tensor"):
            said = self.refused("-sm is given", "-sm", mode)
            self.assertTrue(said.endswith(f"{HINT} -sm layer\n"), said)
        self.assertEqual(self.given("-sm", "layer")[0], ["-sm", "layer", *PLACED, *REST])
        self.assertTrue(
            self.refused("-ts is given", "-ts", "1", "--mmproj", "x").endswith("-mmdev Vulkan0\n")
        )

    def test_no_room_for_weights(self):
        small = ["Vulkan0: Card (64 MiB, 64 MiB free)", KVANT]
        words, said = self.exec(self.program(*small), "-m", self.model(size=31 * 64 << 20))
        self.assertEqual(words[2:], ADDED)
        self.assertIn("on the CPU: Vulkan0 has not enough free memory for them. Not used", said)

    def test_lists_of_llama_bench(self):
        bench, rest = {"name": "llama-bench"}, ["--device", "KVANT", "-fa", "on"]
        for value in ("10,20", "0-30+10"):
            self.refused("llama-bench is given several values of -ngl", "-ngl", value,
                         left=rest, **bench)  # fmt: skip
        self.refused("llama-bench is given several", "-ngl", "9", "-ngl", "8", left=rest, **bench)
        self.refused("llama-bench is given several models", "-m", "other", **bench)
        self.refused("-fitt is given", "-fitt", "512", **bench)
        self.refused("-ncmoe is given", "-ncmoe", "9", **bench)
        words, said = self.given("-nkvo", "0,1", **bench)
        self.assertEqual(words, ["-nkvo", "0,1", *REST])
        self.assertIn("with -nkvo no layer has kvant's cache", said)

    def test_another_device(self):
        server, model = self.program(VULKAN, KVANT), self.model()
        for given, environment in (
            (["--device", "Vulkan0"], {}),
            (["-dev", "Vulkan0"], {}),
            ([], {"LLAMA_ARG_DEVICE": "Vulkan0"}),
        ):
            words, said = self.given(*given, **environment)
            self.assertEqual(words, [*given, *REST])
            self.assertIn("the device is set to 'Vulkan0', so the cache will not be kvant's", said)
            self.assertTrue(said.endswith(f"{HINT}\n"), said)
        for given in ("KVANT,Vulkan0", "Vulkan0,KVANT"):
            for more in ([], ["-ts", "29.5,1.5"], ["-ot", "blk=Vulkan0"]):
                words, said = self.given("--device", given, *more)
                self.assertEqual(words, ["--device", given, *more, *REST])
                self.assertIn("weights stay on the CPU in layers with kvant's cache", said)
        words, said = self.given("--device", "KVANT")
        self.assertEqual(words, ["--device", "KVANT", *REST])
        self.assertIn("because --device KVANT holds only the cache", said)
        self.assertTrue(said.endswith(f"{HINT}\n"), said)
        self.assertEqual(self.exec(server, "-m", model, *PLACED)[1], "")

    def test_no_cache_for_kvant(self):
        """exec keeps the GPU in use for a cache that stays llama.cpp's."""
        for listed, words in (([KVANT], ADDED), ([KVANT, "KVANT0: Card"], ADDED)):
            said = self.given("-nkvo", listed=listed)[1]
            self.assertIn("with -nkvo no layer has kvant's cache", said)
            self.assertEqual("weights stay on the CPU in any case" in said, listed == [KVANT])
            said = self.given("-ngl", "0", listed=listed)[1]
            self.assertIn("with -ngl 0 no layer has kvant's cache", said)
        words, said = self.given(LLAMA_ARG_NO_KV_OFFLOAD="1")
        self.assertEqual(words, REST)
        self.assertIn("with -nkvo no layer has kvant's cache", said)
        self.assertTrue(said.endswith(f"{HINT}, without -nkvo and LLAMA_ARG_NO_KV_OFFLOAD\n"))
        words, said = self.given("-nkvo", "-ts", "1,1")
        self.assertEqual(words, ["-nkvo", "-ts", "1,1", *REST])
        self.assertNotIn(
            "no layer's cache", self.given("-nkvo", "-kvo", "-ngl", "0", "-ngl", "5")[1]
        )


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
        """With KVANT_GPU=0, or without libkvant_cuda, the cache is in the computer's memory."""
        for more in ([], [VULKAN]):
            listed = ["CUDA0: H100 (80000 MiB, 79000 MiB free)", *more, KVANT]
            words, said = self.given(listed=listed)
            self.assertEqual(words, ADDED)
            self.assertIn("on the CPU: kvant does not work on NVIDIA GPUs here (run ", said)
            flags = "--device KVANT,CUDA0 -ts 29.5,1.5 -ot 'blk\\..*=CUDA0'\n"
            self.assertTrue(said.endswith(flags), said)

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
