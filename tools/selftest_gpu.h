/* selftest_gpu.h - a GPU that `kvant selftest` works on: memory that is freed all at once, and the
 * first error, after which nothing more is enqueued. */
#ifndef KVANT_TOOLS_SELFTEST_GPU_H
#define KVANT_TOOLS_SELFTEST_GPU_H

#include "selftest.h"
#include "selftest_driver.h"

#include <kvant/cuda.h>

enum { GPU_MOST_SPANS = 64 };

struct test_gpu {
    const gpu_driver *driver;
    void *stream, *begin, *end; /* a stream and two events */
    gpu_address spans[GPU_MOST_SPANS];
    size_t n_spans;
    char error[TEST_WHY_BYTES]; /* the first one since gpu_begin, or "" */
    bool lost;                  /* an error that the device does not recover from */
};

/* Forgets an earlier error and frees all memory. */
void gpu_begin(test_gpu *gpu);

/* Memory filled with a byte, or a copy of the host's; NULL after an error. */
void *gpu_new(test_gpu *gpu, size_t bytes, int fill);
void *gpu_upload(test_gpu *gpu, const void *from, size_t bytes);
/* Waits for all work. */
bool gpu_read(test_gpu *gpu, void *to, const void *from, size_t bytes);

/* Notes an error: of a function of the driver, and of kvant's. False when there is one by now. */
bool gpu_ok(test_gpu *gpu, int result, const char *what);
bool gpu_did(test_gpu *gpu, kvant_status status, const char *what);

/* The rows of a host array as bf16, which has them exactly. */
void *gpu_upload_bf16(test_gpu *gpu, const float *rows, size_t n);

/* Seconds between both events. */
void gpu_start(test_gpu *gpu);
double gpu_stop(test_gpu *gpu);

static inline gpu_address gpu_at(const void *memory)
{
    return (gpu_address)(uintptr_t)memory;
}

#endif /* KVANT_TOOLS_SELFTEST_GPU_H */
