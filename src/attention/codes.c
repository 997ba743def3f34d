/* codes.c - see codes.h. */
#include "codes.h"

#include <string.h>

/* From this many query rows on, unpacking a page once is cheaper than looking up its codes for
 * every few rows. From TILE_ROWS on, codes of a single band are unpacked to a tile of values. From
 * BAND_ROWS on, codes of several bands and chunk codes are unpacked to a tile of numbers. */
#define TILE_ROWS 8u
#define BAND_ROWS 24u

static size_t dot_stride(const kvant_attention_plan *plan)
{
    return (plan->v_dim + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS;
}

/* Whether pages of a codec are multiplied as codes. With many query rows, pages of several bands or
 * of chunks are unpacked instead, because unpacking once is cheaper than corrections per row. */
static bool suits(const kvant_attention_plan *plan, const kvant_codec *codec)
{
    if (plan->problem.exact)
        return false;
    const kvant_code_product *product = &codec->product;
    const bool one_tile = product->n_bands == 1 && codec->view.kind != KVANT_CODES_CHUNK;
    return product->lines && (one_tile || kvant_attention_rows(plan) < BAND_ROWS);
}

static uint32_t column_tiles(const kvant_code_product *product)
{
    return product->n_columns / KVANT_TILE;
}

/* Takes count numbers of size bytes from scratch, in whole cache lines. When scratch is NULL it
 * only counts them. */
static void take(float *scratch, size_t *used, size_t count, size_t size, void **array)
{
    if (scratch)
        *array = scratch + *used;
    *used += (count * size + 63) / 64 * 16;
}

static void convert_integers(float *scratch, size_t *used, const kvant_code_product *product,
                             size_t rows, kvant_attention_integers *integers)
{
    size_t bands = rows * (product->by_row ? 1 : product->n_bands);
    void *x = NULL, *steps = NULL, *zeros = NULL, *sums = NULL;
    take(scratch, used, bands * product->n_columns, sizeof(int16_t), &x);
    take(scratch, used, bands, sizeof(float), &steps);
    take(scratch, used, bands, sizeof(float), &zeros);
    take(scratch, used, rows * column_tiles(product), sizeof(int32_t), &sums);
    *integers = (kvant_attention_integers){ x, steps, zeros, sums };
}

/* Lays out the arrays of a view's queries and returns their size in floats. */
static size_t lay_out_query(const kvant_attention_plan *plan, const kvant_codec *k, float *scratch,
                            kvant_attention_query *query)
{
    const size_t rows = kvant_attention_rows(plan);
    size_t used = 0;
    void *queries = NULL;
    take(scratch, &used, rows * k->product.n_columns, sizeof(float), &queries);
    convert_integers(scratch, &used, &k->product, rows, &query->integers);
    query->rows = queries;
    return used;
}

static kvant_attention_query query_of(const kvant_attention_plan *plan, const kvant_codec *k,
                                      const kvant_attention_codes *codes, uint32_t view)
{
    kvant_attention_query query;
    lay_out_query(plan, k, codes->views + view * codes->view_floats, &query);
    return query;
}

/* Lays out the scratch of a kv head's work items and returns its size in floats. When codes is NULL
 * it only counts. */
static size_t lay_out(const kvant_attention_plan *plan, uint32_t kv_head,
                      kvant_attention_codes *codes, float *scratch)
{
    const kvant_codec *k = plan->k->codecs[kv_head], *v = plan->v->codecs[kv_head];
    size_t rows = kvant_attention_rows(plan), used = 0;
    void *dots = NULL, *lines = NULL;
    codes->k_suits = suits(plan, k);
    codes->v_suits = suits(plan, v);
    if (!codes->k_suits && !codes->v_suits)
        return 0;
    if (codes->k_suits) {
        kvant_attention_query query;
        codes->views = scratch;
        codes->view_floats = lay_out_query(plan, k, NULL, &query);
        used = plan->k_views.n * codes->view_floats;
    }
    if (codes->v_suits)
        convert_integers(scratch, &used, &v->product, rows, &codes->weight);
    take(scratch, &used, rows * dot_stride(plan), sizeof(int32_t), &dots);
    take(scratch, &used, 1, sizeof(kvant_code_lines), &lines);
    codes->dots = dots;
    codes->lines = lines;
    return used;
}

size_t kvant_attention_codes_floats(const kvant_attention_plan *plan)
{
    kvant_attention_codes codes;
    size_t most = 0;
    if (plan->source)
        return 0;
    for (uint32_t kv_head = 0; kv_head < plan->n_kv_heads; kv_head++) {
        size_t n = lay_out(plan, kv_head, &codes, NULL);
        most = n > most ? n : most;
    }
    return most;
}

void kvant_attention_codes_bind(const kvant_attention_plan *plan, uint32_t kv_head,
                                kvant_attention_codes *codes, float *scratch)
{
    if (!plan->source)
        lay_out(plan, kv_head, codes, scratch);
}

/* Rounds the rows of a, n_rows x n_columns, to integers. */
static void round_rows(const kvant_kernels *kernels, const kvant_code_product *product,
                       const float *a, uint32_t n_rows, kvant_attention_integers *out)
{
    kvant_fixed_rows rows = { .w = a,
                              .limit = product->limit,
                              .x = out->x,
                              .x_stride = product->n_columns,
                              .line_stride = 1,
                              .steps = out->steps,
                              .zeros = out->zeros,
                              .sums = out->sums };
    kernels->fixed_point(&rows, product->n_columns, n_rows);
}

static void round_products(const kvant_kernels *kernels, const kvant_code_product *product,
                           const kvant_code_lines *lines, const float *a, uint32_t n_rows,
                           kvant_attention_integers *out)
{
    for (uint32_t band = 0; band < product->n_bands; band++) {
        kvant_fixed_rows rows = { .w = a,
                                  .scale = lines->scale + (size_t)band * product->stride,
                                  .zero = product->has_zero
                                              ? lines->zero + (size_t)band * product->stride
                                              : NULL,
                                  .limit = product->limit,
                                  .x = out->x + (size_t)band * product->n_columns,
                                  .x_stride = (size_t)product->n_bands * product->n_columns,
                                  .line_stride = product->n_bands,
                                  .steps = out->steps + band,
                                  .zeros = out->zeros + band };
        kernels->fixed_point(&rows, product->n_columns, n_rows);
    }
}

typedef struct multiplication {
    const kvant_kernels *kernels;
    kvant_page_ref page;
    kvant_code_lines *lines;
    const kvant_attention_integers *a;
    int32_t *dots;
    size_t dot_stride;
    uint32_t n_rows;
    bool add; /* true: adds to sums; false: overwrites them */
    float *sums;
    size_t stride;
} multiplication;

/* Computes the offsets that multiply zero points: steps times the sums of integers over columns. */
static void set_offsets(const multiplication *m, uint32_t first, uint32_t end)
{
    uint32_t tiles = column_tiles(&m->page.codec->product);
    for (uint32_t row = 0; row < m->n_rows; row++) {
        const int32_t *sums = m->a->sums + (size_t)row * tiles;
        int32_t sum = 0;
        for (uint32_t ct = first; ct < end; ct++)
            sum += sums[ct];
        m->a->zeros[row] = m->a->steps[row] * (float)sum;
    }
}

/* Whether codes are unpacked to a tile of 16-bit values. Only codes of single channels can be. It
 * pays when enough rows share the tile, and needs the same band in 4 row tiles. */
static bool accepts_tile(const multiplication *m, const kvant_code_sums *out)
{
    const kvant_code_kind kind = m->page.codec->view.kind;
    return (kind == KVANT_CODES_UNIFORM || kind == KVANT_CODES_CODEBOOK) &&
           m->n_rows >= TILE_ROWS &&
           (out->band_tiles % 4 == 0 || out->band_tiles >= m->page.codec->layout.row_tiles);
}

static void dot_codes(const multiplication *m, const kvant_code_factors *factors)
{
    const kvant_codec *codec = m->page.codec;
    const kvant_code_values *numbers;
    switch (codec->view.kind) {
    case KVANT_CODES_UNIFORM:
    case KVANT_CODES_CODEBOOK:
        m->kernels->code_dots(&codec->layout, m->page.page, codec->product.integers.values, factors,
                              m->dots, m->dot_stride, m->n_rows);
        return;
    case KVANT_CODES_TRELLIS:
        m->kernels->trellis_dots(codec->product.integers.trellis, &codec->layout, m->page.page,
                                 factors->x, factors->stride, m->dots, m->dot_stride, m->n_rows);
        return;
    case KVANT_CODES_CHUNK:
        numbers = codec->product.integers.chunk;
        m->kernels->chunk_dots(&numbers->chunk, numbers->layout, m->page.page, factors->x,
                               factors->stride, m->dots, m->dot_stride, m->n_rows);
        return;
    case KVANT_CODES_NONE: return; /* a codec without codes offers no product */
    }
}

static void multiply_codes(const multiplication *m, const kvant_code_factors *factors,
                           const kvant_code_sums *out)
{
    const kvant_codec *codec = m->page.codec;
    const kvant_layout *layout = &codec->layout;
    if (accepts_tile(m, out)) {
        m->kernels->tile_sums(layout, m->page.page, codec->product.integers.values, factors,
                              m->dots, m->dot_stride, out, m->n_rows);
        return;
    }
    dot_codes(m, factors);
    m->kernels->sum_dots(layout, m->dots, m->dot_stride, out, m->n_rows);
}

static void multiply_by_row(const multiplication *m)
{
    const kvant_layout *layout = &m->page.codec->layout;
    const kvant_code_product *product = &m->page.codec->product;
    kvant_code_factors factors = { m->a->x, product->n_columns, 0, layout->row_tiles, 0, 0 };
    kvant_code_sums out = { .steps = m->a->steps,
                            .n_bands = 1,
                            .band_tiles = layout->row_tiles,
                            .sums = m->sums,
                            .stride = m->stride };
    for (uint32_t band = 0; band < product->n_bands; band++) {
        factors.first = band * product->band_tiles;
        factors.end = band + 1 < product->n_bands ? factors.first + product->band_tiles
                                                  : layout->column_tiles;
        out.scale = m->lines->scale + (size_t)band * product->stride;
        out.add = m->add || band > 0;
        if (product->has_zero) {
            set_offsets(m, factors.first, factors.end);
            out.zero = m->lines->zero + (size_t)band * product->stride;
            out.offsets = m->a->zeros;
        }
        multiply_codes(m, &factors, &out);
    }
}

/* The dots of chunk codes have the order of sums. */
static void add_dots(const multiplication *m, uint32_t n)
{
    for (uint32_t row = 0; row < m->n_rows; row++) {
        const int32_t *dots = m->dots + row * m->dot_stride;
        float step = m->a->steps[row], *sums = m->sums + row * m->stride;
        for (uint32_t j = 0; j < n; j++)
            sums[j] = (m->add ? sums[j] : 0) + (float)dots[j] * step;
    }
}

static void multiply_by_column(const multiplication *m)
{
    const kvant_codec *codec = m->page.codec;
    const kvant_code_product *product = &codec->product;
    kvant_code_factors factors = { .x = m->a->x,
                                   .stride = (size_t)product->n_bands * product->n_columns,
                                   .band_stride = product->n_columns,
                                   .band_tiles = product->band_tiles,
                                   .end = codec->layout.column_tiles };
    kvant_code_sums out = { .steps = m->a->steps,
                            .offsets = m->a->zeros,
                            .n_bands = product->n_bands,
                            .band_tiles = product->band_tiles,
                            .add = m->add,
                            .sums = m->sums,
                            .stride = m->stride };
    if (codec->view.kind != KVANT_CODES_CHUNK) {
        multiply_codes(m, &factors, &out);
        return;
    }
    dot_codes(m, &factors);
    add_dots(m, codec->layout.padded_dim);
}

/* Computes m->sums = a x page, or += when m->add; a is n_rows x n_columns. Queries with lines by
 * row are integers already. */
static void multiply(multiplication *m, const float *a, kvant_attention_integers *integers)
{
    const kvant_codec *codec = m->page.codec;
    const kvant_code_product *product = &codec->product;
    m->a = integers;
    product->lines(codec, m->kernels, m->page.page, m->lines);
    if (!product->by_row)
        round_products(m->kernels, product, m->lines, a, m->n_rows, integers);
    else if (codec->info.role == KVANT_ROLE_V)
        round_rows(m->kernels, product, a, m->n_rows, integers);
    if (product->by_row)
        multiply_by_row(m);
    else
        multiply_by_column(m);
}

void kvant_attention_codes_set_queries(const kvant_attention_plan *plan,
                                       const kvant_kernels *kernels, const kvant_codec *codec,
                                       kvant_attention_codes *codes, uint32_t view,
                                       const float *queries, uint32_t n_rows)
{
    const kvant_code_product *product = &codec->product;
    uint32_t places[KVANT_MAX_HEAD_DIM];
    kvant_codec_query_positions(codec, plan->k_dim, places);
    kvant_attention_query query = query_of(plan, codec, codes, view);
    float *placed = query.rows;
    memset(placed, 0, (size_t)n_rows * product->n_columns * sizeof *placed);
    for (uint32_t row = 0; row < n_rows; row++)
        for (uint32_t i = 0; i < plan->k_dim; i++)
            placed[(size_t)row * product->n_columns + places[i]] =
                queries[(size_t)row * plan->k_dim + i];
    if (product->by_row)
        round_rows(kernels, product, placed, n_rows, &query.integers);
}

static multiplication multiplication_of(const kvant_attention_plan *plan,
                                        const kvant_kernels *kernels,
                                        const kvant_attention_codes *codes, kvant_page_ref page,
                                        uint32_t n_rows)
{
    return (multiplication){ .kernels = kernels,
                             .page = page,
                             .lines = codes->lines,
                             .dots = codes->dots,
                             .dot_stride = dot_stride(plan),
                             .n_rows = n_rows };
}

void kvant_attention_codes_score(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                 kvant_attention_codes *codes, uint32_t view, kvant_page_ref k,
                                 uint32_t n_rows, float *scores)
{
    multiplication m = multiplication_of(plan, kernels, codes, k, n_rows);
    m.sums = scores, m.stride = KVANT_PAGE_TOKENS;
    kvant_attention_query query = query_of(plan, k.codec, codes, view);
    multiply(&m, query.rows, &query.integers);
}

void kvant_attention_codes_add(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                               kvant_attention_codes *codes, kvant_page_ref v, uint32_t n_rows,
                               const float *weights, float *sums)
{
    multiplication m = multiplication_of(plan, kernels, codes, v, n_rows);
    m.add = true, m.sums = sums, m.stride = plan->v_dim;
    multiply(&m, weights, &codes->weight);
}
