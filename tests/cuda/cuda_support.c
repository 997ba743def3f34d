/* cuda_support.c - see cuda_support.h. */
#include "cuda_support.h"

#include "../../src/base/half.h"
#include "../unit/open_codec.h"

static uint64_t state = 88172645463325252u;

bool begin_tests(int argc, char **argv)
{
    int devices = 0;
    const char *limit = getenv("KVANT_TEST_SHARED_KB");
    if (limit) {
        kvant_cuda_limit_shared_memory((size_t)atoi(limit) << 10);
        printf("blocks have %s KB of shared memory at most\n", limit);
    }
    choose_cases(argc, argv);
    if (getenv("KVANT_TEST_SEED"))
        state += strtoull(getenv("KVANT_TEST_SEED"), NULL, 10) << 32;
    if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0)
        return true;
    printf("skipped: no CUDA device\n");
    return false;
}

bool small_tests(void)
{
    return getenv("KVANT_TEST_SMALL") != NULL;
}

uint64_t random_bits(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

float random_uniform(float low, float high)
{
    return low + (high - low) * (float)(random_bits() >> 40) * 0x1p-24f;
}

float random_normal(void)
{
    float sum = 0;
    for (int i = 0; i < 4; i++)
        sum += random_uniform(-0.8660254f, 0.8660254f);
    return random_bits() % 97 == 0 ? 6 * sum : sum;
}

void *device_new(size_t bytes, int fill)
{
    void *p = NULL;
    check_cuda(cudaMalloc(&p, bytes ? bytes : 1));
    check_cuda(cudaMemset(p, fill, bytes ? bytes : 1));
    return p;
}

void device_free(const void *memory)
{
    check_cuda(cudaFree((void *)(uintptr_t)memory)); /* arguments of kernels are const */
}

void *device_copy(const void *from, size_t bytes)
{
    void *p = device_new(bytes, 0);
    check_cuda(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice));
    return p;
}

