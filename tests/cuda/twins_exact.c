/* twins_exact.c - see twins.h: caches of presets, which keep their first and newest tokens
 * exact. */
#include "twins.h"

#include <kvant/settings.h>

#include "../../src/cache/cuda_layers.h"

/* Largest step, and the newest tokens that stay exact, in a context of 2048 tokens: twins.c. */
enum { STEP = 256, NEWEST = 64 };

/* The rows that a sequence got, by layer. */
typedef struct given {
    uint32_t n;
    float k[LAYERS][MOST][WIDTH], v[LAYERS][MOST][WIDTH];
} given;

static void append(twins *t, int32_t s, given *g, uint32_t n)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        float *k = twins_rows(t, (size_t)n * WIDTH, 0.5f),
              *v = twins_rows(t, (size_t)n * WIDTH, 0.5f);
        memcpy(g->k[layer][g->n], k, n * sizeof *g->k[layer]);
        memcpy(g->v[layer][g->n], v, n * sizeof *g->v[layer]);
        if (twins_append_rows(t, s, layer, k, v, n) != KVANT_OK)
            fail_msg("%s: %s", t->spec->preset, kvant_error_message());
        free(k);
        free(v);
    }
    g->n += n;
}

/* Rows of fp16 pass through a rotation and a matrix, so each number errs by at most 2^-11 of the
 * transformed row's number. At 6 bits, the most that presets have, the error of normal numbers is
 * 2^-6 of them in the mean. */
static double error_of(const float *got, const float *want)
{
    double off = 0, size = 0;
    for (uint32_t i = 0; i < WIDTH; i++) {
        off += pow((double)got[i] - (double)want[i], 2);
        size += pow((double)want[i], 2);
    }
    return sqrt(off / size);
}

static bool is_exact(const float *got, const float *want)
{
    return error_of(got, want) < 0x1p-8;
}

/* Finds the tokens whose keys and values are exact in every layer. */
static void find_exact(twins *t, int32_t s, const given *g, bool exact[MOST])
{
    static float k[MOST][WIDTH], v[MOST][WIDTH];
    const size_t bytes = g->n * sizeof *k;
    void *on_gpu[] = { device_new(bytes, 0xff), device_new(bytes, 0xff) };
    memset(exact, 1, MOST * sizeof *exact);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        assert_int_equal(kvant_cache_read(t->gpu, layer, s, 0, g->n, on_gpu[0], on_gpu[1]),
                         KVANT_OK);
        device_read(k, on_gpu[0], bytes);
        device_read(v, on_gpu[1], bytes);
        for (uint32_t i = 0; i < g->n; i++) {
            exact[i] = exact[i] && is_exact(k[i], g->k[layer][i]) && is_exact(v[i], g->v[layer][i]);
            assert_true(error_of(k[i], g->k[layer][i]) < 0.5);
            assert_true(error_of(v[i], g->v[layer][i]) < 0.5);
        }
    }
    cudaFree(on_gpu[0]);
    cudaFree(on_gpu[1]);
}

/* The first 64 tokens, the last `step` tokens, and the newest tokens before them are exact. */
static void check_exact(twins *t, int32_t s, const given *g, uint32_t step)
{
    bool exact[MOST];
    uint32_t n = 0;
    find_exact(t, s, g, exact);
    for (uint32_t i = 0; i < g->n; i++) {
        n += exact[i];
        if ((i < 64 || i + step + NEWEST >= g->n) && !exact[i])
            fail_msg("%s: token %u of %u is not exact after a step of %u", t->spec->preset, i, g->n,
                     step);
    }
    assert_true(n <= 64 * ((cuda_memory *)t->gpu->memory)->n_exact);
}

/* Once the CPU seals its pages, too, codes are the same, and so are blocks that stay exact. */
static void compare_codes(twins *t, int32_t s)
{
    for (uint32_t i = 0; i < 2 * LAYERS; i++) {
        kvant_tensor *cpu = t->cpu->tensors[i], *gpu = t->gpu->tensors[i];
        uint8_t *bytes = malloc(gpu->block_bytes);
        kvant_open_seal_due(&cpu, 1, true, 1);
        for (uint32_t j = 1; j < t->gpu->sequences[s].n_blocks; j++) {
            const uint32_t block = (uint32_t)t->gpu->sequences[s].table[j];
            assert_int_equal(t->cpu->sequences[s].table[j], block);
            kvant_pages_read(gpu, bytes, kvant_sealed_page(gpu, block, 0), gpu->block_bytes);
            if (memcmp(bytes, kvant_sealed_page(cpu, block, 0), gpu->block_bytes) != 0)
                fail_msg("%s: block %u of tensor %u has other codes than on the CPU",
                         t->spec->preset, j, i);
        }
        free(bytes);
    }
    const size_t used = twins_export_from(t, t->cpu, s, 0, t->of_cpu);
    assert_int_equal(used, twins_export_from(t, t->gpu, s, 0, t->of_gpu));
    assert_memory_equal(t->of_cpu, t->of_gpu, used);
}

