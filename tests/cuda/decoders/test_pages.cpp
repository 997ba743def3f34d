/* test_pages.cpp - pages in decode kernels (src/cuda/attention) without a GPU. The warp of warp.h
 * computes scores of a page's keys and sums of its values, which are compared with the CPU's rows.
 *
 * A query is rounded to 2^-12 of a power of two above its numbers. Codes times scales plus zero
 * points err by 2^-11 of codes and of zero points, three times at most (attention_bound.c). Bytes
 * of a direction are within 2^-8 of the chunk's length. */
#include "warp.h"

#include "cuda/attention/attention_pairs.h"
#include "device/attention/values.cuh"
#include "page.h"

#include <kvant/settings.h>

Warp warp;

using namespace kvant;

static constexpr int COLUMNS = 8, TABLE_AT = 1 << 16;

static struct Task {
    const test_page *page;
    int valid;
    AttentionArgs args;
    GroupPlaces places;
    ChunkAttentionArgs chunks;
    float queries[COLUMNS][256], scores[64][COLUMNS];
    /* results: scores, or sums of values with their weights */
    float of_tokens[64][COLUMNS], sums[COLUMNS][256], total[COLUMNS], top[COLUMNS];
} task;

template <class C> static auto table_of()
{
    if constexpr (HAS_CHUNKS<C>) {
        if (warp.lane == 0)
            memset(warp.shared + TABLE_AT, 0xff, sizeof warp.shared - TABLE_AT);
        meet();
        C::fill(warp.shared + TABLE_AT, task.chunks.k_directions, 2);
        meet();
        return chunk_table<C, 2>(warp.shared + TABLE_AT, task.chunks.k_directions, warp.lane);
    } else if constexpr (HAS_WIDE_BOOK<C>) {
        meet();
        fill_wide_book<C>(warp.shared + TABLE_AT, task.chunks.k_levels);
        meet();
        return wide_table(warp.shared + TABLE_AT, 1, warp.lane);
    } else if constexpr (HAS_TRELLIS<C>) {
        constexpr int COPIES = level_copies<C, true>();
        meet();
        fill_levels<C, COPIES>(warp.shared + TABLE_AT, task.args.k_bytes);
        meet();
        return level_table<C, COPIES>(warp.shared + TABLE_AT, 1, warp.lane);
    } else
        return bytes_of(task.args.k_bytes, 1);
}

template <class C, int D> static int code_bytes_of(bool keys)
{
    if constexpr (HAS_CHUNKS<C>)
        return chunk_code_bytes(C::BITS, ChunkPlaces<C, D>::CHUNKS, keys);
    else
        return keys ? code_bytes(C::BITS, 4, D / 16) : code_bytes(C::BITS, D / 16, 4);
}

template <class C, int D> static void score()
{
    constexpr bool BYTES = HAS_TRELLIS<C> && C::BIASED; /* as Shape has it for 8 columns */
    static QueryTile<D, COLUMNS, BYTES> tile;
    const auto table = table_of<C>();
    for (int n = 0; n < COLUMNS; n++) {
        Row<D> row;
        row.each(warp.lane, [&](float &x, int channel) { x = task.queries[n][channel]; });
        prepare_row<C, D>(tile, task.args, n, row, nullptr, 0, warp.lane);
    }
    meet();
    uint32_t q[1][key_tiles<C, D>()][2];
    load_operands<C, D>(tile, 0, q[0], warp.lane);
    const ScoreFactors<C, D> factors[1] = { score_factors<C, D>(
        tile, 0, warp.lane, task.args.k_step, task.args.k_bias, task.args.k_symmetric,
        task.args.k_offset) };
    float s[1][4][4];
    const int codes = code_bytes_of<C, D>(true);
    if (C::GROUP != KVANT_CUDA_GROUP_TOKEN && task.places.hybrid)
        split_hybrid(task.page->page + codes, task.places, task.args.k_offset, warp.lane);
    score_page<C, D, BYTES>(task.page->page, codes, q, factors, table, task.args.k_symmetric,
                            task.args.k_offset, task.places, warp.lane, s);
    if constexpr (BYTES) { /* kernels for one matrix read q from the tile: the same scores */
        float own[1][4][4];
        score_page<C, D, BYTES, true>(task.page->page, codes, q, factors, table,
                                      task.args.k_symmetric, task.args.k_offset, task.places,
                                      warp.lane, own, reinterpret_cast<uint4 *>(tile.fixed));
        for (int i = 0; i < 16; i++)
            if (own[0][i / 4][i % 4] != s[0][i / 4][i % 4])
                s[0][i / 4][i % 4] = NAN;
    }
    for (int i = 0; i < 16; i++)
        task.of_tokens[16 * (i / 4) + 8 * (i / 2 % 2) + warp.lane / 4]
                      [2 * (warp.lane % 4) + i % 2] = s[0][i / 4][i % 4];
}

