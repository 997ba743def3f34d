/* test_families.c - without a GPU: every spec of the CPU's library is also on the GPU. Rows of
 * codecs in the general form (src/cuda/any/general.h) equal the CPU's rows byte by byte. The code
 * under test is the kernels' own code, compiled as C for a team of one lane. */
#include "../unit/testing.h"

#include <float.h>

#include "../../src/codec/encode.h"
#include "../../src/cuda/any/general_encode.h"
#include "../../src/cuda/table.h"
#if KVANT_PAPERS
#include "../../src/cuda/papers/halves.h"
#endif
#include "../unit/calibrated.h"

/* Specs in addition to all_specs, for code paths that only the kernels have. */
static const char *const more_specs[] = {
#if KVANT_PAPERS
    "octopus-1:split=1.1",
    "octopus-5:split=8.2,round=scalar",
    "octopus-3:round=full",
    "octopus-4:qjl,sketch=gaussian",
    "octopus-3:split=5.2,round=2x2,scale=norm",
    "octopus-5:split=8.2,round=next,pad=zero,qjl",
    "turboquant-8:qjl",
    "turboquant-3.5",
    "turboquant-2.5:rotate=dense,signs=seed",
    "hqmq-s341r6",
    "hqmq-s1024r8:slots=3,med=2",
    "hqmq-s24r2:med=1,slots=4,scale=norm",
    "hqmq-s96r4:med=1,median=page,slots=9",
    "hqmq-s48r2:med3,median=page,range=all",
    "hqmq-s24r6:book=random,scale=norm,med=5,median=page,slots=112",
    "naive-2:slots=9",
    "naive-4:med=0,slots=300",
    "naive-7:med=5,range=all",
    "addvq-k192r4",
    "addvq-k30r8:search=greedy,scale=unbiased",
    "spherical-r2jl0",
    "spherical-r8jl8:scale=unbiased",
    "kivi-4",
    "kivi-4:group=16",
    "kivi-2:group=64",
    "innerq-hybrid:hybrid=code,group=16",
    "innerq-hybrid:group=64",
#endif
    "int-8:group=16,hybrid",
    "int-2:group=64,hybrid=code",
    "int-8:group=128,hybrid",
    "turboquant-4:rotate=none",
};

static float normal(uint64_t *rng)
{
    float x;
    fill_normal(&x, 1, rng);
    return x;
}

/* Rows of all sorts: usual rows, tiny rows, zeros, rows with some large numbers, rows of ties; some
 * beyond fp16. */
static void fill_row(float *x, uint32_t n, uint64_t *rng, bool huge)
{
    const uint64_t kind = test_random(rng) % 12;
    const float size = kind == 1           ? 1e-6f
                       : kind == 2         ? 3000.0f
                       : kind == 3         ? 1e-30f
                       : huge && kind == 4 ? 9e4f
                       : huge && kind == 5 ? 3e38f
                                           : 1;
    for (uint32_t j = 0; j < n; j++) {
        x[j] = kind == 6   ? 0.0f
               : kind == 7 ? (float)(test_random(rng) % 5) - 2
                           : normal(rng) * size;
        if (kind == 8 && test_random(rng) % 16 == 0)
            x[j] *= 40;
        x[j] = fmaxf(-FLT_MAX, fminf(x[j], FLT_MAX));
        if (kind == 9)
            x[j] = test_random(rng) % 2 ? 0.0f : -0.0f;
    }
}

typedef struct work {
    float y[KVANT_MAX_HEAD_DIM], a[KVANT_MAX_HEAD_DIM], b[KVANT_MAX_HEAD_DIM], sums[16];
    uint32_t codes[KVANT_MAX_HEAD_DIM];
} work;

static const general_team alone = { 0, 1, 0 };

static general_space space_of(work *w)
{
    return (general_space){ w->y, w->a, w->b, w->codes, w->sums };
}

static bool general_of(const kvant_codec *codec, kvant_cuda_codec *gpu)
{
    const kvant_codec_view *view = kvant_codec_get_view(codec);
    memset(gpu, 0, sizeof *gpu);
    gpu->params.head_dim = codec->info.head_dim;
    gpu->params.role = codec->info.role;
    gpu->params.metadata_offset = (uint32_t)codec->info.metadata_offset;
    const bool known = kvant_cuda_general_init(gpu, view);
    gpu->general.tables = view->tables;
    return known;
}

