#!/bin/sh
# Installs missing packages for building (deps.sh build), for fetching models and compilers, too
# (deps.sh fetch), for testing (deps.sh test), for testing with LMCache (deps.sh lmcache), or for
# compiling shaders (deps.sh vulkan), or for running programs of ARM64 (deps.sh arm64) or of Windows
# (deps.sh windows) on this machine. Does and prints nothing when all of them are there. Uses
# apt-get, as root or through sudo; without apt-get it names the missing packages.
set -eu

missing=

need_program() { # program, package
    command -v "$1" >/dev/null 2>&1 || missing="$missing $2"
}

need_library() { # pkg-config name, package
    command -v pkg-config >/dev/null 2>&1 && pkg-config --exists "$1" || missing="$missing $2"
}

need_pip() {
    python3 -m pip --version >/dev/null 2>&1 || missing="$missing python3-pip"
}

need_numpy() {
    python3 -c 'import numpy' 2>/dev/null || missing="$missing python3-numpy"
}

case "${1:-}" in
    build | fetch | test | lmcache | arm64 | vulkan | windows) ;;
    *)
        echo "usage: scripts/deps.sh build|fetch|test|lmcache|arm64|vulkan|windows" >&2
        exit 2
        ;;
esac

need_program cmake cmake
need_program make make
need_program cc gcc
need_program git git
need_program python3 python3
if [ "$1" != build ]; then
    need_pip
fi
if [ "$1" = lmcache ] && ! command -v valkey-server >/dev/null 2>&1; then
    need_program redis-server redis-server
fi
if [ "$1" = test ] || [ "$1" = lmcache ]; then
    need_program c++ g++ # headers are C++, too
    need_program pkg-config pkg-config
    need_library cmocka libcmocka-dev
    need_program clang clang
    need_program chromium chromium # looks at the page of kvant report
    need_numpy # tests/python, tests/tuning
    need_program qemu-x86_64 qemu-user # kernels on emulated CPUs
fi
if [ "$1" = arm64 ] || [ "$1" = test ] && [ "$(uname -m)" = x86_64 ]; then # for tests/aarch64
    need_program qemu-aarch64 qemu-user
    # Compilers do not name the C library that they need.
    need_program aarch64-linux-gnu-gcc "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
fi
if [ "$1" = vulkan ]; then # for bench/vulkan
    need_program glslangValidator glslang-tools
    need_program pkg-config pkg-config
    need_library vulkan libvulkan-dev
fi
if [ "$1" = windows ]; then # for tests/windows
    need_program wine "wine wine64"
fi

[ -n "$missing" ] || exit 0

echo "deps: missing:$missing" >&2
if ! command -v apt-get >/dev/null 2>&1; then
    echo "  hint: there is no apt-get here; install these packages with your package manager" \
        "(the names are Debian's)" >&2
    exit 1
fi
as_root=
if [ "$(id -u)" != 0 ]; then
    # Without a terminal a password cannot be typed.
    if command -v sudo >/dev/null 2>&1 && { [ -t 0 ] || sudo -n true 2>/dev/null; }; then
        as_root=sudo
    else
        echo "  hint: run as root: apt-get update &&" \
            "apt-get install -y --no-install-recommends$missing" >&2
        exit 1
    fi
fi
# shellcheck disable=SC2086 # the list is meant to be split
{
    $as_root apt-get update -q
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get \
        install -q -y --no-install-recommends $missing
} >&2 || {
    echo "deps: apt-get failed" >&2
    echo "  hint: apt-get update && apt-get install -y --no-install-recommends$missing" >&2
    exit 1
}
