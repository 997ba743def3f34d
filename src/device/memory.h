/* memory.h - memory of the GPU for the caches of src/cache, and kernels that they alone need:
 * calls of libkvant_cuda.so, since libkvant links no CUDA. Work is ordered on a stream of the
 * current GPU. The functions leave no message. */
#pragma once

#include <kvant/cuda.h>

#ifdef __cplusplus
extern "C" {
#endif

/* *device = number of the calling thread's current GPU. */
kvant_status kvant_cuda_device_current(int *device);

/* Zeroed; KVANT_ERR_MEMORY when there is not enough. *memory is NULL after an error. Both wait for
 * the GPU. */
kvant_status kvant_cuda_memory_new(void **memory, size_t bytes);
void kvant_cuda_memory_free(void *memory); /* NULL is fine */

/* Zeroed memory of the host that the GPU reads and writes itself. */
kvant_status kvant_cuda_host_new(void **memory, size_t bytes);
void kvant_cuda_host_free(void *memory); /* NULL is fine */

/* To the device, from the host or the device; the host's bytes may change after the call. */
kvant_status kvant_cuda_memory_copy(void *to, const void *from, size_t bytes,
                                    kvant_cuda_stream stream);
/* To the host; waits for the stream. */
kvant_status kvant_cuda_memory_read(void *to, const void *from, size_t bytes,
                                    kvant_cuda_stream stream);
kvant_status kvant_cuda_memory_clear(void *memory, size_t bytes, kvant_cuda_stream stream);

/* Two arrays of numbers on the device; n is 0 where one is not to be looked at. */
typedef struct kvant_cuda_numbers {
    const float *at[2];
    size_t n[2];
    uint32_t *room; /* device: 2 words */
} kvant_cuda_numbers;

/* largest[i] = the largest magnitude in array i, 0 for no numbers, a NaN when there is one. Waits. */
kvant_status kvant_cuda_largest(const kvant_cuda_numbers *numbers, float *largest,
                                kvant_cuda_stream stream);

/* Adds rows first, first + n / taken, ... of n rows to sums, minima and maxima per channel of KVANT_STATISTICS_PARTS
 * parts, as src/cache/versions.c does on the host; numbers that are not finite count as 0. Arrays are on the device. */
typedef struct kvant_cuda_note_args {
    const float *rows;
    size_t stride, width;           /* of rows; channels */
    uint32_t n, taken, seen, parts; /* seen: rows that were added before */
    float *sum, *min, *max;         /* parts x width */
} kvant_cuda_note_args;

kvant_status kvant_cuda_note_rows(const kvant_cuda_note_args *args, kvant_cuda_stream stream);

/* out[i] = after sum over j of matrix[j][i] before_j (rows_j - center_j) / divisor_j, of every row; matrices of kv heads
 * are matrix_stride numbers apart, 0: all have the same. rows and out may be the same. Arrays are on the device; NULL leaves a factor out. */
typedef struct kvant_cuda_turn_args {
    const float *rows; /* n_tokens x n_heads x head_dim */
    size_t token_stride, head_stride;
    uint32_t n_tokens, n_heads, n_kv_heads, head_dim;
    const float *center, *divisor, *before, *after; /* n_kv_heads x head_dim */
    const float *matrix;
    size_t matrix_stride;
    float *out;
    size_t out_token_stride, out_head_stride;
} kvant_cuda_turn_args;

kvant_status kvant_cuda_turn(const kvant_cuda_turn_args *args, kvant_cuda_stream stream);

/* kvant_cuda_codec_from with codecs of a dense rotation too. Their rows, queries and outputs are the caller's to turn:
 * append takes transformed rows alone. */
kvant_status kvant_cuda_codec_unturned(const kvant_codec *source, kvant_cuda_codec **codec,
                                       char *err, size_t errlen);

#ifdef __cplusplus
}
#endif
