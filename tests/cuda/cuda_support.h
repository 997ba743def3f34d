/* cuda_support.h - what the CUDA tests share: device arrays, random numbers, a paged cache written by the CPU
 * encoder. */
#ifndef KVANT_TESTS_CUDA_SUPPORT_H
#define KVANT_TESTS_CUDA_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#include <kvant/cuda_kernels.h>

#define check_cuda(call)                                                                           \
    do {                                                                                           \
        cudaError_t error_ = (call);                                                               \
        if (error_ != cudaSuccess)                                                                 \
            fail_msg("%s: %s", #call, cudaGetErrorString(error_));                                 \
    } while (0)

/* False, after saying so, without a GPU: main returns 77 then, which CTest counts as skipped. With an argument the tests run
 * that it names, with * for anything. The environment variable KVANT_TEST_SHARED_KB makes blocks have no more shared memory,
 * as on smaller GPUs; KVANT_TEST_SEED gives random tests other numbers. */
bool begin_tests(int argc, char **argv);

/* Whether KVANT_TEST_SMALL is set: one problem in so many, for tools that slow kernels down by a hundred. */
bool small_tests(void);

uint64_t random_bits(void);
float random_uniform(float low, float high);
/* Sum of 4 uniform numbers, variance 1; now and then a large one, as keys have. */
float random_normal(void);

void *device_new(size_t bytes, int fill);
void device_free(const void *memory);
void *device_copy(const void *from, size_t bytes);
void device_read(void *to, const void *from, size_t bytes);

/* Numbers of a type, rounded to it, and as float again. */
void *to_type(const float *from, size_t n, kvant_cuda_type type, size_t *bytes);
float from_type(const void *from, size_t i, kvant_cuda_type type);
float round_to_type(float x, kvant_cuda_type type);

/* A pool of blocks, K and V pages of all kv heads of a block side by side, on the host and on the device. */
typedef struct test_cache {
    kvant_codec *k, *v;
    kvant_cuda_codec *gpu_k, *gpu_v;
    kvant_codec_info k_info, v_info;
    uint32_t head_dim, n_kv_heads, n_blocks;
    size_t block_bytes, v_offset;
    uint8_t *pool, *gpu_pool;
} test_cache;

/* fill: what the pool's bytes are before anything is written. */
void cache_open(test_cache *cache, const char *k_spec, const char *v_spec, uint32_t head_dim,
                uint32_t n_kv_heads, uint32_t n_blocks, int fill);
void cache_close(test_cache *cache);
void *cache_page(const test_cache *cache, kvant_role role, uint32_t block, uint32_t kv_head);
kvant_cuda_pages cache_pages(const test_cache *cache, kvant_role role);

/* A pool of open blocks with as many blocks as a cache, all bytes ones; K pages of all kv heads first,
 * then V. */
typedef struct test_open_pool {
    kvant_codec *codec[2]; /* of each role */
    kvant_cuda_codec *gpu_codec[2];
    uint32_t n_kv_heads, n_blocks;
    size_t page_bytes;
    uint8_t *pool, *gpu_pool;
} test_open_pool;

void open_pool_new(test_open_pool *open, const test_cache *cache);
void open_pool_free(test_open_pool *open);
void open_pool_upload(const test_open_pool *open);
void *open_page(const test_open_pool *open, kvant_role role, uint32_t block, uint32_t kv_head);
kvant_cuda_pages open_pages(const test_open_pool *open, kvant_role role);

#endif
