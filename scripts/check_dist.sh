#!/bin/sh
# check_dist.sh TARBALL GLIBC [ROOT]: no program or library of the tarball asks for a newer glibc or
# for another library. No file names a folder of this machine. The command runs in a folder with
# nothing but the tarball and a C library: that of ROOT (an unpacked libc6 package of an old Debian,
# say), or this machine's. A tarball for ARM64 runs under qemu-user elsewhere, with the C library of
# Debian's cross compiler.
set -eu
[ $# -ge 2 ] || { echo "usage: scripts/check_dist.sh TARBALL GLIBC [ROOT]" >&2; exit 2; }
tarball=$1 glibc=$2 system=${3:-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
    echo "check_dist: $1" >&2
    exit 1
}

tar -C "$work" -xf "$tarball"
kvant=$(find "$work" -mindepth 1 -maxdepth 1 -type d)
for file in bin/kvant lib/libkvant.so lib/libggml-kvant.so lib/libkvant.a include/kvant/kvant.h \
    lib/pkgconfig/kvant.pc \
    lib/cmake/kvant/kvant-config.cmake share/man/man1/kvant.1 \
    share/bash-completion/completions/kvant share/kvant/plot/LICENSE-d3 LICENSE README.txt; do
    [ -e "$kvant/$file" ] || fail "$file is missing"
done

"$(dirname "$0")/check_elf.sh" "$glibc" "$kvant/bin/kvant" "$kvant/lib/libkvant.so" \
    "$kvant/lib/libggml-kvant.so"
if grep -rlF -e "$(cd "$(dirname "$0")/.." && pwd)" -e "${HOME:-/root}/" "$kvant" \
    >"$work/named"; then
    named=$(sed "s|$kvant/||" "$work/named" | tr '\n' ' ')
    fail "these files name a folder of this machine: $named"
fi

machine=x86_64 loader=/lib64/ld-linux-x86-64.so.2 emulator=
case $kvant in
    *-aarch64) machine=aarch64 loader=/lib/ld-linux-aarch64.so.1 ;;
esac
if [ "$machine" != "$(uname -m)" ]; then
    emulator=$(command -v "qemu-$machine") || { echo "not run: needs qemu-$machine"; exit 0; }
fi
as_root=
if [ -z "$emulator" ] && [ "$(id -u)" != 0 ]; then
    unshare -r true 2>/dev/null || { echo "not run: neither root nor user namespaces"; exit 0; }
    as_root="unshare -r"
fi
# lib64 has the loader, whose path is in every program; /lib is in its search path.
mkdir -p "$work/root/lib64" "$work/root/lib" "$work/root/proc"
for name in "${loader##*/}" libc.so.6 libm.so.6 libpthread.so.0 libdl.so.2; do
    path=$(find "$system/lib/$machine-linux-gnu" "$system"/lib64 "$system"/usr/lib64 \
        "$system"/lib "/usr/$machine-linux-gnu/lib" -maxdepth 1 -name "$name" 2>/dev/null | head -1)
    [ -n "$path" ] || fail "${system:-this machine} has no $name"
    cp -L "$path" "$work/root/lib/"
done
cp "$work/root/lib/${loader##*/}" "$work/root/lib64/"
mv "$kvant" "$work/root/kvant"
bare() {
    if [ -n "$emulator" ]; then # which looks for files in $work/root first
        program=$work/root$1
        shift
        "$emulator" -L "$work/root" "$program" "$@" >"$work/out" 2>&1
    else
        $as_root chroot "$work/root" "$@" >"$work/out" 2>&1
    fi
}
runs() {
    bare "$@" || { cat "$work/out" >&2; fail "failed: $*"; }
}
runs /kvant/bin/kvant --version
runs /kvant/bin/kvant codecs --head-dim 128
grep -q trellis-4 "$work/out" || fail "kvant codecs lists no trellis-4"
# The loader resolves every symbol and version of the libraries, as dlopen would.
for library in libkvant.so libggml-kvant.so; do
    runs $loader --list /kvant/lib/$library
    ! grep -q 'not found' "$work/out" || { cat "$work/out" >&2; fail "$library does not load"; }
done
echo "runs with nothing but $(strings -n 12 "$work/root/lib/libc.so.6" |
    grep -m1 -oE 'GNU C Library .*version [0-9.]+' | sed 's/.*version /glibc /;s/\.$//')"
