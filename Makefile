# A thin front over CMake: it installs or names missing tools, fetches models and libraries that a
# target needs, and calls cmake and ctest. Anything finer is CMake's: cmake --preset release, debug,
# asan or tsan. The library alone needs none of this: cmake -B build && cmake --build build.

BUILD  ?= build
PREFIX ?= /usr/local
# dist and wheel build for this machine. For another MACHINE the names of their folders end in it.
MACHINE ?= $(shell uname -m)
FOLDER = $(BUILD)/$@$(if $(filter $(MACHINE),$(shell uname -m)),,-$(MACHINE))
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
PYTHON ?= python3

FETCH = $(PYTHON) scripts/fetch.py
RUN_TESTS = $(PYTHON) scripts/run_tests.py
MAKEFLAGS += --no-print-directory

# The command is compiled against the runtime's headers and opens its libraries by default. Only
# figures of kvant report want `plot`.
define configure
	headers=$$($(FETCH) headers) && runtime=$$($(FETCH) runtime) && plot=$$($(FETCH) plot || true) && \
	cmake --preset $(1) -B $(2) -DKVANT_LLAMA_SRC="$$headers" -DKVANT_LLAMA_LIB="$$runtime" \
	    -DKVANT_PLOT_LIB="$$plot" $(3)
endef

.PHONY: all demo cuda test test-fast test-long test-clang test-arm64 test-windows test-cuda \
    test-docs test-lean test-api3 test-archs test-versions test-vulkan test-vllm test-lmcache \
    bench-vulkan native \
    asan tsan format check-format install dist dist-all wheel release clean help

all: $(BUILD)/fetched
	cmake --build $(BUILD) -j $(JOBS)

# Not CMakeCache.txt: a build that was configured without what is fetched here has that too.
$(BUILD)/fetched:
	scripts/deps.sh build
	$(call configure,release,$(BUILD),-DKVANT_BUILD_TESTS=OFF -DKVANT_CUDA=OFF)
	touch $@

demo: all
	scripts/deps.sh fetch
	$(PYTHON) scripts/demo.py --kvant $(BUILD)/bin/kvant

# Every table of README and docs, from bench/results. A new line in a CSV needs this.
.PHONY: pages
pages:
	$(PYTHON) scripts/pages
	$(PYTHON) scripts/messages

# The figures of README and docs, from bench/results.
.PHONY: pictures
pictures:
	$(PYTHON) scripts/figures

# Asks every program for every codec, and writes the answers (tests/doors).
.PHONY: doors
doors:
	$(call configure_tests)
	cmake --build $(BUILD) --target doors_csv
	$(PYTHON) scripts/pages

# The papers' ablations on three models; TEXT is a file to score, such as WikiText-2's
# wiki.test.raw. Both targets continue where they were interrupted, and append to bench/results.
PAPERS = $(PYTHON) bench/papers.py -f "$(TEXT)" -w $(BUILD)/papers --kvant $(BUILD)/bin/kvant

.PHONY: papers papers-long
papers: all
	mkdir -p $(BUILD)/papers && text=$$($(FETCH) text) && \
	for name in smollm2 qwen gemma; do \
	    model=$$($(FETCH) model $$name) && captured=$(BUILD)/papers/$$name.safetensors && \
	    { test -e "$$captured" || $(BUILD)/bin/kvant capture -m "$$model" -f "$$text" -n 1024 \
	        -c 1024 -o "$$captured"; } && \
	    $(PAPERS) -o bench/results/quality_papers.csv -m "$$model" --captured "$$captured" || exit; \
	done

# After make cuda, with a PYTHON that has PyTorch for a GPU, transformers and gguf; on CPUs it takes
# days. All words of Gemma's vocabulary would not fit the GPU. The second run of long_contexts.py
# measures calibrations of the first 2048 positions.
papers-long: all
	text=$$($(FETCH) text) && \
	for run in "smollm2 8192 2048,8192 --reading" "gemma 32768 2048,8192,32768 --prune 4000" \
	    "qwen 32768 8192 --reading --prune 4000 --round 3"; do \
	    set -- $$run && model=$$($(FETCH) model $$1) && ctx=$$2 && needles=$$3 && shift 3 && \
	    long=$(BUILD)/long/$$(basename "$$model") && \
	    $(PYTHON) bench/long_prepare.py -m "$$model" -f "$(TEXT)" --calibration "$$text" -c $$ctx \
	        --needles $$needles $$* -o $(BUILD)/long && \
	    export KVANT_LIBRARY=$(BUILD)/lib/libkvant.so && \
	    rows="-o bench/results/long_contexts.csv" && \
	    $(PYTHON) bench/long_contexts.py "$$long" $$rows --needles bench/results/needles.csv && \
	    $(PYTHON) bench/long_contexts.py "$$long" $$rows --positions 2048 \
	        --only "balanced small quality" || exit; done

