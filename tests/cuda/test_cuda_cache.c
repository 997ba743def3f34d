/* test_cuda_cache.c - the same calls to a cache on the CPU and to one on the GPU: appends,
 * forks, truncations, dropped blocks, exports at random. Every block of every sequence has the
 * same exported bytes on both. Attention on the GPU stays within the bound that
 * attention_bound.c derives for softmax in binary64 over the rows of these bytes. */
#include "attention_fixture.h"

#include <math.h>

#include <kvant/cache.h>

#include "../../src/codec/codec_internal.h"
#include "../unit/calibrated.h"

enum { LAYERS = 2, HEADS = 8, KV_HEADS = 2, DIM = 64, WIDTH = KV_HEADS * DIM, Q_WIDTH = HEADS * DIM };
enum { MOST = 640, SEQUENCES = 4, MOST_QUERIES = 20, EXPORT_HEADER = 40, STEPS = 60 };

#define CALIBRATION "test_cuda_cache.kvcal"

typedef struct spec_pair {
    const char *k, *v;
    const char *transformed; /* codec of the same pages for keys behind transform=file, or NULL */
    bool calibrated;
} spec_pair;

typedef struct twins {
    const spec_pair *spec;
    kvant_scheme *scheme;
    kvant_cache *cpu, *gpu;
    uint32_t dropped[SEQUENCES]; /* blocks */
    uint8_t *of_cpu, *of_gpu;    /* exports */
    size_t room;
    double worst;
} twins;

static kvant_cache *make_cache(kvant_scheme *scheme, const char *device)
{
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    kvant_cache *cache;
    params.n_layers = LAYERS, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS, params.head_dim = DIM;
    params.max_tokens = MOST, params.max_sequences = SEQUENCES, params.n_threads = 2;
    params.scheme = scheme, params.device = device;
    if (kvant_cache_create(&params, &cache) != KVANT_OK)
        fail_msg("%s: %s", device, kvant_error_message());
    return cache;
}

static void twins_new(twins *t, const spec_pair *spec)
{
    kvant_scheme_params params = { .size = sizeof params,
                                   .k = spec->k,
                                   .v = spec->v,
                                   .calibration = spec->calibrated ? CALIBRATION : NULL };
    *t = (twins){ .spec = spec };
    if (kvant_scheme_create(&params, &t->scheme) != KVANT_OK)
        fail_msg("%s / %s: %s", spec->k, spec->v, kvant_error_message());
    t->cpu = make_cache(t->scheme, "cpu");
    t->gpu = make_cache(t->scheme, "cuda:0");
    t->room = kvant_cache_export_size(t->cpu);
    assert_int_equal(kvant_cache_export_size(t->gpu), t->room);
    t->of_cpu = malloc(t->room);
    t->of_gpu = malloc(t->room);
}

static void twins_free(twins *t)
{
    kvant_cache_free(&t->cpu);
    kvant_cache_free(&t->gpu);
    kvant_scheme_free(&t->scheme);
    free(t->of_cpu);
    free(t->of_gpu);
}

static float *random_rows(size_t n, float size)
{
    float *rows = malloc((n ? n : 1) * sizeof *rows);
    for (size_t i = 0; i < n; i++)
        rows[i] = random_normal() * size + (i % DIM == 3 ? size / 2 : 0);
    return rows;
}

static kvant_status append_rows(twins *t, int32_t s, uint32_t layer, const float *k, const float *v, uint32_t n)
{
    const size_t bytes = (size_t)n * WIDTH * sizeof(float);
    void *gpu_k = device_copy(k, bytes), *gpu_v = device_copy(v, bytes);
    kvant_status of_cpu = kvant_cache_append(t->cpu, layer, s, k, v, n),
                 of_gpu = kvant_cache_append(t->gpu, layer, s, gpu_k, gpu_v, n);
    if (of_cpu != of_gpu)
        fail_msg("%u tokens: status %d on the CPU, %d on the GPU: %s", n, of_cpu, of_gpu, kvant_error_message());
    assert_int_equal(kvant_sequence_length(t->gpu, s, layer), kvant_sequence_length(t->cpu, s, layer));
    cudaFree(gpu_k);
    cudaFree(gpu_v);
    return of_gpu;
}

static uint32_t length_of(const twins *t, int32_t s)
{
    return kvant_sequence_length(t->gpu, s, 0);
}

/* Rows to append: with a calibration like its own rows, so that scores and outputs are of the
 * size that it expects. */