void device_read(void *to, const void *from, size_t bytes)
{
    check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

float from_type(const void *from, size_t i, kvant_cuda_type type)
{
    if (type == KVANT_CUDA_F32)
        return ((const float *)from)[i];
    uint16_t bits = ((const uint16_t *)from)[i];
    return type == KVANT_CUDA_F16 ? kvant_half_to_float(bits) : kvant_bf16_to_float(bits);
}

static uint16_t bits_of(float x, kvant_cuda_type type)
{
    return type == KVANT_CUDA_F16 ? kvant_half_from_float(x) : kvant_bf16_from_float(x);
}

float round_to_type(float x, kvant_cuda_type type)
{
    if (type == KVANT_CUDA_F32)
        return x;
    uint16_t bits = bits_of(x, type);
    return from_type(&bits, 0, type);
}

void *to_type(const float *from, size_t n, kvant_cuda_type type, size_t *bytes)
{
    *bytes = n * (type == KVANT_CUDA_F32 ? 4 : 2);
    void *to = malloc(*bytes);
    for (size_t i = 0; i < n; i++)
        if (type == KVANT_CUDA_F32)
            ((float *)to)[i] = from[i];
        else
            ((uint16_t *)to)[i] = bits_of(from[i], type);
    return to;
}

static void open_role(const char *spec, uint32_t head_dim, kvant_role role, kvant_codec **codec,
                      kvant_cuda_codec **gpu, kvant_codec_info *info)
{
    char text[256];
    *info = (kvant_codec_info){ .size = sizeof *info };
    if (kvant_codec_create(spec, head_dim, role, 7, codec, text, sizeof text) != KVANT_OK ||
        kvant_cuda_codec_from(*codec, gpu, text, sizeof text) != KVANT_OK)
        fail_msg("%s, head_dim %u: %s", spec, head_dim, text);
    assert_int_equal(kvant_codec_get_info(*codec, info), KVANT_OK);
}

void cache_open(test_cache *cache, const char *k_spec, const char *v_spec, uint32_t head_dim,
                uint32_t n_kv_heads, uint32_t n_blocks, int fill)
{
    *cache = (test_cache){ .head_dim = head_dim, .n_kv_heads = n_kv_heads, .n_blocks = n_blocks };
    open_role(k_spec, head_dim, KVANT_ROLE_K, &cache->k, &cache->gpu_k, &cache->k_info);
    open_role(v_spec, head_dim, KVANT_ROLE_V, &cache->v, &cache->gpu_v, &cache->v_info);
    cache->v_offset = cache->k_info.page_bytes * n_kv_heads;
    cache->block_bytes = cache->v_offset + cache->v_info.page_bytes * n_kv_heads;
    cache->pool = malloc(cache->block_bytes * n_blocks);
    memset(cache->pool, fill, cache->block_bytes * n_blocks);
    cache->gpu_pool = device_new(cache->block_bytes * n_blocks, fill);
}

void cache_close(test_cache *cache)
{
    kvant_codec_free(&cache->k);
    kvant_codec_free(&cache->v);
    kvant_cuda_codec_free(&cache->gpu_k);
    kvant_cuda_codec_free(&cache->gpu_v);
    free(cache->pool);
    cudaFree(cache->gpu_pool);
}

void *cache_page(const test_cache *cache, kvant_role role, uint32_t block, uint32_t kv_head)
{
    size_t page = role == KVANT_ROLE_K ? cache->k_info.page_bytes * kv_head
                                       : cache->v_offset + cache->v_info.page_bytes * kv_head;
    return cache->pool + cache->block_bytes * block + page;
}

kvant_cuda_pages cache_pages(const test_cache *cache, kvant_role role)
{
    return role == KVANT_ROLE_K
               ? (kvant_cuda_pages){ cache->gpu_pool, cache->block_bytes, cache->k_info.page_bytes }
               : (kvant_cuda_pages){ cache->gpu_pool + cache->v_offset, cache->block_bytes,
                                     cache->v_info.page_bytes };
}

kvant_cuda_rows cache_rows(const test_cache *cache, kvant_role role, const void *rows)
{
    return (kvant_cuda_rows){ .codec = role == KVANT_ROLE_K ? cache->gpu_k : cache->gpu_v,
                              .pages = cache_pages(cache, role),
                              .rows = rows,
                              .token_stride = (size_t)cache->n_kv_heads * cache->head_dim,
                              .head_stride = cache->head_dim };
}

void open_pool_new(test_open_pool *open, const test_cache *cache)
{
    *open = (test_open_pool){ .n_kv_heads = cache->n_kv_heads,
                              .n_blocks = cache->n_blocks,
                              .page_bytes = (size_t)64 * cache->head_dim * sizeof(uint16_t) };
    assert_int_equal(open_codec_create(cache->k, &open->codec[0]), KVANT_OK);
    assert_int_equal(open_codec_create(cache->v, &open->codec[1]), KVANT_OK);
    assert_int_equal(kvant_cuda_codec_create_open(cache->gpu_k, &open->gpu_codec[0]), KVANT_OK);
    assert_int_equal(kvant_cuda_codec_create_open(cache->gpu_v, &open->gpu_codec[1]), KVANT_OK);
    size_t bytes = 2 * open->page_bytes * open->n_kv_heads * open->n_blocks;
    open->pool = malloc(bytes);
    memset(open->pool, 0xff, bytes);
    open->gpu_pool = device_new(bytes, 0xff);
}

void open_pool_free(test_open_pool *open)
{
    for (int i = 0; i < 2; i++) {
        open_codec_free(&open->codec[i]);
        kvant_cuda_codec_free(&open->gpu_codec[i]);
    }
    free(open->pool);
    cudaFree(open->gpu_pool);
}

void open_pool_upload(const test_open_pool *open)
{
    check_cuda(cudaMemcpy(open->gpu_pool, open->pool,
                          2 * open->page_bytes * open->n_kv_heads * open->n_blocks,
                          cudaMemcpyHostToDevice));
}

void *open_page(const test_open_pool *open, kvant_role role, uint32_t block, uint32_t kv_head)
{
    return open->pool +
           ((2 * block + role) * (size_t)open->n_kv_heads + kv_head) * open->page_bytes;
}

kvant_cuda_pages open_pages(const test_open_pool *open, kvant_role role)
{
    size_t half = open->page_bytes * open->n_kv_heads;
    return (kvant_cuda_pages){ open->gpu_pool + role * half, 2 * half, open->page_bytes };
}
