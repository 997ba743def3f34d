/* test_cuda_cache.c - the same calls to a cache on the CPU and to one on the GPU: appends,
 * forks, truncations, dropped blocks, exports at random. Every block of every sequence has the
 * same exported bytes on both: pages, states, centres and scales. Attention on the GPU stays within
 * the bound that attention_bound.c derives for softmax in binary64 over the rows of these bytes.
 *
 * test_cuda_cache_host is this file on host/host_table.c, where there is no GPU. */
#include "attention_fixture.h"

#include <math.h>

#include <kvant/cache.h>

#include "../unit/calibrated.h"
#include "../unit/open_codec.h"

enum { LAYERS = 2, HEADS = 8, KV_HEADS = 2, DIM = 64, WIDTH = KV_HEADS * DIM, Q_WIDTH = HEADS * DIM };
enum { MOST = 640, SEQUENCES = 4, MOST_QUERIES = 20, EXPORT_HEADER = 40, STEPS = 60 };

#define CALIBRATION "test_cuda_cache.kvcal"

typedef struct spec_pair {
    const char *k, *v;
    const char *transformed; /* codec of the same pages for keys behind transform=file, or NULL */
    bool calibrated;
    bool decoded; /* the reference reads the pages decoded to fp16 */
} spec_pair;

typedef struct twins {
    const spec_pair *spec;
    kvant_scheme *scheme;
    kvant_cache *cpu, *gpu;
    uint32_t dropped[SEQUENCES]; /* blocks */
    uint8_t *of_cpu, *of_gpu;    /* exports */
    size_t room;
    double worst;
    uint32_t most_parts; /* versions in one call of attention */
} twins;

static kvant_cache *make_cache(kvant_scheme *scheme, const char *device, uint32_t n_sequences)
{
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    kvant_cache *cache;
    params.n_layers = LAYERS, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS, params.head_dim = DIM;
    params.max_tokens = MOST, params.max_sequences = n_sequences, params.n_threads = 2;
    params.scheme = scheme, params.device = device;
    if (kvant_cache_create(&params, &cache) != KVANT_OK)
        fail_msg("%s: %s", device, kvant_error_message());
    return cache;
}

