/* codes.c - see codes.h. */
#include "codes.h"

#include <string.h>

#define TILE_ROWS 8u  /* from here a tile of codes costs less than looking codes up for every few rows */
#define BAND_ROWS 24u /* from here a tile of numbers does, where codes have several bands or are those of chunks */

static size_t dot_stride(const kvant_attention_plan *plan)
{
    return (plan->v_dim + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS;
}

bool kvant_attention_codes_suit(const kvant_attention_plan *plan, const kvant_codec *codec)
{
    if (plan->problem.exact)
        return false;
    bool one_tile = codec->code_table.n_bands == 1 && !codec->numbers;
    return codec->code_lines && (one_tile || kvant_attention_rows(plan) < BAND_ROWS);
}

static uint32_t row_bands(const kvant_code_table *table)
{
    return table->by_row ? 1 : table->n_bands;
}

static uint32_t column_tiles(const kvant_code_table *table)
{
    return table->n_columns / KVANT_TILE;
}

/* Points *array to count numbers of size bytes at scratch + *used, in whole cache lines, when there is scratch; counts always. */
static void take(float *scratch, size_t *used, size_t count, size_t size, void **array)
{
    if (scratch)
        *array = scratch + *used;
    *used += (count * size + 63) / 64 * 16;
}

static void take_integers(float *scratch, size_t *used, const kvant_code_table *table, size_t rows,
                          kvant_attention_integers *integers)
{
    size_t bands = rows * row_bands(table);
    void *x = NULL, *steps = NULL, *zeros = NULL, *sums = NULL;
    take(scratch, used, bands * table->n_columns, sizeof(int16_t), &x);
    take(scratch, used, bands, sizeof(float), &steps);
    take(scratch, used, bands, sizeof(float), &zeros);
    take(scratch, used, rows * column_tiles(table), sizeof(int32_t), &sums);
    *integers = (kvant_attention_integers){ x, steps, zeros, sums };
}

/* The scratch of a kv head's units: its floats, and where codes' arrays lie in it unless it is NULL. */
static size_t lay_out(const kvant_attention_plan *plan, uint32_t kv_head, kvant_attention_codes *codes,
                      float *scratch)
{
    const kvant_codec *k = plan->k->codecs[kv_head], *v = plan->v->codecs[kv_head];
    size_t rows = kvant_attention_rows(plan), used = 0;
    void *dots = NULL;
    bool k_suits = kvant_attention_codes_suit(plan, k), v_suits = kvant_attention_codes_suit(plan, v);
    if (!k_suits && !v_suits)
        return 0;
    for (uint32_t version = 0; k_suits && version < plan->k_versions.n; version++) {
        void *queries = NULL;
        take(scratch, &used, rows * k->code_table.n_columns, sizeof(float), &queries);
        take_integers(scratch, &used, &k->code_table, rows, &codes->query[version]);
        codes->queries[version] = queries;
    }
    if (v_suits)
        take_integers(scratch, &used, &v->code_table, rows, &codes->weight);
    take(scratch, &used, rows * dot_stride(plan), sizeof(int32_t), &dots);
    codes->dots = dots;
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

void kvant_attention_codes_bind(const kvant_attention_plan *plan, uint32_t kv_head, kvant_attention_codes *codes,
                                float *scratch)
{
    if (!plan->source)
        lay_out(plan, kv_head, codes, scratch);
}

/* a: n_rows x n_columns. */
static void round_rows(const kvant_kernels *kernels, const kvant_code_table *table, const float *a, uint32_t n_rows,
                       kvant_attention_integers *out)
{
    kvant_fixed_rows rows = { .w = a,
                              .limit = table->limit,
                              .x = out->x,
                              .x_stride = table->n_columns,
                              .line_stride = 1,
                              .steps = out->steps,
                              .zeros = out->zeros,
                              .sums = out->sums };
    kernels->fixed_point(&rows, table->n_columns, n_rows);
}

static void round_products(const kvant_kernels *kernels, const kvant_code_table *table,
                           const kvant_code_lines *lines, const float *a, uint32_t n_rows,
                           kvant_attention_integers *out)
{
    for (uint32_t band = 0; band < table->n_bands; band++) {
        kvant_fixed_rows rows = { .w = a,
                                  .scale = lines->scale + (size_t)band * table->stride,
                                  .zero = table->has_zero ? lines->zero + (size_t)band * table->stride : NULL,
                                  .limit = table->limit,
                                  .x = out->x + (size_t)band * table->n_columns,
                                  .x_stride = (size_t)table->n_bands * table->n_columns,
                                  .line_stride = table->n_bands,
                                  .steps = out->steps + band,
                                  .zeros = out->zeros + band };
        kernels->fixed_point(&rows, table->n_columns, n_rows);
    }
}

typedef struct product {
    const kvant_kernels *kernels;
    kvant_page_ref page;
    const kvant_code_lines *lines;
    const kvant_attention_integers *a;
    int32_t *dots;
    size_t dot_stride;
    uint32_t n_rows;
    bool add; /* to sums, else they are whatever they are */
    float *sums;
    size_t stride;
} product;

/* offsets of zero points that multiply integers: steps times sums of integers over columns. */
static void set_offsets(const product *p, uint32_t first, uint32_t end)
{
    uint32_t tiles = column_tiles(&p->page.codec->code_table);
    for (uint32_t row = 0; row < p->n_rows; row++) {
        const int32_t *sums = p->a->sums + (size_t)row * tiles;
        int32_t sum = 0;
        for (uint32_t ct = first; ct < end; ct++)
            sum += sums[ct];
        p->a->zeros[row] = p->a->steps[row] * (float)sum;
    }
}

/* Codes become a tile only where enough rows share it, and where 4 row tiles have the same band. */
static bool takes_tile(const product *p, const kvant_code_sums *out)
{
    return p->n_rows >= TILE_ROWS &&
           (out->band_tiles % 4 == 0 || out->band_tiles >= p->page.codec->layout.row_tiles);
}

static void dot_codes(const product *p, const kvant_code_factors *factors)
{
    const kvant_codec *codec = p->page.codec;
    if (codec->numbers)
        p->kernels->chunk_dots(&codec->numbers->chunk, codec->numbers->layout, p->page.page, factors->x,
                               factors->stride, p->dots, p->dot_stride, p->n_rows);
    else if (codec->trellis)
        p->kernels->trellis_dots(codec->trellis, &codec->layout, p->page.page, factors->x, factors->stride, p->dots,
                                 p->dot_stride, p->n_rows);
    else
        p->kernels->code_dots(&codec->layout, p->page.page, codec->code_table.values, factors, p->dots,
                              p->dot_stride, p->n_rows);
}

static void multiply_codes(const product *p, const kvant_code_factors *factors, const kvant_code_sums *out)
{
    const kvant_codec *codec = p->page.codec;
    const kvant_layout *layout = &codec->layout;
    if (!codec->numbers && !codec->trellis && takes_tile(p, out)) {
        p->kernels->tile_sums(layout, p->page.page, codec->code_table.values, factors, p->dots, p->dot_stride, out,
                              p->n_rows);
        return;
    }
    dot_codes(p, factors);
    p->kernels->sum_dots(layout, p->dots, p->dot_stride, out, p->n_rows);
}

static void multiply_by_row(const product *p)
{
    const kvant_layout *layout = &p->page.codec->layout;
    const kvant_code_table *table = &p->page.codec->code_table;
    kvant_code_factors factors = { p->a->x, table->n_columns, 0, layout->row_tiles, 0, 0 };
    kvant_code_sums out = {
        .steps = p->a->steps, .n_bands = 1, .band_tiles = layout->row_tiles, .sums = p->sums, .stride = p->stride
    };
    for (uint32_t band = 0; band < table->n_bands; band++) {
        factors.first = band * table->band_tiles;
        factors.end = band + 1 < table->n_bands ? factors.first + table->band_tiles : layout->column_tiles;
        out.scale = p->lines->scale + (size_t)band * table->stride;
        out.add = p->add || band > 0;
        if (table->has_zero) {
            set_offsets(p, factors.first, factors.end);
            out.zero = p->lines->zero + (size_t)band * table->stride;
            out.offsets = p->a->zeros;
        }
        multiply_codes(p, &factors, &out);
    }
}

/* Chunks' dots lie as sums do. */
static void add_dots(const product *p, uint32_t n)
{
    for (uint32_t row = 0; row < p->n_rows; row++) {
        const int32_t *dots = p->dots + row * p->dot_stride;
        float step = p->a->steps[row], *sums = p->sums + row * p->stride;
        for (uint32_t j = 0; j < n; j++)
            sums[j] = (p->add ? sums[j] : 0) + (float)dots[j] * step;
    }
}

static void multiply_by_column(const product *p)
{
    const kvant_codec *codec = p->page.codec;
    const kvant_code_table *table = &codec->code_table;
    kvant_code_factors factors = { .x = p->a->x,
                                   .stride = (size_t)table->n_bands * table->n_columns,
                                   .band_stride = table->n_columns,
                                   .band_tiles = table->band_tiles,
                                   .end = codec->layout.column_tiles };
    kvant_code_sums out = { .steps = p->a->steps,
                            .offsets = p->a->zeros,
                            .n_bands = table->n_bands,
                            .band_tiles = table->band_tiles,
                            .add = p->add,
                            .sums = p->sums,
                            .stride = p->stride };
    if (!codec->numbers) {
        multiply_codes(p, &factors, &out);
        return;
    }
    dot_codes(p, &factors);
    add_dots(p, codec->layout.padded_dim);
}

/* p->sums = or += a x page; a: n_rows x n_columns; its integers are there already when they are of queries and lines by row. */
static void multiply(product *p, const float *a, kvant_attention_integers *integers)
{
    const kvant_codec *codec = p->page.codec;
    const kvant_code_table *table = &codec->code_table;
    kvant_code_lines lines;
    p->lines = &lines;
    p->a = integers;
    codec->code_lines(codec, p->kernels, p->page.page, &lines);
    if (!table->by_row)
        round_products(p->kernels, table, &lines, a, p->n_rows, integers);
    else if (codec->info.role == KVANT_ROLE_V)
        round_rows(p->kernels, table, a, p->n_rows, integers);
    if (table->by_row)
        multiply_by_row(p);
    else
        multiply_by_column(p);
}

void kvant_attention_codes_set_queries(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                       const kvant_codec *codec, kvant_attention_codes *codes, uint32_t version,
                                       const float *queries, uint32_t n_rows)
{
    const kvant_code_table *table = &codec->code_table;
    uint32_t places[KVANT_MAX_HEAD_DIM];
    for (uint32_t i = 0; i < plan->k_dim; i++)
        places[i] = kvant_codec_query_place(codec, i);
    float *placed = codes->queries[version];
    memset(placed, 0, (size_t)n_rows * table->n_columns * sizeof *placed);
    for (uint32_t row = 0; row < n_rows; row++)
        for (uint32_t i = 0; i < plan->k_dim; i++)
            placed[(size_t)row * table->n_columns + places[i]] = queries[(size_t)row * plan->k_dim + i];
    if (table->by_row)
        round_rows(kernels, table, placed, n_rows, &codes->query[version]);
}

void kvant_attention_codes_score(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                 kvant_attention_codes *codes, uint32_t version, kvant_page_ref k, uint32_t n_rows,
                                 float *scores)
{
    product p = { .kernels = kernels,
                  .page = k,
                  .dots = codes->dots,
                  .dot_stride = dot_stride(plan),
                  .n_rows = n_rows,
                  .sums = scores,
                  .stride = KVANT_PAGE_TOKENS };
    multiply(&p, codes->queries[version], &codes->query[version]);
}

void kvant_attention_codes_add(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                               kvant_attention_codes *codes, kvant_page_ref v, uint32_t n_rows,
                               const float *weights, float *sums)
{
    product p = { .kernels = kernels,
                  .page = v,
                  .dots = codes->dots,
                  .dot_stride = dot_stride(plan),
                  .n_rows = n_rows,
                  .add = true,
                  .sums = sums,
                  .stride = plan->v_dim };
    multiply(&p, weights, &codes->weight);
}
