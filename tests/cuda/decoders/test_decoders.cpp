/* test_decoders.cpp - decoders of tiles (decode_*.cuh of src/cuda/any and src/cuda/papers) without
 * a GPU. The warp of warp.h runs their source, and the results are compared with the CPU's rows.
 * Copies of the headers lie next to this program and include warp.h in place of CUDA.
 *
 * A number is rounded to fp16 up to three times, by 2^-11 of itself each time. Products with a
 * rotation of halves have the rotation's errors: 2^-11 of its numbers, whose magnitudes as a matrix
 * have a length of at most sqrt(head_dim). */
#include "warp.h"

#include "device/any/decode_trellis.cuh"
#include "device/any/decode_uniform.cuh"
#include "device/any/decoders.h"
#if KVANT_PAPERS
#include "device/papers/decode_families.cuh"
#endif
#include "page.h"

Warp warp;

using namespace kvant;

static constexpr int UNITS_AT = 1 << 16, SCRATCH_AT = UNITS_AT + 256, LEVELS_AT = SCRATCH_AT + 8192;

static const char *const specs[] = {
    "int-2",
    "int-4",
    "int-5",
    "int-8:sym",
    "int-4:group=16",
    "int-3:group=24",
    "int-4:group=64,axis=channel",
    "int-2:group=16,axis=channel",
    "kivi-2",
    "innerq-base",
    "int-3:group=32,hybrid",
    "turboquant-1:rotate=none",
    "turboquant-4:rotate=none",
    "turboquant-7:rotate=none",
    "trellis-2:rotate=none",
    "trellis-3:rotate=none",
    "trellis-4:rotate=none",
    "octopus-4:rotate=none",
    "hqmq-s96r4",
    "hqmq-s192r6",
#if KVANT_PAPERS
    "octopus-5:rotate=none",
    "octopus-4:split=7.1,rotate=none",
    "octopus-3:split=4.3,rotate=none",
    "octopus-5:split=8.2,rotate=none",
    "hqmq-s341r6:med3",
    "hqmq-s341r6:med=1",
    "hqmq-s42r8",
    "hqmq-s12r2",
    "hqmq-s96r4:med3,median=page",
    "naive-4:slots=9",
    "hqmq-s342r4",
    "spherical-r4jl4",
    "addvq-k24r3",
    "innerq-hybrid",
    "polar-3:rotate=none",
    "polar-4:rotate=none",
    "kmeans-4:c=4",
    "kmeans-3:c=257,group=8",
    "turboquant-4:qjl,rotate=none",
    "turboquant-1:qjl,rotate=none",
    "turboquant-3:qjl,sketch=gaussian,rotate=none",
    "octopus-2:qjl,rotate=none",
    "turboquant-2.5",
    "turboquant-3.5",
#endif
};

template <bool KEYS> static void decode(const test_page &page, const DecodedTile &tile)
{
    const kvant_general &g = page.general;
    if (page.params.codes == KVANT_CUDA_CODES_CODEBOOK)
        return decode_book<KEYS>((int)page.params.bits, (int)g.metadata, page.values, tile);
    if (page.params.codes == KVANT_CUDA_CODES_TRELLIS)
        return decode_trellis<KEYS>(page.params,
                                    reinterpret_cast<uint16_t *>(warp.shared + LEVELS_AT), tile);
    if (g.view.kind == KVANT_GENERAL_UNIFORM && g.view.uniform.clusters == 0)
        return decode_uniform_codes<KEYS, true>(g, tile);
#if KVANT_PAPERS
    decode_family<KEYS>(g, tile);
#endif
}

static struct Task {
    const test_page *page;
    int first, valid;
} task;

static void run_lane()
{
    const int d = (int)task.page->general.head_dim;
    const DecodedTile tile{ task.page->page, 0,          UNITS_AT, SCRATCH_AT, d + 8, d,
                            task.first,      task.valid, 0,        d,          0,     1,
                            warp.lane,       0,          0 };
    task.page->general.keys ? decode<true>(*task.page, tile) : decode<false>(*task.page, tile);
}

static void run_warp()
{
    memset(warp.shared, 0x3c, sizeof warp.shared);
    memcpy(warp.shared + LEVELS_AT, task.page->levels, sizeof task.page->levels);
    run_lanes(run_lane);
}

/* The largest error of a token, relative to its row. Tokens that a page does not have must decode
 * to finite numbers. */
static double error_of_tile()
{
    const int d = (int)task.page->general.head_dim;
    const float *units = reinterpret_cast<const float *>(warp.shared + UNITS_AT);
    double worst = 0;
    for (int t = 0; t < TILE_TOKENS; t++) {
        double error = 0, size = 0;
        for (int j = 0; j < d; j++) {
            const double x = (double)__half2float(
                                 reinterpret_cast<const __half *>(warp.shared)[t * (d + 8) + j]) *
                             units[t],
                         y = t < task.valid ? task.page->rows[(task.first + t) * d + j] : x;
            error += (x - y) * (x - y), size += y * y;
        }
        worst = std::isfinite(size) && units[t] >= LEAST_UNIT
                    ? fmax(worst, sqrt(error / (size > 0 ? size : 1)))
                    : INFINITY;
    }
    return worst;
}

static int check(const char *spec, uint32_t head_dim, kvant_role role)
{
    test_page page;
    int failed = 0;
    if (!test_page_make(spec, head_dim, role, &page))
        return 0;
    const double bound = 0x1p-11 * (3.01 + (page.general.view.sketched ? sqrt(head_dim) : 0));
    for (int i = 0; i < 3; i++) {
        task = Task{ &page, i == 1 ? 32 : 0, i == 2 ? 13 : 32 };
        run_warp();
        const double error = error_of_tile();
        if (error <= bound)
            continue;
        printf("FAILED %s, head_dim %u, %s, tokens %d to %d: error %g, bound %g\n", spec, head_dim,
               role == KVANT_ROLE_K ? "keys" : "values", task.first, task.first + task.valid, error,
               bound);
        failed++;
    }
    test_page_free(&page);
    return failed;
}

int main()
{
    int failed = 0;
    for (const char *spec : specs)
        for (const uint32_t head_dim : { 16u, 64u, 80u, 96u, 128u })
            for (const kvant_role role : { KVANT_ROLE_K, KVANT_ROLE_V })
                failed += check(spec, head_dim, role);
    printf("%d failed\n", failed);
    return failed != 0;
}
