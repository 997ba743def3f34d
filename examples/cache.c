/* A cache of a model with the shape of SmolLM2-135M: tokens go in layer by layer, attention comes
 * out.
 *
 *     cc cache.c $(pkg-config --cflags --libs kvant) -o cache && ./cache [model.kvcal]
 *
 * c.md says how to install kvant first and where pkg-config finds it.
 *
 * Keys, values and queries are random here; in an engine they come from a layer. */
#include <kvant/cache.h>

#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 30, HEADS = 9, KV_HEADS = 3, HEAD_DIM = 64, TOKENS = 256 };

static void fill(float *x, int n)
{
    for (int i = 0; i < n; i++)
        x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

int main(int argc, char **argv)
{
    static float k[KV_HEADS * HEAD_DIM], v[KV_HEADS * HEAD_DIM], q[HEADS * HEAD_DIM],
        out[HEADS * HEAD_DIM];
    kvant_cache_params params = KVANT_CACHE_PARAMS; /* preset balanced, on the CPU, all threads */
    params.n_layers = LAYERS, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS,
    params.head_dim = HEAD_DIM;
    params.max_tokens = 4096;
    params.calibration = argc > 1 ? argv[1] : NULL;

    kvant_cache *cache;
    if (kvant_cache_create(&params, &cache) != KVANT_OK) {
        fprintf(stderr, "%s\n", kvant_error_message());
        return 1;
    }
    int32_t sequence = kvant_sequence_create(cache);
    for (int t = 0; t < TOKENS; t++)
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            fill(k, KV_HEADS * HEAD_DIM);
            fill(v, KV_HEADS * HEAD_DIM);
            fill(q, HEADS * HEAD_DIM);
            if (kvant_cache_append(cache, layer, sequence, k, v, 1) != KVANT_OK ||
                kvant_cache_attend(cache, layer, sequence, q, out, 1) != KVANT_OK) {
                fprintf(stderr, "%s\n", kvant_error_message());
                kvant_cache_free(&cache);
                return 1;
            }
        }
    kvant_cache_info info = { .size = sizeof info };
    kvant_cache_get_info(cache, &info);
    printf("%d tokens: %zu bytes, %zu as fp16\n", TOKENS, info.bytes, info.f16_bytes);
    kvant_cache_free(&cache);
    return 0;
}
