/* memory.h - memory of the GPU for the caches of src/cache, and kernels that only they need.
 * libkvant links no CUDA, so these are calls of libkvant_cuda.so. Work is ordered on a stream of
 * the current GPU. The functions leave no message. */
#pragma once

#include <kvant/cuda.h>

#ifdef __cplusplus
extern "C" {
#endif

/* *device = the number of the calling thread's current GPU. */
kvant_status kvant_cuda_device_current(int *device);

/* Allocates zeroed memory on the GPU. KVANT_ERR_MEMORY: the GPU has too little. *memory is NULL
 * after an error. Both functions wait for the GPU. */
kvant_status kvant_cuda_memory_new(void **memory, size_t bytes);
void kvant_cuda_memory_free(void *memory); /* NULL is fine */

/* Zeroed host memory that the GPU reads and writes directly. */
kvant_status kvant_cuda_host_new(void **memory, size_t bytes);
void kvant_cuda_host_free(void *memory); /* NULL is fine */

/* Copies to the device, from the host or the device. Host bytes may change after the call. */
kvant_status kvant_cuda_memory_copy(void *to, const void *from, size_t bytes,
                                    kvant_cuda_stream stream);
/* Copies to the host and waits for the stream. */
kvant_status kvant_cuda_memory_read(void *to, const void *from, size_t bytes,
                                    kvant_cuda_stream stream);
kvant_status kvant_cuda_memory_clear(void *memory, size_t bytes, kvant_cuda_stream stream);

/* Two arrays of numbers on the device. n is 0 for an array that is not to be read. */
typedef struct kvant_cuda_values {
    const float *at[2];
    size_t n[2];
    uint32_t *room; /* device: 2 words */
} kvant_cuda_values;

/* largest[i] = the largest magnitude in array i: 0 if it has no numbers, NaN if it has a NaN. Waits
 * for the stream. */
kvant_status kvant_cuda_largest(const kvant_cuda_values *numbers, float *largest,
                                kvant_cuda_stream stream);

/* Adds `taken` of n rows, spread evenly over them, to the sums, minima and maxima per channel of
 * KVANT_STATISTICS_PARTS parts. src/cache/statistics.c does the same on the host. Numbers that are
 * not finite count as 0. Arrays are on the device. */
typedef struct kvant_cuda_note_args {
    const float *rows;
    size_t stride, width;           /* between rows; channels */
    uint32_t n, taken, seen, parts; /* seen: rows that were added before */
    float *sum, *min, *max;         /* parts x width */
} kvant_cuda_note_args;

kvant_status kvant_cuda_note_rows(const kvant_cuda_note_args *args, kvant_cuda_stream stream);

/* Multiplies every row by a matrix:
 *
 *     out[i] = after_i * sum over j of matrix[j][i] before_j (rows_j - center_j) / divisor_j
 *
 * The matrices of kv heads are matrix_stride numbers apart; 0: all kv heads have the same matrix.
 * rows and out may be the same. Arrays are on the device. A factor that is NULL is left out. */
typedef struct kvant_cuda_rotate_rows_args {
    const float *rows; /* n_tokens x n_heads x head_dim */
    size_t token_stride, head_stride;
    uint32_t n_tokens, n_heads, n_kv_heads, head_dim;
    const float *center, *divisor, *before, *after; /* n_kv_heads x head_dim */
    const float *matrix;
    size_t matrix_stride;
    float *out;
    size_t out_token_stride, out_head_stride;
} kvant_cuda_rotate_rows_args;

kvant_status kvant_cuda_rotate_rows(const kvant_cuda_rotate_rows_args *args,
                                    kvant_cuda_stream stream);

/* kvant_cuda_codec_from, but it also accepts codecs with a dense rotation. The caller has to rotate
 * their rows, queries and outputs (kvant_cuda_rotate_rows), because append then takes only
 * transformed rows. */
kvant_status kvant_cuda_codec_unrotated(const kvant_codec *source, kvant_cuda_codec **codec,
                                        char *err, size_t errlen);

#ifdef __cplusplus
}
#endif