template <class C, int D> static void add()
{
    const auto table = table_of<C>();
    const int codes = code_bytes_of<C, D>(false), lane = warp.lane;
    float s[1][4][4];
    for (int i = 0; i < 16; i++)
        s[0][i / 4][i % 4] =
            task.scores[16 * (i / 4) + 8 * (i / 2 % 2) + lane / 4][2 * (lane % 4) + i % 2];
    Accumulator<C, D> sums[1];
    sums[0].clear();
    if (C::GROUP != KVANT_CUDA_GROUP_TOKEN && task.places.hybrid)
        split_hybrid(task.page->page + codes, task.places, task.args.k_offset, lane);
    if constexpr (C::GROUP != KVANT_CUDA_GROUP_TOKEN)
        if (task.valid < PAGE_TOKENS)
            clear_scales<C, D>(task.page->page + codes, task.args.k_symmetric, task.places,
                               task.valid, lane);
    add_page<C, D>(task.page->page, codes, table, task.args.k_symmetric, task.args.k_offset,
                   task.places, lane, task.valid, s, sums);
    sums[0].finish(task.args.k_step, task.args.k_bias, lane);
    for (int i = 0; i < 2 * Accumulator<C, D>::TILES; i++)
        for (int h = 0; h < 2; h++) {
            const int channel = value_channel<C, D>(i / 2, lane / 4, i % 2),
                      column = 2 * (lane % 4) + h;
            if (channel < D)
                task.sums[column][channel] = sums[0].o[i / 2][h + 2 * (i % 2)];
            task.total[column] = sums[0].sum[h], task.top[column] = sums[0].max[h];
        }
}

/* ---- expected results ---- */

static double half_number(const test_page &page, uint32_t at)
{
    return kvant_half_to_float(
        reinterpret_cast<const uint16_t *>(page.page + page.general.metadata)[at]);
}

/* The size that errors of a number are relative to. */
static double size_of_number(const test_page &page, int token, int channel)
{
    const kvant_general_view &view = page.general.view;
    const int d = (int)page.general.head_dim;
    if (view.kind == KVANT_GENERAL_UNIFORM) {
        const auto &u = view.uniform;
        const uint32_t at =
            u.per_channel ? token / u.group * d + channel : channel / u.group * 64 + token;
        const double scale = fabs(half_number(page, at)),
                     zero = u.mode == GENERAL_SYM ? 0 : fabs(half_number(page, u.n_scales + at));
        return scale * (1 << u.bits) + fmax(zero, scale * u.bias);
    }
    /* A number of a trellis is a byte: 128 plus a level. The factor is at most 255. */
    if (page.gpu.params.codes == KVANT_CUDA_CODES_TRELLIS) {
        const uint16_t *scales =
            reinterpret_cast<const uint16_t *>(page.page + page.gpu.params.metadata_offset);
        return kvant_half_to_float(scales[token]) * page.gpu.params.step * 255;
    }
    /* A level of a codebook is rounded once: by 2^-11 of itself, in units of 3 x 2^-11. */
    if (page.gpu.params.codes == KVANT_CUDA_CODES_CODEBOOK)
        return fabs(page.rows[token * d + channel]) / 3;
    double squares = 0;
    const int n = view.kind == KVANT_GENERAL_TRIPLETS ? 3 : 4, first = channel / n * n;
    for (int i = first; i < min(first + n, d); i++)
        squares += (double)page.rows[token * d + i] * page.rows[token * d + i];
    return sqrt(squares) * (n == 4 ? 2.9 : 1.1); /* 2^-8 in units of 3 x 2^-11, and a third more */
}

