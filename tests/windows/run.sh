#!/bin/sh
# run.sh BUILD ZIP WHEEL ZIG FETCHED MODEL: runs what people download for Windows under Wine: the
# unit tests on the static library of the zip file, the bytes that codecs write, the Python package
# of the wheel, the command, and the plug-in with llama.cpp's real libraries. FETCHED is the folder
# of `fetch.py windows`.
#
# KVANT_PARTS names the parts to run: unit bytes command.
set -eu
[ $# = 6 ] || { echo "usage: run.sh BUILD ZIP WHEEL ZIG FETCHED MODEL" >&2; exit 2; }
zip=$(realpath "$2") wheel=$(realpath "$3") zig=$4 fetched=$5 model=$6
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
mkdir -p "$1"
build=$(cd "$1" && pwd)
parts=${KVANT_PARTS:-unit bytes command}

# Wine takes the names of files from the locale.
export WINEPREFIX="$build/wine" WINEDEBUG=-all LANG=C.UTF-8
# No window asks for Mono or Gecko, and no debugger starts when a program crashes.
export WINEDLLOVERRIDES="mscoree,mshtml,winedbg.exe="

rm -rf "$build/dist"
python3 -m zipfile -e "$zip" "$build/dist"
dist=$(find "$build/dist" -mindepth 1 -maxdepth 1 -type d)
mkdir -p "$build/programs"
# pip installs the wheel only if its name says that it is for this Python.
rm -rf "$build/python"
cp -r "$fetched/python" "$build/python"
python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
    --target "$build/python" --only-binary :all: --platform win_amd64 --python-version 3.11 "$wheel"
timeout 300 wine cmd /c ver >/dev/null 2>&1 || {
    echo "run: Wine does not start: wine cmd /c ver" >&2
    exit 1
}

compile() { # name of the program, its sources and more words
    name=$1
    shift
    "$zig" cc -target x86_64-windows-gnu -O1 -g0 -std=c11 "$@" -o "$build/programs/$name.exe" \
        >"$build/programs/$name.log" 2>&1 || { cat "$build/programs/$name.log" >&2; return 1; }
}

# These tests need what Windows has not: fork(), signals, libgomp, the linker's --wrap, a mock of a
# GPU, files of Linux in /proc, /sys and /dev, or llama.cpp's headers.
without="allocation_failure cache_allocation index_allocation available cuda_loader"
without="$without cuda_struct_sizes eval_texts host_threads learning_bytes llama_params openmp"
without="$without pack parallel trace unload"

unit_test() { # name
    test=$1 more=
    case $test in
        test_attention | test_attention_codes) more=$root/tests/unit/attention_setup.c ;;
        test_host | test_model_file)
            more="$root/integrations/llama.cpp/model_file.c"
            more="$more $root/integrations/llama.cpp/host_windows.c"
            ;;
        test_placement | test_mla) more=$root/integrations/llama.cpp/${test#test_}.c ;;
    esac
    # shellcheck disable=SC2086 # there may be no more sources
    compile "$test" -include "$here/posix.h" -I"$root/include" -I"$fetched/cmocka/include" \
        -D_XOPEN_SOURCE=700 -DKVANT_PAPERS=1 -DKVANT_VECTORS="\"$root/tests/vectors\"" \
        -DKVANT_TRACES="\"$root/tests/traces\"" "$root/tests/unit/$test.c" $more \
        "$build/programs/cmocka.o" "$dist/lib/libkvant.a" || return 1
    # Wine ends with 0 after a crash, so only the line that cmocka prints at the end counts.
    timeout 1200 wine "$build/programs/$test.exe" >"$build/programs/$test.out" 2>&1 || true
    if grep -aq 'FAILED' "$build/programs/$test.out" ||
        ! grep -aq 'PASSED' "$build/programs/$test.out"; then
        tail -n 20 "$build/programs/$test.out" >&2
        echo "$test: failed" >&2
        return 1
    fi
    echo "$test: $(grep -a PASSED "$build/programs/$test.out" | tr -d '\r')"
}

unit_tests() { # this one of two
    status=0 i=0
    for file in "$root"/tests/unit/test_*.c; do
        name=$(basename "$file" .c)
        case " $without " in *" ${name#test_} "*) continue ;; esac
        i=$((i + 1))
        [ $((i % 2)) = "$1" ] || continue
        unit_test "$name" || status=1
    done
    return $status
}

status=0
case " $parts " in
    *" unit "*)
        for header in INTTYPES STDINT STDLIB STRING TIME SIGNAL IO MALLOC; do
            echo "#define HAVE_${header}_H 1"
        done >"$build/programs/config.h"
        printf '#define HAVE_SNPRINTF 1\n#define HAVE_VSNPRINTF 1\n' >>"$build/programs/config.h"
        "$zig" cc -target x86_64-windows-gnu -O1 -g0 -w -DHAVE_CONFIG_H -I"$build/programs" \
            -I"$fetched/cmocka/include" -c "$fetched/cmocka/src/cmocka.c" \
            -o "$build/programs/cmocka.o"
        unit_tests 0 &
        unit_tests 1 || status=1
        wait $! || status=1
        ;;
esac
case " $parts " in
    *" bytes "*)
        compile same_bytes -include "$here/posix.h" -I"$root/include" -DKVANT_PAPERS=1 \
            "$root/tests/unit/same_bytes.c" "$dist/lib/libkvant.a"
        for level in c avx2; do
            timeout 600 wine "$build/programs/same_bytes.exe" $level | tr -d '\r' \
                >"$build/programs/same_bytes.txt"
            diff "$root/tests/unit/same_bytes.txt" "$build/programs/same_bytes.txt" || status=1
            echo "level $level: $(wc -l <"$build/programs/same_bytes.txt") hashes"
        done
        ;;
esac
case " $parts " in
    *" command "*)
        compile arguments "$here/arguments.c"
        compile interrupt "$here/interrupt.c"
        KVANT_DIST=$dist KVANT_RUNTIME_DLLS=$fetched/bin KVANT_TEST_MODEL=$model \
            KVANT_PROGRAMS=$build/programs KVANT_PYTHON_DLLS=$build/python \
            python3 "$here/test_windows.py" || status=1
        ;;
esac
exit $status
