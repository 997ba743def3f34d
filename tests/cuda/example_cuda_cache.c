/* example_cuda_cache.c - examples/cache.c on a GPU: the same calls with device = "cuda" and device
 * pointers. */
#include <cuda_runtime_api.h>
#include <kvant/cache.h>

#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 30, HEADS = 9, KV_HEADS = 3, HEAD_DIM = 64, TOKENS = 256 };

/* n random numbers on the device. In an engine, a layer computes them. */
static float *device_numbers(int n)
{
    float *host = malloc((size_t)n * sizeof *host), *device = NULL;
    for (int i = 0; host && i < n; i++)
        host[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    if (!host || cudaMalloc((void **)&device, (size_t)n * sizeof *host) != cudaSuccess ||
        cudaMemcpy(device, host, (size_t)n * sizeof *host, cudaMemcpyHostToDevice) != cudaSuccess) {
        fprintf(stderr, "no memory on the GPU\n");
        exit(1);
    }
    free(host);
    return device;
}

int main(void)
{
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    params.n_layers = LAYERS, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS,
    params.head_dim = HEAD_DIM;
    params.max_tokens = 4096;
    params.device = "cuda";

    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("skipped: no CUDA device\n");
        return 77; /* CTest: skipped */
    }
    kvant_cache *cache;
    if (kvant_cache_create(&params, &cache) != KVANT_OK) {
        fprintf(stderr, "%s\n", kvant_error_message());
        return 1;
    }
    const int kv_width = KV_HEADS * HEAD_DIM, width = HEADS * HEAD_DIM;
    float *k = device_numbers(TOKENS * kv_width), *v = device_numbers(TOKENS * kv_width),
          *q = device_numbers(TOKENS * width), *out = device_numbers(width);
    int32_t sequence = kvant_sequence_create(cache);
    for (int t = 0; t < TOKENS; t++)
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            if (kvant_cache_append(cache, layer, sequence, k + t * kv_width, v + t * kv_width, 1) !=
                    KVANT_OK ||
                kvant_cache_attend(cache, layer, sequence, q + t * width, out, 1) != KVANT_OK) {
                fprintf(stderr, "%s\n", kvant_error_message());
                kvant_cache_free(&cache);
                return 1;
            }
    kvant_cache_info info = { .size = sizeof info };
    kvant_cache_get_info(cache, &info);
    printf("%d tokens: %zu bytes, %zu as fp16\n", TOKENS, info.bytes, info.f16_bytes);
    kvant_cache_free(&cache);
    cudaFree(k);
    cudaFree(v);
    cudaFree(q);
    cudaFree(out);
    return 0;
}