# Other programs' caches next to kvant's, on the CPU: builds those programs, measures what
# bench/results/rivals.csv lacks, and draws the tables. TEXT as above; bench/rivals --help has more.
.PHONY: rivals
rivals: all
	run="$(PYTHON) bench/rivals --float -f $(TEXT) --kvant $(BUILD)/bin/kvant \
	    --work $(BUILD)/rivals" && \
	$$run --lengths 2048 && $$run --lengths 8192 --models smollm2
	$(PYTHON) scripts/pages

# The command and the plug-in do without a GPU; its library takes nvcc minutes, so it is asked for.
cuda:
	scripts/deps.sh build
	$(call configure,release,$(BUILD),-DKVANT_CUDA=ON -DKVANT_CUDA_PAIRS=ALL \
	    -UCMAKE_CUDA_ARCHITECTURES)
	cmake --build $(BUILD) -j $(JOBS) --target kvant_cuda

# Configures and builds everything with tests. $(1): KVANT_CUDA. Kernels for GPUs take nvcc longer
# than everything else together, so `make test` compiles them only where a GPU will run them.
define configure_tests
	scripts/deps.sh test
	model=$$($(FETCH) model) && torch=$$($(FETCH) torch || true) && cuda="$(1)" && \
	vllm=$$([ -z "$$torch" ] || $(FETCH) vllm || true) && \
	archs=$$($(FETCH) archs || true) && \
	if [ -z "$$cuda" ]; then nvidia-smi -L >/dev/null 2>&1 && cuda=AUTO || cuda=OFF; fi && \
	$(call configure,release,$(BUILD),-DKVANT_BUILD_TESTS=ON -DKVANT_TEST_MODEL="$$model" \
	    -DKVANT_TEST_PYTHON="$$torch" -DKVANT_TEST_VLLM="$$vllm" -DKVANT_TEST_ARCHS="$$archs" \
	    -DKVANT_CUDA=$$cuda -DCMAKE_CUDA_ARCHITECTURES=90-real -DKVANT_CUDA_PAIRS=ALL)
	touch $(BUILD)/fetched
	cmake --build $(BUILD) -j $(JOBS)
endef

test:
	$(call configure_tests)
	$(RUN_TESTS) $(BUILD) -LE long -j $(JOBS)

# Under a minute: what a change of the library is checked with while it is made.
test-fast:
	$(call configure_tests)
	$(RUN_TESTS) $(BUILD) -L fast -j $(JOBS)

# Everything else, hours on 2 cores: long tests, clang, sanitizers, llama.cpp's other interface, all
# kernels for GPUs.
test-long:
	$(call configure_tests,AUTO)
	$(RUN_TESTS) $(BUILD) -L "long|cuda" -j $(JOBS)
	$(MAKE) test-clang
	$(MAKE) test-lean
	$(MAKE) asan
	$(MAKE) tsan
	$(MAKE) test-api3
	$(MAKE) test-versions
	$(MAKE) test-vulkan
	$(MAKE) test-vllm
	$(MAKE) test-lmcache

# Everything compiles without a warning of clang's, and passes the tests that need no model.
test-clang:
	scripts/deps.sh test
	model=$$($(FETCH) model) && \
	$(call configure,release,$(BUILD)-clang,-DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
	    -DKVANT_BUILD_TESTS=ON -DKVANT_TEST_MODEL="$$model" -DKVANT_CUDA=OFF)
	cmake --build $(BUILD)-clang -j $(JOBS)
	$(RUN_TESTS) $(BUILD)-clang -L fast -j $(JOBS)

# 64-bit ARM. On such a machine: the fast tests, those with llama.cpp, tarball and wheel. Elsewhere
# under qemu: unit tests, kernels, bytes, and the tarball and the wheel with llama.cpp's libraries.
ifeq ($(shell uname -m),aarch64)
test-arm64:
	$(call configure_tests,OFF)
	$(RUN_TESTS) $(BUILD) -L "fast|integration" -LE long -j $(JOBS)
	$(MAKE) dist wheel