/* Imports the first and the last block of a sequence into a new cache on the GPU. */
static void import_exact(twins *t, const kvant_cache *from, const given *g)
{
    static given both;
    const uint32_t last = g->n / 64 * 64;
    bool exact[MOST];
    twins other;
    twins_new(&other, t->spec, SEQUENCES);
    kvant_sequence_create(other.gpu);
    both = *g;
    both.n = 64 + g->n - last;
    for (uint32_t i = 0; i < 2; i++) {
        const size_t used = twins_export_from(t, from, 1, i ? last / 64 : 0, t->of_cpu);
        if (kvant_sequence_import(other.gpu, 0, t->of_cpu, used) != KVANT_OK)
            fail_msg("%s: %s", t->spec->preset, kvant_error_message());
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        memcpy(both.k[layer][64], g->k[layer][last], (g->n - last) * sizeof *g->k[layer]);
        memcpy(both.v[layer][64], g->v[layer][last], (g->n - last) * sizeof *g->v[layer]);
    }
    find_exact(&other, 0, &both, exact);
    for (uint32_t i = 0; i < both.n; i++)
        assert_true(exact[i]);
    twins_free(&other);
}

/* A fork's copy of the last block, and blocks of both caches in another cache. */
static void copies_stay_exact(twins *t, given *g)
{
    assert_int_equal(kvant_sequence_fork(t->cpu, 0), 1);
    assert_int_equal(kvant_sequence_fork(t->gpu, 0), 1);
    append(t, 1, g, 3);
    check_exact(t, 1, g, 3);
    import_exact(t, t->cpu, g);
    import_exact(t, t->gpu, g);
}

/* A sequence that is cut in a block of codes gets a page for its next rows. The block's older rows
 * come from their codes. */
static void cut(twins *t, given *g, uint32_t length)
{
    bool exact[MOST];
    find_exact(t, 1, g, exact);
    assert_false(exact[length - 1]);
    assert_int_equal(kvant_sequence_truncate(t->cpu, 1, length), KVANT_OK);
    assert_int_equal(kvant_sequence_truncate(t->gpu, 1, length), KVANT_OK);
    g->n = length;
    append(t, 1, g, 3);
    find_exact(t, 1, g, exact);
    assert_true(exact[length] && exact[length + 2]);
}

/* Appends a batch that fills more blocks than there are pages. */
static void append_long(const spec_pair *spec, given *g)
{
    twins t;
    memset(g, 0, sizeof *g);
    twins_new(&t, spec, SEQUENCES);
    kvant_sequence_create(t.cpu);
    kvant_sequence_create(t.gpu);
    append(&t, 0, g, 512);
    check_exact(&t, 0, g, 192);
    compare_codes(&t, 0);
    twins_free(&t);
}

void twins_exact(const spec_pair *spec)
{
    static given g;
    static const uint32_t sizes[] = { 1, 30, 64, 100, STEP };
    twins t;
    memset(&g, 0, sizeof g);
    twins_new(&t, spec, SEQUENCES);
    kvant_sequence_create(t.cpu);
    kvant_sequence_create(t.gpu);
    while (g.n < 600) {
        uint32_t n = 1 + (uint32_t)(random_bits() % sizes[random_bits() % 5]);
        n = n < 600 - g.n ? n : 600 - g.n;
        append(&t, 0, &g, n);
        check_exact(&t, 0, &g, n);
        if (g.n > 64)
            twins_attend_rows(&t, 0, n < 20 ? n : 20);
    }
    copies_stay_exact(&t, &g);
    if (spec->calibrated)
        compare_codes(&t, 0);
    cut(&t, &g, 132);
    twins_free(&t);
    if (spec->calibrated)
        append_long(spec, &g);
}

/* A row of the tensor's kv head 0 whose transformed row is a single number that fp16 cannot hold.
 * Its root mean square, the scale of codecs, is 2^17 / sqrt(DIM), which fp16 holds. */