static bool wrong(const char *spec, const char *what, int token, int column, double x, double y,
                  double bound)
{
    if (fabs(x - y) <= bound)
        return false;
    printf("FAILED %s, head_dim %u: %s %d of column %d: %g instead of %g, bound %g\n", spec,
           task.page->general.head_dim, what, token, column, x, y, bound);
    return true;
}

static bool wrong_scores(const char *spec)
{
    const int d = (int)task.page->general.head_dim;
    for (int n = 0; n < COLUMNS; n++) {
        double largest = 0;
        for (int j = 0; j < d; j++)
            largest = fmax(largest, fabs(task.queries[n][j]));
        for (int t = 0; t < task.valid; t++) {
            double sum = 0, bound = 0;
            for (int j = 0; j < d; j++) {
                const double y = task.page->rows[t * d + j],
                             size = size_of_number(*task.page, t, j);
                sum += task.queries[n][j] * y;
                bound += 2 * largest * 0x1p-12 * fabs(y) +
                         3.1 * 0x1p-11 * fabs(task.queries[n][j]) * size + 0x1p-20 * largest * size;
            }
            if (wrong(spec, "score", t, n, task.of_tokens[t][n], sum, bound))
                return true;
        }
    }
    return false;
}

static bool wrong_sums(const char *spec)
{
    const int d = (int)task.page->general.head_dim;
    for (int n = 0; n < COLUMNS; n++) {
        double total = 0;
        for (int t = 0; t < task.valid; t++)
            total += exp2(task.scores[t][n]);
        const double reference = exp2(task.top[n]);
        if (wrong(spec, "total", 0, n, task.total[n] * reference, total, total * 0x1p-18))
            return true;
        for (int j = 0; j < d; j++) {
            double sum = 0, bound = 0, most = 0;
            for (int t = 0; t < task.valid; t++) {
                const double w = exp2(task.scores[t][n]) / total,
                             size = size_of_number(*task.page, t, j);
                sum += w * task.page->rows[t * d + j];
                bound += 3.1 * 0x1p-11 * w * size;
                most = fmax(most, size);
            }
            if (wrong(spec, "channel", j, n, task.sums[n][j] / task.total[n], sum,
                      bound + 0x1p-18 * most))
                return true;
        }
    }
    return false;
}

/* A query that picks one channel of the keys gives one number of each token, so no other number
 * hides a wrong one. The query is exact. The level is rounded to fp16, which is 2^-11 of it. Its
 * product with the scale is rounded to fp32. */
template <class C, int D> static bool wrong_numbers(const char *spec)
{
    for (int first = 0; first < D; first += COLUMNS) {
        for (int n = 0; n < COLUMNS; n++)
            for (int j = 0; j < D; j++)
                task.queries[n][j] = j == first + n;
        run_lanes(score<C, D>);
        for (int n = 0; n < COLUMNS; n++)
            for (int t = 0; t < task.valid; t++) {
                const double y = task.page->rows[t * D + first + n];
                const double bound = 1.01 * 0x1p-11 * fabs(y);
                if (wrong(spec, "number", t, first + n, task.of_tokens[t][n], y, bound))
                    return true;
            }
    }
    return false;
}