else
test-arm64:
	@scripts/deps.sh arm64 || { echo "skipped: test-arm64 needs a compiler and qemu" && exit 0; } && \
	$(MAKE) dist wheel MACHINE=aarch64 && \
	packages=$$($(FETCH) arm64) && runtime=$$($(FETCH) runtime aarch64) && \
	model=$$($(FETCH) model) && \
	tests/aarch64/run.sh $(abspath $(BUILD))/aarch64 "$$packages" && \
	tests/aarch64/delivery.sh $(BUILD)/dist-aarch64/kvant-*-linux-aarch64.tar.gz \
	    $(BUILD)/wheel-aarch64/kvant-*.whl "$$packages" "$$runtime" "$$model"
endif

# What `tests/native/run.py FOLDER` needs to test the archive and the wheel of MACHINE on such a
# machine: unit tests, bytes, the command and the plug-in with llama.cpp's libraries.
native:
	$(MAKE) dist wheel
	folder() { [ $(MACHINE) = $$(uname -m) ] && echo $(BUILD)/$$1 || echo $(BUILD)/$$1-$(MACHINE); }; \
	runtime=$$($(FETCH) runtime $(MACHINE)) && model=$$($(FETCH) model) && \
	case $(MACHINE) in windows-*) python=$$($(FETCH) windows) || exit ;; esac && \
	tests/native/prepare.sh $(MACHINE) $(FOLDER) $$(folder dist)/kvant-*.[tz]* \
	    $$(folder wheel)/kvant-*.whl "$$runtime" "$$model" $$python

# The zip file and the wheel for Windows under Wine: unit tests, bytes, the Python package, the
# command and the plug-in with llama.cpp's libraries.
test-windows:
	@scripts/deps.sh windows || { echo "skipped: test-windows needs Wine" && exit 0; } && \
	$(MAKE) native MACHINE=windows-x86_64 && \
	tests/windows/run.sh $(BUILD)/native-windows-x86_64

# Kernels for GPUs compile, one of each template, and their tests without a GPU pass.
test-cuda:
	scripts/deps.sh test
	cmake --preset release -B $(BUILD)-cuda -DKVANT_BUILD_TESTS=ON -DKVANT_BUILD_TOOLS=OFF \
	    -DKVANT_BUILD_PLUGIN=OFF -DKVANT_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90-real \
	    -DKVANT_CUDA_PAIRS=FEW
	cmake --build $(BUILD)-cuda -j $(JOBS)
	$(RUN_TESTS) $(BUILD)-cuda -L cuda -j $(JOBS)

# Lays out all C, CUDA and Python. Comments keep their lines.
format:
	scripts/deps.sh fetch
	$(PYTHON) scripts/format.py

# Fails where `make format` would change a file.
check-format:
	scripts/deps.sh fetch
	$(PYTHON) scripts/format.py --check

# Pages: links, names, tables, figures.
test-docs:
	scripts/deps.sh fetch
	$(PYTHON) tests/docs/test_pages.py
	$(PYTHON) tests/docs/test_code.py
	$(PYTHON) tests/docs/test_tables.py
	$(PYTHON) tests/docs/test_figures.py

# An engine of vLLM on the CPU, and the GPU's backend on the mock of a GPU.
test-vllm:
	scripts/deps.sh test
	torch=$$($(FETCH) torch) && vllm=$$($(FETCH) vllm) && \
	$(call configure,release,$(BUILD),-DKVANT_BUILD_TESTS=ON -DKVANT_TEST_PYTHON="$$torch" \
	    -DKVANT_TEST_VLLM="$$vllm")
	cmake --build $(BUILD) -j $(JOBS) --target kvant_shared kvant_cuda_host
	$(RUN_TESTS) $(BUILD) -L vllm

# LMCache's storage manager and server on the CPU, with files and a Redis server.
test-lmcache:
	scripts/deps.sh lmcache
	torch=$$($(FETCH) torch) && lmcache=$$($(FETCH) lmcache || true) && \
	$(call configure,release,$(BUILD),-DKVANT_BUILD_TESTS=ON -DKVANT_TEST_PYTHON="$$torch" \
	    -DKVANT_TEST_LMCACHE="$$lmcache")
	cmake --build $(BUILD) -j $(JOBS) --target kvant_shared
	$(RUN_TESTS) $(BUILD) -L lmcache

# The same integration tests on the other generation of ggml's back-end interface.
test-api3:
	scripts/deps.sh test
	model=$$($(FETCH) model) && llama=$$($(FETCH) api3) && \
	cmake --preset release -B $(BUILD)/api3 -DKVANT_BUILD_TESTS=ON -DKVANT_TEST_MODEL="$$model" \
	    -DKVANT_LLAMA_SRC="$$llama/llama.cpp" -DKVANT_LLAMA_LIB="$$llama/build/bin" -DKVANT_CUDA=OFF
	cmake --build $(BUILD)/api3 -j $(JOBS)
	$(RUN_TESTS) $(BUILD)/api3 -L integration -LE long -j $(JOBS)

