/* Pages of an engine on an NVIDIA GPU: rows are appended as fp16, sealed, attended to and decoded.
 * Then decode steps of a cache, which a CUDA graph may replay.
 *
 *     nvcc -x cu gpu.c $(pkg-config --cflags --libs kvant) -o gpu && ./gpu
 *
 * A program that compiles C links CUDA's runtime library (cudart). */
#include <kvant/cache.h>
#include <kvant/cuda.h>

#include <cuda_runtime_api.h>

#include "example.h"

enum { HEADS = 4, KV_HEADS = 2, DIM = 64, ROW = KV_HEADS * DIM, TOKENS = 300, BLOCKS = 5 };

static void *allocated[64]; /* on the GPU */
static int n_allocated;

static void *on_device(const void *host, size_t bytes)
{
    void *device = NULL;
    if (n_allocated == 64 || cudaMalloc(&device, bytes) != cudaSuccess ||
        cudaMemset(device, 0, bytes) != cudaSuccess ||
        (host && cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice) != cudaSuccess))
        exit(1);
    return allocated[n_allocated++] = device;
}

static float *device_numbers(size_t n)
{
    float *host = random_numbers(n), *device = on_device(host, n * sizeof *host);
    free(host);
    return device;
}

/* One role: its codecs, and pages of blocks whose kv heads follow each other. */
typedef struct half {
    kvant_codec *cpu_codec;
    kvant_cuda_codec *codec, *open_codec;
    kvant_cuda_pages pages, open;
    kvant_cuda_tables tables; /* numbers of cpu_codec, which an engine copies to the device */
} half;

static kvant_cuda_pages make_pages(const kvant_cuda_codec *codec)
{
    kvant_codec_info info = { .size = sizeof info };
    check(kvant_cuda_codec_get_info(codec, &info));
    const size_t block = KV_HEADS * info.page_bytes;
    return (kvant_cuda_pages){ on_device(NULL, BLOCKS * block), block, info.page_bytes };
}

static half make_half(kvant_role role)
{
    half made = { .tables = { .size = sizeof made.tables } };
    check(kvant_codec_create("turboquant-4", DIM, role, 0, &made.cpu_codec, NULL, 0));
    check(kvant_cuda_codec_tables(made.cpu_codec, &made.tables));
    check(kvant_cuda_codec_from(made.cpu_codec, &made.codec, NULL, 0));
    check(kvant_cuda_codec_create_open(made.codec, &made.open_codec));
    made.pages = make_pages(made.codec);
    made.open = make_pages(made.open_codec);
    return made;
}

/* All rows become fp16 rows of open blocks; then the first four blocks are sealed. */
static void append_and_seal(const half *k, const half *v, const float *rows)
{
    static const int32_t full[] = { 0, 1, 2, 3 };
    int64_t slots[TOKENS];
    for (int i = 0; i < TOKENS; i++)
        slots[i] = i;
    const int64_t *device_slots = on_device(slots, sizeof slots);
    const int32_t *blocks = on_device(full, sizeof full);
    kvant_cuda_append_args append = { .size = sizeof append,
                                      .k = { .codec = k->open_codec, .pages = k->open },
                                      .v = { .codec = v->open_codec, .pages = v->open },
                                      .type = KVANT_CUDA_F32,
                                      .n_tokens = TOKENS,
                                      .n_kv_heads = KV_HEADS,
                                      .slots = device_slots };
    append.k.rows = append.v.rows = on_device(rows, TOKENS * ROW * sizeof *rows);
    append.k.token_stride = append.v.token_stride = ROW;
    append.k.head_stride = append.v.head_stride = DIM;
    check(kvant_cuda_append(&append, NULL));
    const kvant_cuda_seal_args seal = {
        .size = sizeof seal,
        .k = { .codec = k->codec, .open = k->open, .sealed = k->pages },
        .v = { .codec = v->codec, .open = v->open, .sealed = v->pages },
        .n_blocks = 4,
        .n_kv_heads = KV_HEADS,
        .from = blocks,
        .to = blocks,
    };
    check(kvant_cuda_seal(&seal, NULL));
}

/* The queries as attention takes them: through W, if the codec of the keys has one. */
static float *transform(const half *k, float *q, const float *inverse_key_transform)
{
    if (k->tables.key_transform_size != (size_t)DIM * DIM)
        return q;
    float *out = on_device(NULL, HEADS * DIM * sizeof *out);
    const kvant_cuda_query_args args = { .size = sizeof args,
                                         .k_codec = k->codec,
                                         .batch = 1,
                                         .n_heads = HEADS,
                                         .n_kv_heads = KV_HEADS,
                                         .type = KVANT_CUDA_F32,
                                         .q = q,
                                         .q_batch_stride = HEADS * DIM,
                                         .q_head_stride = DIM,
                                         .inverse_key_transform = inverse_key_transform,
                                         .out = out };
    check(kvant_cuda_transform_queries(&args, NULL));
    return out;
}