#if KVANT_PAPERS
static void seal_tiers(const kvant_general *g, const float *rows, void *page)
{
    work w;
    general_space s = space_of(&w);
    const uint32_t d = g->head_dim;
    for (uint32_t j = 0; j < d; j++) {
        const general_run x = { rows + j, NULL, (int)d, 64 };
        w.a[j] = general_energy(&x);
    }
    uint32_t *mask = (uint32_t *)(void *)((uint8_t *)page + g->view.tiers.mask);
    memset(mask, 0, (d + 31) / 32 * sizeof *mask);
    for (uint32_t j = 0; j < d; j++)
        mask[j / 32] |= (uint32_t)general_is_outlier(g, w.a, (int)j) << j % 32;
    for (int t = 0; t < 64; t++) {
        memcpy(w.y, rows + (size_t)t * d, d * sizeof *rows);
        general_encode_tiers(alone, g, &s, t, page);
    }
}
#endif

#if KVANT_PAPERS
static void seal_pool(const kvant_general *g, const float *rows, void *page)
{
    const uint32_t d = g->head_dim;
    general_outlier_count counts[64];
    work w;
    const general_space s = space_of(&w);
    uint16_t *halves = malloc((size_t)64 * d * sizeof *halves);
    for (uint32_t i = 0; i < 64 * d; i++)
        halves[i] = kvant_half_from_float(rows[i]);
    const general_page open = { halves, 64, (int)d };
    const general_pool pool = general_choose_pool(alone, g, &open);
    for (int t = 0; t < 64; t++)
        counts[t] = general_count_outliers(g, &open, &pool, t);
    for (int t = 0; t < 64; t++) {
        const general_pool own = general_pool_at(pool, counts, t);
        memcpy(w.y, rows + (size_t)t * d, d * sizeof *rows);
        general_encode_pooled(alone, g, &s, t, page, &own);
    }
    general_clear_slots(alone, g, general_pool_at(pool, counts, 64).slot, page);
    free(halves);
}
#endif

static void seal(const kvant_general *g, const float *rows, void *page)
{
    const uint32_t d = g->head_dim;
    for (uint32_t first = 0; g->view.kind == KVANT_GENERAL_UNIFORM && first < 64;
         first += g->view.uniform.group)
        for (uint32_t j = 0; j < d; j++) {
            const general_run x = { rows + (size_t)first * d + j, NULL, (int)d, 64 };
            general_encode_tokens(g, &x, (int)first, (int)j, page);
        }
#if KVANT_PAPERS
    if (g->view.kind == KVANT_GENERAL_TIERS)
        seal_tiers(g, rows, page);
    if (g->view.chunks.pool)
        seal_pool(g, rows, page);
#endif
}

/* Both encode the same transformed rows into pages with the same old bytes. */
static void check_rows(const kvant_codec *codec, const kvant_general *g, const float *rows,
                       uint8_t *cpu, uint8_t *gpu)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    const uint32_t d = g->head_dim, group = codec->info.block_tokens;
    for (uint32_t t = 0; t < 64; t += group) {
        bool fits = true;
        for (uint32_t i = 0; i < group; i++)
            fits = fits &&
                   codec->quantizer->check(codec, kernels, rows + (size_t)(t + i) * d) == KVANT_OK;
        if (group == 1) {
            work w;
            const general_space s = space_of(&w);
            memcpy(w.y, rows + (size_t)t * d, d * sizeof *rows);
            if (general_encode(alone, g, &s, (int)t, gpu) != fits)
                fail_msg("%s: token %u %s on the CPU", codec->info.spec, t,
                         fits ? "fits" : "does not fit");
        }
        if (fits)
            kvant_codec_encode_transformed(codec, kernels, rows + (size_t)t * d, t, group, cpu);
    }
    if (group > 1)
        seal(g, rows, gpu);
    for (size_t i = 0; i < codec->info.page_bytes; i++)
        if (cpu[i] != gpu[i])
            fail_msg("%s, head_dim %u, %s: byte %zu of %zu is %02x, the CPU's %02x",
                     codec->info.spec, d, codec->info.role ? "values" : "keys", i,
                     (size_t)codec->info.page_bytes, gpu[i], cpu[i]);
}

static void check_decoded(const kvant_codec *codec, const kvant_general *g, const void *page)
{
    float y[KVANT_MAX_HEAD_DIM];
    work w;
    const general_space s = space_of(&w);
    for (uint32_t t = 0; t < 64; t++) {
        kvant_codec_decode_transformed(codec, kvant_kernels_get(KVANT_CPU_AUTO), page, t, y);
        general_decode(alone, g, page, (int)t, &s);
        for (uint32_t j = 0; j < g->head_dim; j++)
            if (!(w.y[j] == y[j] || (isnan(w.y[j]) && isnan(y[j]))))
                fail_msg("%s, head_dim %u: token %u, channel %u is %.9g, the CPU's %.9g",
                         codec->info.spec, g->head_dim, t, j, (double)w.y[j], (double)y[j]);
    }
}