static float *rows_for(const twins *t, size_t n, float size)
{
    float *rows = random_rows(n, t->spec->calibrated ? 1 : size);
    for (size_t i = 0; t->spec->calibrated && i < n; i++)
        rows[i] += (float)(i % DIM % 11) - (i % DIM == 3 ? 40.0f : 0.0f);
    return rows;
}

/* False when there is no room. */
static bool append(twins *t, int32_t s, uint32_t n)
{
    kvant_status status[LAYERS];
    const uint32_t before = length_of(t, s);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        float *k = rows_for(t, (size_t)n * WIDTH, 0.5f), *v = rows_for(t, (size_t)n * WIDTH, 0.02f);
        status[layer] = append_rows(t, s, layer, k, v, n);
        assert_true(status[layer] == KVANT_OK || status[layer] == KVANT_ERR_FULL);
        free(k);
        free(v);
    }
    if (status[0] == KVANT_OK && status[LAYERS - 1] == KVANT_OK)
        return true;
    assert_int_equal(kvant_sequence_truncate(t->cpu, s, before), KVANT_OK);
    assert_int_equal(kvant_sequence_truncate(t->gpu, s, before), KVANT_OK);
    return false;
}

static size_t export_both(twins *t, int32_t s, uint32_t block)
{
    size_t used = 0, again = 0;
    assert_int_equal(kvant_sequence_export(t->cpu, s, block, t->of_cpu, t->room, &used), KVANT_OK);
    if (kvant_sequence_export(t->gpu, s, block, t->of_gpu, t->room, &again) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    assert_int_equal(again, used);
    for (size_t i = 0; i < used; i++)
        if (t->of_cpu[i] != t->of_gpu[i])
            fail_msg("%s / %s: sequence %d, block %u: byte %zu of its export is %02x, the CPU's %02x", t->spec->k,
                     t->spec->v, s, block, i, t->of_gpu[i], t->of_cpu[i]);
    return used;
}

static void compare(twins *t)
{
    kvant_cache_info of_cpu = { .size = sizeof of_cpu }, of_gpu = { .size = sizeof of_gpu };
    for (int32_t s = 0; s < SEQUENCES; s++)
        for (uint32_t i = t->dropped[s]; i * 64 < length_of(t, s); i++)
            export_both(t, s, i);
    assert_int_equal(kvant_cache_get_info(t->cpu, &of_cpu), KVANT_OK);
    assert_int_equal(kvant_cache_get_info(t->gpu, &of_gpu), KVANT_OK);
    assert_int_equal(of_gpu.bytes, of_cpu.bytes);
    assert_int_equal(of_gpu.f16_bytes, of_cpu.f16_bytes);
    assert_int_equal(of_gpu.n_free_blocks, of_cpu.n_free_blocks);
    assert_true(of_gpu.true_bits == of_cpu.true_bits);
}

/* Attention: a fixture for attention_bound.c, made of what the GPU exports */

static const kvant_codec *const *codecs_of(twins *t, uint32_t layer, kvant_role role)
{
    kvant_scheme_place place = { .size = sizeof place,
                                 .role = role,
                                 .layer = layer,
                                 .n_layers = LAYERS,
                                 .n_kv_heads = KV_HEADS,
                                 .head_dim = DIM };
    const kvant_codec *const *codecs;
    assert_int_equal(kvant_scheme_codecs(t->scheme, &place, &codecs), KVANT_OK);
    return codecs;
}

static float *table_of(const kvant_codec *const *codecs, bool scale)
{
    float *all = NULL;
    for (uint32_t h = 0; h < KV_HEADS; h++) {
        kvant_cuda_tables tables = { .size = sizeof tables };
        assert_int_equal(kvant_cuda_codec_tables(codecs[h], &tables), KVANT_OK);
        const float *from = scale ? tables.scale : tables.center;
        if (from && !all)
            all = calloc(WIDTH, sizeof *all);
        if (from)
            memcpy(all + h * DIM, from, DIM * sizeof *all);
    }
    return all;
}

/* Pages of a sequence's layer from its block `first` on. */
static void read_pages(twins *t, test_cache *cache, int32_t s, uint32_t layer, uint32_t first)
{
    for (uint32_t b = 0; b < cache->n_blocks; b++) {
        export_both(t, s, first + b);
        const uint8_t *at = t->of_gpu + sizeof(uint64_t);
        for (uint32_t i = 0; i < 2 * layer + 2; i++) {
            uint64_t size;
            memcpy(&size, at, sizeof size);
            at += sizeof size;
            if (i / 2 == layer)
                memcpy(cache_page(cache, (kvant_role)(i % 2), b, 0), at + EXPORT_HEADER,
                       KV_HEADS * (i % 2 ? cache->v_info.page_bytes : cache->k_info.page_bytes));
            at += size;
        }
    }
}

static void open_pages_of(twins *t, fixture *f, int32_t s, uint32_t layer, uint32_t first)
{
    test_cache *cache = &f->cache;
    const kvant_codec *const *k = codecs_of(t, layer, KVANT_ROLE_K), *const *v = codecs_of(t, layer, KVANT_ROLE_V);
    *cache = (test_cache){ .head_dim = DIM, .n_kv_heads = KV_HEADS, .n_blocks = f->blocks_per_row };
    if (t->spec->transformed)
        assert_int_equal(
            kvant_codec_create(t->spec->transformed, DIM, KVANT_ROLE_K, 0, &cache->k, NULL, 0), KVANT_OK);
    else
        cache->k = (kvant_codec *)k[0]; /* which nothing frees */
    cache->v = (kvant_codec *)v[0];
    cache->k_info = cache->k->info, cache->v_info = cache->v->info;
    assert_int_equal(kvant_cuda_codec_from(cache->k, &cache->gpu_k, NULL, 0), KVANT_OK);
    assert_int_equal(kvant_cuda_codec_from(cache->v, &cache->gpu_v, NULL, 0), KVANT_OK);
    cache->v_offset = cache->k_info.page_bytes * KV_HEADS;
    cache->block_bytes = cache->v_offset + cache->v_info.page_bytes * KV_HEADS;
    cache->pool = calloc(cache->n_blocks + 1, cache->block_bytes);
    read_pages(t, cache, s, layer, first);
    f->center = table_of(v, false);
    f->k_scale = t->spec->transformed ? NULL : table_of(k, true);
    f->v_scale = table_of(v, true);
}

/* What sums of DIM products in binary32 in two orders can differ by. */
static double matrix_error(const kvant_codec *codec, const float *q)
{
    kvant_cuda_tables tables = { .size = sizeof tables };
    double worst = 0, largest = 0;
    assert_int_equal(kvant_cuda_codec_tables(codec, &tables), KVANT_OK);
    for (uint32_t i = 0; i < DIM; i++) {
        double row = 0, column = 0;
        for (uint32_t j = 0; j < DIM; j++) {
            row += fabs(tables.inverse_weights[i * DIM + j]);
            column += fabs(tables.inverse_weights[j * DIM + i]);
        }
        worst = fmax(worst, fmax(row, column));
        largest = fmax(largest, fabs(q[i]));
    }
    return 2 * (DIM + 2) * 0x1p-24 * worst * largest;
}

/* The reference takes queries behind the matrix. */
static void transform(twins *t, fixture *f, uint32_t layer, uint32_t n)
{
    const kvant_codec *const *k = codecs_of(t, layer, KVANT_ROLE_K);
    for (uint32_t i = 0; t->spec->transformed && i < n * HEADS; i++) {
        float y[DIM];
        const kvant_codec *codec = k[i % HEADS / (HEADS / KV_HEADS)];
        f->query_error = fmax(f->query_error, matrix_error(codec, f->q + i * DIM));
        assert_int_equal(kvant_codec_transform_query(codec, NULL, f->q + i * DIM, y), KVANT_OK);
        memcpy(f->q + i * DIM, y, sizeof y);
    }
}

static kvant_attention_problem problem_of(const fixture *f, uint32_t n, void *q, void *out)
{
    return (kvant_attention_problem){ .size = sizeof(kvant_attention_problem),
                                      .n_queries = n,
                                      .q = q,
                                      .q_token_stride = Q_WIDTH,
                                      .q_head_stride = DIM,
                                      .out = out,
                                      .out_token_stride = Q_WIDTH,
                                      .out_head_stride = DIM,
                                      .max_bias = f->p.max_bias,
                                      .window = f->p.window,
                                      .logit_softcap = f->p.softcap,
                                      .causal = f->p.causal };
}

static void make_mask(fixture *f, uint32_t n, int32_t length)
{
    f->mask_stride = (uint32_t)length + 5;
    f->mask = malloc((size_t)n * f->mask_stride * sizeof *f->mask);
    for (size_t i = 0; i < (size_t)n * f->mask_stride; i++)
        f->mask[i] = random_bits() % 8 == 0   ? 0xfc00  /* -inf */
                     : random_bits() % 2 == 0 ? 0x3800  /* 0.5 */
                                              : 0xb000; /* -0.125 */
}

static void check_attention(twins *t, int32_t s, uint32_t layer, const attention_problem *p)
{
    const uint32_t first = t->dropped[s], n = p->query_tokens;
    const int32_t length = (int32_t)(length_of(t, s) - 64 * first);
    const attention_case c = { .k_spec = t->spec->k, .v_spec = t->spec->v, .head_dim = DIM, .n_kv_heads = KV_HEADS,
                               .n_heads = HEADS, .batch = 1, .type = KVANT_CUDA_F32, .lengths = &length };
    int32_t starts[2] = { 0, (int32_t)n }, table[MOST / 64 + 1];
    const size_t bytes = (size_t)n * Q_WIDTH * sizeof(float);
    fixture f = { .c = &c, .p = *p, .n_rows = n, .starts = starts, .table = table };
    f.blocks_per_row = ((uint32_t)length + 63) / 64;
    for (int32_t i = 0; i <= MOST / 64; i++)
        table[i] = i;
    open_pages_of(t, &f, s, layer, first);
    f.q = random_rows((size_t)n * Q_WIDTH, 1);
    f.gpu_q = device_copy(f.q, bytes);
    f.gpu_out = device_new(bytes, 0xff);
    const bool centred = t->spec->transformed != NULL; /* keys: then there is no lse */
    f.gpu_lse = device_new((size_t)n * HEADS * sizeof(float), 0xff);
    kvant_attention_problem problem = problem_of(&f, n, f.gpu_q, f.gpu_out);
    problem.lse = centred ? NULL : f.gpu_lse;
    if (p->mask) {
        make_mask(&f, n, length + 64 * (int32_t)first);
        f.gpu_mask = device_copy(f.mask, (size_t)n * f.mask_stride * sizeof *f.mask);
        problem.mask = f.gpu_mask, problem.mask_token_stride = f.mask_stride;
        memmove(f.mask, f.mask + 64 * first, ((size_t)n * f.mask_stride - 64 * first) * sizeof *f.mask);
    }
    if (p->sinks) {
        f.sinks = random_rows(HEADS, 2);
        f.gpu_sinks = device_copy(f.sinks, HEADS * sizeof *f.sinks);
        problem.sinks = f.gpu_sinks;
    }
    if (kvant_cache_attention(t->gpu, layer, s, &problem) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    float *out = malloc(bytes), lse[MOST_QUERIES * HEADS];
    device_read(out, f.gpu_out, bytes);
    device_read(lse, f.gpu_lse, (size_t)n * HEADS * sizeof(float));
    transform(t, &f, layer, n);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t h = 0; h < HEADS; h++)
            check_head(&f, out, centred ? NULL : lse, 0, i, h);
    t->worst = fmax(t->worst, f.worst);
    if (t->spec->transformed)
        kvant_codec_free(&f.cache.k);
    kvant_cuda_codec_free(&f.cache.gpu_k);
    kvant_cuda_codec_free(&f.cache.gpu_v);
    void *of_host[] = { f.cache.pool, f.center, f.k_scale, f.v_scale, f.q, f.mask, f.sinks, out };
    for (size_t i = 0; i < sizeof of_host / sizeof *of_host; i++)
        free(of_host[i]);
    void *of_gpu[] = { f.gpu_q, f.gpu_out, f.gpu_lse, f.gpu_mask, f.gpu_sinks };
    for (size_t i = 0; i < sizeof of_gpu / sizeof *of_gpu; i++)
        cudaFree(of_gpu[i]);
}

static void attend_somehow(twins *t, int32_t s)
{
    const uint32_t seen = length_of(t, s) - 64 * t->dropped[s], limit = seen < MOST_QUERIES ? seen : MOST_QUERIES;
    if (length_of(t, s) <= 64 * t->dropped[s])
        return;
    const bool centred = t->spec->transformed != NULL;
    const attention_problem p = { .query_tokens = random_bits() % 2 ? 1 : 1 + (uint32_t)(random_bits() % limit),
                                  .causal = random_bits() % 4 != 0,
                                  .window = random_bits() % 3 ? 0 : 1 + (uint32_t)(random_bits() % 200),
                                  .softcap = centred || random_bits() % 4 ? 0 : random_uniform(1, 60),
                                  .max_bias = random_bits() % 4 ? 0 : random_uniform(1, 8),
                                  .mask = random_bits() % 4 == 0,
                                  .sinks = !centred && random_bits() % 4 == 0 };
    check_attention(t, s, (uint32_t)(random_bits() % LAYERS), &p);
}

static void fork_one(twins *t, int32_t s)
{
    int32_t of_cpu = kvant_sequence_fork(t->cpu, s), of_gpu = kvant_sequence_fork(t->gpu, s);
    assert_int_equal(of_gpu, of_cpu);
    if (of_gpu >= 0)
        t->dropped[of_gpu] = t->dropped[s];
}

static void truncate_one(twins *t, int32_t s)
{
    const uint32_t least = 64 * t->dropped[s], length = length_of(t, s);
    const uint32_t to = least + (uint32_t)(random_bits() % (length - least + 1));
    assert_int_equal(kvant_sequence_truncate(t->cpu, s, to), KVANT_OK);
    assert_int_equal(kvant_sequence_truncate(t->gpu, s, to), KVANT_OK);
}

static void drop_one(twins *t, int32_t s)
{
    const uint32_t blocks = length_of(t, s) / 64;
    if (blocks <= t->dropped[s] + 1)
        return;
    t->dropped[s]++;
    assert_int_equal(kvant_sequence_drop(t->cpu, s, 64 * t->dropped[s]), KVANT_OK);
    assert_int_equal(kvant_sequence_drop(t->gpu, s, 64 * t->dropped[s]), KVANT_OK);
}

static void free_one(twins *t, int32_t s)
{
    kvant_sequence_free(t->cpu, s);
    kvant_sequence_free(t->gpu, s);
    t->dropped[s] = 0;
    assert_int_equal(kvant_sequence_create(t->cpu), s);
    assert_int_equal(kvant_sequence_create(t->gpu), s);
}

static void random_calls(const spec_pair *spec)
{
    twins t;
    int forks = 0, full = 0;
    twins_new(&t, spec);
    int32_t alive = kvant_sequence_create(t.cpu) + 1;
    assert_int_equal(kvant_sequence_create(t.gpu) + 1, alive);
    for (int step = 0; step < STEPS; step++) {
        int32_t s = (int32_t)(random_bits() % (uint64_t)alive);
        switch (step ? random_bits() % 12 : 0) {
        case 8: truncate_one(&t, s); break;
        case 9: drop_one(&t, s); break;
        case 10:
            if (alive < SEQUENCES) {
                fork_one(&t, s);
                alive++, forks++;
            }
            break;
        case 11:
            if (alive == SEQUENCES)
                free_one(&t, s);
            break;
        default: full += !append(&t, s, 1 + (uint32_t)(random_bits() % (random_bits() % 2 ? 3 : 130)));
        }
        compare(&t);
        attend_somehow(&t, s);
    }
    assert_true(forks > 0);
    printf("%s / %s: %d forks, %d times full, error / bound %.3f\n", spec->k, spec->v, forks, full, t.worst);
    twins_free(&t);
}

static const spec_pair pairs[] = {
    { "turboquant-4", "turboquant-4", NULL, false },
    { "int-4", "int-4", NULL, false },
    { "turboquant-4", "int-4", NULL, false },
    { "trellis-4", "trellis-4", NULL, false },
    { "int-4:norm=file,sink=0", "int-4:center=file,norm=file,sink=0", NULL, true },
    { "trellis-4:transform=file,sink=0", "trellis-4:center=file,sink=0", "trellis-4:rotate=none", true },
};

static void bytes_and_outputs_agree(void **unused)
{
    (void)unused;
    kvant_calibration *calibration = calibrate_fixed(DIM);
    assert_non_null(calibration);
    assert_int_equal(kvant_calibration_save(calibration, CALIBRATION, NULL, 0), KVANT_OK);
    kvant_calibration_free(&calibration);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        random_calls(&pairs[i]);
    remove(CALIBRATION);
}

/* A refused row leaves the length as it was; rows that follow take its slots. */
static void refused_rows_leave_no_trace(void **unused)
{
    (void)unused;
    static const float bad[] = { NAN, 3e38f };
    twins t;
    twins_new(&t, &pairs[1]);
    kvant_sequence_create(t.cpu);
    kvant_sequence_create(t.gpu);
    append(&t, 0, 100);
    for (size_t i = 0; i < 2; i++) {
        float *good = random_rows(7 * WIDTH, 0.5f), *k = random_rows(7 * WIDTH, 0.5f);
        k[5 * WIDTH + 3] = bad[i];
        const kvant_status want = i ? KVANT_ERR_RANGE : KVANT_ERR_NONFINITE;
        assert_int_equal(append_rows(&t, 0, 0, k, good, 7), want);
        assert_non_null(strstr(kvant_error_message(), "layer 0"));
        assert_int_equal(append_rows(&t, 0, 0, good, k, 7), want);
        assert_int_equal(length_of(&t, 0), 100 + 30 * i);
        append(&t, 0, 30);
        compare(&t);
        free(good);
        free(k);
    }
    twins_free(&t);
}

/* Blocks of the CPU are imported on the GPU and the other way round. */
static void blocks_change_devices(void **unused)
{
    (void)unused;
    twins t, other;
    size_t used;
    twins_new(&t, &pairs[0]);
    twins_new(&other, &pairs[0]);
    for (twins *each[] = { &t, &other }, **one = each; one < each + 2; one++) {
        kvant_sequence_create((*one)->cpu);
        kvant_sequence_create((*one)->gpu);
    }
    append(&t, 0, 150);
    for (uint32_t block = 0; block < 3; block++) {
        used = export_both(&t, 0, block);
        t.of_cpu[used / 2] ^= 1;
        assert_int_equal(kvant_sequence_import(other.gpu, 0, t.of_cpu, used), KVANT_ERR_FORMAT);
        t.of_cpu[used / 2] ^= 1;
        assert_int_equal(kvant_sequence_import(other.gpu, 0, t.of_cpu, used), KVANT_OK);
        assert_int_equal(kvant_sequence_import(other.cpu, 0, t.of_gpu, used), KVANT_OK);
    }
    append(&other, 0, 20);
    compare(&other);
    const attention_problem p = { .query_tokens = 9, .causal = true };
    check_attention(&other, 0, 1, &p);
    twins_free(&t);
    twins_free(&other);
}

static void refuses(const char *k, const char *v, const char *words)
{
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    kvant_cache *cache;
    params.n_layers = LAYERS, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS, params.head_dim = DIM;
    params.max_tokens = MOST, params.device = "cuda", params.k = k, params.v = v;
    assert_int_equal(kvant_cache_create(&params, &cache), KVANT_ERR_UNSUPPORTED);
    assert_null(cache);
    if (!strstr(kvant_error_message(), words) || !strstr(kvant_error_message(), "turboquant-4"))
        fail_msg("'%s' does not say '%s'", kvant_error_message(), words);
}

static void what_is_missing_is_refused(void **unused)
{
    (void)unused;
    refuses("f16", "f16", "not on the GPU");
    refuses("turboquant-6", "turboquant-4", "attention over keys");
    refuses("turboquant-4:center=file", "turboquant-4", "calibration");
    twins t;
    twins_new(&t, &pairs[0]);
    kvant_sequence_create(t.cpu);
    kvant_sequence_create(t.gpu);
    append(&t, 0, 3);
    fixture none = { .p = { 0 } };
    float *q = device_new(4 * Q_WIDTH * sizeof *q, 0), *out = device_new(4 * Q_WIDTH * sizeof *q, 0);
    kvant_attention_problem problem = problem_of(&none, 1, q, out);
    problem.exact = true;
    assert_int_equal(kvant_cache_attention(t.gpu, 0, 0, &problem), KVANT_ERR_UNSUPPORTED);
    assert_non_null(strstr(kvant_error_message(), "exact"));
    assert_int_equal(kvant_cache_attend(t.gpu, 0, 0, q, out, 4), KVANT_ERR_ARGUMENT);
    assert_non_null(strstr(kvant_error_message(), "causal"));
    assert_int_equal(kvant_cache_attend(t.gpu, 0, 0, q, out, 3), KVANT_OK);
    cudaFree(q);
    cudaFree(out);
    twins_free(&t);
}

int main(void)
{
    if (!have_device())
        return 77; /* CTest: skipped */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_and_outputs_agree),
        cmocka_unit_test(refused_rows_leave_no_trace),
        cmocka_unit_test(blocks_change_devices),
        cmocka_unit_test(what_is_missing_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
