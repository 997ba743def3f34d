#!/bin/sh
# check_wheel.sh WHEEL [GLIBC]: the wheel installs into a new virtual environment, where the
# command, the plug-in and the package find each other. With GLIBC no file needs a newer C library,
# and none names a folder of this machine.
set -eu
[ $# -ge 1 ] || { echo "usage: scripts/check_wheel.sh WHEEL [GLIBC]" >&2; exit 2; }
wheel=$1 glibc=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    echo "check_wheel: $1" >&2
    exit 1
}
"${PYTHON:-python3}" -m venv "$work/env"
# Compiled Python would name this folder, which may be below $HOME.
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "$wheel"
package=$(find "$work/env/lib" -type d -path '*/site-packages/kvant')
set -- "$package/bin/kvant" "$package/lib/libkvant.so" "$package/lib/libggml-kvant.so"
for file in "$@" "$package/py.typed" "$work/env/share/man/man1/kvant.1" \
    "$work/env/share/bash-completion/completions/kvant" \
    "$package"/../kvant-*.dist-info/licenses/LICENSE; do
    [ -e "$file" ] || fail "$file is missing"
done
others=$(ls "$package/lib" | grep -vxE 'libkvant\.so|libggml-kvant\.so|libkvant_cuda\.so' || true)
[ -z "$others" ] || fail "lib has more than libraries: $others"
if [ -n "$glibc" ]; then
    "$here/check_elf.sh" "$glibc" "$@"
    if grep -rlF -e "$(dirname "$here")" -e "${HOME:-/root}/" "$package" >"$work/named"; then
        fail "these files name a folder of this machine: $(tr '\n' ' ' <"$work/named")"
    fi
fi

cd "$work" # not where the sources lie
kvant=$work/env/bin/kvant
"$kvant" --version
[ "$("$kvant" plugin-path)" = "$(realpath "$package/lib/libggml-kvant.so")" ] ||
    fail "the command does not find its plug-in"
# shellcheck disable=SC2016 # sh expands it
"$kvant" exec -- sh -c 'test -r "$GGML_BACKEND_PATH"' 2>"$work/said" ||
    { cat "$work/said" >&2; fail "kvant exec"; }
"$kvant" bench distortion --help >/dev/null || fail "a command that is Python does not start"
"$work/env/bin/python" "$here/check_wheel.py"
echo "installs and runs: $(basename "$wheel")"
