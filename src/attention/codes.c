/* codes.c - see codes.h. */
#include "codes.h"

#include <string.h>

#define TILE_ROWS 8u  /* from here a tile of codes costs less than looking codes up for every few rows */
#define BAND_ROWS 24u /* from here a tile of numbers does, where codes have several bands or are those of chunks */
#define MAX_ROW_TILES (KVANT_MAX_HEAD_DIM / KVANT_TILE)

static size_t dot_stride(const kvant_attention_plan *plan)
{
    return (plan->v_dim + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS;
}

/* Codes become a tile only where enough rows share it. */
static kvant_code_dots_fn *dots_for(const kvant_kernels *kernels, uint32_t n_rows)
{
    return n_rows < TILE_ROWS ? kernels->code_dots : kernels->tile_dots;
}

bool kvant_attention_codes_suit(const kvant_attention_plan *plan, const kvant_codec *codec)
{
    if (plan->args->fp32)
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

/* The scratch of a plan: its floats, and where codes' arrays lie in it unless it is NULL. */
static size_t lay_out(const kvant_attention_plan *plan, kvant_attention_codes *codes, float *scratch)
{
    size_t rows = kvant_attention_rows(plan), used = 0;
    void *queries = NULL, *dots = NULL;
    bool k_suits = plan->k_codec && kvant_attention_codes_suit(plan, plan->k_codec),
         v_suits = plan->v_codec && kvant_attention_codes_suit(plan, plan->v_codec);
    if (!k_suits && !v_suits)
        return 0;
    if (k_suits) {
        take(scratch, &used, rows * plan->k_codec->code_table.n_columns, sizeof(float), &queries);
        take_integers(scratch, &used, &plan->k_codec->code_table, rows, &codes->query);
    }
    if (v_suits)
        take_integers(scratch, &used, &plan->v_codec->code_table, rows, &codes->weight);
    take(scratch, &used, rows * dot_stride(plan), sizeof(int32_t), &dots);
    codes->queries = queries;
    codes->dots = dots;
    return used;
}

size_t kvant_attention_codes_floats(const kvant_attention_plan *plan)
{
    kvant_attention_codes codes;
    return lay_out(plan, &codes, NULL);
}

void kvant_attention_codes_bind(const kvant_attention_plan *plan, kvant_attention_codes *codes, float *scratch)
{
    lay_out(plan, codes, scratch);
}

/* a: n_rows x n_columns. */
static void round_rows(const kvant_kernels *kernels, const kvant_code_table *table, const float *a, uint32_t n_rows,
                       kvant_attention_integers *out)
{
    for (uint32_t row = 0; row < n_rows; row++)
        out->steps[row] = kernels->fixed_point(a + (size_t)row * table->n_columns, NULL, table->n_columns,
                                               table->limit, out->x + (size_t)row * table->n_columns,
                                               out->sums + (size_t)row * column_tiles(table));
}

static void round_products(const kvant_kernels *kernels, const kvant_code_table *table,
                           const kvant_code_lines *lines, const float *a, uint32_t n_rows,
                           kvant_attention_integers *out)
{
    uint32_t n = table->n_columns;
    for (uint32_t row = 0; row < n_rows; row++, a += n)
        for (uint32_t band = 0; band < table->n_bands; band++) {
            size_t at = (size_t)row * table->n_bands + band;
            out->steps[at] = kernels->fixed_point(a, lines->scale + (size_t)band * table->stride, n, table->limit,
                                                  out->x + at * n, out->sums + (size_t)row * column_tiles(table));
            out->zeros[at] = table->has_zero ? kernels->dot(a, lines->zero + (size_t)band * table->stride, n) : 0;
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
} product;

static int32_t integer_sum(const product *p, uint32_t row, uint32_t first, uint32_t end)
{
    const int32_t *tiles = p->a->sums + (size_t)row * column_tiles(&p->page.codec->code_table);
    int32_t sum = 0;
    for (uint32_t ct = first; ct < end; ct++)
        sum += tiles[ct];
    return sum;
}

/* dots of a page's codes and the integers of factors. */
static void multiply_codes(const product *p, const kvant_code_factors *factors)
{
    const kvant_codec *codec = p->page.codec;
    if (codec->numbers)
        p->kernels->chunk_dots(&codec->numbers->chunk, codec->numbers->layout, p->page.page, factors->x,
                               factors->stride, p->dots, p->dot_stride, p->n_rows);
    else
        dots_for(p->kernels, p->n_rows)(&codec->layout, p->page.page, codec->code_table.values, factors, p->dots,
                                        p->dot_stride, p->n_rows);
}

static void multiply_by_row(const product *p, float *sums, size_t stride)
{
    const kvant_layout *layout = &p->page.codec->layout;
    const kvant_code_table *table = &p->page.codec->code_table;
    kvant_code_factors factors = { p->a->x, table->n_columns, 0, layout->row_tiles, 0, 0 };
    for (uint32_t band = 0; band < table->n_bands; band++) {
        const float *scale = p->lines->scale + (size_t)band * table->stride,
                    *zero = p->lines->zero + (size_t)band * table->stride;
        factors.first = band * table->band_tiles;
        factors.end = band + 1 < table->n_bands ? factors.first + table->band_tiles : layout->column_tiles;
        multiply_codes(p, &factors);
        for (uint32_t row = 0; row < p->n_rows; row++) {
            float step = p->a->steps[row];
            float offset = table->has_zero ? step * (float)integer_sum(p, row, factors.first, factors.end) : 0;
            p->kernels->add_row_dots(layout, p->dots + row * p->dot_stride, step, scale, offset,
                                     table->has_zero ? zero : NULL, sums + row * stride);
        }
    }
}

/* Chunks' dots lie as sums do. */
static void add_dots(const int32_t *dots, float step, uint32_t n, float *sums)
{
    for (uint32_t j = 0; j < n; j++)
        sums[j] += (float)dots[j] * step;
}

static void multiply_by_column(const product *p, float *sums, size_t stride)
{
    const kvant_layout *layout = &p->page.codec->layout;
    const kvant_code_table *table = &p->page.codec->code_table;
    _Alignas(64) float step[MAX_ROW_TILES], zero[MAX_ROW_TILES];
    kvant_code_factors factors = { .x = p->a->x,
                                   .stride = (size_t)table->n_bands * table->n_columns,
                                   .band_stride = table->n_columns,
                                   .band_tiles = table->band_tiles,
                                   .end = layout->column_tiles };
    uint32_t row_tiles = (layout->row_tiles + 3) / 4 * 4, bands[MAX_ROW_TILES];
    for (uint32_t rt = 0; rt < row_tiles; rt++)
        bands[rt] = rt < layout->row_tiles ? rt / table->band_tiles : table->n_bands - 1;
    multiply_codes(p, &factors);
    for (uint32_t row = 0; row < p->n_rows; row++) {
        if (p->page.codec->numbers) {
            add_dots(p->dots + row * p->dot_stride, p->a->steps[row], layout->padded_dim, sums + row * stride);
            continue;
        }
        const float *steps = p->a->steps + (size_t)row * table->n_bands,
                    *zeros = p->a->zeros + (size_t)row * table->n_bands;
        for (uint32_t rt = 0; rt < row_tiles; rt++) {
            step[rt] = steps[bands[rt]];
            zero[rt] = zeros[bands[rt]];
        }
        p->kernels->add_tile_dots(layout, p->dots + row * p->dot_stride, step, zero, sums + row * stride);
    }
}

/* sums += a x page; a: n_rows x n_columns; its integers are there already when they are of queries and lines by row. */
static void multiply(const kvant_attention_plan *plan, const kvant_kernels *kernels, kvant_attention_codes *codes,
                     kvant_page_ref page, const float *a, uint32_t n_rows, float *sums, size_t stride)
{
    const kvant_code_table *table = &page.codec->code_table;
    kvant_attention_integers *integers = page.codec->info.role == KVANT_ROLE_K ? &codes->query : &codes->weight;
    kvant_code_lines lines;
    product p = { kernels, page, &lines, integers, codes->dots, dot_stride(plan), n_rows };
    page.codec->code_lines(page.codec, kernels, page.page, &lines);
    if (!table->by_row)
        round_products(kernels, table, &lines, a, n_rows, integers);
    else if (page.codec->info.role == KVANT_ROLE_V)
        round_rows(kernels, table, a, n_rows, integers);
    if (table->by_row)
        multiply_by_row(&p, sums, stride);
    else
        multiply_by_column(&p, sums, stride);
}

void kvant_attention_codes_set_queries(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                       kvant_attention_codes *codes, const float *queries, uint32_t n_rows)
{
    const kvant_code_table *table = &plan->k_codec->code_table;
    memset(codes->queries, 0, (size_t)n_rows * table->n_columns * sizeof *codes->queries);
    for (uint32_t row = 0; row < n_rows; row++)
        for (uint32_t i = 0; i < plan->k_dim; i++)
            codes->queries[(size_t)row * table->n_columns + kvant_codec_query_place(plan->k_codec, i)] =
                queries[(size_t)row * plan->k_dim + i];
    if (table->by_row)
        round_rows(kernels, table, codes->queries, n_rows, &codes->query);
}

void kvant_attention_codes_score(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                 kvant_attention_codes *codes, kvant_page_ref k, uint32_t n_rows, float *scores)
{
    memset(scores, 0, (size_t)n_rows * KVANT_PAGE_TOKENS * sizeof *scores);
    multiply(plan, kernels, codes, k, codes->queries, n_rows, scores, KVANT_PAGE_TOKENS);
}

void kvant_attention_codes_add(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                               kvant_attention_codes *codes, kvant_page_ref v, uint32_t n_rows,
                               const float *weights, float *sums)
{
    multiply(plan, kernels, codes, v, weights, n_rows, sums, plan->v_dim);
}
