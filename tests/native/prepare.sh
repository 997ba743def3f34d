#!/bin/sh
# prepare.sh MACHINE FOLDER ARCHIVE WHEEL RUNTIME MODEL [PYTHON]: fills FOLDER with what run.py runs
# on MACHINE, which need not be this one: the unpacked archive of make dist, unit tests and
# same_bytes that are linked with its static library, the wheel, llama.cpp's libraries of RUNTIME,
# and a model. For Windows, PYTHON is the folder of `fetch.py windows`, into which the wheel is
# installed. The compiler is zig, the C library that of make dist.
set -eu
[ $# -ge 6 ] || {
    echo "usage: prepare.sh MACHINE FOLDER ARCHIVE WHEEL RUNTIME MODEL [PYTHON]" >&2
    exit 2
}
machine=$1 archive=$3 wheel=$4 runtime=$5 model=$6 python=${7:-}
root=$(cd "$(dirname "$0")/../.." && pwd)
fetch="python3 $root/scripts/fetch.py"
zig=$($fetch zig) cmocka=$($fetch cmocka)
. "$root/scripts/zig_tools.sh"
rm -rf "$2"
mkdir -p "$2/programs" "$2/dist"
folder=$(cd "$2" && pwd)
programs=$folder/programs
echo "$machine" >"$folder/machine"

case $archive in
    *.zip) python3 -m zipfile -e "$archive" "$folder/unpacked" ;;
    *) mkdir "$folder/unpacked" && tar -C "$folder/unpacked" -xf "$archive" ;;
esac
mv "$folder"/unpacked/kvant-*/* "$folder/dist/"
rm -r "$folder/unpacked"
cp "$wheel" "$folder/"
cp -r "$runtime" "$folder/runtime"
cp "$model" "$folder/model.gguf"
if [ -n "$python" ]; then
    cp -r "$python" "$folder/python"
    # pip installs the wheel only if its name says that it is for this Python.
    python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
        --target "$folder/python" --only-binary :all: --platform "$tag" --python-version 3.11 \
        "$wheel"
fi

# These tests need a mock of a GPU, libgomp, a shared library beside them, or llama.cpp's headers.
without="cuda_loader cuda_struct_sizes openmp unload eval_texts llama_params"
plugin=$root/integrations/llama.cpp
os=posix ending='' more_words=-D_GNU_SOURCE
case $cmake_system in
    Windows) # has neither fork(), signals nor the files of Linux in /proc, /sys and /dev; ends
        # lines by two characters; a GPU's states are not packed there (align, pack)
        without="$without align available concurrent log pack parallel trace"
        os=windows ending=.exe more_words="-include $root/tests/native/windows.h"
        ;;
    Darwin) # has no barriers for threads
        without="$without concurrent"
        more_words=-D_DARWIN_C_SOURCE
        ;;
esac

compile() { # name of the program, its sources and more words
    name=$1
    shift
    # shellcheck disable=SC2086 # the words are meant to be split
    "$zig" cc -target $target -O1 -g0 -std=c11 -pthread $more_words "$@" \
        -o "$programs/$name$ending" >"$folder/$name.log" 2>&1 || {
        cat "$folder/$name.log" >&2
        return 1
    }
    rm "$folder/$name.log"
}

unit_test() { # name
    case $1 in
        test_attention | test_attention_codes) more=$root/tests/unit/attention_setup.c ;;
        test_host | test_model_file)
            more="$plugin/model_file.c $plugin/gguf.c $plugin/host_$os.c" ;;
        test_align) more="$plugin/align.c $plugin/pack.c $plugin/host_hints.c $plugin/host_$os.c" ;;
        test_pack) more="$plugin/pack.c $plugin/host_hints.c $plugin/host_$os.c" ;;
        test_log) more="$plugin/log.c $plugin/host_$os.c" ;;
        test_trace) more="$plugin/trace.c $plugin/log.c $plugin/host_$os.c" ;;
        test_placement | test_mla) more=$plugin/${1#test_}.c ;;
        *) more='' ;;
    esac
    # run.py starts them in the root of the source, whatever its path is there.
    # shellcheck disable=SC2086
    compile "$1" -I"$root/include" -I"$cmocka/include" -DKVANT_PAPERS=1 \
        -DKVANT_VECTORS='"tests/vectors"' -DKVANT_TRACES='"tests/traces"' \
        "$root/tests/unit/$1.c" $more "$folder/cmocka.o" "$folder/dist/lib/libkvant.a"
}

unit_tests() { # this one of two
    status=0 i=0
    for file in "$root"/tests/unit/test_*.c; do
        test=$(basename "$file" .c)
        # These call functions that the linker's option --wrap makes. Not all linkers have it.
        grep -q '__real_\|"refused.h"' "$file" && continue
        case " $without " in *" ${test#test_} "*) continue ;; esac
        i=$((i + 1))
        [ $((i % 2)) = "$1" ] || continue
        unit_test "$test" || status=1
    done
    return $status
}

mkdir "$folder/config"
for header in INTTYPES STDINT STDLIB STRING TIME SIGNAL IO MALLOC STRINGS UNISTD; do
    echo "#define HAVE_${header}_H 1"
done >"$folder/config/config.h"
printf '#define HAVE_SNPRINTF 1\n#define HAVE_VSNPRINTF 1\n' >>"$folder/config/config.h"
if [ "$cmake_system" != Windows ]; then
    sed -i '/HAVE_IO_H\|HAVE_MALLOC_H/d' "$folder/config/config.h"
fi
"$zig" cc -target $target -O1 -g0 -w -DHAVE_CONFIG_H -I"$folder/config" -I"$cmocka/include" \
    -c "$cmocka/src/cmocka.c" -o "$folder/cmocka.o"
unit_tests 0 &
status=0
unit_tests 1 || status=1
wait $! || status=1
compile same_bytes -I"$root/include" -DKVANT_PAPERS=1 "$root/tests/unit/same_bytes.c" \
    "$folder/dist/lib/libkvant.a" || status=1
if [ "$cmake_system" = Windows ]; then
    more_words=
    compile arguments "$root/tests/windows/arguments.c" || status=1
    compile interrupt "$root/tests/windows/interrupt.c" || status=1
fi
rm -r "$folder/config" "$folder/cmocka.o"
find "$programs" -name '*.pdb' -delete
exit $status