template <class C, int D> static int check(const char *spec)
{
    int failed = 0;
    for (const kvant_role role : { KVANT_ROLE_K, KVANT_ROLE_V })
        for (int valid = 64; valid > 0; valid -= 41) {
            test_page page;
            if (!test_page_make(spec, D, role, &page))
                continue;
            const kvant_codec_view *view = page.view;
            const kvant_cuda_params &p = page.gpu.params;
            if (HAS_WIDE_BOOK<C> && role == KVANT_ROLE_V) { /* only keys have this kind */
                test_page_free(&page);
                continue;
            }
            if (p.kind != C::KIND && p.decoder != C::KIND) {
                printf("FAILED %s, head_dim %d: kind %d, decoder %d instead of %d\n", spec, D,
                       p.kind, p.decoder, C::KIND);
                failed++;
            }
            task.page = &page;
            task.valid = valid;
            task.args.scale_log2 = 1;
            task.args.k_step = HAS_TRELLIS<C> ? p.step : 1;
            task.args.k_bias = HAS_TRELLIS<C> ? p.bias : 0;
            if (HAS_TRELLIS<C>)
                memcpy(task.args.k_bytes, p.bytes, sizeof task.args.k_bytes);
            if (view->kind == KVANT_CODES_UNIFORM) {
                task.args.k_symmetric = (int)p.symmetric;
                task.args.k_offset = p.offset;
                task.places = { (int)p.group_log, (int)p.n_scales, (int)p.hybrid };
            } else if (HAS_TRELLIS<C>) {
                task.places = {};
            } else if (HAS_WIDE_BOOK<C>) {
                memcpy(task.chunks.k_levels, page.gpu.wide.values, sizeof task.chunks.k_levels);
            } else {
                task.chunks.k_directions = page.gpu.directions;
            }
            static uint32_t rng = 1;
            const auto next = [] {
                return (float)((rng = rng * 1664525u + 1013904223u) >> 8 & 0xffff) * 0x1p-15f - 1;
            };
            for (int n = 0; n < COLUMNS; n++) {
                for (int j = 0; j < D; j++)
                    task.queries[n][j] = next() * (n == 3 ? 1000 : 1);
                for (int t = 0; t < 64; t++)
                    task.scores[t][n] = next() * (n == 2 ? 30 : 3);
            }
            if (role == KVANT_ROLE_K) {
                run_lanes(score<C, D>);
                failed += wrong_scores(spec);
                if constexpr (HAS_WIDE_BOOK<C>)
                    failed += wrong_numbers<C, D>(spec);
            } else if constexpr (!HAS_WIDE_BOOK<C>) {
                run_lanes(add<C, D>);
                failed += wrong_sums(spec);
            }
            test_page_free(&page);
        }
    return failed;
}

template <class C> static bool is_kind(const kvant_cuda_params &p, bool other)
{
    return (other && p.decoder ? p.decoder : p.kind) == C::KIND;
}

/* Whether attention_pairs.h has the pair, as launch.cu looks for it. */
static bool has_pair(const kvant_cuda_params &k, const kvant_cuda_params &v)
{
    bool found = false;
#define KVANT_IS_PAIR(K, V) found = found || (is_kind<K>(k, other) && is_kind<V>(v, other));
    for (const bool other : { false, true }) {
        KVANT_CUDA_ATTENTION_PAIRS(KVANT_IS_PAIR)
    }
#undef KVANT_IS_PAIR
    return found;
}

/* A pair without a decode kernel takes up to five times as long. So the presets, their first layer
 * in vLLM, and the codecs that the guide recommends for servers (docs/start/vllm.md), must have a
 * kernel. A transform or a centre after a codec's name in a preset does not change the kind of its
 * codes. */