# Every architecture that llama.cpp's own test makes a tiny model of, on a CPU. Writes a table.
test-archs:
	scripts/deps.sh test
	archs=$$($(FETCH) archs) && \
	$(call configure,release,$(BUILD),-DKVANT_BUILD_TESTS=ON -DKVANT_TEST_ARCHS="$$archs")
	cmake --build $(BUILD) -j $(JOBS) --target ggml-kvant arch_probe
	ARCH_PROBE=$(BUILD)/bin/arch_probe KVANT_PLUGIN_FILE=$(abspath $(BUILD))/lib/libggml-kvant.so \
	    $(PYTHON) tests/archs/test_archs.py --all bench/results/archs.csv

# Stock builds of llama.cpp, one or more of each of ggml's versions: tables, a completion, and the
# KL divergence. Writes the results.
test-versions:
	scripts/deps.sh test
	$(call configure_tests)
	cmake --build $(BUILD) -j $(JOBS) --target kvant ggml-kvant
	$(PYTHON) tests/versions/test_versions.py $(BUILD)/bin/kvant \
	    $(abspath $(BUILD))/lib/libggml-kvant.so "$$($(FETCH) model)" --csv bench/results/versions.csv

# Weights on a GPU of Vulkan, for which Mesa's software driver stands, and caches in the computer's
# memory. And the shaders of bench/vulkan.
test-vulkan:
	scripts/deps.sh test
	scripts/deps.sh vulkan
	vulkan=$$($(FETCH) vulkan) && model=$$($(FETCH) model) && \
	$(call configure,release,$(BUILD),-DKVANT_BUILD_TESTS=ON -DKVANT_TEST_MODEL="$$model" \
	    -DKVANT_TEST_VULKAN="$$vulkan")
	cmake --build $(BUILD) -j $(JOBS)
	$(RUN_TESTS) $(BUILD) -R vulkan -j 1

# Times of the shaders of bench/vulkan on the computer's first Vulkan device, and of the CPU.
SHAPE = 1,32,8,128,8192
bench-vulkan:
	scripts/deps.sh vulkan
	vulkan=$$($(FETCH) vulkan) && \
	$(call configure,release,$(BUILD),-DKVANT_BUILD_TESTS=ON -DKVANT_TEST_VULKAN="$$vulkan")
	cmake --build $(BUILD) -j $(JOBS) --target bench_vulkan vulkan_shaders
	$(BUILD)/bin/bench_vulkan $(BUILD)/tests/vulkan times $(SHAPE)

# Everything else builds and passes without the families that only papers need.
test-lean:
	scripts/deps.sh test
	model=$$($(FETCH) model) && \
	$(call configure,release,$(BUILD)-lean,-DKVANT_PAPERS=OFF -DKVANT_BUILD_TESTS=ON \
	    -DKVANT_TEST_MODEL="$$model" -DKVANT_CUDA=OFF)
	cmake --build $(BUILD)-lean -j $(JOBS)
	$(RUN_TESTS) $(BUILD)-lean -LE long -j $(JOBS)

# GCC 13 turns this check on, and then stores vectors of 64 bytes at addresses that are not aligned.
asan: export ASAN_OPTIONS ?= detect_stack_use_after_return=0
asan:
	scripts/deps.sh test
	model=$$($(FETCH) model) && \
	$(call configure,asan,$(BUILD)-asan,-DKVANT_BUILD_TESTS=ON -DKVANT_TEST_MODEL="$$model")
	cmake --build $(BUILD)-asan -j $(JOBS)
	$(RUN_TESTS) $(BUILD)-asan -LE long -j $(JOBS)

# The tests in which threads meet, ours and those that llama.cpp lends.
tsan:
	scripts/deps.sh test
	model=$$($(FETCH) model) && \
	$(call configure,tsan,$(BUILD)-tsan,-DKVANT_BUILD_TESTS=ON -DKVANT_TEST_MODEL="$$model")
	cmake --build $(BUILD)-tsan -j $(JOBS)
	$(RUN_TESTS) $(BUILD)-tsan -L threads -j $(JOBS)

install: all
	cmake --install $(BUILD) --prefix $(PREFIX)

# A tarball for any x86-64 Linux with glibc 2.28 or newer, checked in a bare folder
# (scripts/check_dist.sh). MACHINE=aarch64 makes the one for ARM64, MACHINE=windows-x86_64 a zip
# file for Windows, and MACHINE=macos-aarch64 a tarball for macOS.
dist:
	scripts/deps.sh fetch
	headers=$$($(FETCH) headers) && plot=$$($(FETCH) plot) && zig=$$($(FETCH) zig) && \
	JOBS=$(JOBS) scripts/dist.sh $(FOLDER) "$$headers" "$$plot" "$$zig" $(MACHINE)