static void make_spike(const kvant_tensor *tensor, float row[WIDTH])
{
    const kvant_affine affine = kvant_tensor_transform_affine(tensor, tensor->newest, 0);
    const float y[DIM] = { 0x1p17f };
    kvant_transform_inverse(kvant_tensor_head_transform(tensor, tensor->newest, 0),
                            kvant_kernels_get(KVANT_CPU_AUTO), &affine, y, row);
}

/* A cache with an exact part refuses such rows on both devices. Codecs with a trellis search but
 * without an exact part have fp16 pages only on a GPU. */
void twins_beyond_half(const spec_pair *spec)
{
    twins t;
    twins_new(&t, spec, SEQUENCES);
    kvant_sequence_create(t.cpu);
    kvant_sequence_create(t.gpu);
    assert_true(twins_append(&t, 0, 200));
    for (int role = 0; role < 2; role++) {
        float *rows[] = { random_rows(7 * WIDTH, 0.5f), random_rows(7 * WIDTH, 0.5f) };
        const kvant_tensor *tensor = kvant_cache_tensor(t.gpu, 0, (kvant_role)role)[0];
        make_spike(tensor, rows[role] + 5 * WIDTH);
        void *k = device_copy(rows[0], 7 * WIDTH * sizeof(float)),
             *v = device_copy(rows[1], 7 * WIDTH * sizeof(float));
        if (spec->preset)
            assert_int_equal(kvant_cache_append(t.cpu, 0, 0, rows[0], rows[1], 7), KVANT_ERR_RANGE);
        assert_int_equal(kvant_cache_append(t.gpu, 0, 0, k, v, 7), KVANT_ERR_RANGE);
        assert_int_equal(twins_length(&t, 0), 200);
        cudaFree(k);
        cudaFree(v);
        free(rows[0]);
        free(rows[1]);
    }
    twins_append(&t, 0, 30);
    twins_compare(&t);
    twins_free(&t);
}

static void save_plain_keys(const char *path)
{
    kvant_settings_layer layers[2 * LAYERS];
    const kvant_settings_config config = { .size = sizeof config,
                                           .n_layers = LAYERS,
                                           .layers = layers };
    kvant_settings *settings;
    for (uint32_t i = 0; i < 2 * LAYERS; i++)
        layers[i] = (kvant_settings_layer){ i % 2 ? "trellis-4" : "f32", KV_HEADS, DIM, NULL };
    assert_int_equal(kvant_settings_create(&config, &settings, NULL, 0), KVANT_OK);
    assert_int_equal(kvant_settings_save(settings, path, NULL, 0), KVANT_OK);
    kvant_settings_free(&settings);
}

/* Keys that are stored as floats do not become fp16 next to values that have an exact part. */
void twins_plain_keys(void)
{
    static float got[150][WIDTH], values[150][WIDTH];
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    kvant_cache *cache;
    char path[64];
    snprintf(path, sizeof path, "test_plain_keys_%d.json", DIM);
    save_plain_keys(path);
    params.n_layers = LAYERS, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS;
    params.head_dim = DIM, params.max_tokens = MOST, params.device = "cuda:0",
    params.settings = path;
    if (kvant_cache_create(&params, &cache) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    kvant_sequence_create(cache);
    float *k = random_rows(150 * WIDTH, 0.5f), *v = random_rows(150 * WIDTH, 0.5f);
    void *on_gpu[] = { device_copy(k, sizeof got), device_copy(v, sizeof got),
                       device_new(sizeof got, 0xff), device_new(sizeof got, 0xff) };
    for (uint32_t first = 0; first < 150; first += 75)
        assert_int_equal(kvant_cache_append(cache, 0, 0, (float *)on_gpu[0] + first * WIDTH,
                                            (float *)on_gpu[1] + first * WIDTH, 75),
                         KVANT_OK);
    assert_int_equal(kvant_cache_read(cache, 0, 0, 0, 150, on_gpu[2], on_gpu[3]), KVANT_OK);
    device_read(got, on_gpu[2], sizeof got);
    device_read(values, on_gpu[3], sizeof values);
    assert_memory_equal(got, k, sizeof got);
    for (uint32_t i = 0; i < 150; i++)
        assert_true(i >= 64 || is_exact(values[i], v + i * WIDTH));
    kvant_cache_free(&cache);
    for (int i = 0; i < 4; i++)
        cudaFree(on_gpu[i]);
    free(k);
    free(v);
    remove(path);
}
