/* host.h - a mock of libkvant_cuda.so and of the NVIDIA driver, whose device is this computer:
 * kernels are loops over the CPU's codecs. It serves the tests of how libkvant finds its library
 * (test_cuda_loader), of caches (test_cuda_cache_host) and of `kvant bench cuda`.
 *
 * A test that opens the library itself can make its functions return a status instead of computing,
 * and can read their arguments (host_control_get). */
#ifndef KVANT_TESTS_CUDA_HOST_H
#define KVANT_TESTS_CUDA_HOST_H

#include <stdatomic.h>

#include "../../../src/device/cuda_table.h"

typedef struct host_control {
    /* Fields that the test sets. Zeros: a library of this build that computes. */
    /* values in the table in place of the library's own */
    uint32_t version, view_bytes, args_bytes;
    /* status that all functions with a status return, which then compute nothing */
    kvant_status answer;
    const char *said;   /* the message of that status */
    uint32_t no_memory; /* number of the memory allocation that fails, counted from 1; 0: none */
    /* The last call */
    const char *function; /* "host_append" and the like */
    kvant_code_kind kind; /* kind of the codes of a view */
    const kvant_cuda_codec *codec;
    unsigned char arguments[4096]; /* a copy, zeros behind it */
    /* The attention that was computed last. A captured call is computed when its graph is
     * launched. */
    kvant_cuda_kernel_attention_args attention;
    kvant_cuda_stream stream;
    uint32_t learned_queries; /* how many tokens' queries the last matrices were learned from */
    atomic_int freed;         /* number of freed codecs */
    size_t shared_limit;
} host_control;

typedef host_control *host_control_fn(void);

#define HOST_CONTROL_FUNCTION "host_control_get"

#endif