# The archives and the wheels of all systems.
dist-all:
	for machine in x86_64 aarch64 windows-x86_64 macos-aarch64; do \
	    $(MAKE) dist wheel MACHINE=$$machine || exit; \
	done

# A Python wheel for the same machines: library, command, plug-in and package
# (scripts/check_wheel.sh installs and runs it).
wheel:
	scripts/deps.sh fetch
	headers=$$($(FETCH) headers) && plot=$$($(FETCH) plot) && zig=$$($(FETCH) zig) && \
	JOBS=$(JOBS) PYTHON=$(PYTHON) scripts/wheel.sh $(FOLDER) "$$headers" "$$plot" "$$zig" \
	    $(MACHINE)

# All files of a release in build/release, and the commands that tag and upload them
# (scripts/release.py). Refuses a tree with changes, and versions that disagree.
release:
	JOBS=$(JOBS) $(PYTHON) scripts/release.py $(BUILD)/release

clean:
	cmake -E rm -rf $(BUILD) $(BUILD)-asan $(BUILD)-tsan $(BUILD)-lean $(BUILD)-clang $(BUILD)-cuda

help:
	@echo 'make            build/bin/kvant, libraries and plug-in in build/lib'
	@echo 'make demo       memory, quality and speed of the caches of llama.cpp and kvant (3 minutes)'
	@echo 'make pictures   the figures of README and docs, from bench/results'
	@echo 'make pages      the tables of README and docs, from bench/results, and the page of messages'
	@echo 'make doors      which program serves which codec; writes the table (needs what test needs)'
	@echo 'make papers     ablations of papers on three models (hours); TEXT=wiki.test.raw'
	@echo 'make papers-long  the same with contexts up to 32768 tokens, on a GPU'
	@echo 'make rivals     caches of other programs next to kvant (hours); TEXT=wiki.test.raw'
	@echo 'make cuda       build/lib/libkvant_cuda.so, for sm_80 and later; needs nvcc, takes minutes'
	@echo 'make test       build and run the tests but the long ones (15 minutes on 2 cores)'
	@echo 'make test-fast  those that need no model (under a minute)'
	@echo 'make test-long  the long ones, GPU kernels, clang, sanitizers, llama.cpp b11434 (hours)'
	@echo 'make test-clang a build by clang, and its tests without a model'
	@echo 'make test-arm64 64-bit ARM: tests, tarball and wheel, under qemu elsewhere'
	@echo 'make native     what tests/native/run.py runs on MACHINE (see make dist): archive and tests'
	@echo 'make test-windows  the zip file and the wheel for Windows under Wine'
	@echo 'make test-cuda  kernels for GPUs compile, and their tests without a GPU pass'
	@echo 'make format     lays out C, CUDA and Python; make check-format fails where it would'
	@echo 'make test-docs  pages: links, names, tables, figures'
	@echo 'make test-api3  integration tests on llama.cpp b11434, built from source (15 minutes)'
	@echo 'make test-archs every architecture of llama.cpp; writes bench/results/archs.csv (5 minutes)'
	@echo 'make test-vulkan  weights on a GPU of Vulkan, on a software driver (70 MB to download)'
	@echo 'make bench-vulkan  times of bench/vulkan; SHAPE=SEQUENCES,HEADS,KV_HEADS,DIM,TOKENS'
	@echo 'make test-vllm  vLLM on the CPU with compressed blocks, and its GPU backend on a mock'
	@echo 'make test-lmcache  LMCache with files and a Redis server (2 minutes)'
	@echo 'make test-lean  the tests of a build without the papers'"'"' families'
	@echo 'make asan       the tests with AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make tsan       the tests of threads with ThreadSanitizer'
	@echo 'make install    PREFIX=$(PREFIX), DESTDIR as usual'
	@echo 'make dist       build/dist/kvant-VERSION-linux-x86_64.tar.gz, or MACHINE=aarch64,'
	@echo '                windows-x86_64 or macos-aarch64, as make wheel'
	@echo 'make wheel      build/wheel/kvant-VERSION-py3-none-manylinux_2_28_x86_64.whl (2 minutes)'
	@echo 'make dist-all   archives and wheels of all four systems'
	@echo 'make release    build/release: source, tarball, wheel, sums and notes (3 minutes)'
	@echo 'make clean      removes build folders; downloads stay in $${KVANT_CACHE:-~/.cache/kvant}'
