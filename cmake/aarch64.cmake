# aarch64.cmake - cross compiles for 64-bit ARM Linux with the distribution's compiler (Debian:
# gcc-aarch64-linux-gnu) and runs what it built under qemu-user:
#
#   cmake -S . -B build-aarch64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake
#
# KVANT_QEMU_CPU names the processor that is emulated, qemu-aarch64 -cpu help lists them.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(KVANT_QEMU_CPU max CACHE STRING "Processor that tests of a cross build run on")
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64;-cpu;${KVANT_QEMU_CPU};-L;/usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
