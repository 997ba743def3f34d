# Warnings for all code here. In builds with tests a warning is an error. A compiler with more
# warnings can still build with -DCMAKE_COMPILE_WARNING_AS_ERROR=OFF.
set(KVANT_WARNINGS -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Wundef -Wvla -Wcast-qual)
# Kernels compiled as C++ mix signed and unsigned indices. In C++, GCC leaves that out of
# -Wconversion, but clang does not.
set(KVANT_CXX_WARNINGS -Wno-sign-conversion)
set(KVANT_C_WARNINGS -Wstrict-prototypes -Wmissing-prototypes)
add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:${KVANT_WARNINGS}>"
    "$<$<COMPILE_LANGUAGE:C>:${KVANT_C_WARNINGS}>"
    "$<$<COMPILE_LANGUAGE:CXX>:${KVANT_CXX_WARNINGS}>")
if(KVANT_BUILD_TESTS AND NOT DEFINED CMAKE_COMPILE_WARNING_AS_ERROR)
    set(CMAKE_COMPILE_WARNING_AS_ERROR ON)
endif()