/* One query token over all tokens: four sealed blocks, and open block 4. */
static void attend(const half *k, const half *v, float *out)
{
    static const int32_t table[] = { 0, 1, 2, 3, -1 - 4 }, length = TOKENS;
    const size_t bytes = kvant_cuda_attention_workspace(DIM);
    char reason[256];
    if (kvant_cuda_attention_check(k->codec, v->codec, reason, sizeof reason) != KVANT_OK) {
        fprintf(stderr, "%s\n", reason);
        exit(1);
    }
    float *device_out = on_device(NULL, HEADS * DIM * sizeof *out);
    const kvant_cuda_attention_args args = {
        .size = sizeof args,
        .k_codec = k->codec,
        .v_codec = v->codec,
        .k = k->pages,
        .v = v->pages,
        .k_open = k->open,
        .v_open = v->open,
        .block_table = on_device(table, sizeof table),
        .table_stride = BLOCKS,
        .blocks_per_row = BLOCKS,
        .lengths = on_device(&length, sizeof length),
        .batch = 1,
        .n_heads = HEADS,
        .n_kv_heads = KV_HEADS,
        .type = KVANT_CUDA_F32,
        .q = transform(k, device_numbers(HEADS * DIM), NULL),
        .q_batch_stride = HEADS * DIM,
        .q_head_stride = DIM,
        .out = device_out,
        .out_batch_stride = HEADS * DIM,
        .out_head_stride = DIM,
        .scale = 0.125f,
        .workspace = on_device(NULL, bytes), /* zeros */
        .workspace_bytes = bytes,
    };
    check(kvant_cuda_attention(&args, NULL));
    cudaMemcpy(out, device_out, HEADS * DIM * sizeof *out, cudaMemcpyDeviceToHost);
}

/* The rows of sealed block 0, for a store or another engine. */
static void decode(const half *v, float *rows)
{
    static const int32_t first = 0;
    float *out = on_device(NULL, 64 * ROW * sizeof *out);
    const kvant_cuda_decode_args args = { .size = sizeof args,
                                          .codec = v->codec,
                                          .pages = v->pages,
                                          .blocks = on_device(&first, sizeof first),
                                          .n_blocks = 1,
                                          .n_kv_heads = KV_HEADS,
                                          .type = KVANT_CUDA_F32,
                                          .out = out,
                                          .token_stride = ROW,
                                          .head_stride = DIM };
    check(kvant_cuda_decode(&args, NULL));
    cudaMemcpy(rows, out, 64 * ROW * sizeof *rows, cudaMemcpyDeviceToHost);
}

/* Steps of a cache: the calls between begin and append may be captured and replayed. */
static void run_steps(void)
{
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    params.n_layers = 1, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS;
    params.head_dim = DIM, params.max_tokens = 1024, params.device = "cuda";
    kvant_cache *cache;
    check(kvant_cache_create(&params, &cache));
    const int32_t sequence = kvant_sequence_create(cache);
    float *rows = device_numbers(100 * ROW), *q = device_numbers(HEADS * DIM);
    check(kvant_cache_append(cache, 0, sequence, rows, rows, 100));
    kvant_steps_info info = { .size = sizeof info };
    check(kvant_steps_begin(cache, &sequence, 1, &info));
    const kvant_step step = { .size = sizeof step,
                              .q = q,
                              .k = rows,
                              .v = rows,
                              .out = on_device(NULL, HEADS * DIM * sizeof(float)),
                              .type = KVANT_CUDA_F32 };
    for (uint32_t i = 0; i < 2 && i < info.n_steps; i++) {
        check(kvant_steps_next(cache));
        check(kvant_cache_step(cache, 0, &step));
    }
    check(kvant_cache_append(cache, 0, sequence, rows, rows, 2)); /* the rows of both steps */
    kvant_cache_free(&cache);
}

/* Whether a codec is there for GPUs; this needs no GPU. */
static void print_support(const char *spec)
{
    char reason[256];
    kvant_cuda_codec *codec;
    const kvant_status status =
        kvant_cuda_codec_create(spec, DIM, KVANT_ROLE_K, 0, &codec, reason, sizeof reason);
    printf("%s: %s\n", spec, status == KVANT_OK ? "on the GPU, too" : reason);
    kvant_cuda_codec_free(&codec);
}

static void free_half(half *made)
{
    kvant_cuda_codec_free(&made->codec);
    kvant_cuda_codec_free(&made->open_codec);
    kvant_codec_free(&made->cpu_codec);
}

int main(void)
{
    char reason[256];
    if (kvant_cuda_available(reason, sizeof reason) != KVANT_OK) {
        printf("skipped: %s\n", reason);
        return 77;
    }
    print_support("int-4");
    print_support("int-4:rotate=dense");
    half k = make_half(KVANT_ROLE_K), v = make_half(KVANT_ROLE_V);
    float *rows = random_numbers(TOKENS * ROW), out[HEADS * DIM];
    static float decoded[64 * ROW];
    append_and_seal(&k, &v, rows);
    attend(&k, &v, out);
    decode(&v, decoded);
    run_steps();
    double error = 0, energy = 0;
    for (int i = 0; i < 64 * ROW; i++) {
        error += (double)(decoded[i] - rows[i]) * (decoded[i] - rows[i]);
        energy += (double)rows[i] * rows[i];
    }
    printf("%d tokens: out[0] %.3f, squared error of block 0: %.4f\n", TOKENS, out[0],
           error / energy);
    free(rows);
    free_half(&k);
    free_half(&v);
    for (int i = 0; i < n_allocated; i++)
        cudaFree(allocated[i]);
    return 0;
}
