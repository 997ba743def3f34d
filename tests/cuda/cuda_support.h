/* cuda_support.h - device arrays, random numbers, and a paged cache that the CPU encodes, for the
 * CUDA tests. */
#ifndef KVANT_TESTS_CUDA_SUPPORT_H
#define KVANT_TESTS_CUDA_SUPPORT_H

#include <cuda_runtime_api.h>

#include <kvant/cuda_kernels.h>

#include "../cases.h"

#define check_cuda(call)                                                                           \
    do {                                                                                           \
        cudaError_t error_ = (call);                                                               \
        if (error_ != cudaSuccess)                                                                 \
            fail_msg("%s: %s", #call, cudaGetErrorString(error_));                                 \
    } while (0)

/* Returns false, after a message, if there is no GPU; main then returns 77, which CTest counts as
 * skipped. An argument names the tests to run, with * for any text. The environment variable
 * KVANT_TEST_SHARED_KB limits the shared memory of blocks, as on smaller GPUs. KVANT_TEST_SEED
 * gives random tests other numbers. */
bool begin_tests(int argc, char **argv);

/* A program that runs the cases of its file on a GPU (cases.h). */
#define RUN_CASES_ON_GPU(start, stop)                                                              \
    int main(int argc, char **argv)                                                                \
    {                                                                                              \
        return begin_tests(argc, argv) ? run_cases(start, stop) : 77;                              \
    }

/* Whether KVANT_TEST_SMALL is set: then tests run only a part of their problems, for tools that
 * slow kernels down by a factor of a hundred. */
bool small_tests(void);

uint64_t random_bits(void);
float random_uniform(float low, float high);
/* Sum of 4 uniform numbers, with variance 1; now and then a large number, as keys have. */
float random_normal(void);

void *device_new(size_t bytes, int fill);
void device_free(const void *memory);
void *device_copy(const void *from, size_t bytes);
void device_read(void *to, const void *from, size_t bytes);

/* Rounds numbers to a type; returns them in this type, and as floats in `from`. */
void *to_type(const float *from, size_t n, kvant_cuda_type type, size_t *bytes);
float from_type(const void *from, size_t i, kvant_cuda_type type);
float round_to_type(float x, kvant_cuda_type type);

/* A pool of blocks, on the host and on the device. A block has the K and V pages of all kv
 * heads. */
typedef struct test_cache {
    kvant_codec *k, *v;
    kvant_cuda_codec *gpu_k, *gpu_v;
    kvant_codec_info k_info, v_info;
    uint32_t head_dim, n_kv_heads, n_blocks;
    size_t block_bytes, v_offset;
    uint8_t *pool, *gpu_pool;
} test_cache;

/* fill: value of the pool's bytes at the start. */
void cache_open(test_cache *cache, const char *k_spec, const char *v_spec, uint32_t head_dim,
                uint32_t n_kv_heads, uint32_t n_blocks, int fill);
void cache_close(test_cache *cache);
void *cache_page(const test_cache *cache, kvant_role role, uint32_t block, uint32_t kv_head);
kvant_cuda_pages cache_pages(const test_cache *cache, kvant_role role);

/* Rows on the device for the pages of a role, one behind another, without centre and scale. */
kvant_cuda_rows cache_rows(const test_cache *cache, kvant_role role, const void *rows);

/* A pool of exact blocks with as many blocks as a cache; all bytes are ones. The K pages of all kv
 * heads come first, then the V pages. */
typedef struct test_open_pool {
    kvant_codec *codec[2]; /* codec of each role */
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
