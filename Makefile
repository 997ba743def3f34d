# A thin front over CMake: it installs or names what is missing, fetches what is needed, and calls cmake and
# ctest. Anything finer is CMake's: cmake --preset release, debug or asan.

BUILD  ?= build
PREFIX ?= /usr/local
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)
PYTHON ?= python3

FETCH = $(PYTHON) scripts/fetch.py
MAKEFLAGS += --no-print-directory

# The command is compiled against the runtime's headers and opens its libraries by default.
define configure
	headers=$$($(FETCH) headers) && runtime=$$($(FETCH) runtime) && plot=$$($(FETCH) plot) && \
	cmake --preset $(1) -B $(2) -DKVANT_LLAMA_SRC="$$headers" -DKVANT_LLAMA_LIB="$$runtime" \
	    -DKVANT_PLOT_LIB="$$plot" $(3)
endef

.PHONY: all demo cuda test test-api3 asan install clean help

all: $(BUILD)/CMakeCache.txt
	cmake --build $(BUILD) -j $(JOBS)

$(BUILD)/CMakeCache.txt:
	scripts/deps.sh build
	$(call configure,release,$(BUILD),-DKVANT_BUILD_TESTS=OFF -DKVANT_CUDA=OFF)

demo: all
	$(PYTHON) scripts/demo.py --kvant $(BUILD)/bin/kvant

# The command and the plug-in do without a GPU; its library takes nvcc minutes, so it is asked for.
cuda:
	scripts/deps.sh build
	$(call configure,release,$(BUILD),-DKVANT_CUDA=ON \
	    -DCMAKE_CUDA_ARCHITECTURES="80-real;90-real;90-virtual")
	cmake --build $(BUILD) -j $(JOBS) --target kvant_cuda

# With a CUDA toolkit, GPU or not, the library for GPUs is compiled too, for one generation of them.
test:
	scripts/deps.sh test
	model=$$($(FETCH) model) && \
	$(call configure,release,$(BUILD),-DKVANT_BUILD_TESTS=ON -DKVANT_TEST_MODEL="$$model" \
	    -DKVANT_CUDA=AUTO -DCMAKE_CUDA_ARCHITECTURES=90-real)
	cmake --build $(BUILD) -j $(JOBS)
	ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)

# The same integration tests on the other generation of ggml's back-end interface.
test-api3:
	scripts/deps.sh test
	model=$$($(FETCH) model) && llama=$$($(FETCH) api3) && \
	cmake --preset release -B $(BUILD)/api3 -DKVANT_BUILD_TESTS=ON -DKVANT_TEST_MODEL="$$model" \
	    -DKVANT_LLAMA_SRC="$$llama/llama.cpp" -DKVANT_LLAMA_LIB="$$llama/build/bin" -DKVANT_CUDA=OFF
	cmake --build $(BUILD)/api3 -j $(JOBS)
	ctest --test-dir $(BUILD)/api3 --output-on-failure -L integration

asan:
	scripts/deps.sh test
	model=$$($(FETCH) model) && \
	$(call configure,asan,$(BUILD)-asan,-DKVANT_BUILD_TESTS=ON -DKVANT_TEST_MODEL="$$model" -DKVANT_CUDA=OFF)
	cmake --build $(BUILD)-asan -j $(JOBS)
	ctest --test-dir $(BUILD)-asan --output-on-failure -j $(JOBS)

install: all
	cmake --install $(BUILD) --prefix $(PREFIX)

clean:
	cmake -E rm -rf $(BUILD) $(BUILD)-asan

help:
	@echo 'make            build/bin/kvant, libraries and plug-in in build/lib'
	@echo 'make demo       quality, size and speed of stock and compressed caches, then an answer (3 minutes)'
	@echo 'make cuda       build/lib/libkvant_cuda.so, for sm_80, sm_90 and later; needs nvcc, takes minutes'
	@echo 'make test       build and run every test'
	@echo 'make test-api3  integration tests on llama.cpp b11434, built from source (15 minutes the first time)'
	@echo 'make asan       the tests with AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make install    PREFIX=$(PREFIX), DESTDIR as usual'
	@echo 'make clean      removes build folders; downloads stay in $${KVANT_CACHE:-~/.cache/kvant}'