#if KVANT_PAPERS
/* Products of a row with the operands B of mma.m16n8k16 (PTX ISA, "Matrix Fragments") are the row
 * rotated back. For keys of tiers they are rotated as queries are (direct_tiers.cuh). */
static void check_rotation(const kvant_codec *codec, const kvant_general *g, uint64_t *rng)
{
    const uint32_t d = g->head_dim, tiles = d / 16, n = g->view.sketched ? d : g->view.books[0].n;
    const kvant_rotation_position *places[] = { g->view.sketched ? &g->view.projection
                                                                 : &g->view.tiers.rotations[0],
                                                &g->view.tiers.rotations[1] };
    float row[KVANT_MAX_HEAD_DIM], from[KVANT_MAX_HEAD_DIM], to[KVANT_MAX_HEAD_DIM];
    const size_t bytes = kvant_cuda_halves_bytes(g);
    if (bytes == 0 || g->view.kind == KVANT_GENERAL_DIRECTIONS)
        return;
    uint16_t *halves = malloc(bytes);
    kvant_cuda_halves(g, g->tables, halves);
    for (uint32_t j = 0; j < d; j++)
        row[j] = from[j] = normal(rng);
    for (uint32_t k = 0; k < (n < d ? 2u : 1u); k++)
        if (g->view.sketched || !g->keys)
            general_rotate_back(alone, places[k], g->tables, from + k * n, to + k * n);
        else
            general_rotate(alone, places[k], g->tables, from + k * n, to + k * n);
    for (uint32_t column = 0; column < d; column++) {
        double sum = 0, bound = 0;
        for (uint32_t i = 0; i < d; i++) {
            const uint32_t k = i % 16, lane = 4 * (column % 8) + k % 8 / 2,
                           registers = column % 16 / 8 * 2 + k / 8;
            const double term =
                (double)row[i] *
                kvant_half_to_float(
                    halves[(((size_t)(column / 16) * tiles + i / 16) * 32 + lane) * 8 +
                           2 * registers + k % 2]);
            sum += term, bound += fabs(term) * 0x1p-10;
        }
        if (!(fabs(sum - to[column]) <= bound + 1e-6))
            fail_msg("%s, head_dim %u: column %u of the rotation gives %g, not %g",
                     codec->info.spec, d, column, sum, (double)to[column]);
    }
    free(halves);
}
#endif

/* Each codec gets this number of pages with 64 random rows. The first page has rows of all
 * kinds. */
static int n_pages = 3;

static uint32_t check_codec(const kvant_codec *codec, uint64_t *rng)
{
    const uint32_t d = codec->info.head_dim;
    kvant_cuda_codec gpu;
    if (!general_of(codec, &gpu))
        return 0;
    uint8_t *pages[2] = { aligned(codec->info.page_bytes), aligned(codec->info.page_bytes) };
    float *rows = malloc((size_t)64 * d * sizeof *rows);
    const bool groups = codec->info.block_tokens > 1;
    for (int page = 0; page < n_pages; page++) {
        for (uint32_t t = 0; t < 64; t++)
            fill_row(rows + (size_t)t * d, d, rng, !groups);
        for (uint32_t i = 0; groups && i < 64 * d; i++) /* exact pages hold fp16 */
            rows[i] = kvant_half_to_float(kvant_half_from_float(rows[i]));
        check_rows(codec, &gpu.general, rows, pages[0], pages[1]);
        check_decoded(codec, &gpu.general, pages[1]);
    }
    for (size_t i = 0; i < codec->info.page_bytes;
         i++) /* damaged bytes do no harm and decode to the same numbers */
        pages[0][i] = (uint8_t)test_random(rng);
    check_decoded(codec, &gpu.general, pages[0]);
#if KVANT_PAPERS
    check_rotation(codec, &gpu.general, rng);
#endif
    free(rows);
    free(pages[0]);
    free(pages[1]);
    return 1;
}

static const char *spec_at(size_t i)
{
    return i < COUNT(all_specs)                       ? all_specs[i]
           : i < COUNT(all_specs) + COUNT(more_specs) ? more_specs[i - COUNT(all_specs)]
                                                      : NULL;
}

static const uint32_t dims[] = { 16, 64, 80, 96, 128, 256, 512 };

