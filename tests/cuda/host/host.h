/* host.h - a library in the place of libkvant_cuda.so, and of the NVIDIA driver, whose device is this
 * computer: kernels are loops over the CPU's codecs. It serves the tests of how libkvant finds its
 * library (test_cuda_door), of caches (test_cuda_cache_host) and of `kvant bench cuda`.
 *
 * A test that opens the library itself can make its functions answer instead of compute, and reads
 * what they were given: host_control_get. */
#ifndef KVANT_TESTS_CUDA_HOST_H
#define KVANT_TESTS_CUDA_HOST_H

#include "../../../src/device/cuda_table.h"

typedef struct host_control {
    /* What the test sets. Zeros: a library of this build that computes. */
    uint32_t version, view_bytes; /* that the table shows instead of its own */
    kvant_status answer; /* of all functions that have a status, which compute nothing then */
    const char *said;    /* and their message */
    uint32_t no_memory;  /* the allocation of memory, counted from 1, that fails; 0: none */
    /* What was called last */
    const char *function; /* "host_append" and the like */
    kvant_code_kind kind; /* of a view */
    const kvant_cuda_codec *codec;
    unsigned char arguments[1024]; /* a copy, zeros behind it */
    kvant_cuda_kernel_attention_args
        attention; /* of the last attention, whatever was called behind it */
    kvant_cuda_stream stream;
    int freed; /* codecs */
    size_t shared_limit;
} host_control;

typedef host_control *host_control_fn(void);

#define HOST_CONTROL_FUNCTION "host_control_get"

#endif
