/* selftest_gpu.h - a GPU that `kvant selftest` works on: memory that is freed all at once, and the
 * first error, after which nothing more is enqueued. selftest_gpu_layer.c works on it. */
#pragma once

#include "selftest.h"

#include <kvant/cuda.h>

typedef unsigned long long gpu_address;
enum { GPU_MOST_SPANS = 64 };

struct test_gpu {
    void *context, *stream;
    gpu_address spans[GPU_MOST_SPANS];
    size_t n_spans;
    char error[TEST_WHY_BYTES]; /* the first one since gpu_begin, or "" */
};

/* Makes this GPU the current one, forgets an earlier error and frees all memory. A kernel that
 * failed makes every later call of the process fail: then the error is there again. */
void gpu_begin(test_gpu *gpu);
/* Notes an error of kvant. False when there is an error by now, as of all below. */
bool gpu_did(test_gpu *gpu, kvant_status status, const char *what);
bool gpu_finish(test_gpu *gpu);

/* Memory filled with a byte; NULL after an error. */
void *gpu_new(test_gpu *gpu, size_t bytes, int fill);
/* Bytes from the host to `at` bytes behind `to`, within the GPU, and to the host: all are done. */
bool gpu_write(test_gpu *gpu, void *to, size_t at, const void *from, size_t bytes);
bool gpu_copy(test_gpu *gpu, void *to, const void *from, size_t bytes);
bool gpu_read(test_gpu *gpu, void *to, const void *from, size_t bytes);
bool gpu_fill(test_gpu *gpu, void *at, int value, size_t bytes);

void *gpu_upload(test_gpu *gpu, const void *from, size_t bytes);
/* n numbers of a host array, which has `period` numbers and is repeated, as bf16. */
void *gpu_upload_bf16(test_gpu *gpu, const float *rows, size_t period, size_t n);
size_t gpu_free_bytes(test_gpu *gpu);