static void twins_new(twins *t, const spec_pair *spec, uint32_t n_sequences)
{
    kvant_scheme_params params = { .size = sizeof params,
                                   .k = spec->k,
                                   .v = spec->v,
                                   .calibration = spec->calibrated ? CALIBRATION : NULL };
    *t = (twins){ .spec = spec };
    if (kvant_scheme_create(&params, &t->scheme) != KVANT_OK)
        fail_msg("%s / %s: %s", spec->k, spec->v, kvant_error_message());
    t->cpu = make_cache(t->scheme, "cpu", n_sequences);
    t->gpu = make_cache(t->scheme, "cuda:0", n_sequences);
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

/* Keys or values of a block, from its export. */
typedef struct stored {
    bool open;
    float center[WIDTH], scale[WIDTH]; /* 0 and 1 where the codec has none */
    uint8_t *pages;
    size_t bytes;
} stored;

/* A sequence's layer from its block `first` on. */
typedef struct stored_layer {
    const kvant_codec *const *codecs[2]; /* by kvant_role */
    uint32_t n_blocks;
    stored blocks[2][MOST / 64];
} stored_layer;

static void read_numbers(const kvant_codec *const *codecs, const uint8_t *learnt, stored *block)
{
    for (uint32_t i = 0; i < WIDTH; i++) {
        kvant_cuda_tables tables = { .size = sizeof tables };
        assert_int_equal(kvant_cuda_codec_tables(codecs[i / DIM], &tables), KVANT_OK);
        block->center[i] = tables.center ? tables.center[i % DIM] : 0;
        block->scale[i] = tables.scale ? tables.scale[i % DIM] : 1;
    }
    if (learnt) {
        memcpy(block->center, learnt, sizeof block->center);
        memcpy(block->scale, learnt + sizeof block->center, sizeof block->scale);
    }
}

static void read_block(const kvant_codec *const *codecs, const uint8_t *at, size_t size, stored *block)
{
    uint32_t open, learnt;
    memcpy(&open, at + 32, sizeof open);
    memcpy(&learnt, at + 36, sizeof learnt);
    const size_t numbers = learnt ? 2 * WIDTH * sizeof(float) : 0;
    block->open = open;
    block->bytes = size - EXPORT_HEADER - numbers - sizeof(uint64_t); /* a checksum follows */
    block->pages = malloc(block->bytes);
    memcpy(block->pages, at + EXPORT_HEADER + numbers, block->bytes);
    read_numbers(codecs, learnt ? at + EXPORT_HEADER : NULL, block);
}

static void read_layer(twins *t, int32_t s, uint32_t layer, stored_layer *all)
{
    const uint32_t first = t->dropped[s], n = (length_of(t, s) + 63) / 64 - first;
    *all = (stored_layer){ .n_blocks = n };
    for (int role = 0; role < 2; role++)
        all->codecs[role] = codecs_of(t, layer, (kvant_role)role);
    for (uint32_t b = 0; b < n; b++) {
        export_both(t, s, first + b);
        const uint8_t *at = t->of_gpu + sizeof(uint64_t);
        for (uint32_t i = 0; i < 2 * layer + 2; i++) {
            uint64_t size;
            memcpy(&size, at, sizeof size);
            at += sizeof size;
            if (i / 2 == layer)
                read_block(all->codecs[i % 2], at, size, &all->blocks[i % 2][b]);
            at += size;
        }
    }
}

static void free_layer(stored_layer *all)
{
    for (uint32_t i = 0; i < 2 * all->n_blocks; i++)
        free(all->blocks[i % 2][i / 2].pages);
}

static bool same_version(const stored_layer *all, uint32_t a, uint32_t b)
{
    for (int role = 0; role < 2; role++)
        if (memcmp(all->blocks[role][a].center, all->blocks[role][b].center, sizeof(float[WIDTH])) != 0 ||
            memcmp(all->blocks[role][a].scale, all->blocks[role][b].scale, sizeof(float[WIDTH])) != 0)
            return false;
    return true;
}

/* parts[b]: the first block of the version of block b. Returns how many parts there are. */
static uint32_t find_parts(const stored_layer *all, uint32_t parts[MOST / 64])
{
    uint32_t n = 0;
    for (uint32_t b = 0; b < all->n_blocks; b++) {
        parts[b] = 0;
        while (!same_version(all, parts[b], b))
            parts[b]++;
        n += parts[b] == b;
    }
    return n;
}

/* A codec whose rows before the rotation are what its pages hold behind transform=file. */
static const kvant_codec *reference_codec(const twins *t, const stored_layer *all, kvant_role role, kvant_codec **made)
{
    *made = NULL;
    if (role == KVANT_ROLE_V || !t->spec->transformed)
        return all->codecs[role][0];
    assert_int_equal(kvant_codec_create(t->spec->transformed, DIM, KVANT_ROLE_K, 0, made, NULL, 0), KVANT_OK);
    return *made;
}

/* What the GPU reads where a block is open for keys or values alone: sealed pages as fp16. */
static void fill_open_page(const fixture *f, const stored *block, kvant_role role, uint32_t b)
{
    const kvant_codec *codec = role == KVANT_ROLE_K ? f->cache.k : f->cache.v;
    for (uint32_t h = 0; h < KV_HEADS; h++) {
        uint16_t *to = open_page(&f->open, role, b, h);
        if (block->open)
            memcpy(to, block->pages + h * f->open.page_bytes, f->open.page_bytes);
        for (uint32_t i = 0; i < 64 && !block->open; i++) {
            float y[DIM];
            kvant_codec_decode_transformed(codec, kvant_kernels_get(KVANT_CPU_AUTO),
                                           block->pages + h * codec->info.page_bytes, i, y);
            kvant_kernels_get(KVANT_CPU_AUTO)->float_to_half(y, to + i * DIM, DIM);
        }
    }
}

static void fill_block(const twins *t, fixture *f, const stored_layer *all, uint32_t b)
{
    const bool open = all->blocks[0][b].open || all->blocks[1][b].open || t->spec->decoded;
    for (int role = 0; role < 2; role++)
        if (open)
            fill_open_page(f, &all->blocks[role][b], (kvant_role)role, b);
        else
            memcpy(cache_page(&f->cache, (kvant_role)role, b, 0), all->blocks[role][b].pages, all->blocks[role][b].bytes);
    f->table[f->blocks_per_row++] = open ? -1 - (int32_t)b : (int32_t)b;
}

static kvant_cuda_codec *gpu_codec(const kvant_codec *codec, bool open)
{
    kvant_cuda_codec *sealed, *of_open;
    assert_int_equal(kvant_cuda_codec_from(codec, &sealed, NULL, 0), KVANT_OK);
    if (!open)
        return sealed;
    assert_int_equal(kvant_cuda_codec_create_open(sealed, &of_open), KVANT_OK);
    kvant_cuda_codec_free(&sealed);
    return of_open;
}

typedef struct part {
    fixture f;
    attention_case c;
    kvant_codec *made; /* by reference_codec */
    int32_t length, table[MOST / 64];
    float k_scale[WIDTH], v_scale[WIDTH], v_center[WIDTH];
    const float *k_center; /* of all kv heads */
} part;

/* A fixture of the blocks of one version. The last block of the sequence may be partly there. */
static void part_open(part *p, twins *t, const stored_layer *all, const uint32_t *parts, uint32_t version, int32_t length,
                      const attention_problem *problem, int32_t *starts)
{
    kvant_codec *none;
    fixture *f = &p->f;
    const stored *k = &all->blocks[KVANT_ROLE_K][version], *v = &all->blocks[KVANT_ROLE_V][version];
    *p = (part){ .c = { .k_spec = t->spec->k, .v_spec = t->spec->v, .head_dim = DIM, .n_kv_heads = KV_HEADS,
                        .n_heads = HEADS, .batch = 1, .type = KVANT_CUDA_F32 } };
    p->k_center = k->center;
    p->c.lengths = &p->length;
    *f = (fixture){ .c = &p->c, .p = *problem, .n_rows = problem->query_tokens, .starts = starts, .table = p->table };
    f->cache = (test_cache){ .head_dim = DIM, .n_kv_heads = KV_HEADS, .n_blocks = all->n_blocks };
    f->cache.k = (kvant_codec *)reference_codec(t, all, KVANT_ROLE_K, &p->made);
    f->cache.v = (kvant_codec *)reference_codec(t, all, KVANT_ROLE_V, &none);
    f->cache.k_info = f->cache.k->info, f->cache.v_info = f->cache.v->info;
    f->cache.gpu_k = gpu_codec(f->cache.k, t->spec->decoded);
    f->cache.gpu_v = gpu_codec(f->cache.v, t->spec->decoded);
    f->cache.v_offset = f->cache.k_info.page_bytes * KV_HEADS;
    f->cache.block_bytes = f->cache.v_offset + f->cache.v_info.page_bytes * KV_HEADS;
    f->cache.pool = calloc(all->n_blocks + 1, f->cache.block_bytes);
    f->open = (test_open_pool){ .n_kv_heads = KV_HEADS, .n_blocks = all->n_blocks, .page_bytes = 64 * DIM * 2 };
    assert_int_equal(open_codec_create(f->cache.k, &f->open.codec[0]), KVANT_OK);
    assert_int_equal(open_codec_create(f->cache.v, &f->open.codec[1]), KVANT_OK);
    f->open.pool = calloc(2 * KV_HEADS * (all->n_blocks + 1), f->open.page_bytes);
    for (uint32_t b = 0; b < all->n_blocks; b++)
        if (parts[b] == version) {
            fill_block(t, f, all, b);
            p->length += length - 64 * (int32_t)b < 64 ? length - 64 * (int32_t)b : 64;
        }
    memcpy(p->k_scale, k->scale, sizeof p->k_scale);
    memcpy(p->v_scale, v->scale, sizeof p->v_scale);
    memcpy(p->v_center, v->center, sizeof p->v_center);
    f->k_scale = t->spec->transformed ? NULL : p->k_scale;
    f->v_scale = p->v_scale;
    f->center = p->v_center;
}

static void part_close(part *p)
{
    open_codec_free(&p->f.open.codec[0]);
    open_codec_free(&p->f.open.codec[1]);
    kvant_codec_free(&p->made);
    kvant_cuda_codec_free(&p->f.cache.gpu_k);
    kvant_cuda_codec_free(&p->f.cache.gpu_v);
    free(p->f.cache.pool);
    free(p->f.open.pool);
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
static float *transform(const twins *t, fixture *f, const stored_layer *all, const float *q, uint32_t n)
{
    float *to = malloc((size_t)n * Q_WIDTH * sizeof *to);
    memcpy(to, q, (size_t)n * Q_WIDTH * sizeof *to);
    for (uint32_t i = 0; t->spec->transformed && i < n * HEADS; i++) {
        const kvant_codec *codec = all->codecs[KVANT_ROLE_K][i % HEADS / (HEADS / KV_HEADS)];
        f->query_error = fmax(f->query_error, matrix_error(codec, q + i * DIM));
        assert_int_equal(kvant_codec_transform_query(codec, NULL, q + i * DIM, to + i * DIM), KVANT_OK);
    }
    return to;
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

/* What the GPU is given and gives. */
typedef struct attended {
    uint32_t n;
    float *q, *sinks, *out, *lse;
    uint16_t *mask;
    uint32_t mask_stride;
} attended;

static void attend_on_gpu(twins *t, int32_t s, uint32_t layer, const attention_problem *p, attended *a)
{
    const uint32_t n = p->query_tokens, length = length_of(t, s), first = t->dropped[s];
    const size_t bytes = (size_t)n * Q_WIDTH * sizeof(float), lse_bytes = (size_t)n * HEADS * sizeof(float);
    fixture f = { .p = *p };
    *a = (attended){ .n = n, .q = random_rows((size_t)n * Q_WIDTH, 1), .out = malloc(bytes), .lse = malloc(lse_bytes) };
    void *q = device_copy(a->q, bytes), *out = device_new(bytes, 0xff), *lse = device_new(lse_bytes, 0xff), *mask = NULL,
         *sinks = NULL;
    kvant_attention_problem problem = problem_of(&f, n, q, out);
    problem.lse = lse;
    if (p->mask) {
        make_mask(&f, n, (int32_t)length);
        a->mask = f.mask, a->mask_stride = f.mask_stride;
        problem.mask = mask = device_copy(f.mask, (size_t)n * f.mask_stride * sizeof *f.mask);
        problem.mask_token_stride = f.mask_stride;
        memmove(a->mask, a->mask + 64 * first, ((size_t)n * f.mask_stride - 64 * first) * sizeof *a->mask);
    }
    if (p->sinks) {
        a->sinks = random_rows(HEADS, 2);
        problem.sinks = sinks = device_copy(a->sinks, HEADS * sizeof *a->sinks);
    }
    if (kvant_cache_attention(t->gpu, layer, s, &problem) != KVANT_OK)
        fail_msg("%s", kvant_error_message());
    device_read(a->out, out, bytes);
    device_read(a->lse, lse, lse_bytes);
    void *of_gpu[] = { q, out, lse, mask, sinks };
    for (size_t i = 0; i < sizeof of_gpu / sizeof *of_gpu; i++)
        cudaFree(of_gpu[i]);
}

static void attended_free(attended *a)
{
    void *of_host[] = { a->q, a->sinks, a->out, a->lse, a->mask };
    for (size_t i = 0; i < sizeof of_host / sizeof *of_host; i++)
        free(of_host[i]);
}

/* <q, c> of a part's keys, and how far binary32 may be from it. */
static double of_center(const part *p, const float *q, uint32_t head, double *error)
{
    const float *c = p->k_center + head / (HEADS / KV_HEADS) * DIM;
    const double scale = 1 / sqrtf((float)DIM);
    double sum = 0, size = 0;
    for (uint32_t j = 0; j < DIM; j++) {
        sum += (double)q[j] * c[j];
        size += fabs((double)q[j] * c[j]);
    }
    *error = scale * size * (DIM + 2) * 0x1p-24;
    return scale * sum;
}

/* Parts are weighed by e^lse, <q, c> added, and a sink is a part without a value. With every lse off by at most delta, a
 * weight is off by e^(2 delta) - 1 of itself; the kernel's own exponentials and sums add 2^-20. */
static void check_merged(twins *t, part *parts, uint32_t n_parts, const attended *a, uint32_t i, uint32_t head)
{
    static reference r[MOST / 64];
    double lse[MOST / 64], delta = 0x1p-20, top = a->sinks ? a->sinks[head] : -INFINITY;
    const float *q = a->q + (i * HEADS + head) * DIM, *got = a->out + (i * HEADS + head) * DIM;
    for (uint32_t p = 0; p < n_parts; p++) {
        double error;
        compute_reference(&parts[p].f, 0, i, head, &r[p]);
        lse[p] = r[p].lse + of_center(&parts[p], q, head, &error);
        if (isinf(lse[p]))
            continue;
        delta = fmax(delta, r[p].lse_bound + error + 0x1p-20 * (1 + fabs(lse[p])));
        top = fmax(top, lse[p]);
    }
    double total = a->sinks ? exp(a->sinks[head] - top) : 0, want[DIM] = { 0 }, bound = 0, norms = 0, off = 0;
    for (uint32_t p = 0; p < n_parts && !isinf(top); p++) {
        const double w = exp(lse[p] - top);
        double norm = 0;
        for (uint32_t j = 0; j < DIM; j++) {
            want[j] += w * r[p].out[j];
            norm += r[p].out[j] * r[p].out[j];
        }
        total += w;
        bound += w * r[p].bound;
        norms += w * sqrt(norm);
    }
    for (uint32_t j = 0; j < DIM; j++)
        off += pow(got[j] - (total > 0 ? want[j] / total : 0), 2);
    bound = total > 0 ? (bound + (exp(2 * delta) - 1) * norms) / total : 0;
    if (!(sqrt(off) <= bound))
        fail_msg("%s / %s, %u parts, query %u, head %u: error %g, bound %g", t->spec->k, t->spec->v, n_parts, i, head,
                 sqrt(off), bound);
    t->worst = fmax(t->worst, bound > 0 ? sqrt(off) / bound : 0);
    const double want_lse = total > 0 ? top + log(total) : -INFINITY;
    if (!(a->lse[i * HEADS + head] == want_lse || fabs(a->lse[i * HEADS + head] - want_lse) <= 2 * delta))
        fail_msg("%s / %s, %u parts: log-sum-exp %g, reference %g", t->spec->k, t->spec->v, n_parts,
                 a->lse[i * HEADS + head], want_lse);
}

/* Positions across parts are not what a part's fixture knows: problems of several parts depend on none. */
static void check_attention(twins *t, int32_t s, uint32_t layer, const attention_problem *problem)
{
    static stored_layer all;
    static part list[MOST / 64];
    uint32_t parts[MOST / 64], n = 0;
    attention_problem p = *problem;
    read_layer(t, s, layer, &all);
    const int32_t length = (int32_t)(length_of(t, s) - 64 * t->dropped[s]);
    if (find_parts(&all, parts) > 1)
        p = (attention_problem){ .query_tokens = 1, .causal = problem->causal, .sinks = problem->sinks };
    attended a;
    attend_on_gpu(t, s, layer, &p, &a);
    int32_t starts[2] = { 0, (int32_t)a.n };
    for (uint32_t b = 0; b < all.n_blocks; b++)
        if (parts[b] == b) {
            part_open(&list[n], t, &all, parts, b, length, &p, starts);
            list[n].f.q = transform(t, &list[n].f, &all, a.q, a.n);
            list[n].f.mask = a.mask, list[n].f.mask_stride = a.mask_stride;
            n++;
        }
    for (uint32_t i = 0; i < a.n; i++)
        for (uint32_t h = 0; h < HEADS; h++)
            check_merged(t, list, n, &a, i, h);
    t->most_parts = n > t->most_parts ? n : t->most_parts;
    for (uint32_t i = 0; i < n; i++) {
        free(list[i].f.q);
        part_close(&list[i]);
    }
    free_layer(&all);
    attended_free(&a);
}

static void attend_somehow(twins *t, int32_t s)
{
    const uint32_t seen = length_of(t, s) - 64 * t->dropped[s], limit = seen < MOST_QUERIES ? seen : MOST_QUERIES;
    if (length_of(t, s) <= 64 * t->dropped[s])
        return;
    const bool centred = codecs_of(t, 0, KVANT_ROLE_K)[0]->info.center != KVANT_CENTER_NONE;
    const attention_problem p = { .query_tokens = random_bits() % 2 ? 1 : 1 + (uint32_t)(random_bits() % limit),
                                  .causal = random_bits() % 4 != 0,
                                  .window = random_bits() % 3 ? 0 : 1 + (uint32_t)(random_bits() % 200),
                                  .softcap = centred || random_bits() % 4 ? 0 : random_uniform(1, 60),
                                  .max_bias = random_bits() % 4 ? 0 : random_uniform(1, 8),
                                  .mask = random_bits() % 4 == 0,
                                  .sinks = random_bits() % 4 == 0 };
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
    twins_new(&t, spec, SEQUENCES);
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
    printf("%s / %s: %d forks, %d times full, at most %u versions at once, error / bound %.3f\n", spec->k, spec->v, forks, full,
           t.most_parts, t.worst);
    twins_free(&t);
}

static const spec_pair pairs[] = {
    { "turboquant-4", "turboquant-4", NULL, false, false },
    { "int-4", "int-4", NULL, false, false },
    { "turboquant-4", "int-4", NULL, false, false },
    { "trellis-4", "trellis-4", NULL, false, false },
    { "int-4:norm=file,sink=0", "int-4:center=file,norm=file,sink=0", NULL, true, false },
    { "trellis-4:transform=file,sink=0", "trellis-4:center=file,sink=0", "trellis-4:rotate=none", true, false },
    /* the presets small, balanced and quality, without and with a calibration */
    { "trellis-3:center=first,norm=first", "trellis-3", NULL, false, false },
    { "trellis-4:center=first,norm=first", "trellis-4", NULL, false, false },
    { "turboquant-6:center=first,norm=first", "trellis-4:center=first", NULL, false, true },
    { "trellis-4:transform=file", "trellis-4", "trellis-4:rotate=none", true, false },
    { "turboquant-6:transform=file", "trellis-4:center=file", "turboquant-6:rotate=none", true, true },
    /* groups of tokens, windows, sinks */
    { "kivi-2", "kivi-2", NULL, false, false },
    { "innerq-base", "innerq-base", NULL, false, false },
    { "innerq-small", "innerq-small", NULL, false, false },
    { "trellis-3:sink=3,recent=100", "trellis-3", NULL, false, false },
    { "turboquant-4:recent=40", "turboquant-4:sink=70,center=first", NULL, false, false },
};

static void bytes_and_outputs_agree(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        random_calls(&pairs[i]);
}

/* A refused row leaves the length as it was; rows that follow take its slots. */
static void refuse_rows(const spec_pair *pair)
{
    static const float bad[] = { NAN, 3e38f };
    twins t;
    twins_new(&t, pair, SEQUENCES);
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

static void refused_rows_leave_no_trace(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        refuse_rows(&pairs[i]);
}

/* A block that was sealed, cut and filled again is not complete, as its old slots were not written again. When the pool has too
 * many of them they are sealed all the same, and old slots keep their bytes. */
static void cut_blocks_are_sealed_again(void **unused)
{
    (void)unused;
    static const uint32_t grown[] = { 330, 330, 460, 590, 630 }, cut[] = { 100, 228, 356, 484, 600 };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        twins t;
        twins_new(&t, &pairs[i], 1);
        kvant_sequence_create(t.cpu);
        kvant_sequence_create(t.gpu);
        for (int step = 0; step < 5; step++) {
            while (length_of(&t, 0) < grown[step])
                assert_true(append(&t, 0, grown[step] - length_of(&t, 0) < 20 ? grown[step] - length_of(&t, 0) : 20));
            compare(&t);
            assert_int_equal(kvant_sequence_truncate(t.cpu, 0, cut[step]), KVANT_OK);
            assert_int_equal(kvant_sequence_truncate(t.gpu, 0, cut[step]), KVANT_OK);
        }
        const attention_problem p = { .query_tokens = 3, .causal = true };
        check_attention(&t, 0, 0, &p);
        twins_free(&t);
    }
}

/* Sealed and open blocks, with versions, of the CPU are imported on the GPU and the other way round. */
static void change_devices(const spec_pair *pair)
{
    twins t, other;
    twins_new(&t, pair, SEQUENCES);
    twins_new(&other, pair, SEQUENCES);
    for (twins *each[] = { &t, &other }, **one = each; one < each + 2; one++) {
        kvant_sequence_create((*one)->cpu);
        kvant_sequence_create((*one)->gpu);
    }
    append(&t, 0, 150);
    for (uint32_t block = 0; block < 3; block++) {
        const size_t used = export_both(&t, 0, block);
        t.of_cpu[used / 2] ^= 1;
        assert_int_equal(kvant_sequence_import(other.gpu, 0, t.of_cpu, used), KVANT_ERR_FORMAT);
        t.of_cpu[used / 2] ^= 1;
        assert_int_equal(kvant_sequence_import(other.gpu, 0, t.of_cpu, used), KVANT_OK);
        assert_int_equal(kvant_sequence_import(other.cpu, 0, t.of_gpu, used), KVANT_OK);
    }
    compare(&other);
    append(&other, 0, 20);
    append(&other, 0, 90);
    compare(&other);
    const attention_problem p = { .query_tokens = 9, .causal = true };
    check_attention(&other, 0, 1, &p);
    twins_free(&t);
    twins_free(&other);
}

static void blocks_change_devices(void **unused)
{
    (void)unused;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        change_devices(&pairs[i]);
}

static void refuses(const char *k, const char *v, const char *words)
{
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    kvant_cache *cache;
    params.n_layers = LAYERS, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS, params.head_dim = DIM;
    params.max_tokens = MOST, params.device = "cuda", params.k = k, params.v = v, params.calibration = CALIBRATION;
    const kvant_status status = kvant_cache_create(&params, &cache);
    if (status != KVANT_ERR_UNSUPPORTED)
        fail_msg("%s / %s: status %d: %s", k, v, status, status == KVANT_OK ? "" : kvant_error_message());
    assert_null(cache);
    if (!strstr(kvant_error_message(), words) || !strstr(kvant_error_message(), "presets"))
        fail_msg("'%s' does not say '%s'", kvant_error_message(), words);
}

static void what_is_missing_is_refused(void **unused)
{
    (void)unused;
    refuses("f16", "f16", "not on the GPU");
    refuses("turboquant-4:transform=file,feedback", "turboquant-4", "feedback");
    refuses("turboquant-4:transform=file", "turboquant-4:rotate=dense", "rotate=dense");
    twins t;
    twins_new(&t, &pairs[0], SEQUENCES);
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

static int save_calibration(void **unused)
{
    (void)unused;
    kvant_calibration *calibration = calibrate_fixed(DIM);
    const bool saved = calibration && kvant_calibration_save(calibration, CALIBRATION, NULL, 0) == KVANT_OK;
    kvant_calibration_free(&calibration);
    return saved ? 0 : -1;
}

static int remove_calibration(void **unused)
{
    (void)unused;
    return remove(CALIBRATION);
}

int main(void)
{
    if (!have_device())
        return 77; /* CTest: skipped */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_and_outputs_agree),
        cmocka_unit_test(refused_rows_leave_no_trace),
        cmocka_unit_test(cut_blocks_are_sealed_again),
        cmocka_unit_test(blocks_change_devices),
        cmocka_unit_test(what_is_missing_is_refused),
    };
    return cmocka_run_group_tests(tests, save_calibration, remove_calibration);
}