CASE(general_rows_are_the_cpus)
{
    uint64_t rng = 11;
    uint32_t n = 0;
    for (size_t i = 0; spec_at(i); i++)
        for (size_t d = 0; d < COUNT(dims); d++)
            for (int role = 0; role < 2; role++) {
                kvant_codec *codec;
                if ((dims[d] == 512 && strstr(spec_at(i), "k192")) ||
                    kvant_codec_create(spec_at(i), dims[d], (kvant_role)role, 3, &codec, NULL, 0) !=
                        KVANT_OK)
                    continue;
                n += check_codec(codec, &rng);
                kvant_codec_free(&codec);
            }
    printf("%u codecs\n", n);
    assert_true(n > 100);
}

CASE(calibrated_rows_are_the_cpus)
{
    uint64_t rng = 12;
    for (size_t d = 1; d < 5; d++) {
        kvant_calibration *calibration = calibrate_fixed(dims[d]);
        assert_non_null(calibration);
        for (size_t i = 0; i < N_CALIBRATED_SPECS + N_WEIGHTED_SPECS; i++)
            for (uint32_t head = 0; head < 4; head++) {
                const char *spec = i < N_CALIBRATED_SPECS ? calibrated_specs[i]
                                                          : weighted_specs[i - N_CALIBRATED_SPECS];
                kvant_codec *codec;
                if (kvant_codec_create_calibrated(spec, dims[d], (kvant_role)(head % 2), 3,
                                                  calibration, 1, head / 2, &codec, NULL,
                                                  0) != KVANT_OK)
                    continue;
                check_codec(codec, &rng);
                kvant_codec_free(&codec);
            }
        kvant_calibration_free(&calibration);
    }
}

/* polar-3.9 has a radius per 16 channels, which no kernel supports. So it has no view and is
 * refused by name. Every other codec is on the GPU. */
static void expect_on_gpu(const kvant_codec *codec)
{
    const char *spec = codec->info.spec;
    const bool refused = strncmp(spec, "polar-3.9", 9) == 0;
    kvant_cuda_codec *gpu = NULL;
    char text[512] = "";
    const kvant_status status = kvant_cuda_codec_unrotated(codec, &gpu, text, sizeof text);
    if (status != (refused ? KVANT_ERR_UNSUPPORTED : KVANT_OK) ||
        (refused && !strstr(text, "not on the GPU")))
        fail_msg("%s, head_dim %u: status %d, %s", spec, codec->info.head_dim, (int)status, text);
    kvant_cuda_codec_free(&gpu);
}

/* Every spec that the CPU's library accepts, for both roles, through the public functions; dense
 * rotations as a cache uses them. */
CASE(all_specs_are_on_the_gpu)
{
    uint32_t n = 0;
    for (size_t i = 0; spec_at(i); i++)
        for (size_t d = 0; d < COUNT(dims); d++)
            for (int role = 0; role < 2; role++) {
                kvant_codec *codec;
                if (kvant_codec_create(spec_at(i), dims[d], (kvant_role)role, 3, &codec, NULL, 0) !=
                    KVANT_OK)
                    continue;
                expect_on_gpu(codec);
                kvant_codec_free(&codec);
                n++;
            }
    assert_true(n > 500);
}

/* Nothing of `kvant codecs` is missing: each family with each variant that it lists. */
CASE(all_families_are_on_the_gpu)
{
    kvant_calibration *calibration = calibrate_fixed(64);
    kvant_codec_family family = { .size = sizeof family };
    assert_non_null(calibration);
    for (size_t i = 0; kvant_codec_family_get(i, &family) == KVANT_OK; i++)
        for (const char *at = family.variants;;
             at += strcspn(at, " ") + (at[strcspn(at, " ")] != 0)) {
            const int length = (int)strcspn(at, " ");
            char spec[64];
            snprintf(spec, sizeof spec, "%s%s%.*s%s", family.name, length ? "-" : "", length, at,
                     strcmp(family.name, "kmeans") == 0 ? ":c=4" : "");
            for (int role = 0; role < 2; role++) {
                kvant_codec *codec;
                assert_int_equal(kvant_codec_create_calibrated(spec, 64, (kvant_role)role, 0,
                                                               calibration, 0, 0, &codec, NULL, 0),
                                 KVANT_OK);
                expect_on_gpu(codec);
                kvant_codec_free(&codec);
            }
            if (!at[length])
                break;
        }
    kvant_calibration_free(&calibration);
}

/* The test calls only kvant_cuda_general_init of params.c. */
void kvant_cuda_tables_free(kvant_cuda_tables_of *tables)
{
}

/* test_families [PAGES] */
int main(int argc, char **argv)
{
    n_pages = argc > 1 ? atoi(argv[1]) : n_pages;
    return run_cases(NULL, NULL);
}