static int lacks_kernel_for(const char *k_spec, const char *v_spec, uint32_t head_dim)
{
    test_page pages[2];
    for (int i = 0; i < 2; i++) {
        char name[32] = "";
        sscanf(i ? v_spec : k_spec, "%31[^:]", name);
        if (!test_page_make(name, head_dim, i ? KVANT_ROLE_V : KVANT_ROLE_K, &pages[i]))
            return printf("FAILED %s: no such codec\n", name) > 0;
    }
    const bool found = has_pair(pages[0].gpu.params, pages[1].gpu.params);
    if (!found)
        printf("FAILED %s with %s at head_dim %u: attention_pairs.h has no such pair\n", k_spec,
               v_spec, head_dim);
    for (test_page &page : pages)
        test_page_free(&page);
    return !found;
}

static int lacks_kernel(const char *k_spec, const char *v_spec)
{
    return lacks_kernel_for(k_spec, v_spec, 64) + lacks_kernel_for(k_spec, v_spec, 128);
}

static int check_pairs()
{
    int failed = lacks_kernel(VLLM_FIRST_KEYS, "turboquant-4");
    for (const char *name : { "quality", "balanced", "small", "tiny" })
        for (const int calibrated : { 0, 1 }) {
            kvant_preset preset = {};
            preset.size = sizeof preset;
            if (kvant_preset_get(name, calibrated, &preset) != KVANT_OK)
                return printf("FAILED no preset %s\n", name) > 0;
            failed += lacks_kernel(preset.k, preset.v);
            if (preset.more_k)
                failed += lacks_kernel(preset.more_k, preset.v);
            else /* vLLM serves the presets without more_k */
                failed += lacks_kernel(VLLM_FIRST_KEYS, preset.v);
        }
    return failed;
}

template <class C> static int check_all(const char *spec)
{
    return check<C, 64>(spec) + check<C, 96>(spec) + check<C, 128>(spec) + check<C, 256>(spec);
}

int main()
{
    int failed = check_pairs();
    failed += check_all<Uniform4>("int-4") + check_all<Uniform2>("int-2:sym") +
              check_all<Uniform3>("int-3");
    failed += check_all<Uniform2Channels32>("int-2:group=32") +
              check<Uniform2Channels32, 128>("int-2:group=64") +
              check<Uniform2Channels32, 256>("int-2:group=128,sym") +
              check_all<Uniform3Channels32>("int-3:group=32,hybrid");
    failed += check_all<Uniform2Tokens32>("int-2:group=32,axis=channel") +
              check_all<Uniform2Tokens32>("int-2:group=64,axis=channel") +
              check_all<Uniform3Tokens32>("int-3:group=64,axis=channel,hybrid");
    failed += check_all<Uniform4Channels>("int-4:group=32") +
              check<Uniform4Channels, 128>("int-4:group=16") +
              check<Uniform4Channels, 64>("int-4:group=16,sym") +
              check<Uniform4Channels, 96>("int-4:group=64") +
              check<Uniform4Channels, 256>("int-4:group=128,hybrid=code") +
              check<Uniform4Channels, 96>("int-4:group=16,hybrid");
    failed += check_all<Uniform8Channels>("int-8:group=32") +
              check<Uniform8Channels, 128>("int-8:group=16,sym");
    failed += check_all<Uniform4Tokens>("int-4:group=32,axis=channel") +
              check_all<Uniform4Tokens>("int-4:group=64,axis=channel,sym") +
              check<Uniform4Tokens, 128>("int-4:group=16,axis=channel") +
              check<Uniform4Tokens, 64>("int-4:group=16,axis=channel,hybrid") +
              check<Uniform4Tokens, 96>("int-4:group=16,axis=channel,sym");
    failed += check_all<Codebook6>("turboquant-6:rotate=none");
    failed += check_all<Trellis4>("trellis-4") + check_all<Trellis3>("trellis-3") +
              check_all<Trellis2>("trellis-2");
    failed += check_all<Octopus2>("octopus-2:rotate=none,round=next,pad=zero") +
              check_all<Octopus3>("octopus-3:rotate=none") +
              check_all<Octopus4>("octopus-4:rotate=none") + check_all<HqmqS96R4>("hqmq-s96r4");
    printf("%d failed\n", failed);
    return failed != 0;
}
